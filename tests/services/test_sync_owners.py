"""Who may write, between regions and with a clock moved by hand: wrong clocks, owners that come and go, graves and
retired writers."""

from __future__ import annotations

import numpy as np
import pytest
from support.syncing import KEYS, World, two

from services.parameter_server.syncing.service import SyncConfig
from services.parameter_server.syncing.status import standing_of, status
from services.parameter_server.types import ParametersRefused
from sync.pushes import Push, Source


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
