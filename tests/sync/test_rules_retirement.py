"""What breaks without the rules of retired writers and of full replacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ruled import Patch, Server, differs, servers

from sync.errors import BadSpec, Unsettled
from sync.knowledge import Horizon, covers
from sync.records import Learned, Update
from sync.replica import Replica
from sync.shard import Shard


@pytest.fixture(autouse=True)
def _writers() -> None:
    Server.writers = 0


class TestRetirement:
    def fleet(self) -> tuple[Server, Server, Server]:
        a, b, c = servers("a", "b", "c")
        a.shard.lead(201, 1)
        a.push(1, 2)
        for one in (b, c):
            one.pull_from(a)
        b.shard.lead(202, 2)
        b.push(3)
        return a, b, c

    def test_vectors_get_shorter_and_nothing_is_replaced(self) -> None:
        a, b, c = self.fleet()
        assert b.shard.retire(2, c.shard.knowledge)
        for one in (c, a):
            one.pull_from(b)
        assert set(c.shard.knowledge) == {202}
        assert a.rows == b.rows == c.rows
        assert b.feeds.counts.replacements_total == 0

    def test_not_while_somebody_lacks_something(self) -> None:
        _, b, _ = self.fleet()
        assert not b.shard.retire(2, {})
        assert set(b.shard.knowledge) == {201, 202}

    def stranger(self) -> None:
        """Who has not heard of it, and not all that was retired, gets a full replacement."""
        a, b, c = self.fleet()
        late = Server("d", a.time)
        a.push(1)
        late.pull_from(a)
        b.pull_from(a)
        c.pull_from(b)
        saved = late.shard.state()
        assert b.shard.retire(2, c.shard.knowledge)
        late.start(saved)
        b.delete(1)
        assert b.shard.collect(b.shard.knowledge) == 1
        late.pull_from(b)
        assert late.rows == b.rows

    def test_who_has_not_heard_is_told_all(self) -> None:
        self.stranger()

    def deposed(self) -> None:
        a, b, c = self.fleet()
        # a writes on, cut off; nobody else ever hears of it before it is retired.
        a.push(1)
        a.push(9)
        a.delete(2)
        assert b.shard.retire(2, c.shard.knowledge)
        c.pull_from(b)
        for one, other in ((c, a), (a, b), (c, a), (b, a), (a, c)):
            one.pull_from(other)
        assert a.rows == b.rows == c.rows
        assert set(a.rows) == {1, 2, 3}
        assert a.shard.knowledge == b.shard.knowledge == c.shard.knowledge

    def test_what_a_deposed_owner_had_told_nobody_loses_when_it_returns(self) -> None:
        self.deposed()

    def test_without_the_last_versions_it_keeps_them_for_ever(self, monkeypatch: Patch) -> None:
        def old(self: Horizon, knowledge: Any, retired: int, epochs: Any = None) -> bool:
            if retired < self.retired and not (
                retired >= self.retired_before and covers(knowledge, self.last)
            ):
                return False
            return all(
                knowledge.get(w, 0) >= t or (epochs or {}).get(w, retired) < retired
                for w, t in self.graves.items()
            )

        monkeypatch.setattr(Horizon, "passed_by", old)
        monkeypatch.setattr(Replica, "_settled", lambda self, update, horizon, epochs, dropped: ())
        assert differs(self.deposed)

    def returned_with_a_buried_row(self) -> None:
        a, b, c = self.fleet()
        a.push(1)
        b.delete(1)
        c.pull_from(b)
        # a is gone for good, it seems: its writers are retired, and then the grave goes.
        assert b.shard.retire(2, c.shard.knowledge)
        b.shard.collect(c.shard.knowledge)
        b.pull_from(a)
        c.pull_from(b), c.pull_from(a), a.pull_from(b), c.pull_from(a)
        assert a.rows == b.rows == c.rows
        assert set(a.rows) == {2, 3}

    def test_graves_go_only_after_the_writers_before(self) -> None:
        _, b, c = self.fleet()
        b.delete(1)
        assert b.shard.collect(b.shard.knowledge) == 0
        c.pull_from(b)
        assert b.shard.retire(2, c.shard.knowledge)
        assert b.shard.collect(b.shard.knowledge) == 1
        self.returned_with_a_buried_row()

    def test_collected_before_them_a_deposed_owner_brings_the_row_back_to_some(
        self, monkeypatch: Patch
    ) -> None:
        monkeypatch.setattr(Shard, "retire", lambda self, epoch, held: True)

        def collect(self: Shard, cut: Mapping[int, int]) -> int:
            for name, table in self._tables.items():
                self._step(collected=((name, self._collect(table, cut)),))
            return 1

        monkeypatch.setattr(Shard, "collect", collect)
        assert differs(self.returned_with_a_buried_row)

    def test_a_retired_owner_writes_no_more(self) -> None:
        a, b, c = self.fleet()
        assert b.shard.retire(2, c.shard.knowledge)
        a.pull_from(b)
        with pytest.raises(BadSpec, match="was retired"):
            a.push(1)
        with pytest.raises(BadSpec, match="was retired"):
            a.delete(1)

    def test_more_than_the_last_versions_is_not_kept_in_silence(self) -> None:
        """The source did not know that its puller had heard more of a retired writer from somebody else."""
        a, b, c = self.fleet()
        c.pull_from(b)
        a.push(1)
        [rows] = a.shard.state().rows
        c.shard.merge(Update((rows,), epochs=a.shard.epochs))
        assert b.shard.retire(2, {201: b.shard.knowledge[201]})
        horizon = b.shard.horizon
        with pytest.raises(Unsettled, match="known here only"):
            c.shard.merge(Update(learned=Learned(b.shard.knowledge, horizon), epochs=b.shard.epochs))
        c.pull_from(b)
        c.time.s += 10.0
        c.pull_from(b)
        assert (c.rows, c.shard.horizon) == (b.rows, horizon)

    def test_the_floor_does_not_name_retired_writers(self) -> None:
        a, b, c = self.fleet()
        a.delete(1)
        a.shard.collect(a.shard.knowledge)
        assert a.shard.retire(1, {})
        a.shard.collect(a.shard.knowledge)
        for one in (b, c, b):
            one.pull_from(a)
        b.shard.lead(203, 3)
        assert b.shard.horizon.graves
        assert b.shard.retire(3, b.shard.knowledge)
        assert b.shard.horizon.graves == {}
        replaced = b.feeds.counts.replacements_total
        a.pull_from(b)
        for _ in range(3):
            b.push(5)
            a.pull_from(b)
        assert b.feeds.counts.replacements_total <= replaced + 1
        assert a.rows == b.rows


class TestFullReplacement:
    def test_it_drops_what_the_other_knows_and_omits_and_nothing_else(self) -> None:
        a, b = servers("a", "b")
        a.push(1, 2)
        b.pull_from(a)
        own = b.push(7)
        saved = b.shard.state()
        a.delete(1)
        a.shard.collect(a.shard.knowledge)
        b.start(saved)
        b.pull_from(a)
        assert set(b.rows) == {2, 7}
        assert b.rows[7][0] == own

    def test_without_dropping_the_row_stays(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr("sync.replica.omitted", lambda here, learned, whole: ())
        assert differs(self.test_it_drops_what_the_other_knows_and_omits_and_nothing_else)

    def test_dropping_all_that_is_omitted_loses_own_rows(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(
            "sync.replica.omitted",
            lambda here, learned, whole: (
                (
                    "rows",
                    np.setdiff1d(
                        here.table("rows").known_keys(here.known(here.knowledge)), whole.get("rows", [])
                    ),
                ),
            ),
        )
        assert differs(self.test_it_drops_what_the_other_knows_and_omits_and_nothing_else)


def test_a_wrong_cut_without_fencing_is_not_guarded_against() -> None:
    """The limit that ``Shard.collect`` states: several writers without epochs, a grave collected although one that
    comes back had not heard of it, and had written before it. It is why such cuts must be right."""
    a, b, c = servers("a", "b", "c")
    a.push(1)
    b.pull_from(a), c.pull_from(a)
    b.push(1)  # known to b alone
    a.time.us += 1_000
    a.delete(1)
    c.pull_from(a)
    a.shard.collect(a.shard.knowledge)
    a.pull_from(b)
    c.pull_from(b)
    assert (set(a.rows), set(c.rows)) == ({1}, set())


class TestAdoption:
    def test_who_retires_writes_again_what_came_out_of_turn(self) -> None:
        """A row of a deposed owner came here ahead of the exchange that would cover it, and its owner is gone."""
        a, b, c = servers("a", "b", "c")
        a.shard.lead(201, 1)
        a.push(1, 2)
        b.pull_from(a)
        c.pull_from(a)
        a.push(1)
        rows = a.shard.state().rows[0]
        ahead = replace(
            rows,
            **{
                f: getattr(rows, f)[rows.time == rows.time.max()]
                for f in ("keys", "values", "state", "time", "writer")
            },
        )
        b.shard.merge(Update((ahead,), epochs=a.shard.epochs, urgent=True))
        b.shard.lead(202, 2)
        assert b.shard.retire(2, c.shard.knowledge)
        assert b.rows[1][1] == 202
        assert b.shard.pull("rows", np.array([1], np.uint64)).tobytes() == ahead.values.tobytes()
        c.pull_from(b), a.pull_from(b)
        assert a.rows == b.rows == c.rows
