"""A model that is declared in a region which does not write it is declared by who does, before anybody hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.parameters import DECLARATION, SPECS
from support.service_process import eventually
from support.sync_regions import Region, gradients, running, same
from support.syncing import Server, World
from support.wan import free_port

from services.coordination.sqlite import SqliteCoordination
from services.freshness.updates import MODEL, UpdateWriter
from services.parameter_server import ModelMismatch, ParametersUnavailable
from services.parameter_server.declarations import Declaration, encode_declaration, read_declaration
from services.parameter_server.messages import MODEL_MISMATCH, DeclareRequest, Done, pack, unpack
from services.parameter_server.syncing.service import SyncConfig
from services.rpc.codec import Failure, Reply, Request
from services.rpc.server import BUSY
from services.settings.model import SyncSettings
from sync.pushes import Source

NOTHING: frozenset[int] = frozenset()


def region(
    world: World, name: str, number: int, follows: str = "", writes: frozenset[int] | None = None
) -> Server:
    """A region that knows no model; it writes what it is told to, else nothing where it follows somebody."""
    upstreams = tuple(filter(None, follows.split()))
    written = NOTHING if upstreams and writes is None else writes
    config = SyncConfig(region=name, upstreams=upstreams)
    return world.server(name, number, config, written=written, declaration=None)


def declare(
    world: World,
    server: Server,
    declaration: Declaration = DECLARATION,
    *,
    again: bool = False,
    seconds: float = 2.5,
) -> Reply | Failure | None:
    """The server's answer to a client that waits for two seconds."""
    message = pack(DeclareRequest(encode_declaration(declaration), again=again))
    what = Request(7, "declare", 2_000, message, ())
    server.handle(what, world.clock.now_s + 2.0)
    world.run(seconds)
    found = [answer for call, answer in server.answers if call.request is what]
    return found[0] if found else None


def knows(server: Server) -> bool:
    return "main" in server.host.models


def test_it_is_answered_once_the_writing_region_has_it() -> None:
    world = World()
    home, eu = region(world, "home", 0), region(world, "eu", 1, "home")
    world.run(1.0)
    assert declare(world, eu, seconds=0.01) is not None
    assert knows(home)
    assert home.settled == [DECLARATION], "where home's clients find it"
    assert eu.settled == [], "its client wrote it down before it asked"
    world.run(2.0)
    home.push(0)
    world.run(0.1)
    assert eu.rows() == home.rows()


def test_it_goes_by_way_of_regions_in_between_and_not_in_circles() -> None:
    world = World()
    home = region(world, "home", 0, "eu", writes=frozenset({0}))
    eu, asia = region(world, "eu", 1, "home", writes=frozenset({1})), region(world, "asia", 2, "eu")
    world.run(1.0)
    answer = declare(world, asia)
    assert isinstance(answer, Reply)
    unpack(answer.body, Done)
    assert all(map(knows, (home, eu, asia)))
    assert (home.settled, eu.settled, asia.settled) == ([DECLARATION], [DECLARATION], [])
    assert [server.syncing.forwarding.counts.forwarded_total for server in (asia, eu, home)] == [1, 1, 0]


def test_while_no_writing_region_answers_nobody_hears_of_it() -> None:
    world = World()
    home, eu = region(world, "home", 0), region(world, "eu", 1, "home")
    world.run(1.0)
    home.alive = False
    answer = declare(world, eu)
    assert isinstance(answer, Failure)
    assert answer.code == BUSY, "it is to be tried again"
    assert not knows(eu)
    home.alive = True
    world.run(10.0)
    assert isinstance(declare(world, eu), Reply)
    assert knows(home)


def test_an_address_that_is_away_does_not_matter_where_another_answers() -> None:
    for follows in ("gone home", "home gone"):
        world = World()
        home, eu = region(world, "home", 0), region(world, "eu", 1, follows)
        world.run(1.0)
        assert isinstance(declare(world, eu), Reply)
        assert knows(home)
        assert knows(eu)


def test_what_home_declares_otherwise_is_refused_and_stays_unknown_here() -> None:
    world = World()
    home, eu = region(world, "home", 0), region(world, "eu", 1, "home")
    other = Declaration("main", "fp-2", DECLARATION.tables)
    # As long as eu has not heard of it.
    home.host.declare(other)
    answer = declare(world, eu, seconds=0.01)
    assert isinstance(answer, Failure)
    assert answer.code == MODEL_MISMATCH
    assert "region" in answer.message
    assert "fp-2" in answer.message
    world.run(3.0)
    assert eu.host.models["main"].declaration == other, "it follows home"


def test_what_is_declared_otherwise_here_is_not_sent_anywhere() -> None:
    world = World()
    home, eu = region(world, "home", 0), region(world, "eu", 1, "home")
    eu.host.declare(Declaration("main", "fp-2", DECLARATION.tables))
    answer = declare(world, eu)
    assert isinstance(answer, Failure)
    assert answer.code == MODEL_MISMATCH
    assert not knows(home)


def test_a_server_that_did_not_know_it_serves_readers_while_home_is_away() -> None:
    world = World()
    home, eu = region(world, "home", 0), region(world, "eu", 1, "home")
    world.run(1.0)
    home.alive = False
    assert isinstance(declare(world, eu, again=True, seconds=0.01), Reply)
    assert knows(eu)
    home.alive = True
    world.run(10.0)
    assert isinstance(declare(world, eu, again=True, seconds=0.01), Reply)
    assert knows(home), "and home is told of it, too"


def stored(where: Region, model: str) -> Declaration | None:
    store = SqliteCoordination(where.folder / "coordination.db")
    try:
        return read_declaration(store, model)
    finally:
        store.close()


def test_marked_updates_of_a_following_region_need_none_at_home_before(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0, servers=2)
    eu = Region(tmp_path, "eu", 1, SyncSettings(upstreams=tuple(home.addresses.values())))
    with running(home, eu), eu.client() as client, home.client() as at_home:
        writer = UpdateWriter(client, 3)
        writer.open()
        assert at_home.pull(MODEL, {}).rows == {}
        eventually(lambda: stored(home, MODEL) is not None)
        first, second = writer.push(), writer.push()
        assert second.number > first.number
        assert {one.applied for one in at_home.applied(MODEL, Source("probes", 3)).values()} == {
            second.number
        }


def test_a_declaration_that_home_refuses_does_not_stay_in_the_regions_store(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    eu = Region(tmp_path, "eu", 1, SyncSettings(upstreams=tuple(home.addresses.values())))
    with running(home, eu), home.client() as at_home, eu.client() as client:
        at_home.declare("main", SPECS, "fp-1")
        with pytest.raises(ModelMismatch, match="fp-1"):
            client.declare("main", SPECS, "fp-2")

        def follows() -> bool:
            found = stored(eu, "main")
            return found is not None and found.fingerprint == "fp-1"

        eventually(follows)
        at_home.push("main", Source("log", 0), 0, {0: -1, 1: -1}, 0, None, gradients(0))
        same(at_home, client)


def test_without_home_a_declaration_is_not_answered(tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    eu = Region(tmp_path, "eu", 1, SyncSettings(upstreams=(gone,)))
    with running(eu), eu.client(2.0) as client, pytest.raises(ParametersUnavailable):
        client.declare("main", SPECS, "fp-1")
