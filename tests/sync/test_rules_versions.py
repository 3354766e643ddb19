"""What breaks without the rules of versions and owners: larger versions win, hybrid time, fencing epochs, skew, one
atomic step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ruled import Patch, Server, Time, differs, servers

from sync.clock import HybridClock
from sync.errors import ClockAhead, TableFull
from sync.records import Learned, Update
from sync.shard import Shard


@pytest.fixture(autouse=True)
def _writers() -> None:
    Server.writers = 0


class TestLargerVersionWins:
    def scenario(self) -> None:
        a, b, c, d = servers("a", "b", "c", "d")
        a.push(1)
        b.push(1)
        # In either order.
        c.pull_from(a), c.pull_from(b)
        d.pull_from(b), d.pull_from(a)
        assert c.rows == d.rows == b.rows

    def test_whatever_the_order_of_arrival(self) -> None:
        self.scenario()

    def test_last_come_wins_diverges(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr("sync.merging.newer", lambda v, o, e: np.ones(len(v[0]), np.bool_))
        assert differs(self.scenario)


class TestHybridTime:
    def scenario(self, observe: bool = True) -> None:
        time = Time()
        a = Server("a", time)
        b = Server("b", time, clock=lambda: time() - 500_000_000)  # eight minutes behind
        a.push(1)
        b.pull_from(a)
        written = b.push(1, amount=7.0)
        a.pull_from(b)
        assert a.rows == b.rows
        assert a.rows[1] == (written, b.shard.writer)

    def test_a_write_beats_every_write_before_it_that_was_seen(self) -> None:
        self.scenario()

    def test_with_physical_clocks_it_loses(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(HybridClock, "observe", lambda self, version_time: None)
        assert differs(self.scenario)

    def test_between_writes_that_do_not_know_of_each_other_all_choose_the_same(self) -> None:
        time = Time()
        a, c = Server("a", time), Server("c", time)
        b = Server("b", time, clock=lambda: time() - 500_000_000)
        a.push(1), b.push(1)
        c.pull_from(b), a.pull_from(b), b.pull_from(a), c.pull_from(a)
        assert a.rows == b.rows == c.rows
        assert a.rows[1][1] == a.shard.writer


class TestFencingEpochs:
    def scenario(self) -> None:
        time = Time()
        a, b = Server("a", time), Server("b", time, clock=lambda: time() - 500_000_000)
        a.shard.lead(101, 1)
        a.push(1)
        b.pull_from(a)
        # b takes over; a, whose clock is ahead, does not know it yet.
        b.shard.lead(102, 2)
        b.push(1)
        time.us += 1_000_000
        a.push(1)
        a.pull_from(b)
        b.pull_from(a)
        assert a.rows == b.rows
        assert a.rows[1][1] == 102

    def test_what_a_deposed_owner_wrote_loses_whatever_its_clock_says(self) -> None:
        self.scenario()

    def test_without_them_the_later_clock_wins(self, monkeypatch: Patch) -> None:
        from sync.merging import newer

        monkeypatch.setattr(
            "sync.merging.newer", lambda versions, others, epochs: newer(versions, others, {})
        )
        assert differs(self.scenario)


class TestSkewBound:
    def ahead(self) -> tuple[Server, Server]:
        time = Time()
        a = Server("a", time, clock=lambda: time() + 3_600_000_000)
        return a, Server("b", time, max_ahead_us=600_000_000)

    def test_a_version_an_hour_ahead_is_refused_and_counted(self) -> None:
        a, b = self.ahead()
        a.push(1)
        b.pull_from(a)
        assert (b.rows, b.shard.clock.last < a.shard.clock.last) == ({}, True)
        assert b.pullers["a"].counts.ahead_total > 0
        assert "ahead of this clock" in b.pullers["a"].counts.last_fault

    def test_nothing_changes_with_it(self) -> None:
        a, b = self.ahead()
        a.push(1)
        [rows] = a.shard.state().rows
        before = (b.shard.token, b.shard.clock.last, dict(b.shard.epochs))
        with pytest.raises(ClockAhead):
            b.shard.merge(Update((rows,), epochs=a.shard.epochs, learned=Learned(a.shard.knowledge)))
        assert (b.shard.token, b.shard.clock.last, dict(b.shard.epochs)) == before

    def test_without_it_one_clock_carries_all_others_off(self, monkeypatch: Patch) -> None:
        a, b = self.ahead()
        a.push(1)
        monkeypatch.setattr("sync.replica.check", lambda here, update: None)
        b.pull_from(a)
        assert b.shard.clock.last > b.shard.clock.physical_us() + 3_000_000_000


class TestOneAtomicStep:
    def test_version_row_and_knowledge_move_together_or_not_at_all(self) -> None:
        (a,) = servers("a", max_rows=2)
        a.push(1, 2)
        before = (a.rows, dict(a.shard.knowledge), a.shard.token, a.shard.clock.last)
        with pytest.raises(TableFull):
            a.push(3, 4)
        assert (a.rows, dict(a.shard.knowledge), a.shard.token, a.shard.clock.last) == before

    def scenario(self) -> None:
        a, b = servers("a", "b")
        a.push(1)
        seen: list[dict[int, tuple[int, int]]] = []

        def pulled(delta: Any) -> None:
            b.pull_from(a)
            seen.append(b.rows)

        # Whoever asks as soon as a step is told finds its row and its knowledge.
        a.shard.on_delta = pulled
        a.push(2)
        a.shard.on_delta = None
        b.pull_from(a)
        assert seen[0] == b.rows == a.rows

    def test_a_reply_in_the_moment_of_a_step_has_all_of_it(self) -> None:
        self.scenario()

    def test_knowledge_raised_before_the_row_loses_it(self, monkeypatch: Patch) -> None:
        write = Shard._write

        def torn(self: Shard, prepared: Any, pushes: Any) -> None:
            # The clock and knowledge move, somebody asks, and then the row comes under the version already told.
            time = self.clock.tick()
            self.knowledge[self.writer] = time
            self._note(self.epoch, self.writer, self.position + 1)
            if self.on_delta is not None:
                self.on_delta(None)  # type: ignore[arg-type]
                self.on_delta = None
            last, self.clock = self.clock, HybridClock(lambda: 0, time - 1)
            write(self, prepared, pushes)
            self.clock = last

        monkeypatch.setattr(Shard, "_write", torn)
        assert differs(self.scenario)
