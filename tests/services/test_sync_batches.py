"""Batches between regions, with a clock moved by hand: parts of large ones, pace, size, and what a puller may ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.parameters import SOURCE
from support.syncing import SHARDS, Server, World, asked, request, two

from services.parameter_server.declarations import Declaration
from services.parameter_server.messages import pack, unpack
from services.parameter_server.syncing.messages import (
    RestReply,
    RestRequest,
    SyncReply,
    SyncRequest,
    WireWant,
)
from services.parameter_server.syncing.service import SyncConfig
from services.parameter_server.syncing.status import status
from services.rpc.codec import Failure, Reply, Request
from services.rpc.server import BUSY
from sync.exchange import Batch, Taken
from sync.placement import shard_of
from sync.pushes import Push, Source
from sync.quantise import Precision
from sync.spec import Initialiser, Optimiser, TableSpec

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
