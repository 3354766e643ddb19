"""A server's part between regions, with a clock moved by hand: what is fed when, and what becomes of bad peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.parameters import DECLARATION, SOURCE
from support.syncing import KEYS, SHARDS, Server, World

from services.parameter_server.declarations import Declaration
from services.parameter_server.messages import (
    AppliedReply,
    AppliedRequest,
    ChangesReply,
    ChangesRequest,
    Part,
    PublishReply,
    PublishRequest,
    PushRequest,
    PushResponse,
    ShardCursor,
    ShardDelta,
    pack,
    unpack,
)
from services.parameter_server.syncing.messages import (
    OTHER_SHARDS,
    RestReply,
    RestRequest,
    SyncReply,
    SyncRequest,
    WireWant,
    received,
    reply_of,
)
from services.parameter_server.syncing.service import SyncConfig
from services.parameter_server.syncing.status import standing_of, status
from services.parameter_server.types import ParametersRefused
from services.rpc.codec import Failure, Reply, Request
from services.rpc.server import BUSY
from sync.exchange import Batch, Taken
from sync.placement import shard_of
from sync.pushes import Push, Source
from sync.quantise import Precision
from sync.records import Generation
from sync.spec import Initialiser, Optimiser, TableSpec


def two(
    world: World, *, declaration: Declaration | None = DECLARATION, **config: object
) -> tuple[Server, Server]:
    """Home, and a region that follows it."""
    home = world.server("home")
    settings = replace(SyncConfig(region="eu", upstreams=("home",)), **config)  # type: ignore[arg-type]
    return home, world.server("eu", 1, settings, written=frozenset(), declaration=declaration)


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


LARGE = Declaration(
    "large",
    "fp-1",
    (TableSpec("dense", 1_000, Initialiser.uniform(0.1), Optimiser("sgd", 0.1), "single", 1_500),),
)
"""Six megabytes of dense weights."""


def publish(home: Server, scale: float) -> int:
    """Train the dense weights a little, and publish them."""
    model = home.host.models["large"]
    shard = model.held[home.host.shard_of("dense")].shard
    source, chunks = Source("dense", 0), np.arange(1_500, dtype=np.uint64)
    offset = shard.applied(source) + 1
    gradients = np.full((1_500, 1_000), scale, np.float32)
    assert (
        shard.push(Push(source, offset, offset - 1, None, (("dense", chunks, gradients),))).status
        == "applied"
    )
    return home.host.publish("large", "dense")


def dense_of(server: Server) -> tuple[int, bytes]:
    model = server.host.models["large"]
    found = model.held[server.host.shard_of("dense")].shard.dense("dense")
    return found.number, found.values.tobytes()


def test_dense_weights_that_are_larger_than_any_batch_come_part_by_part() -> None:
    world = World()
    home, eu = two(world)
    home.host.declare(LARGE)
    world.run(3.0)
    for scale in (0.5, 0.25):
        number = publish(home, scale)
        home.push(home.host.models["main"].held[0].shard.applied(SOURCE) + 1)
        world.run(1.0)
        assert dense_of(eu) == dense_of(home)
        assert dense_of(eu)[0] == number
        assert eu.rows() == home.rows()
    assert eu.syncing.upstreams[0].puller.counts.faults_total == 0
    assert all(not peer.rest for peer in home.syncing.source.peers.values())
    assert eu.syncing.upstreams[0]._fetching == 0


def test_a_large_batch_that_breaks_off_is_asked_for_anew() -> None:
    world = World()
    home, eu = two(world)
    home.host.declare(LARGE)
    world.run(3.0)
    spoilt = 0

    def spoil(answer: Reply | Failure) -> Reply | Failure:
        nonlocal spoilt
        if isinstance(answer, Reply) and answer.body == pack(RestReply()) and spoilt < 1:
            spoilt += 1
            return replace(answer, arrays=(answer.arrays[0][:-1],))
        return answer

    world.spoil = spoil
    publish(home, 0.5)
    world.run(8.0)
    assert spoilt == 1
    assert eu.syncing.upstreams[0].counts.damaged_total == 1
    assert dense_of(eu) == dense_of(home)


def test_a_part_of_no_batch_is_refused() -> None:
    world = World()
    home, _ = two(world)
    world.run(2.0)
    name = next(iter(home.syncing.source.peers))
    stream = home.syncing.source.peers[name].stream
    for message in (
        RestRequest("nobody", stream, 1, 0, 1),
        RestRequest(name, stream + 1, 1, 0, 1),
        RestRequest(name, stream, 1, 0, 1),
    ):
        answer = asked(world, home, request("sync-rest", message), 0.01)
        assert isinstance(answer, Failure)
        assert answer.code == "refused"


def test_a_puller_that_never_fetches_its_parts_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.parameter_server.syncing.source.LARGEST_BYTES", 15 * 2**20)
    world = World()
    home, _ = two(world)
    home.host.declare(LARGE)
    publish(home, 0.5)
    name = "large", home.host.shard_of("dense")
    for number in range(1, 7):
        pull = SyncRequest("x", "x", 2, 1, number, 1, 0.0, [WireWant(*name, number, [])])
        assert isinstance(asked(world, home, request("sync", pull), 0.1), Reply)
    rest = home.syncing.source.peers["x"].rest
    assert sorted(rest) == [5, 6]
    assert all(len(part) > 5 * 2**20 for part in rest.values())


def test_a_puller_that_is_gone_is_forgotten() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    assert [one.region for one in status(home.syncing).pullers] == ["eu"]
    eu.alive = False
    world.run(15.0)
    assert status(home.syncing).pullers == []
    assert home.syncing.source.feeds.pullers == ()
    eu.alive = True
    home.push(0)
    world.run(8.0)
    assert eu.rows() == home.rows()


def test_batches_wait_while_no_step_may_be_taken() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    eu.allowed = False
    home.push(0)
    world.run(1.0)
    assert eu.rows() != home.rows()
    assert eu.syncing.upstreams[0].waiting >= 1
    assert eu.syncing.next_s(1.0) > 0.0
    eu.allowed = True
    assert eu.syncing.next_s(1.0) == 0.0
    world.run(0.05)
    assert eu.rows() == home.rows()


def test_readers_that_wait_have_smaller_batches_and_pauses_between_them() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    puller = eu.syncing.upstreams[0].puller
    take, taken = puller.take, list[float]()

    def slowly(batch: Batch, nbytes: int, now_s: float, clock_us: int = 0) -> Taken:
        eu.clock.now_s += 0.002
        taken.append(eu.clock.now_s)
        return take(batch, nbytes, now_s, clock_us)

    def pauses(offsets: range) -> list[float]:
        taken.clear()
        for offset in offsets:
            home.push(offset, 50)
            world.run(0.006, 0.001)
        world.run(0.3, 0.001)
        assert eu.rows() == home.rows()
        return np.diff(taken).tolist()  # type: ignore[no-any-return]

    puller.take = slowly  # type: ignore[method-assign]
    puller.pace.rate = 20e6
    assert puller.pace.budget == 2**20
    assert min(pauses(range(20))) < 0.008
    for _ in range(20):
        eu.syncing.note_read(0.1)
    assert (eu.syncing.brake.slow_total, eu.syncing.brake_level) == (20, pytest.approx(0.95))
    puller.pace.rate = 20e6
    assert puller.pace.budget < 0.1 * 2**20
    # Two ms of work, and nineteen times as long for others; the level is halved each second.
    assert 0.03 < pauses(range(20, 40))[0] < 0.05
    world.run(10.0)
    assert eu.syncing.brake_level == 0.0


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_a_batch_has_the_bytes_that_were_asked_for_whatever_the_precision(precision: Precision) -> None:
    world = World()
    wide = Declaration(
        "main", "fp-1", (TableSpec("items", 32, Initialiser.uniform(0.1), Optimiser("sgd", 0.1)),)
    )
    home = world.server("home", declaration=wide)
    config = SyncConfig(region="eu", upstreams=("home",), precision=precision)
    eu = world.server("eu", 1, config, written=frozenset(), declaration=wide)
    world.run(2.0)
    (upstream,) = eu.syncing.upstreams
    puller, came = upstream.puller, list[tuple[int, int]]()
    take = puller.take

    def noted(batch: Batch, nbytes: int, now_s: float, clock_us: int = 0) -> Taken:
        _, asked, _ = puller._open[batch.number]
        came.append((nbytes, asked))
        return take(batch, nbytes, now_s, clock_us)

    puller.take = noted  # type: ignore[method-assign]
    keys = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shard, held in home.host.led(home.host.models["main"]):
        mine = keys[shard_of(keys, SHARDS) == shard]
        held.shard.push(Push(SOURCE, 0, -1, None, (("items", mine, np.ones((len(mine), 32), np.float32)),)))
    world.run(2.0)
    large = [(nbytes, asked) for nbytes, asked in came if nbytes > 10_000]
    assert len(large) >= 3
    assert all(0.8 < nbytes / asked < 1.2 for nbytes, asked in large[:-2])


def test_only_what_taking_over_held_up_counts_against_it() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    puller = eu.syncing.upstreams[0].puller
    take = puller.take

    def slowly(batch: Batch, nbytes: int, now_s: float, clock_us: int = 0) -> Taken:
        eu.clock.now_s += 0.02
        return take(batch, nbytes, now_s, clock_us)

    puller.take = slowly  # type: ignore[method-assign]
    home.push(0)
    longest = 0.0
    for _ in range(10):
        world.run(0.01)
        longest = max(longest, eu.syncing.merging_s)
    assert longest == pytest.approx(0.02)
    world.run(0.3)
    assert eu.syncing.merging_s == 0.0


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_wrong_clock_takes_no_pushes_where_it_is_certain_which_one_is_wrong(others: int) -> None:
    world = World()
    home = world.server("home")
    for number in range(1, others + 1):
        name = f"r{number}"
        world.server(name, number, SyncConfig(region=name, upstreams=("home",)), written=frozenset())
    home.clock.ahead_us = -3_600_000_000
    world.run(5.0)
    verdict = home.syncing.clock_verdict
    assert verdict.off
    assert verdict.ahead_s == pytest.approx(-3_600.0, abs=1.0)
    assert bool(home.syncing.takes_no_pushes()) == (others >= 2)
    for name in ("r1", "r2")[: others - 1]:
        assert not world.servers[name].syncing.takes_no_pushes()
    home.clock.ahead_us = 0
    world.run(3.0)
    assert not home.syncing.clock_verdict.off


def test_a_machine_whose_clock_is_wrong_does_not_outvote_a_right_one() -> None:
    world = World()
    home = world.server("home")
    for name in ("eu-0", "eu-1"):
        server = world.server(name, 1, SyncConfig(region="eu", upstreams=("home",)), written=frozenset())
        server.clock.ahead_us = 3_600_000_000
    world.run(5.0)
    assert {peer.region for peer in home.syncing.source.peers.values()} == {"eu"}
    assert len(home.syncing.source.peers) == 2
    assert home.syncing.clock_verdict.off
    assert not home.syncing.takes_no_pushes()


def test_a_version_from_too_far_in_the_future_is_refused() -> None:
    world = World()
    home, eu = two(world)
    world.run(2.0)
    home.clock.ahead_us = 3_600_000_000
    home.push(0)
    world.run(1.0)
    assert eu.rows() != home.rows()
    assert standing_of(eu.syncing, eu.syncing.upstreams[0]).ahead_total >= 1
    assert eu.syncing.upstreams[0].puller.clock_ahead_s == pytest.approx(3_600.0, abs=1.0)


def test_the_puller_says_how_it_wants_to_be_fed() -> None:
    world = World()
    home = world.server("home")
    exact = world.server(
        "exact", 1, SyncConfig(region="exact", upstreams=("home",), optimiser_state=True),
        written=frozenset(), optimiser_state=True,
    )  # fmt: skip
    rough = world.server(
        "rough", 2, SyncConfig(region="rough", upstreams=("home",), precision="int8"), written=frozenset()
    )
    world.run(2.0)
    home.push(0)
    world.run(0.1)
    assert exact.rows() == home.rows()
    of = [server.host.models["main"].held[0].shard.table("items") for server in (home, exact, rough)]
    pages = [table.page(0, 1_000)[0] for table in of]
    assert [page.state.shape[1] for page in pages] == [1, 1, 0]
    by_key = [dict(zip(page.keys.tolist(), page.state.tolist(), strict=True)) for page in pages[:2]]
    assert by_key[0] == by_key[1]
    values = [dict(zip(page.keys.tolist(), page.values, strict=True)) for page in pages]
    far = max(float(np.abs(values[0][key] - values[2][key]).max()) for key in values[0])
    span = max(float(np.ptp(row)) for row in values[0].values())
    assert 0.0 < far <= span / 510 * 1.001
    told = {one.region: one.bytes_total for one in home.syncing.source.peers.values()}
    assert told["rough"] < told["exact"]


def test_a_region_that_nobody_serves_says_how_far_behind_it_falls() -> None:
    world = World()
    home, eu = two(world)
    (upstream,) = eu.syncing.upstreams
    assert standing_of(eu.syncing, upstream).behind_s is None
    world.run(2.0)
    home.alive = False
    world.run(30.0)
    now = standing_of(eu.syncing, upstream)
    assert (now.served, now.wanted) == (0, 2)
    assert now.behind_s == pytest.approx(30.0, abs=1.5)
    told = status(eu.syncing).followed
    assert [(one.upstream, one.behind_s) for one in told] == [("", pytest.approx(30.0, abs=1.5))] * 2
    home.alive = True
    world.run(10.0)
    assert standing_of(eu.syncing, upstream).behind_s == pytest.approx(0.5, abs=0.6)


def test_a_region_that_begins_with_empty_folders_is_another_source_to_whom_it_feeds() -> None:
    world = World()
    home, first = two(world)
    config = SyncConfig(region="asia", upstreams=("eu",))
    asia = world.server("asia", 2, config, written=frozenset())
    world.run(2.0)
    for offset in range(10):
        home.push(offset)
        world.run(0.05)
    first.alive = False
    for offset in range(10, 13):
        home.push(offset, 25)
    # Coordination began anew, too: it gives the same fences for a second time, and fewer changes were counted.
    again = world.server("eu", 1, first.syncing.config, written=frozenset())
    world.run(12.0)
    assert again.host.fences == first.host.fences
    assert again.host.incarnation != first.host.incarnation
    assert again.rows() == home.rows()
    assert asia.rows() == home.rows()


def test_graves_are_forgotten_once_everybody_has_them() -> None:
    world = World()
    home, eu = two(world, member_timeout_s=60.0)
    home.syncing.upkeep._due_s = world.clock.now_s + 60.0
    world.run(2.0)
    home.push(0)
    shard = home.host.models["main"].held[0].shard
    mine = KEYS[0::2][:20]
    shard.delete("items", mine)
    theirs = eu.host.models["main"].held[0].shard
    world.run(1.0)
    assert len(theirs.table("items").graves) == 20
    # Not before they are old enough, and not while a region that counts does not say that it has them.
    world.run(40.0, 0.05)
    assert len(shard.table("items").graves) == 20
    world.run(80.0, 0.05)
    assert len(shard.table("items").graves) == 0
    world.run(6.0, 0.05)
    assert len(theirs.table("items").graves) == 0
    assert home.syncing.source.feeds.counts.replacements_total == 0
    assert eu.rows() == home.rows()


def test_one_look_retires_older_owners_and_forgets_their_graves() -> None:
    world = World()
    home, _ = two(world)
    world.run(2.0)
    home.push(0)
    home.host.models["main"].held[0].shard.delete("items", KEYS[0::2][:20])
    world.run(1.0)
    home.host.follow(0)
    home.host.lead(0, 9)
    world.run(70.0, 0.05)
    shard, upkeep = home.host.models["main"].held[0].shard, home.syncing.upkeep
    assert len(shard.table("items").graves) == 20
    upkeep._due_s = world.clock.now_s
    assert upkeep.turn()
    assert (upkeep.retired_total >= 1, len(shard.table("items").graves)) == (True, 0)


def test_a_region_with_optimiser_state_goes_on_in_the_owners_place() -> None:
    world = World()
    home = world.server("home")
    config = SyncConfig(region="eu", upstreams=("home",), optimiser_state=True)
    eu = world.server("eu", 1, config, written=frozenset(), optimiser_state=True)
    for offset in range(3):
        home.push(offset)
    dense = home.host.models["main"].held[home.host.shard_of("dense")].shard
    chunks = np.arange(3, dtype=np.uint64)
    source = Source("other", 0)
    dense.push(Push(source, 0, -1, None, (("dense", chunks, np.ones((3, 8), np.float32)),)))
    home.host.publish("main", "dense")
    world.run(2.0)
    assert eu.rows() == home.rows()
    states = {shard: held.shard.state() for shard, held in eu.host.models["main"].held.items()}
    heir = world.server("heir", 1, SyncConfig(region="eu"), states=states, fence=20)
    for offset in range(3, 6):
        home.push(offset)
        heir.push(offset)
    assert heir.rows() == home.rows()
    mine = heir.host.models["main"].held[heir.host.shard_of("dense")].shard
    assert mine.dense("dense", published=False).values.tobytes() == dense.dense("dense").values.tobytes()
    outcome = mine.push(Push(source, 1, 0, None, (("dense", chunks, np.ones((3, 8), np.float32)),)))
    assert outcome.status == "applied"
    assert heir.host.publish("main", "dense") > dense.dense("dense").number
    # And back again: the one that was home follows, and drops what only a writer needs.
    kept = {shard: held.shard.state() for shard, held in home.host.models["main"].held.items()}
    follower = world.server(
        "was-home",
        0,
        SyncConfig(region="home", upstreams=("heir",)),
        written=frozenset(),
        states=kept,
        fence=30,
    )
    world.run(2.0)
    assert follower.rows() == heir.rows()
    assert follower.host.models["main"].held[0].shard.table("items").state_dim == 0


def test_a_folder_without_optimiser_state_is_not_written_to() -> None:
    world = World()
    home, eu = two(world)
    home.push(0)
    world.run(2.0)
    states = {shard: held.shard.state() for shard, held in eu.host.models["main"].held.items()}
    for more in ({"written": None}, {"written": frozenset[int](), "optimiser_state": True}):
        with pytest.raises(ParametersRefused, match=r"sync\.optimiser_state"):
            world.server("heir", 1, states=states, fence=20, **more)  # type: ignore[arg-type]


def request(method: str, message: msgspec.Struct, arrays: tuple[np.ndarray, ...] = ()) -> Request:
    return Request(7, method, 2_000, pack(message), arrays)  # type: ignore[arg-type]


def push_of(offset: int, shards: list[int], incarnation: int = 0) -> Request:
    """A push of one row of each shard, as a client of a server that leads ``shards`` sends it."""
    of = shard_of(KEYS, 2)
    keys = np.concatenate([KEYS[of == shard][:3] for shard in shards])
    message = PushRequest(
        "main", 1, SOURCE.log, SOURCE.partition, offset, 5, ("events", 0, offset, 5), shards,
        [offset - 1] * len(shards), [Part("items", shards, [3] * len(shards))], incarnation,
    )  # fmt: skip
    return request("push", message, (keys, np.ones((len(keys), 4), np.float32)))


def asked(world: World, server: Server, what: Request, seconds: float = 0.2) -> Reply | Failure:
    """The server's answer to a client."""
    server.handle(what, world.clock.now_s + 2.0)
    world.run(seconds)
    found = [answer for call, answer in server.answers if call.request is what]
    assert len(found) == 1
    server.answers = [one for one in server.answers if one[0].request is not what]
    return found[0]


def pair(world: World) -> tuple[Server, Server]:
    """Two regions, each of which writes one shard."""
    one = world.server("one", 1, SyncConfig(region="one", upstreams=("two",)), written=frozenset({0}))
    two_ = world.server("two", 2, SyncConfig(region="two", upstreams=("one",)), written=frozenset({1}))
    world.run(3.0)
    return one, two_


def test_a_push_is_split_by_who_writes_and_answered_as_the_owners_answer() -> None:
    world = World()
    one, two_ = pair(world)
    for offset in range(3):
        answer = asked(world, one if offset % 2 else two_, push_of(offset, [0, 1]))
        assert isinstance(answer, Reply)
        outcomes = unpack(answer.body, PushResponse).outcomes
        assert [(found.shard, found.status, found.applied) for found in outcomes] == [
            (0, "applied", offset),
            (1, "applied", offset),
        ]
    assert one.rows() == two_.rows()
    again = asked(world, one, push_of(1, [0, 1]))
    assert isinstance(again, Reply)
    assert {found.status for found in unpack(again.body, PushResponse).outcomes} == {"duplicate"}
    applied = asked(
        world, one, request("applied", AppliedRequest("main", 1, SOURCE.log, SOURCE.partition, [0, 1]))
    )
    assert isinstance(applied, Reply)
    assert [found[:2] for found in unpack(applied.body, AppliedReply).shards] == [(0, 2), (1, 2)]
    assert one.syncing.forwarding.counts.forwarded_total == 3
    assert one.host.models["main"].held[1].shard.counts.applied_total == 0


def test_dense_weights_are_published_by_who_writes_them() -> None:
    world = World()
    one, two_ = pair(world)
    dense = one.host.shard_of("dense")
    owner, other = (one, two_) if one.host.writes(dense) else (two_, one)
    asked(world, owner, push_of(0, [0, 1]))
    answer = asked(world, other, request("publish", PublishRequest("main", 1, "dense")))
    assert isinstance(answer, Reply)
    number = unpack(answer.body, PublishReply).generation
    assert number >= 1
    assert other.host.models["main"].held[dense].shard.dense("dense").number == number


def test_whoever_pushes_through_a_region_hears_of_another_process_at_the_owner() -> None:
    world = World()
    one, two_ = pair(world)
    first = asked(world, one, push_of(0, [0, 1]))
    assert isinstance(first, Reply)
    known = unpack(first.body, PushResponse).incarnation
    same = asked(world, one, push_of(1, [0, 1], known))
    assert isinstance(same, Reply)
    assert unpack(same.body, PushResponse).incarnation == known
    two_.host.follow(1)
    two_.host.lead(1, 9)
    world.run(3.0)
    after = asked(world, one, push_of(2, [0, 1], known))
    assert isinstance(after, Reply)
    assert unpack(after.body, PushResponse).incarnation != known
    refused = asked(world, one, push_of(3, [0, 1], known))
    assert isinstance(refused, Failure)
    assert refused.code == "incarnation"


def test_where_a_push_cannot_be_forwarded_it_is_said_why() -> None:
    world = World()
    one, two_ = pair(world)
    two_.host.follow(1)
    world.run(2.0)
    gone = asked(world, one, push_of(0, [0, 1]))
    assert isinstance(gone, Failure)
    assert gone.code == BUSY
    assert "written in two" in gone.message
    assert one.host.models["main"].held[0].shard.applied(SOURCE) == -1
    alone = world.server("alone", 3, SyncConfig(region="alone"), written=frozenset({0}))
    refused = asked(world, alone, push_of(0, [1]))
    assert isinstance(refused, Failure)
    assert refused.code == "refused"
    assert "sync.upstreams is empty" in refused.message


def test_a_push_that_nobody_writes_does_not_go_round_for_ever() -> None:
    world = World()
    one = world.server("one", 1, SyncConfig(region="one", upstreams=("two",)), written=frozenset())
    world.server("two", 2, SyncConfig(region="two", upstreams=("one",)), written=frozenset())
    world.run(3.0)
    refused = asked(world, one, push_of(0, [0, 1]), 0.5)
    assert isinstance(refused, Failure)
    assert refused.code == "refused"
    assert "no region on the way writes" in refused.message


def test_an_owner_that_does_not_answer_is_waited_for_as_long_as_the_caller_waits() -> None:
    world = World()
    one, two_ = pair(world)
    two_.alive = False
    silent = asked(world, one, push_of(0, [1]), 3.0)
    assert isinstance(silent, Failure)
    assert silent.code == BUSY
    assert one.syncing.forwarding.counts.failed_total == 1


@pytest.mark.parametrize("arrays", [(), (KEYS[:3],), (KEYS[:2], np.ones((2, 4), np.float32))])
def test_a_push_that_makes_no_sense_is_not_forwarded(arrays: tuple[np.ndarray, ...]) -> None:
    world = World()
    one, two_ = pair(world)
    served = two_.served
    refused = asked(world, one, replace(push_of(0, [1]), arrays=arrays), 0.01)
    assert isinstance(refused, Failure)
    assert refused.code == "refused"
    assert two_.served <= served + 3


def test_a_pull_that_makes_no_sense_is_refused_and_counted() -> None:
    world = World()
    home = world.server("home")
    for body in (
        b"",
        pack(SyncRequest("x", "x", 2, 0, 0, 0, 0.0)),
        pack(SyncRequest("x", "x", 3, 1, 1, 1, 0.0)),
    ):
        answer = asked(world, home, Request(1, "sync", 1_000, body, ()), 0.01)
        assert isinstance(answer, Failure)
    assert home.syncing.source.counts.refused_total == 3
    unknown = asked(world, home, request("sync", SyncRequest("x", "x", 2, 5, 2, 1, 0.0)), 0.01)
    assert isinstance(unknown, Reply)
    assert unpack(unknown.body, SyncReply).ended


@pytest.mark.parametrize(
    ("pull", "why"),
    [
        ({"wants": [WireWant("main", 0, 1, [])] * 1_025}, "length <= 1024"),
        ({"unwanted": [("main", 0)] * 1_025}, "length <= 1024"),
        ({"held": [("main", 0, [])] * 1_025}, "length <= 1024"),
        ({"wants": [WireWant("main", 0, 1, [(1, 1)] * 65_537)]}, "length <= 65536"),
        ({"wants": [WireWant("main", 0, 1, [(w, 1) for w in range(1, 40_000)])] * 2}, "79998 writers"),
        ({"models": {"x" * 2**21: ""}}, "bytes"),
    ],
)
def test_a_pull_that_says_too_much_at_once_is_refused(pull: dict[str, Any], why: str) -> None:
    world = World()
    home = world.server("home")
    refused = asked(world, home, request("sync", SyncRequest("x", "x", 2, 1, 1, 1, 0.0, **pull)), 0.01)
    assert isinstance(refused, Failure)
    assert (refused.code, why in refused.message) == ("refused", True)
    assert home.syncing.source.counts.refused_total == 1
    assert not home.syncing.source.peers


def test_one_puller_too_many_makes_the_one_that_is_gone_forgotten_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sync.exchange.feeds.MAX_PULLERS", 2)
    world = World()
    home, eu = two(world)
    world.run(2.0)
    for number, ended in ((1, False), (2, True), (3, False)):
        found = asked(world, home, request("sync", SyncRequest(f"x{number}", "x", 2, 1, 1, 1, 0.0)), 0.01)
        assert isinstance(found, Reply)
        assert unpack(found.body, SyncReply).ended is ended
        # For some seconds nobody can tell whether it comes back at once.
        world.run(12.0 if number == 2 else 1.0, 0.05)
    counts = home.syncing.source.feeds.counts
    assert (counts.forgotten_total, counts.turned_away_total) == (1, 1)
    assert "1 that are gone were forgotten so far" in caplog.text
    home.push(0)
    world.run(0.1)
    assert eu.rows() == home.rows()


def test_a_stream_speaks_of_so_many_shards_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.parameter_server.syncing.source.MAX_SHARDS", 10)
    world = World()
    home = world.server("home")
    first = SyncRequest("x", "x", 2, 1, 1, 1, 0.0, unwanted=[(f"m{n}", 0) for n in range(8)])
    assert isinstance(asked(world, home, request("sync", first), 0.01), Reply)
    second = SyncRequest("x", "x", 2, 1, 2, 1, 0.0, unwanted=[(f"n{n}", 0) for n in range(8)])
    refused = asked(world, home, request("sync", second), 0.01)
    assert isinstance(refused, Failure)
    assert refused.code == BUSY
    assert not home.syncing.source.peers
