"""Rows that nobody pushes expire between everything else: at what pace, on which shards, in how long turns."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support.parameters import CHUNK, CHUNKS, DECLARATION, Kept, Numbers, client_of, make_settings, threads
from support.service_process import eventually

from services.parameter_server.declarations import Declaration
from services.parameter_server.expiry import BUDGET_S, LOOK_S, SLICE, Expiry, Pace
from services.parameter_server.holdings import HostConfig
from services.parameter_server.host import Host
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

SHORT = TableSpec("short", 2, Initialiser.uniform(0.1), expiry_s=10)
LONG = TableSpec("long", 2, Initialiser.uniform(0.1), expiry_s=1_000)
DENSE = TableSpec("dense", CHUNK, Initialiser.uniform(0.1), Optimiser("adagrad"), "single", CHUNKS)
ROWS = 3_000


class TestPace:
    @pytest.mark.parametrize("slots", [1, 7, 700, 5_000, 100_000])
    @pytest.mark.parametrize("expiry_s", [1.0, 60.0, 3_600.0])
    def test_a_round_takes_a_tenth_of_the_expiry_and_at_least_a_second(
        self, slots: int, expiry_s: float
    ) -> None:
        pace, now, looked = Pace(expiry_s, 0.0), 0.0, 0
        round_s = max(expiry_s / 10, 1.0)
        # As often as the loop looks, or as it takes for slices to be large enough.
        step_s = min(round_s * SLICE / slots / 2, round_s / 4)
        while looked < 3 * slots:
            now += step_s
            looked += pace.due(now, slots)
        assert now == pytest.approx(3 * round_s, rel=0.35)

    def test_no_slice_is_larger_than_the_bound_and_what_is_left_is_caught_up(self) -> None:
        pace = Pace(10.0, 0.0)
        slots = 3 * SLICE
        assert [pace.due(100.0, slots) for _ in range(4)] == [SLICE, SLICE, SLICE, 0]

    def test_small_looks_are_put_off(self) -> None:
        pace = Pace(100.0, 0.0)
        assert pace.due(0.1, 10_000) == 0
        assert pace.due(1.0, 10_000) == 1_000

    def test_an_empty_table_owes_nothing(self) -> None:
        pace = Pace(10.0, 0.0)
        assert pace.due(1_000.0, 0) == 0
        assert pace.due(1_000.0, 10_000) == 0


class World:
    """A host that leads two shards, its clock, and the time of its loop: one and the same."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.work_s = 0.0
        clock = HybridClock(lambda: int(self.now_s * 1e6))
        self.host = Host(HostConfig("a", 2, 10_000), Kept(), Numbers(), clock)
        for shard in (0, 1):
            self.host.lead(shard, 1 + shard)
        self.host.declare(Declaration("main", "fp", (SHORT, LONG, DENSE)))
        self.forbidden: set[int] = set()
        self.expiry = Expiry(self.host, lambda shard: shard not in self.forbidden, self.monotonic)
        self.offset = -1

    def monotonic(self) -> float:
        """Each look at the clock takes ``work_s``."""
        self.now_s += self.work_s
        return self.now_s

    def push(self, keys: np.ndarray) -> None:
        parts = tuple((t, keys, np.ones((len(keys), 2), np.float32)) for t in ("short", "long"))
        for held in self.host.models["main"].held.values():
            held.shard.push(Push(Source("log", 0), self.offset + 1, self.offset, None, parts))
        self.offset += 1

    def rows(self, table: str) -> list[int]:
        return [len(held.shard.table(table)) for held in self.host.models["main"].held.values()]

    def run(self, seconds: float) -> int:
        """Turns of the loop; how many of them saw rows go."""
        until, worked = self.now_s + seconds, 0
        while self.now_s < until:
            worked += self.expiry.turn()
            self.now_s += 0.05
        return worked


class TestExpiry:
    def test_rows_go_within_a_tenth_of_their_time_after_it(self) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        assert world.run(9.9) == 0
        assert world.rows("short") == [ROWS, ROWS]
        assert world.run(1.6) > 0
        assert world.rows("short") == [0, 0]
        assert world.rows("long") == [ROWS, ROWS]
        for held in world.host.models["main"].held.values():
            assert held.shard.table("short").counts.expired_rows_total == ROWS
            assert held.shard.counts.deleted_rows_total == ROWS
            assert len(held.shard.table("short").graves) == ROWS

    def test_what_is_pushed_again_stays(self) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        world.run(8.0)
        world.push(np.arange(10, dtype=np.uint64))
        world.run(8.0)
        assert world.rows("short") == [10, 10]

    def test_shards_that_may_not_take_steps_wait(self) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        world.forbidden = {1}
        world.run(15.0)
        assert world.rows("short") == [0, ROWS]
        world.forbidden = set()
        world.run(1.5)
        assert world.rows("short") == [0, 0]

    def test_only_leaders_let_rows_expire(self) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        world.run(5.0)
        world.host.follow(1)
        world.run(10.0)
        assert world.rows("short") == [0, ROWS]
        world.host.lead(1, 7)
        world.run(1.5)
        assert world.rows("short") == [0, 0]

    def test_a_shard_that_was_handed_on_in_the_middle_of_a_look_is_left_alone(self) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        world.now_s += 20.0
        world.expiry.turn()
        world.now_s += 2.0
        # Each turn gets through one table only, so the others are still due when the shard goes.
        world.work_s = BUDGET_S
        world.expiry.turn()
        world.host.follow(0)
        world.host.follow(1)
        before = [held.shard.position for held in world.host.models["main"].held.values()]
        for _ in range(10):
            world.expiry.turn()
        assert [held.shard.position for held in world.host.models["main"].held.values()] == before

    def test_a_turn_ends_after_its_budget_and_the_next_goes_on(self) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        world.expiry.turn()
        world.now_s += 2_000.0
        world.work_s = BUDGET_S
        seen = []
        for _ in range(4):
            world.expiry.turn()
            seen.append(sum(world.rows("short")) + sum(world.rows("long")))
        assert seen == [3 * ROWS, 2 * ROWS, ROWS, 0]

    def test_a_table_is_not_looked_at_more_often_than_it_is_due(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = World()
        world.push(np.arange(ROWS, dtype=np.uint64))
        slices: list[int] = []

        def expire(_shard: Shard, _table: str, slot: int, limit: int) -> tuple[int, int]:
            slices.append(limit)
            return 0, slot

        monkeypatch.setattr(Shard, "expire", expire)
        world.run(5.0)
        # Five rounds over two shards of the short table; the long one's round takes a hundred seconds.
        assert 8 * ROWS <= sum(slices) <= 11 * ROWS
        assert len(slices) <= 5.0 / LOOK_S * 2


def test_a_server_lets_rows_expire_and_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("expiry")
    brief = replace(SHORT, expiry_s=1)
    keys = np.arange(100, dtype=np.uint64)
    with threads(make_settings(folder, 2, 2)), client_of(folder) as client:
        client.declare("main", (brief, *DECLARATION.tables), "fp-1")
        parts = {"short": (keys, np.ones((100, 2), np.float32))}
        first = client.pull("main", {"short": keys}).rows["short"]
        client.push("main", Source("log", 0), 0, {0: -1, 1: -1}, 0, None, parts)
        pushed = client.pull("main", {"short": keys}).rows["short"]
        assert not np.array_equal(first, pushed)

        def rows() -> int:
            return sum(
                table.rows
                for server in client.describe()
                for table in server.models["main"]
                if table.name == "short"
            )

        assert rows() == 100
        eventually(lambda: rows() == 0)
        again = client.pull("main", {"short": keys}).rows["short"]
        assert again.tobytes() == first.tobytes()
        told = "\n".join(client.metrics().values())
        expired = re.findall(r'_table_rows_handled_total\{.*table="short",what="expired"\} (\S+)', told)
        graves = re.findall(r'_table_graves\{.*table="short"\} (\S+)', told)
        assert sum(map(float, expired)) == sum(map(float, graves)) == 100.0
