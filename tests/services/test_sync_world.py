"""A server's part between regions, with a clock moved by hand: what is fed when, and what becomes of bad peers."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support.parameters import DECLARATION
from support.syncing import World, pair, two

from services.parameter_server.declarations import Declaration
from services.parameter_server.messages import (
    ChangesReply,
    ChangesRequest,
    ShardCursor,
    ShardDelta,
    pack,
    unpack,
)
from services.parameter_server.syncing.messages import OTHER_SHARDS, SyncReply, received, reply_of
from services.parameter_server.syncing.service import SyncConfig
from services.parameter_server.syncing.status import standing_of, status
from services.rpc.codec import Failure, Reply
from sync.pushes import Push, Source
from sync.records import Generation
from sync.spec import Initialiser, Optimiser, TableSpec


def test_what_is_pushed_arrives_within_milliseconds() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    for offset in range(5):
        home.push(offset)
        world.run(0.02)
        assert eu.rows() == home.rows()
    (upstream,) = eu.syncing.upstreams
    now = standing_of(eu.syncing, upstream)
    assert (now.served, now.behind_changes, now.faults_total, upstream.region) == (2, 0, 0, "home")
    assert now.behind_s is not None
    assert now.behind_s < 0.05
    # A source that has nothing new says so once a second, and nothing else passes.
    asked = home.served
    world.run(10.0)
    assert 9 * eu.syncing.config.window <= home.served - asked <= 11 * (eu.syncing.config.window + 1)


def test_no_step_leaves_before_this_regions_replicas_hold_it() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    before = eu.rows()
    home.pending = {0: (1, 1), 1: (1, 1)}
    home.push(0)
    world.run(1.0)
    assert eu.rows() == before
    assert home.fed.waiting
    # A shard that is acknowledged does not wait for another one.
    home.pending = {}
    world.run(0.1)
    assert eu.rows() == home.rows()


def test_readers_of_changes_in_the_region_hear_of_rows_generations_and_watermarks() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    dense = eu.host.shard_of("dense")
    cursors = [ShardCursor(shard) for shard in range(2)]

    def changes() -> dict[int, ShardDelta]:
        found = eu.host.changes(ChangesRequest("main", 1, ["items"], cursors, 1_000, 0))
        if found is None:
            return {}
        reply, _ = found
        assert isinstance(reply, ChangesReply)
        for delta in reply.deltas:
            cursors[delta.cursor.shard] = delta.cursor
        return {delta.cursor.shard: delta for delta in reply.deltas}

    assert set(changes()) == {0, 1}
    assert changes() == {}
    home.push(0)
    world.run(0.05)
    told = changes()
    assert {shard: (delta.parts, delta.marks) for shard, delta in told.items()} == {
        shard: ([("items", 20)], [("events", 0, 0, 1_000)]) for shard in range(2)
    }
    assert changes() == {}
    chunks = np.arange(3, dtype=np.uint64)
    live = home.host.models["main"].held[dense].shard
    live.push(Push(Source("other", 0), 0, -1, None, (("dense", chunks, np.ones((3, 8), np.float32)),)))
    number = home.host.publish("main", "dense")
    world.run(0.05)
    told = changes()
    assert set(told) == {dense}
    assert told[dense].cursor.generation == number
    # Nothing is published in a region that only follows, whatever the interval.
    eu.host.publish_all()
    assert changes() == {}


def test_a_model_declared_at_home_is_declared_in_the_region_and_written_down() -> None:
    world = World()
    home, eu = two(world, declaration=None)
    home.push(0)
    world.run(1.5)
    assert eu.settled == [DECLARATION]
    assert eu.rows() == home.rows()
    later = Declaration("second", "fp-1", DECLARATION.tables)
    home.host.declare(later)
    world.run(1.5)
    assert eu.settled == [DECLARATION, later]
    assert eu.syncing.models_learned_total == 2


def test_a_model_declared_otherwise_is_not_followed_and_holds_up_no_other() -> None:
    world = World()
    wider = TableSpec("items", 9, Initialiser.uniform(0.1), Optimiser("sgd", 0.1))
    home, eu = two(world, declaration=Declaration("second", "fp-1", (wider,)))
    home.host.declare(Declaration("second", "fp-1", DECLARATION.tables[:1]))
    home.push(0)
    world.run(3.0)
    (upstream,) = eu.syncing.upstreams
    assert upstream.unlike == {"second"}
    assert eu.rows() == home.rows()
    assert upstream.puller.counts.faults_total == 0
    assert "declares it otherwise" in upstream.counts.last_fault
    assert {name for name, _ in upstream.puller.standings} == {"main"}


def test_regions_cut_into_other_numbers_of_shards_tell_each_other_nothing() -> None:
    world = World()
    home = world.server("home", shards=2)
    eu = world.server("eu", 1, SyncConfig(region="eu", upstreams=("home",)), written=frozenset(), shards=4)
    home.push(0)
    world.run(2.0)
    (upstream,) = eu.syncing.upstreams
    assert OTHER_SHARDS in upstream.counts.last_fault
    assert home.syncing.source.counts.refused_total >= 2
    assert all(not held.shard.position for _, held in eu.host.all_held())


def test_two_regions_of_one_number_tell_each_other_nothing() -> None:
    world = World()
    home = world.server("home", 3)
    eu = world.server("eu", 3, SyncConfig(region="eu", upstreams=("home",)), written=frozenset())
    home.push(0)
    world.run(2.0)
    (upstream,) = eu.syncing.upstreams
    assert "regions home and eu both have region.number = 3" in upstream.counts.last_fault
    assert all(not held.shard.position for _, held in eu.host.all_held())


def test_shards_that_two_regions_write_are_told_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    one = world.server("one", 1, SyncConfig(region="one", upstreams=("two",)), written=frozenset({0, 1}))
    two_ = world.server("two", 2, SyncConfig(region="two", upstreams=("one",)))
    one.push(0)
    world.run(5.0)
    assert two_.rows() != one.rows()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2
    assert told[0].startswith("shards 0-1 are written in region one and in region two alike")
    assert "set sync.writes" in told[0]
    for server in (one, two_):
        (shown,) = status(server.syncing).upstreams
        assert (shown.contested, shown.wanted) == ([0, 1], 0)
    # As long as nobody knows what the other region writes, nothing is said against it.
    two_.alive = False
    world.run(5.0)
    assert status(one.syncing).upstreams[0].contested == []
    # It comes back and follows: all is well.
    del world.servers["two"]
    two_ = world.server("two", 2, SyncConfig(region="two", upstreams=("one",)), written=frozenset())
    world.run(10.0)
    assert [status(server.syncing).upstreams[0].contested for server in (one, two_)] == [[], []]
    assert two_.rows() == one.rows()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2


def test_only_the_shards_that_both_write_are_contested() -> None:
    world = World()
    one = world.server("one", 1, SyncConfig(region="one", upstreams=("two",)), written=frozenset({0}))
    two_ = world.server("two", 2, SyncConfig(region="two", upstreams=("one",)))
    world.run(3.0)
    assert [status(server.syncing).upstreams[0].contested for server in (one, two_)] == [[0], [0]]
    one, two_ = pair(World())
    assert [status(server.syncing).upstreams[0].contested for server in (one, two_)] == [[], []]


def test_a_batch_that_is_not_well_formed_ends_the_stream_and_is_counted() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)

    def spoil(answer: Reply | Failure) -> Reply | Failure:
        assert isinstance(answer, Reply)
        found = unpack(answer.body, SyncReply)
        if not found.pieces:
            return answer
        found.pieces[0] = msgspec.structs.replace(found.pieces[0], header=b"nonsense")
        return replace(answer, body=pack(found))

    world.spoil = spoil
    home.push(0)
    world.run(1.0)
    (upstream,) = eu.syncing.upstreams
    assert upstream.counts.damaged_total >= 1
    assert eu.rows() != home.rows()
    world.spoil = lambda answer: answer
    world.run(6.0)
    assert eu.rows() == home.rows()


def test_a_batch_that_makes_no_sense_does_not_end_the_server() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)

    def spoil(answer: Reply | Failure) -> Reply | Failure:
        assert isinstance(answer, Reply)
        batch = received(answer).batch
        if not batch.pieces:
            return answer
        # Weights of a table that has none.
        wrong = Generation("items", 3, np.ones((2, 4), np.float32), 5, 9)
        update = replace(batch.pieces[0].update, generations=(wrong,), epochs={9: 1})
        spoilt = replace(batch, pieces=(replace(batch.pieces[0], update=update), *batch.pieces[1:]))
        body, arrays = reply_of(spoilt, "float32")
        return Reply(answer.id, body, arrays)

    world.spoil = spoil
    home.push(0)
    world.run(1.0)
    (upstream,) = eu.syncing.upstreams
    assert upstream.counts.damaged_total + upstream.puller.counts.faults_total >= 1
    assert eu.rows() != home.rows()
    world.spoil = lambda answer: answer
    world.run(8.0)
    assert eu.rows() == home.rows()


def test_a_shard_that_cannot_be_opened_is_not_followed_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)

    def cannot(declaration: Declaration) -> None:
        raise OSError("the disk is slow")

    monkeypatch.setattr(eu.host, "declare", cannot)
    home.host.declare(Declaration("second", "fp-1", DECLARATION.tables))
    world.run(2.0)
    home.push(0)
    world.run(0.1)
    assert eu.syncing.upstreams[0].unlike == {"second"}
    assert "the disk is slow" in eu.syncing.upstreams[0].counts.last_fault
    assert eu.rows() == home.rows()


def test_a_source_that_is_silent_is_connected_to_anew() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    home.alive = False
    home.push(0)
    world.run(8.0)
    (upstream,) = eu.syncing.upstreams
    assert 2 <= upstream.counts.expired_total <= 8
    assert [link.closed for link in world.links] == [True] * upstream.counts.connections_total + [False]
    home.alive = True
    world.run(6.0)
    assert eu.rows() == home.rows()
