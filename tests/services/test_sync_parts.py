"""The small parts of what regions tell each other: brake, clocks, rates, split pushes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parameters import DECLARATION
from support.service_process import eventually

from services.coordination.contract import CoordinationError
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server.declarations import (
    Declaration,
    digest_of,
    read_declaration,
    settle_declaration,
    withdraw_declaration,
)
from services.parameter_server.handlers import Rejected
from services.parameter_server.messages import Part, PushRequest
from services.parameter_server.syncing import declaring
from services.parameter_server.syncing.brake import MOST, Brake
from services.parameter_server.syncing.clocks import by_region, judge
from services.parameter_server.syncing.contests import ranges
from services.parameter_server.syncing.declaring import Declarer
from services.parameter_server.syncing.forwarding import split_push
from services.parameter_server.syncing.rates import Rate


class TestBrake:
    def test_readers_that_do_not_wait_leave_it_alone(self) -> None:
        brake = Brake(0.01)
        for at in range(100):
            brake.note(0.01, at / 10)
        assert brake.level(10.0) == 0.0
        assert brake.slow_total == 0

    def test_it_rises_with_every_slow_reader_and_is_halved_every_second(self) -> None:
        brake = Brake(0.01)
        brake.note(0.02, 0.0)
        assert brake.level(0.0) == pytest.approx(0.2)
        assert brake.level(1.0) == pytest.approx(0.1)
        brake.note(1.0, 1.0)
        assert brake.level(1.0) == pytest.approx(0.5)
        assert (brake.slow_total, brake.longest_s) == (2, 1.0)

    def test_without_a_target_it_stays_down(self) -> None:
        brake = Brake(0.0)
        brake.note(5.0, 0.0)
        assert brake.level(0.0) == 0.0

    @given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 2.0))))
    def test_it_never_stops_a_link(self, reads: list[tuple[float, float]]) -> None:
        brake, now = Brake(0.01), 0.0
        for waited, later in reads:
            now += later
            brake.note(waited, now)
            assert 0.0 <= brake.level(now) <= MOST
        assert brake.level(now + 10.0) == 0.0


class TestClocks:
    def test_without_others_nothing_is_known(self) -> None:
        found = judge([], 10.0)
        assert (found.ahead_s, found.off, found.certain) == (None, False, False)

    @pytest.mark.parametrize(
        ("others", "ahead_s", "off", "certain"),
        [
            ([0.1], -0.1, False, False),
            ([-60.0], 60.0, True, False),
            ([60.0, 61.0], -60.5, True, True),
            ([0.0, 60.0, 61.0], -60.0, True, True),
            # One of several that is wrong is not this one.
            ([0.0, 0.1, 3_600.0], -0.1, False, False),
            ([0.0, 15.0], -7.5, False, False),
        ],
    )
    def test_the_median_decides(
        self, others: Sequence[float], ahead_s: float, off: bool, certain: bool
    ) -> None:
        found = judge(others, 10.0)
        assert found.ahead_s == pytest.approx(ahead_s)
        assert (found.off, found.certain) == (off, certain)

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.floats(-1e6, 1e6))
    def test_a_single_wrong_clock_among_many_changes_no_verdict(
        self, others: list[float], wrong: float
    ) -> None:
        right = [0.0] * (len(others) + 2)
        assert not judge([*right, *others], 1.0).off
        assert not judge([0.0, 0.0, wrong], 1.0).off

    def test_servers_of_one_region_have_one_voice(self) -> None:
        ahead = by_region([("eu", 900.0), ("us", 0.1), ("eu", 900.2), ("eu", 900.1)])
        assert sorted(ahead) == [0.1, 900.1]
        assert not judge(by_region([("eu", 900.0), ("eu", 900.0)]), 10.0).certain


class TestRate:
    def test_is_of_the_last_seconds(self) -> None:
        rate = Rate()
        assert rate.per_s(0, 0.0) == 0.0
        for second in range(30):
            rate.note(100 * second, float(second))
            rate.note(100 * second + 50, second + 0.5)
        assert rate.per_s(2_900, 29.0) == pytest.approx(100.0)
        for second in range(30, 45):
            rate.note(2_900, float(second))
        assert rate.per_s(2_900, 44.0) == 0.0


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    named: set[int] = set()
    for part in filter(None, ranges(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        named.update(range(int(first), int(last or first) + 1))
    assert named == numbers


class TestSplit:
    @given(st.data())
    def test_every_shard_gets_its_own_and_nothing_else(self, data: st.DataObject) -> None:
        shards = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
        counts = [data.draw(st.integers(0, 4)) for _ in shards]
        owners = [data.draw(st.integers(0, 2)) for _ in shards]
        # The key says of which shard it is, the gradient which key.
        keys = np.concatenate(
            [
                np.full(n, 100 * s, np.uint64) + np.arange(n, dtype=np.uint64)
                for s, n in zip(shards, counts, strict=True)
            ]
        )
        gradients = keys.astype(np.float32)[:, None] * np.ones((1, 2), np.float32)
        request = PushRequest(
            "main", 3, "log", 0, 7, 5, ("e", 0, 7, 5), shards, [s + 50 for s in shards],
            [Part("items", shards, counts)], 9, [1] * len(shards), 2,
        )  # fmt: skip
        groups = [{s for s, owner in zip(shards, owners, strict=True) if owner == one} for one in range(3)]
        found = split_push(request, (keys, gradients), groups)
        assert [set(share.shards) for share, _ in found] == groups
        for (share, arrays), group in zip(found, groups, strict=True):
            assert share.predecessors == [s + 50 for s in share.shards]
            assert (share.offset, share.mark, share.model, share.hops) == (7, ("e", 0, 7, 5), "main", 1)
            assert (share.incarnation, share.seen) == (0, [])
            if not group:
                assert (share.parts, arrays) == ([], ())
                continue
            (part,) = share.parts
            assert part.shards == [s for s in shards if s in group]
            mine = np.concatenate([np.full(n, s) for s, n in zip(part.shards, part.counts, strict=True)])
            assert (arrays[0] // np.uint64(100)).tolist() == mine.tolist()
            assert arrays[1][:, 0].tolist() == arrays[0].astype(np.float32).tolist()
        assert sum(len(arrays[0]) if arrays else 0 for _, arrays in found) == len(keys)

    @pytest.mark.parametrize(
        ("shards", "counts", "predecessors", "rows"),
        [([0], [2], [0], 3), ([0, 1], [1], [0, 0], 1), ([0], [1], [], 1), ([0], [-1], [0], 1)],
    )
    def test_what_does_not_fit_is_refused(
        self, shards: list[int], counts: list[int], predecessors: list[int], rows: int
    ) -> None:
        request = PushRequest(
            "main", 1, "log", 0, 1, 0, None, shards, predecessors, [Part("items", shards, counts)]
        )
        arrays = (np.zeros(rows, np.uint64), np.zeros((rows, 4), np.float32))
        with pytest.raises(Rejected):
            split_push(request, arrays, [{0}])


class Flaky(SqliteCoordination):
    """A store that cannot be written to at first."""

    failures = 2

    def put(self, *arguments: object, **more: object) -> int:
        if self.failures:
            self.failures -= 1
            raise CoordinationError("not now")
        return super().put(*arguments, **more)  # type: ignore[arg-type]


class TestDeclarer:
    def test_a_model_is_written_down_even_if_the_store_is_away_at_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(declaring, "RETRY_S", 0.01)
        store = Flaky(tmp_path / "coordination.db")
        declarer = Declarer(store)
        try:
            declarer.settle(DECLARATION)
            eventually(lambda: read_declaration(store, "main") == DECLARATION)
            # Another one of the same name does not replace it, and holds up none that follows.
            declarer.settle(Declaration("main", "fp-2", DECLARATION.tables))
            other = Declaration("other", "fp-1", DECLARATION.tables)
            declarer.settle(other)
            eventually(lambda: read_declaration(store, "other") == other)
            assert read_declaration(store, "main") == DECLARATION
        finally:
            declarer.close()
            store.close()

    def test_a_declaration_that_is_taken_back_makes_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(declaring, "RETRY_S", 0.2)
        store = Flaky(tmp_path / "coordination.db")
        store.failures = 0
        assert settle_declaration(store, Declaration("main", "fp-2", DECLARATION.tables))
        declarer = Declarer(store)
        try:
            declarer.settle(DECLARATION)
            withdraw_declaration(store, "main")
            eventually(lambda: read_declaration(store, "main") == DECLARATION)
        finally:
            declarer.close()
            store.close()

    def test_it_ends_while_the_store_is_away(self, tmp_path: Path) -> None:
        store = Flaky(tmp_path / "coordination.db")
        store.failures = 1_000_000
        declarer = Declarer(store)
        declarer.settle(DECLARATION)
        declarer.close()
        assert not any(thread.name == "declarer" for thread in threading.enumerate())
        store.close()


def test_a_digest_tells_declarations_apart() -> None:
    assert digest_of(DECLARATION) == digest_of(Declaration("main", "fp-1", tuple(DECLARATION.tables)))
    assert digest_of(DECLARATION) != digest_of(Declaration("main", "fp-2", DECLARATION.tables))
    assert digest_of(DECLARATION) != digest_of(Declaration("main", "fp-1", DECLARATION.tables[:1]))
