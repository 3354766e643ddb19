"""What a source sends next, and how it is asked."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sync.exchange import Batch, FeedConfig, PaceConfig, Pull, ShardName, Want, feed
from sync.knowledge import Knowledge, Known
from sync.replica import Token
from tests.support.exchange import ROW_BYTES, Pair, Wire, bulk, keys_of, pieces, run
from tests.support.replicas import graves, push, rows, update
from tests.support.twins import told_by

NAME: ShardName = ("m", 0)
PACE = PaceConfig(min_bytes=100 * ROW_BYTES, max_bytes=100 * ROW_BYTES)


class Source(Pair):
    """A pair whose pulls are made by hand."""

    number = 0

    def pull(
        self, budget: int = 10**6, *, wants: tuple[Want, ...] = (), unwanted: tuple[ShardName, ...] = (),
        number: int | None = None, stream: int = 1, wait_s: float = 1.0,
    ) -> Batch | None:  # fmt: skip
        if number is None:
            self.number += 1
            number = self.number
        return self.feeds.take("r", Pull(stream, number, budget, wait_s, wants, unwanted), self.now_s)

    def want(
        self, budget: int = 10**6, knowledge: Knowledge | None = None, token: Token | None = None
    ) -> list[Batch]:
        """Ask for all shards."""
        wants = tuple(Want(name, self.number + 1, knowledge or {}, 0, token) for name in self.names)
        assert self.pull(budget, wants=wants) is None
        return self.answer()

    def next(self, budget: int = 10**6) -> list[Batch]:
        assert self.pull(budget) is None
        return self.answer()

    def level(self) -> None:
        """Have everything told."""
        batches = self.want()
        while not all(piece.left == 0 for piece in pieces(batches)):
            batches = self.next()


def test_batches_keep_to_the_budget_and_tell_the_oldest_change_first() -> None:
    source = Source()
    for first in (0, 100, 200):
        push(source.home[NAME], range(first, first + 100))
    push(source.home[NAME], range(40, 60))
    batches = source.want(50 * ROW_BYTES)
    while pieces(batches)[-1].left:
        batches += source.next(50 * ROW_BYTES)
    assert all(batch.nbytes <= 50 * ROW_BYTES + 400 for batch in batches)
    assert len(batches) == 6
    assert keys_of(pieces(batches)) == [*range(40), *range(60, 300), *range(40, 60)]
    assert [piece.left for piece in pieces(batches)] == [250, 200, 150, 100, 50, 0]
    # Knowledge comes with the last piece, and only that has the token.
    last = pieces(batches)[-1]
    assert [piece.update.learned is not None for piece in pieces(batches)] == [False] * 5 + [True]
    assert [piece.token for piece in pieces(batches)] == [None] * 5 + [source.home[NAME].token]
    assert [piece.first for piece in pieces(batches)] == [True] + [False] * 5
    assert last.update.learned is not None
    assert last.update.learned.knowledge == source.home[NAME].knowledge


@pytest.mark.parametrize("budget", [0, 1, ROW_BYTES])
def test_a_tiny_budget_still_moves(budget: int) -> None:
    source = Source()
    push(source.home[NAME], range(5))
    batches = source.want(budget)
    for _ in range(20):
        batches += source.next(budget)
    moved = keys_of(pieces(batches))
    assert sorted(moved) == ([] if budget == 0 else list(range(5)))


def test_nothing_is_told_to_who_has_the_token() -> None:
    source = Source()
    push(source.home[NAME], range(5))
    shard = source.home[NAME]
    assert source.want(knowledge=shard.knowledge, token=shard.token) == []
    assert source.feeds.due_s(source.now_s) == source.now_s + 1.0
    source.later(1.0)
    (batch,) = source.answer()
    assert (batch.pieces, batch.serves, batch.parked_s) == ((), (NAME,), 1.0)


def test_a_token_of_another_start_is_no_token() -> None:
    source = Source()
    push(source.home[NAME], range(5))
    shard = source.home[NAME]
    (batch,) = source.want(token=Token(shard.token.incarnation + 1, shard.token.counter))
    assert sorted(keys_of(batch.pieces)) == list(range(5))
    assert source.feeds.counts.found == {"token": 0, "cache": 1, "scan": 0}


def test_what_the_token_covers_is_not_looked_at_again() -> None:
    source = Source()
    shard = source.home[NAME]
    push(shard, range(5))
    token, knowledge = shard.token, dict(shard.knowledge)
    push(shard, [3, 9])
    (batch,) = source.want(knowledge=knowledge, token=token)
    assert keys_of(batch.pieces) == [3, 9]
    assert source.feeds.counts.found == {"token": 1, "cache": 0, "scan": 0}


def test_batches_are_apart_by_the_coalescing_time() -> None:
    source = Source(config=FeedConfig(coalesce_s=0.01))
    push(source.home[NAME], [1])
    assert len(source.want()) == 1
    source.later(0.004)
    push(source.home[NAME], [2])
    assert source.next() == []
    assert source.feeds.due_s(source.now_s) == pytest.approx(source.now_s + 0.006)
    source.later(0.003)
    push(source.home[NAME], [3])
    assert source.answer() == []
    source.later(0.004)
    (batch,) = source.answer()
    assert keys_of(batch.pieces) == [2, 3]


def test_a_change_answers_a_parked_pull_at_once() -> None:
    source = Source()
    source.level()
    assert source.next() == []
    source.later(0.5)
    assert source.answer() == []
    push(source.home[NAME], [7])
    (batch,) = source.answer()
    assert keys_of(batch.pieces) == [7]
    assert batch.parked_s == pytest.approx(0.5)


def test_pulls_are_answered_once_and_in_order() -> None:
    source = Source()
    push(source.home[NAME], range(30))
    want = Want(NAME, 1)
    assert source.pull(10 * ROW_BYTES, number=1, wants=(want,)) is None
    for number in (3, 2, 2, 1):
        assert source.pull(10 * ROW_BYTES, number=number, wants=(want,) if number == 1 else ()) is None
    batches = source.answer()
    assert [batch.number for batch in batches] == [1, 2, 3]
    assert keys_of(pieces(batches)) == list(range(30))
    source.pull(number=2)
    source.pull(number=1, wants=(want,))
    assert source.answer() == []
    # A pull that overtook waits for the one before.
    push(source.home[NAME], [50])
    source.pull(number=5)
    assert source.answer() == []
    source.pull(number=4)
    assert [batch.number for batch in source.answer()] == [4]


def test_what_was_said_late_of_a_shard_is_not_heard() -> None:
    source = Source()
    source.level()
    # Pull 3 wants again what pull 2, which comes after it, had enough of.
    source.pull(number=3, wants=(Want(NAME, 3),))
    source.pull(number=2, unwanted=(NAME,))
    batches = source.answer()
    assert (batches[0].number, batches[0].serves) == (2, (NAME,))
    source.pull(number=5, unwanted=(NAME,))
    source.pull(number=4, wants=(Want(NAME, 4),))
    source.later(2.0)
    assert source.answer()[-1].serves == ()


def test_a_stream_that_is_not_known_is_ended() -> None:
    source = Source()
    ended = source.pull(number=2, stream=5)
    assert ended is not None
    assert (ended.ended, ended.stream, ended.number) == (True, 5, 2)
    assert source.pull(number=1, stream=5) is None
    # A newer stream ends the one before, an older one is ended itself.
    assert source.pull(number=1, stream=6) is None
    for stream, number in ((5, 2), (5, 1), (4, 1)):
        old = source.pull(number=number, stream=stream)
        assert old is not None
        assert old.ended
    source.feeds.drop("r")
    gone = source.pull(number=2, stream=6)
    assert gone is not None
    assert gone.ended


def test_too_many_pulls_are_passed_over() -> None:
    source = Source()
    for number in range(2, 500):
        source.pull(number=number) if number > 2 else source.pull(number=1)
    assert source.feeds._feeds["r"].waiting <= 64


def test_shards_share_a_batch_and_take_turns() -> None:
    source = Source(shards=3)
    for name in source.names:
        push(source.home[name], range(1_000))
    budget = 600 * ROW_BYTES
    batches = source.want(budget)
    for _ in range(5):
        batches += source.next(budget)
    for batch in batches[:5]:
        each = {name: keys_of([p for p in batch.pieces if p.shard == name]) for name in source.names}
        assert all(len(keys) >= 140 for keys in each.values()), {n: len(k) for n, k in each.items()}
        assert batch.nbytes <= budget * 1.2
    for name in source.names:
        assert sorted(keys_of([p for p in pieces(batches) if p.shard == name])) == list(range(1_000))


def test_a_shard_without_room_says_that_it_is_ahead() -> None:
    source = Source(shards=3)
    source.level()
    for name in source.names:
        push(source.home[name], range(100))
    (batch,) = source.next(500)
    assert {piece.shard for piece in batch.pieces} == set(source.names)
    assert all(piece.left > 0 for piece in batch.pieces)
    # In a few more batches each of them had its turn.
    told = [piece for _ in range(3) for batch in source.next(500) for piece in batch.pieces]
    assert {piece.shard for piece in told if piece.update.rows} == set(source.names)


def test_a_batch_looks_for_news_of_so_many_shards_and_the_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "MAX_FED", 3)
    source = Source(shards=10)
    source.level()
    told: dict[ShardName, int] = dict.fromkeys(source.names, 0)
    for _ in range(10):
        for name in source.names:
            push(source.home[name], range(5))
        (batch,) = source.next()
        assert {piece.shard for piece in batch.pieces} == set(source.names)
        fed = {piece.shard for piece in batch.pieces if piece.update.rows}
        assert len(fed) == 3
        for name in fed:
            told[name] += 1
    assert all(2 <= times <= 4 for times in told.values()), told


def test_a_shard_that_goes_and_comes_is_served_again() -> None:
    source = Source(shards=2)
    source.level()
    gone, stays = source.names
    del source.served[gone]
    push(source.home[gone], [1])
    push(source.home[stays], [2])
    (batch,) = source.next()
    assert (batch.serves, {piece.shard for piece in batch.pieces}) == ((stays,), {stays})
    source.served[gone] = source.home[gone]
    (batch,) = source.next()
    assert set(batch.serves) == set(source.names)
    assert keys_of(batch.pieces) == [1]


def test_another_incarnation_in_the_midst_begins_anew() -> None:
    source = Source()
    before = source.home[NAME]
    push(before, range(100))
    first = pieces(source.want(30 * ROW_BYTES))
    assert first[0].left == 70
    after = source.clock.shard(50)
    after.restore(before.state())
    push(after, [200])
    source.served[NAME] = after
    rest = pieces(source.next())
    assert rest[0].first
    assert sorted(keys_of(rest)) == [*range(100), 200]
    assert rest[-1].token == after.token
    assert {writer for part in rest[-1].update.rows for writer in part.writer.tolist()} == {1, 50}


def test_rows_that_were_deleted_meanwhile_are_told_as_graves() -> None:
    source = Source()
    shard = source.home[NAME]
    push(shard, range(10))
    told = pieces(source.want(5 * ROW_BYTES))
    shard.delete("rows", np.array([2, 7], np.uint64))
    told += pieces(source.next())
    assert [part.keys.tolist() for piece in told for part in piece.update.graves] == [[7]]
    # The grave of 7 was sent, though no knowledge of it; it is not sent again.
    told = pieces(source.next())
    assert [part.keys.tolist() for piece in told for part in piece.update.graves] == [[2]]
    assert told[-1].update.learned is not None
    assert told[-1].update.learned.knowledge == shard.knowledge


def test_rows_that_are_gone_and_forgotten_make_a_new_exchange() -> None:
    source = Source()
    shard = source.home[NAME]
    push(shard, range(10))
    source.want(5 * ROW_BYTES)
    shard.delete("rows", np.array([7], np.uint64))
    shard.collect(shard.knowledge)
    (piece,) = pieces(source.next())
    assert (piece.update.learned, piece.token, piece.left > 0) == (None, None, True)
    (piece,) = pieces(source.next())
    assert (piece.first, piece.whole) == (True, True)
    assert sorted(keys_of([piece])) == [k for k in range(10) if k != 7]


def test_epochs_of_writers_that_came_up_meanwhile_travel_with_their_rows() -> None:
    source = Source()
    shard = source.home[NAME]
    push(shard, range(10))
    source.want(5 * ROW_BYTES)
    shard.merge(update(rows([(9, source.clock.now_us + 1, 500, 1.0)]), epochs={500: 3}))
    (piece,) = pieces(source.next())
    assert 500 in {w for part in piece.update.rows for w in part.writer.tolist()}
    assert piece.update.epochs[500] == 3


def changes(source: Source, keys: list[int], lengths: float) -> None:
    push(source.home[NAME], keys, lengths)


class TestUrgent:
    """More to tell than a batch holds: what is urgent goes first."""

    def source(self, share: float = 0.05) -> Source:
        source = Source(config=FeedConfig(coalesce_s=0.0, priority_share=share))
        changes(source, list(range(1_000)), 1.0)
        source.level()
        return source

    def test_urgent_rows_overtake_and_are_sent_once(self) -> None:
        source = self.source()
        changes(source, list(range(960)), 1.0)
        changes(source, list(range(960, 1_000)), 500.0)
        told = pieces(source.next(100 * ROW_BYTES))
        assert [piece.update.urgent for piece in told] == [True, False]
        assert set(keys_of(told[:1])) <= set(range(960, 1_000))
        while told[-1].left:
            told += pieces(source.next(100 * ROW_BYTES))
        sent = keys_of(told)
        assert len(sent) == len(set(sent)) == 1_000
        assert set(sent[:40]) == set(range(960, 1_000))
        assert all(piece.update.learned is None for piece in told if piece.update.urgent)

    def test_a_row_that_changes_again_is_sent_again(self) -> None:
        source = self.source()
        changes(source, list(range(1_000)), 1.0)
        changes(source, [5], 500.0)
        assert keys_of(pieces(source.next(100 * ROW_BYTES)))[0] == 5
        changes(source, [5], 900.0)
        assert keys_of(pieces(source.next(100 * ROW_BYTES)))[0] == 5
        told = pieces(source.next())
        assert 5 not in keys_of(told)
        (claim,) = pieces(source.next())
        assert (keys_of([claim]), claim.token) == ([], source.home[NAME].token)
        assert source.next() == []

    def test_a_minor_change_does_not_take_an_unsent_urgent_one_its_place(self) -> None:
        source = self.source()
        changes(source, list(range(1_000)), 1.0)
        changes(source, [5, 7], 500.0)
        for _ in range(3):
            changes(source, [5], 0.01)
        (urgent, _) = told = pieces(source.next(100 * ROW_BYTES))
        assert (urgent.update.urgent, keys_of([urgent])) == (True, [5, 7])
        # With what came after it; from then on the row is what its last change is.
        home = source.home[NAME].table("rows")
        np.testing.assert_array_equal(urgent.update.rows[0].values[0], home.pull(np.array([5], np.uint64))[0])
        changes(source, [5], 0.01)
        told += pieces(source.next(100 * ROW_BYTES))
        assert not any(piece.update.urgent for piece in told[2:])
        while told[-1].left:
            told += pieces(source.next(100 * ROW_BYTES))
        assert sorted(keys_of(told)) == sorted([*range(1_000), 5])

    def test_an_urgent_change_waits_for_its_turn_among_the_urgent_ones(self) -> None:
        """There is no room for all of them: those that waited longest go first, whatever happens to them meanwhile."""
        source = self.source(share=0.5)
        changes(source, list(range(1_000)), 1.0)
        changes(source, list(range(200, 400)), 500.0)
        changes(source, list(range(200, 400)), 0.01)
        changes(source, list(range(500, 600)), 500.0)
        sent: list[int] = []
        while len(sent) < 300:
            told = [piece for piece in pieces(source.next(100 * ROW_BYTES)) if piece.update.urgent]
            assert told
            sent += keys_of(told)
            changes(source, [399], 0.01)
        assert set(sent[:200]) == set(range(200, 400))
        assert sorted(sent) == [*range(200, 400), *range(500, 600)]

    def test_what_was_sent_in_turn_is_not_urgent_any_more(self) -> None:
        source = self.source(share=1.0)
        changes(source, list(range(1_000)), 1.0)
        sent = keys_of(pieces(source.next(100 * ROW_BYTES)))
        for _ in range(60):
            sent += keys_of(pieces(source.next(100 * ROW_BYTES)))
        assert sorted(sent) == list(range(1_000))

    def test_deletions_overtake(self) -> None:
        source = self.source(share=0.0)
        changes(source, list(range(900)), 1.0)
        source.home[NAME].delete("rows", np.array([990, 991], np.uint64))
        told = pieces(source.next(100 * ROW_BYTES))
        assert told[0].update.urgent
        assert [part.keys.tolist() for part in told[0].update.graves] == [[990, 991]]
        while told[-1].left:
            told += pieces(source.next(100 * ROW_BYTES))
        assert sorted(keys_of(told)) == [*range(900), 990, 991]

    def test_a_full_replacement_names_what_overtook(self) -> None:
        pair = Pair(config=FeedConfig(coalesce_s=0.0, priority_share=0.05), pace=PACE)
        home = pair.home[NAME]
        push(home, range(1_000))
        pair.settle()
        home.delete("rows", np.array([3], np.uint64))
        home.merge(update(graves([(9_999, pair.clock.now_us, 60)])))
        push(home, range(10, 60), 500.0)
        push(home, range(100, 900), 1.0)
        # The grave of 9,999 is forgotten before the region had it.
        home.collect({60: pair.clock.now_us})
        pair.settle()
        assert pair.feeds.counts.replacements_total == 1
        assert pair.feeds.counts.urgent_rows_total > 0
        assert pair.equal()

    def test_nothing_is_urgent_while_everything_fits(self) -> None:
        source = self.source()
        changes(source, list(range(100)), 500.0)
        assert [piece.update.urgent for piece in pieces(source.next())] == [False]


class TestRest:
    """A link that falls behind rests between exchanges, for a bounded time."""

    BUDGET = 100 * ROW_BYTES

    def source(self, max_staleness_s: float = 2.0, share: float = 0.05) -> Source:
        config = FeedConfig(coalesce_s=0.0, priority_share=share, max_staleness_s=max_staleness_s)
        source = Source(config=config)
        bulk(source.home[NAME], 0, 1_000, source.clock.now_us)
        source.level()
        return source

    def work(self, source: Source, each_s: float, changed: int, batches: int) -> list[tuple[float, bool]]:
        """A batch of 100 rows every ``each_s`` while ``changed`` rows change; when which was sent, and whether it ended
        an exchange."""
        sent, rng = [], np.random.default_rng(0)
        for _ in range(batches):
            changes(source, rng.choice(1_000, changed, replace=False).tolist(), 1.0)
            for batch in source.next(self.BUDGET):
                sent += [(source.now_s, piece.token is not None) for piece in batch.pieces]
            source.later(each_s)
        return sent

    def test_a_link_that_keeps_up_never_rests(self) -> None:
        source = self.source()
        sent = self.work(source, 0.1, 60, 100)
        assert len({at for at, _ in sent}) == 100
        ends = [at for at, ended in sent if ended]
        assert max(b - a for a, b in pairwise(ends)) < 0.5

    def test_a_link_that_is_too_slow_rests_no_longer_than_is_allowed(self) -> None:
        source = self.source(max_staleness_s=2.0)
        self.work(source, 0.1, 500, 10)
        feed = source.feeds._feeds["r"]._feeds[NAME]
        rests = []
        for _ in range(200):
            changes(source, list(range(0, 1_000, 2)), 1.0)
            source.next(self.BUDGET)
            if feed._not_before_s > source.now_s:
                rests.append(feed._not_before_s - source.now_s)
            source.later(0.1)
        assert rests
        assert max(rests) <= 2.0

    def test_while_it_rests_urgent_rows_cross_and_the_others_are_said_to_wait(self) -> None:
        source = self.source(share=0.0005)
        feed = source.feeds._feeds["r"]._feeds[NAME]
        feed._not_before_s = source.now_s + 1.0
        changes(source, list(range(500)), 1.0)
        changes(source, [700], 900.0)
        (batch,) = source.next()
        assert keys_of(batch.pieces) == [700]
        assert all(piece.left > 0 and piece.update.learned is None for piece in batch.pieces)
        assert source.next() == []
        source.later(0.9)
        assert source.feeds.due_s(source.now_s) == pytest.approx(source.now_s + 0.1)
        source.later(0.2)
        (batch,) = source.answer()
        assert sorted(keys_of(batch.pieces)) == list(range(500))

    def test_an_empty_answer_says_that_others_rest(self) -> None:
        source = self.source()
        feed = source.feeds._feeds["r"]._feeds[NAME]
        feed._not_before_s = source.now_s + 10.0
        bulk(source.home[NAME], 0, 5, source.clock.now_us + 9)
        assert source.next() == []
        source.later(1.5)
        (batch,) = source.answer()
        assert [(piece.left > 0, piece.update.rows) for piece in batch.pieces] == [(True, ())]

    def test_catching_up_is_no_congestion(self) -> None:
        source = Source()
        push(source.home[NAME], range(1_000))
        source.want(self.BUDGET)
        for _ in range(8):
            source.later(1.0)
            source.next(self.BUDGET)
        source.later(1.0)
        (batch,) = source.next(self.BUDGET)
        assert batch.pieces[-1].token is not None
        push(source.home[NAME], [1])
        (batch,) = source.next(self.BUDGET)
        assert keys_of(batch.pieces) == [1]


def test_a_replacement_is_whole_and_names_everything() -> None:
    source = Source()
    shard = source.home[NAME]
    push(shard, range(20))
    shard.delete("rows", np.array([4], np.uint64))
    shard.collect(shard.knowledge)
    shard.delete("rows", np.array([5], np.uint64))
    told = pieces(source.want(8 * ROW_BYTES))
    while told[-1].left:
        told += pieces(source.next(8 * ROW_BYTES))
    assert all(piece.whole for piece in told)
    assert sorted(keys_of(told)) == [k for k in range(20) if k != 4]
    assert {key for _, key in told_by(shard)} == set(keys_of(told))


def test_generations_and_sources_are_told_once() -> None:
    source = Source()
    shard = source.home[NAME]
    push(shard, range(3))
    push(shard, range(3), table="dense")
    shard.publish_dense("dense")
    (batch,) = source.want()
    assert [one.number for one in batch.pieces[0].update.generations] == [1]
    assert batch.pieces[0].update.learned is not None
    assert [one.applied for _, one in batch.pieces[0].update.learned.progress] == [1]
    push(shard, [4])
    (batch,) = source.next()
    assert batch.pieces[0].update.generations == ()
    assert batch.pieces[0].update.learned is not None
    assert [one.applied for _, one in batch.pieces[0].update.learned.progress] == [2]
    # A step that moved nothing but the token is told as such.
    shard.announce()
    (batch,) = source.next()
    assert batch.pieces[0].update.learned is not None
    assert batch.pieces[0].update.learned.progress == ()


def test_what_pullers_hold_is_met_over_those_heard_of_lately() -> None:
    source = Source()
    for number, (puller, held) in enumerate({"a": {1: 5, 2: 3}, "b": {1: 4}}.items()):
        pull = Pull(1, 1, 10, 1.0, (Want(NAME, 1),), held=((NAME, held),))
        assert source.feeds.take(puller, pull, source.now_s + number) is None
    assert source.feeds.held_by_all(NAME, {1: 9, 2: 9}, source.now_s + 1) == {1: 4}
    source.feeds.drop("b")
    assert source.feeds.held_by_all(NAME, {1: 9, 2: 9}, source.now_s + 1) == {1: 4}
    # One that said nothing of the shard yet holds back everything; one that is silent for long, nothing.
    source.feeds.take("c", Pull(1, 1, 10, 1.0, (Want(NAME, 1),)), source.now_s + 2)
    assert source.feeds.held_by_all(NAME, {1: 9}, source.now_s + 2) == {}
    assert source.feeds.held_by_all(NAME, {1: 9}, source.now_s + 4_000) == {1: 9}


class TestCongestion:
    """Over a link that cannot carry what changes: urgent rows come soon, the others within bounds."""

    def delays(self, seconds: float, changed: int, max_staleness_s: float) -> tuple[list[float], Pair]:
        """For one urgent row every half second, how long it took; ``changed`` others change every 20 ms."""
        pair = Pair(
            config=FeedConfig(priority_share=0.001, max_staleness_s=max_staleness_s),
            pace=PaceConfig(min_bytes=4_096),
            change_capacity=100_000,
        )
        rng, number, late = np.random.default_rng(0), 0, list[float]()
        sent: dict[int, float] = {}

        def work(at_s: float) -> None:
            nonlocal number
            push(pair.home[NAME], rng.integers(0, 20_000, changed).tolist(), 0.1)
            if int(at_s / 0.5) > number:
                number += 1
                sent[100_000 + number] = pair.now_s
                push(pair.home[NAME], [100_000 + number], 20.0)

        def came(batch: Batch) -> None:
            for key in set(keys_of(batch.pieces)) & set(sent):
                late.append(pair.now_s - sent.pop(key))

        run(pair, Wire(100_000.0, 0.05), seconds, work, step_s=0.02, on_taken=came)
        assert len(sent) <= 4
        return late, pair

    def test_urgent_rows_come_within_a_second_and_the_others_are_not_forgotten(self) -> None:
        late, pair = self.delays(20.0, 150, 5.0)
        # 210,000 bytes/s change, less than half of which crosses.
        assert float(np.median(late[4:])) < 0.6
        assert max(late[4:]) < 1.5
        assert pair.feeds.counts.urgent_rows_total >= 25
        # The oldest change that the region lacks is not older than a rest and two exchanges.
        lacking = Known.of(dict(pair.region[NAME].knowledge)).scan(
            *pair.home[NAME].table("rows").versions(np.arange(20_000, dtype=np.uint64))
        )
        held, _ = pair.region[NAME].table("rows").versions(np.arange(20_000, dtype=np.uint64))
        fresh, _ = pair.home[NAME].table("rows").versions(np.arange(20_000, dtype=np.uint64))
        assert len(lacking) > 0
        behind = fresh[(held != fresh) & (fresh > 0)]
        assert (pair.clock.now_us - int(behind.min())) / 1e6 < 5.0 + 2 * 20_000 * ROW_BYTES / 100_000

    def test_a_link_with_room_for_all_brings_everything_soon(self) -> None:
        late, pair = self.delays(10.0, 30, 5.0)
        # 42,000 of 100,000 bytes/s: nothing rests, and nobody waits.
        assert max(late[2:]) < 0.5
        fresh, _ = pair.home[NAME].table("rows").versions(np.arange(20_000, dtype=np.uint64))
        held, _ = pair.region[NAME].table("rows").versions(np.arange(20_000, dtype=np.uint64))
        behind = fresh[(held != fresh) & (fresh > 0)]
        assert (pair.clock.now_us - int(behind.min())) / 1e6 < 1.0
