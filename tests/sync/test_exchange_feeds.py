"""All streams of a source: who is known to hold what, and who is told that a stream is over."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sync.clock import HybridClock
from sync.exchange import Batch, Feed, FeedConfig, Feeds, Pace, PaceConfig, Pull, Puller, ShardName, Want
from sync.exchange import feeds as module
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec
from tests.support.exchange import PULLER, Pair
from tests.support.replicas import push

SPEC = TableSpec("rows", 2, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5))
ONE, TWO = ("m", 0), ("m", 1)


def shard(number: int, writer: int, *, stateless: bool = False) -> Shard:
    return Shard(number, (SPEC,), writer, HybridClock(lambda: 1_000), model="m", stateless=stateless)


def pull(number: int, *wants: ShardName, stream: int = 1, held: dict[ShardName, int] | None = None) -> Pull:
    said = tuple((name, {9: time}) for name, time in (held or {}).items())
    return Pull(stream, number, 1_000, 1.0, tuple(Want(name, number) for name in wants), (), said)


def feeds(timeout_s: float = 10.0) -> Feeds:
    return Feeds(lambda: {}, FeedConfig(), timeout_s)


def test_only_those_who_pull_a_shard_have_a_say_in_what_is_held_of_it() -> None:
    source = feeds()
    assert source.take("a", pull(1, ONE, held={ONE: 5}), 0.0) is None
    assert source.take("b", pull(1, TWO, held={TWO: 7}), 0.0) is None
    assert source.held_below(ONE, 0.0) == [{9: 5}]
    assert source.held_by_all(TWO, {9: 8, 4: 1}, 0.0) == {9: 7}
    assert source.held_by_all(("other", 0), {9: 8}, 0.0) == {9: 8}


def test_who_wants_a_shard_and_did_not_say_holds_nothing_of_it() -> None:
    source = feeds()
    source.take("a", pull(1, ONE, TWO, held={ONE: 5}), 0.0)
    assert source.held_by_all(TWO, {9: 8}, 0.0) == {}
    source.take("a", pull(2, held={TWO: 6, ("unasked", 3): 1}), 0.0)
    assert source.held_by_all(TWO, {9: 8}, 0.0) == {9: 6}
    assert source.held_below(("unasked", 3), 0.0) == []


def test_a_shard_that_is_not_wanted_any_more_is_somebody_elses_to_hold() -> None:
    source = feeds()
    source.take("a", pull(1, ONE, TWO, held={ONE: 5, TWO: 5}), 0.0)
    source.take("a", Pull(1, 2, 1_000, 1.0, (), (ONE,)), 0.0)
    assert source.held_below(ONE, 0.0) == []
    assert source.held_below(TWO, 0.0) == [{9: 5}]
    # Another start of the same puller says anew what it has.
    source.take("a", pull(1, ONE, stream=2), 0.0)
    assert source.held_below(TWO, 0.0) == []
    assert source.held_below(ONE, 0.0) == [{}]


def test_an_old_first_pull_changes_nothing() -> None:
    source = feeds()
    source.take("a", pull(1, ONE, stream=5, held={ONE: 5}), 0.0)
    found = source.take("a", pull(1, TWO, stream=4), 0.0)
    assert isinstance(found, Batch)
    assert found.ended
    assert source.held_below(ONE, 0.0) == [{9: 5}]
    assert source.held_below(TWO, 0.0) == []


def test_who_is_silent_for_too_long_does_not_count() -> None:
    source = feeds(10.0)
    source.take("a", pull(1, ONE, held={ONE: 5}), 0.0)
    source.drop("a")
    assert source.held_by_all(ONE, {9: 8}, 10.0) == {9: 5}
    assert source.held_by_all(ONE, {9: 8}, 10.1) == {9: 8}


def test_there_are_so_many_pullers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PULLERS", 2)
    source = feeds(10.0)
    assert source.take("a", pull(1), 0.0) is None
    assert source.take("b", pull(1), 0.0) is None
    for name in "cd":
        refused = source.take(name, pull(1), 1.0)
        assert refused is not None
        assert refused.ended
    assert (source.counts.forgotten_total, source.counts.turned_away_total) == (0, 2)
    # Who was there before may begin anew, and the others once it is forgotten.
    assert source.take("a", pull(1, stream=2), 2.0) is None
    assert source.take("c", pull(1), 11.0) is None


def test_who_is_gone_for_longest_makes_room_and_who_pulls_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PULLERS", 3)
    source = feeds(1_000.0)
    for number, name in enumerate(("live", "first", "second")):
        assert source.take(name, pull(1, ONE, held={ONE: number + 1}), float(number)) is None
    source.take("first", pull(2), 5.0)
    source.drop("first")
    source.drop("second")
    assert source.take("new", pull(1, ONE, held={ONE: 9}), 6.0) is None
    assert source.pullers == ("live", "new")
    # "second" was silent for longer. What it holds counts no more: graves that it lacks may go.
    assert source.held_below(ONE, 6.0) == [{9: 1}, {9: 2}, {9: 9}]
    assert source.take("other", pull(1), 7.0) is None
    assert source.held_below(ONE, 7.0) == [{9: 1}, {9: 9}]
    assert source.take("more", pull(1), 8.0) is not None
    assert source.take("live", pull(2), 8.0) is None
    assert (source.counts.forgotten_total, source.counts.turned_away_total) == (2, 1)


def test_who_was_forgotten_for_others_gets_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PULLERS", 1)
    pair = Pair()
    home = pair.home[ONE]
    push(home, range(10))
    pair.settle()
    pair.feeds.drop(PULLER)
    home.delete("rows", np.array([3], np.uint64))
    assert pair.feeds.held_by_all(ONE, home.knowledge, pair.now_s) != home.knowledge
    assert pair.feeds.take("another", pull(1), pair.now_s) is None
    home.collect(pair.feeds.held_by_all(ONE, home.knowledge, pair.now_s))
    assert len(home.table("rows").graves) == 0
    pair.feeds.drop("another")
    pair.puller.failed(pair.now_s)
    pair.settle()
    assert pair.feeds.counts.replacements_total == 1
    assert pair.equal()


def test_each_stream_is_fed_as_its_puller_wants() -> None:
    home, exact, rough = shard(0, 1), shard(0, 2), shard(0, 3, stateless=True)
    push = Push(
        Source("log", 0), 0, -1, None, (("rows", np.arange(5, dtype=np.uint64), np.ones((5, 2), np.float32)),)
    )
    home.push(push)
    source = Feeds(lambda: {ONE: home}, FeedConfig())
    for name, replica, state in (("exact", exact, True), ("rough", rough, False)):
        puller = Puller(lambda replica=replica: {ONE: replica}, Pace(PaceConfig()), 1, random.Random(1))  # type: ignore[misc]
        asked = puller.ask(0.0)
        assert asked is not None
        source.take(name, asked, 0.0, FeedConfig(state=state))
        (batch,) = source.answers(name, 1.0)
        assert not puller.take(batch, batch.nbytes, 1.0).fault
        assert (
            replica.pull("rows", np.arange(5, dtype=np.uint64)).tobytes()
            == home.pull("rows", np.arange(5, dtype=np.uint64)).tobytes()
        )
        assert replica.table("rows").page(0, 10)[0].state.shape == (5, int(state))


def test_a_puller_without_shards_asks_all_the_same() -> None:
    """What it may want next, it hears from the source."""
    puller = Puller(lambda: {}, Pace(PaceConfig()), 1, random.Random(1))
    asked = puller.ask(0.0)
    assert asked is not None
    assert asked.wants == ()
    feed = Feed(1, lambda: {}, FeedConfig(), feeds().counts)
    feed.take(asked, 0.0)
    batch = feed.next(0.0)
    assert batch is not None
    assert not puller.take(batch, 0, 0.1).fault
    # From then on it is told when there is something, or that there is nothing, once a second.
    asked = puller.ask(0.1)
    assert asked is not None
    feed.take(asked, 0.2)
    assert feed.next(1.1) is None
    assert feed.next(1.2) is not None
    assert puller.counts.batches_total == 1
