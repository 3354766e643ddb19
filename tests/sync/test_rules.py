"""What breaks without each rule of replication: the very core does right in the scenario, a core without the rule
does not. So each test is known to be able to fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ruled import Patch, Server, differs, servers

from sync.errors import BadSpec
from sync.exchange import Puller, ShardName
from sync.exchange.shard_feed import ShardFeed
from sync.knowledge import Horizon, Known
from sync.records import Learned, Update
from sync.replica import Replica, Token


@pytest.fixture(autouse=True)
def _writers() -> None:
    Server.writers = 0


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
