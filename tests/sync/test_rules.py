"""What breaks without each rule of replication: the very core does right in the scenario, a core without the rule
does not. So each test is known to be able to fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sync.clock import HybridClock
from sync.errors import BadSpec, ClockAhead, TableFull, Unsettled
from sync.exchange import FeedConfig, Feeds, Pace, PaceConfig, Puller, ShardName
from sync.exchange.shard_feed import ShardFeed
from sync.knowledge import Horizon, Known, covers
from sync.pushes import Push, Source
from sync.records import Learned, Rows, Update
from sync.replica import Replica, Token
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

SPECS = (TableSpec("rows", 2, Initialiser.uniform(0.1), Optimiser("sgd", 0.5)),)
NAME: ShardName = ("m", 0)
CONFIG = FeedConfig(coalesce_s=0.0, state=True)
Patch = pytest.MonkeyPatch


class Time:
    """A physical clock that is set by hand, and the seconds of the exchange."""

    def __init__(self) -> None:
        self.us = 1_000_000_000
        self.s = 0.0

    def __call__(self) -> int:
        self.us += 1
        return self.us


class Server:
    """A shard with its feeds. Its pullers are kept by the name of their source, as a process keeps them."""

    writers = 0

    def __init__(self, name: str, time: Time, clock: Callable[[], int] | None = None, **options: Any) -> None:
        self.name, self.time = name, time
        self._clock, self._options = clock or time, {"change_capacity": 64, **options}
        self.start()

    def start(self, saved: Any = None, writer: int | None = None, last: int = 0) -> Server:
        Server.writers += 1
        writer = writer or Server.writers
        self.shard = Shard(0, SPECS, writer, HybridClock(self._clock, last), model="m", **self._options)
        if saved is not None:
            self.shard.restore(saved)
        self.feeds = Feeds(lambda: {NAME: self.shard}, CONFIG)
        self.pullers: dict[str, Puller] = {}
        self.linked: dict[str, Feeds] = {}
        return self

    def push(self, *keys: int, amount: float = 1.0) -> int:
        """Push to ``keys``; returns the version time."""
        source = Source("log", self.shard.writer)
        offset = self.shard.applied(source) + 1
        gradients = np.full((len(keys), 2), amount, np.float32)
        parts = (("rows", np.array(keys, np.uint64), gradients),)
        assert self.shard.push(Push(source, offset, offset - 1, None, parts)).status == "applied"
        return self.shard.knowledge[self.shard.writer]

    def delete(self, *keys: int) -> None:
        assert self.shard.delete("rows", np.array(keys, np.uint64)) == len(keys)

    def pull_from(self, other: Server, batches: int = 50, budget: int = 65_536) -> int:
        """Take at most ``batches`` batches; returns how many rows and graves were new."""
        time = self.time
        if other.name not in self.pullers:
            pace = Pace(PaceConfig(min_bytes=budget, max_bytes=budget))
            stream = 1_000 * Server.writers + len(self.pullers) + 1
            Server.writers += 1
            self.pullers[other.name] = Puller(
                lambda: {NAME: self.shard}, pace, stream, random.Random(1), wait_s=0.5
            )
        puller, rows = self.pullers[other.name], 0
        if self.linked.setdefault(other.name, other.feeds) is not other.feeds:
            # The connection to the process before is gone.
            self.linked[other.name] = other.feeds
            puller.failed(time.s)
            time.s += 10.0
        for _ in range(batches):
            time.s += 0.1
            while (pull := puller.ask(time.s)) is not None:
                ended = other.feeds.take(self.name, pull, time.s)
                if ended is not None:
                    puller.take(ended, ended.nbytes, time.s)
                    time.s += 10.0
            if (batch := next(other.feeds.answers(self.name, time.s), None)) is not None:
                rows += puller.take(batch, batch.nbytes, time.s).rows
        return rows

    @property
    def rows(self) -> dict[int, tuple[int, int]]:
        """By key: version time and writer."""
        return {
            key: (time, writer)
            for page in self.shard.pages()
            if isinstance(page, Rows)
            for key, time, writer in zip(
                page.keys.tolist(), page.time.tolist(), page.writer.tolist(), strict=True
            )
        }


def servers(*names: str, **options: Any) -> tuple[Server, ...]:
    time = Time()
    return tuple(Server(name, time, **options) for name in names)


def differs(check: Callable[[], None]) -> bool:
    """Whether what ``check`` asserts does not hold."""
    try:
        check()
    except AssertionError:
        return True
    return False


class TestNewIncarnationAtStart:
    def scenario(self, *, same_writer: bool) -> None:
        a, b, c = servers("a", "b", "c")
        first = a.shard.writer
        a.push(1)
        saved = a.shard.state()
        a.push(5)
        b.pull_from(a)
        # It comes back from before, and its clock is ahead of what it had issued.
        a.start(saved, first if same_writer else None)
        a.push(21)
        for _ in range(2):
            a.pull_from(b)
            c.pull_from(a)
            b.pull_from(a)
        assert a.rows == b.rows == c.rows
        assert set(a.rows) == {1, 5, 21}

    def test_what_was_lost_comes_back_from_others(self) -> None:
        self.scenario(same_writer=False)

    def test_without_it_who_restored_never_hears_of_what_it_had_told(self, monkeypatch: Patch) -> None:
        # The core refuses it; who gets around that loses row 5 for ever.
        with pytest.raises(BadSpec, match="only a new start"):
            self.scenario(same_writer=True)
        begin = Replica.begin

        def careless(self: Replica, head: Any) -> None:
            writer, epochs = self.writer, dict(self.epochs)
            begin(self, replace(head, epochs={w: e for w, e in head.epochs.items() if w != writer}))
            self.epochs |= epochs

        monkeypatch.setattr(Replica, "begin", careless)
        assert differs(lambda: self.scenario(same_writer=True))


class TestDominatorAtLoad:
    def scenario(self) -> None:
        a, b = servers("a", "b", change_capacity=2)
        a.push(*range(10))
        saved = a.shard.state()
        a.start(saved)
        b.pull_from(a)
        assert set(b.rows) == set(range(10))

    def test_who_loaded_a_snapshot_tells_all_of_it(self) -> None:
        self.scenario()

    def test_with_an_empty_one_the_cache_answers_for_what_it_never_had(self, monkeypatch: Patch) -> None:
        from sync.changes import ChangeRing

        evict = ChangeRing._evict

        def forgetful(self: ChangeRing, *versions: Any) -> None:
            evict(self, *versions)
            self.dominator = {}

        monkeypatch.setattr(ChangeRing, "_evict", forgetful)
        assert differs(self.scenario)


class TestKnowledgeAfterTheLastBatch:
    def scenario(self) -> None:
        a, b = servers("a", "b")
        a.push(*range(40))
        # The connection breaks after the first of many batches.
        b.pull_from(a, batches=1, budget=200)
        assert 0 < len(b.rows) < 40
        b.pullers.clear()
        b.pull_from(a)
        assert b.rows == a.rows

    def test_what_was_cut_off_comes_later(self) -> None:
        self.scenario()

    def test_claimed_with_the_first_batch_the_rest_is_lost(self, monkeypatch: Patch) -> None:
        next_piece = ShardFeed._next_piece

        def early(self: ShardFeed, shard: Replica, exchange: Any, room: int, now_s: float) -> Any:
            learned = exchange.learned
            piece = next_piece(self, shard, exchange, room, now_s)
            return replace(piece, update=replace(piece.update, learned=learned))

        monkeypatch.setattr(ShardFeed, "_next_piece", early)
        assert differs(self.scenario)

    def test_urgent_rows_move_no_knowledge(self) -> None:
        a, b = servers("a", "b")
        a.push(*range(5))
        before = dict(b.shard.knowledge)
        [rows] = a.shard.state().rows
        b.shard.merge(Update((rows,), epochs=a.shard.epochs, urgent=True))
        assert (len(b.rows), b.shard.knowledge) == (5, before)


class TestTokens:
    def test_knowledge_of_two_that_know_different_things(self) -> None:
        """K_a = {a: 10}, K_b = {b: 12}: neither is newer, and each tells the other."""
        self.two_sided()

    def two_sided(self) -> None:
        a, b = servers("a", "b")
        a.push(1)
        b.push(2), b.push(2), b.push(2)
        b.pull_from(a)
        a.pull_from(b)
        assert a.rows == b.rows
        assert set(a.rows) == {1, 2}

    def test_compared_by_size_the_larger_one_thinks_itself_newer(self, monkeypatch: Patch) -> None:
        begin = ShardFeed.has_news

        def by_size(self: ShardFeed, shard: Replica, now_s: float) -> bool:
            mine = sum(shard.knowledge.values())
            return mine > sum(self.known.values()) and begin(self, shard, now_s)

        monkeypatch.setattr(ShardFeed, "has_news", by_size)
        assert differs(self.two_sided)

    def per_source(self) -> None:
        a, b, c = servers("a", "b", "c")
        a.push(1)
        b.push(2)
        c.pull_from(a)
        c.pull_from(b)
        assert set(c.rows) == {1, 2}

    def test_tokens_are_kept_per_source(self) -> None:
        self.per_source()

    def test_one_token_for_all_sources_skips_one(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(Replica, "token", property(lambda self: Token(1, self._sequence)))
        monkeypatch.setattr(Puller, "_tokens", {}, raising=False)
        shared: dict[ShardName, tuple[Replica, Token]] = {}
        init = Puller.__init__

        def sharing(self: Puller, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self._tokens = shared

        monkeypatch.setattr(Puller, "__init__", sharing)
        assert differs(self.per_source)

    def restarted(self) -> None:
        a, b = servers("a", "b")
        a.push(1)
        saved = a.shard.state()
        a.push(2)
        b.pull_from(a)
        # The counter starts again and reaches the number that b remembers.
        a.start(saved)
        a.push(3)
        b.pull_from(a)
        assert set(b.rows) == {1, 2, 3}

    def test_a_restarted_counter_is_another_token(self) -> None:
        self.restarted()

    def test_without_the_incarnation_in_it_a_row_is_missed(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(Replica, "token", property(lambda self: Token(1, self._sequence)))
        assert differs(self.restarted)

    def learned_only(self) -> None:
        a, b, c = servers("a", "b", "c")
        a.push(1)
        b.pull_from(a)
        b.start(b.shard.state())
        c.pull_from(b)
        # a's second version of its row never gets to b: only that it is known does.
        b.shard.merge(Update(learned=Learned({a.shard.writer: a.push(1)}), epochs=a.shard.epochs))
        c.pull_from(b)
        assert c.shard.knowledge == b.shard.knowledge

    def test_a_step_that_moves_knowledge_alone_changes_the_token_after_a_restart_too(self) -> None:
        self.learned_only()

    def test_a_token_of_rows_alone_says_unchanged(self, monkeypatch: Patch) -> None:
        def rows_only(self: Replica, epoch: int, writer: int, position: int) -> None:
            self.epochs[writer] = epoch
            self.epoch, self.position = epoch, position

        monkeypatch.setattr(Replica, "_note", rows_only)
        assert differs(self.learned_only)


class TestFloor:
    def scenario(self) -> None:
        a, b, c = servers("a", "b", "c")
        a.push(1, 2)
        b.pull_from(a)
        c.pull_from(a)
        saved = b.shard.state()
        a.delete(1)
        b.pull_from(a)
        c.pull_from(a)
        assert a.shard.collect(a.shard.knowledge) == 1
        # b comes back with the deleted row; nobody has its grave any more.
        b.start(saved)
        for one in (c, b, a):
            for other in (a, b, c):
                if one is not other:
                    one.pull_from(other)
        assert a.rows == b.rows == c.rows
        assert set(a.rows) == {2}

    def test_a_replica_from_before_a_collected_deletion_drops_the_row(self) -> None:
        self.scenario()

    def test_without_it_the_row_stays(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(Horizon, "passed_by", lambda self, knowledge, retired, epochs=None: True)
        assert differs(self.scenario)

    def overtaken(self) -> None:
        """Rows that overtook a full replacement are part of it."""
        a, b = servers("a", "b")
        a.push(*range(30))
        b.pull_from(a)
        saved = b.shard.state()
        a.delete(0)
        b.pull_from(a)
        a.shard.collect(a.shard.knowledge)
        b.start(saved)
        b.pull_from(a, batches=2, budget=200)
        a.push(*range(1, 30))
        b.pull_from(a)
        assert b.rows == a.rows

    def test_a_replacement_while_pushes_go_on_drops_no_live_row(self) -> None:
        self.overtaken()


class TestIgnoreCoveredRows:
    def scenario(self) -> None:
        a, b = servers("a", "b")
        a.push(1)
        # A reply with the row is delayed.
        [delayed] = a.shard.state().rows
        b.pull_from(a)
        a.delete(1)
        b.pull_from(a)
        a.shard.collect(a.shard.knowledge)
        b.pull_from(a)
        assert not len(b.shard.table("rows").graves)
        b.shard.merge(Update((delayed,), epochs=a.shard.epochs))
        assert b.rows == a.rows == {}

    def test_a_delayed_reply_after_the_grave_was_collected_is_passed_over(self) -> None:
        self.scenario()

    def test_without_it_the_row_is_back(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(Known, "above", lambda self, time, writer: np.ones(len(time), np.bool_))
        assert differs(self.scenario)


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


@pytest.fixture(autouse=True)
def _writers() -> None:
    Server.writers = 0


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
