"""Real parameter servers of two and three regions: what is learned in one is served in all."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.parameters import SOURCE, SPECS
from support.service_process import eventually
from support.sync_regions import KEYS, LEASE_S, Region, Seen, gradients, running, same, seen

from services.parameter_server import ModelUnknown, ParameterClient
from services.parameter_server.types import ParametersRefused, ParametersUnavailable
from services.settings.model import SyncSettings
from services.wan.conditions import parse_conditions
from services.wan.emulator import emulated
from sync.pushes import Watermark
from sync.spec import Initialiser, Optimiser, TableSpec


class Trainer:
    """Pushes recorded micro-batches, one after the other, as often as needed."""

    def __init__(self, client: ParameterClient, keys: int = 40) -> None:
        self._client, self._keys = client, keys
        self.offset = -1
        self.lost = 0

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            found = self._client.applied("main", SOURCE)
            applied = min(one.applied for one in found.values())
            self.lost = max(self.lost, self.offset - applied)
            offset = applied + 1
            self._client.push(
                "main",
                SOURCE,
                offset,
                {shard: min(one.applied, offset - 1) for shard, one in found.items()},
                1_000 + offset,
                Watermark("events", 0, offset, 1_000 + offset),
                gradients(offset, self._keys),
            )
            self.offset = offset


def counted(client: ParameterClient, pattern: str) -> float:
    """The sum over a region's servers of the metrics that fit ``pattern``."""
    told = "\n".join(client.metrics().values())
    found: list[str] = re.findall(rf"^{pattern} (\S+)$", told, re.MULTILINE)
    assert found, pattern
    return sum(float(one) for one in found)


def found_by(client: ParameterClient, how: str) -> float:
    """Exchanges of a region's sources whose rows were found so."""
    return counted(client, rf'headwater_sync_exchanges_total\{{how="{how}"\}}')


def declared(client: ParameterClient) -> None:
    """Wait until the region knows the model."""

    def known() -> bool:
        try:
            seen(client)
        except ModelUnknown:
            return False
        return True

    eventually(known)


def following(home: Region, folder: Path, name: str = "eu", number: int = 1, **more: int | str) -> Region:
    """A region that follows ``home``."""
    sync = SyncSettings(upstreams=tuple(home.addresses.values()))
    return Region(folder, name, number, sync, **more)  # type: ignore[arg-type]


@contextmanager
def taught(
    home: Region, region: Region, steps: int
) -> Iterator[tuple[ParameterClient, ParameterClient, Trainer]]:
    """Both regions running, home taught so many steps, and the region level with it: a client of each, and the
    trainer."""
    with running(home, region), home.client() as at_home, region.client() as reader:
        at_home.declare("main", SPECS, "fp-1")
        trainer = Trainer(at_home)
        trainer.step(steps)
        declared(reader)
        same(at_home, reader)
        yield at_home, reader, trainer


def test_what_is_pushed_at_home_is_served_in_another_region_bit_for_bit(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    region = following(home, tmp_path)
    with taught(home, region, 20) as (at_home, reader, trainer):
        for _ in range(10):
            trainer.step()
            assert same(at_home, reader) < 2.0
        # Dense weights are published every half second, and served under the number that they have at home.
        eventually(lambda: at_home.dense("main").generation >= 2)
        same(at_home, reader)
        assert reader.dense("main", published=False).values.tobytes() == reader.dense("main").values.tobytes()
        with pytest.raises(ParametersRefused):
            ParameterClient.publish(reader, "main", "items")
        assert found_by(at_home, "scan") == 0
        # Both end when they are told to, whoever ends first.
        for of in (home, region):
            assert [server.stop() for server in of.servers.values()] == [0]


def test_rows_that_expire_at_home_are_gone_in_the_region(tmp_path: Path) -> None:
    expiring = TableSpec("items", 4, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.1), expiry_s=2)
    home = Region(tmp_path, "home", 0)
    region = following(home, tmp_path)
    with running(home, region), home.client() as at_home, region.client() as reader:
        at_home.declare("main", (expiring, SPECS[1]), "fp-1")
        untouched = at_home.pull("main", {"items": KEYS}).rows["items"].tobytes()
        trainer = Trainer(at_home)
        trainer.step(3)
        declared(reader)
        eventually(lambda: reader.pull("main", {"items": KEYS}).rows["items"].tobytes() != untouched)
        eventually(lambda: reader.pull("main", {"items": KEYS}).rows["items"].tobytes() == untouched)
        same(at_home, reader)
        # And they come back.
        trainer.step()
        assert at_home.pull("main", {"items": KEYS}).rows["items"].tobytes() != untouched
        eventually(lambda: reader.pull("main", {"items": KEYS}).rows["items"].tobytes() != untouched)


def test_a_killed_leader_at_home_or_in_the_region_holds_nothing_up_for_longer_than_a_lease(
    tmp_path: Path,
) -> None:
    home = Region(tmp_path, "home", 0, servers=2, replicas=2)
    region = following(home, tmp_path, servers=2, replicas=2)
    with taught(home, region, 10) as (at_home, reader, trainer):
        for of, client in ((region, reader), (home, at_home)):
            time.sleep(1.0)
            victim = of.place(0).leader
            of.servers[victim].kill()
            killed_s = time.monotonic()
            trainer.step(3)
            same(at_home, reader)
            took_s = time.monotonic() - killed_s
            print(f"{of.name}: goes on after {took_s:.2f} s")
            assert took_s < LEASE_S + 1.0 + 1.0
            of.servers[victim].start()
            of.ready()
            trainer.step(5)
            same(at_home, reader)
            assert client.shards == 2
        assert trainer.lost == 0


def test_a_home_that_is_killed_and_comes_back_is_followed_again(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    region = following(home, tmp_path)
    with taught(home, region, 10) as (at_home, reader, trainer):
        (server,) = home.servers.values()
        for _ in range(2):
            # What was not on disk is pushed again, and wins over what the region had of it.
            trainer.step(5)
            server.kill()
            server.start()
            trainer.step(5)
            same(at_home, reader)


def test_a_region_takes_the_place_of_a_home_that_is_gone(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    sync = SyncSettings(upstreams=tuple(home.addresses.values()), optimiser_state=True)
    region = Region(tmp_path, "eu", 1, sync)
    with running(home, region), home.client() as at_home, region.client() as reader:
        at_home.declare("main", SPECS, "fp-1")
        trainer = Trainer(at_home)
        trainer.step(5)
        (server,) = home.servers.values()
        # A start raises home's fencing epochs, which those of the region have to exceed.
        server.kill()
        server.start()
        home.ready()
        trainer.step()
        # What is pushed from now on is written under these, or newer ones.
        fences = [home.place(shard).fence for shard in range(2)]
        trainer.step(3)
        declared(reader)
        same(at_home, reader)
        published = at_home.dense("main").generation
        server.kill()
        (other,) = region.servers.values()
        assert other.stop() == 0
        region.configure(SyncSettings(writes="all", optimiser_state=True))
        region.start()
        region.ready()
        assert all(region.place(shard).fence > fences[shard] for shard in range(2))
        heir = Trainer(reader)
        heir.offset = trainer.offset
        heir.step(5)
        assert heir.lost == 0
        eventually(lambda: reader.dense("main").generation > published)
        # What was home comes back, and follows.
        home.configure(SyncSettings(upstreams=tuple(region.addresses.values())))
        home.start()
        home.ready()
        heir.step(3)
        same(at_home, reader)
        assert heir.lost == 0


def test_no_region_ever_holds_a_step_that_a_fail_over_at_home_loses(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0, servers=3, replicas=3, replication="quorum")
    region = following(home, tmp_path)
    with taught(home, region, 5) as (at_home, reader, trainer):
        leader = home.place(0).leader
        followers = [server for name, server in home.servers.items() if name != leader]
        before = at_home.applied("main", SOURCE)[0].applied
        for server in followers:
            server.pause()
        stale = seen(reader)
        # The leader takes the push, and nobody else has it: it is not acknowledged, and must not leave the region.
        with home.client(1.0) as hasty, pytest.raises(ParametersUnavailable):
            Trainer(hasty).step()
        assert seen(reader) == stale
        home.servers[leader].kill()
        for server in followers:
            server.resume()
        trainer.step(3)
        same(at_home, reader)
        home.servers[leader].start()
        home.ready()
        trainer.step(3)
        same(at_home, reader)
        assert at_home.applied("main", SOURCE)[0].applied >= before + 6


def test_a_link_that_breaks_or_goes_silent_costs_only_its_time(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    (address,) = home.addresses.values()
    with emulated(address, parse_conditions("delay=20ms,jitter=5ms,rate=50mbit")) as link:
        region = Region(tmp_path, "eu", 1, SyncSettings(upstreams=(link.address,)))
        with taught(home, region, 5) as (at_home, reader, trainer):
            for _ in range(3):
                link.reset()
                trainer.step(2)
                same(at_home, reader)
            link.partition()
            trainer.step(10)
            stale = seen(reader)
            assert stale != seen(at_home)
            time.sleep(3.0)
            assert seen(reader) == stale
            link.heal()
            took_s = same(at_home, reader)
            print(f"caught up {took_s:.2f} s after the partition")
            assert found_by(at_home, "scan") == 0


@pytest.mark.slow
def test_a_link_that_becomes_a_hundred_times_slower_goes_on_carrying(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    (address,) = home.addresses.values()
    with emulated(address, parse_conditions("delay=10ms,rate=100mbit")) as link:
        region = Region(tmp_path, "eu", 1, SyncSettings(upstreams=(link.address,)))
        with running(home, region), home.client() as at_home, region.client() as reader:
            wide = TableSpec("items", 64, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.1))
            at_home.declare("main", (wide, SPECS[1]), "fp-1")
            offset = 0

            def push(rows: int) -> None:
                nonlocal offset
                keys = (np.arange(rows, dtype=np.uint64) + np.uint64(offset * 100_000)) * np.uint64(
                    0x9E3779B97F4A7C15
                )
                parts = {"items": (keys, np.ones((rows, 64), np.float32))}
                at_home.push("main", SOURCE, offset, dict.fromkeys(range(2), offset - 1), 0, None, parts)
                offset += 1

            def told() -> float:
                return counted(reader, r'headwater_sync_upstream_rows_total\{upstream=".*"\}')

            for _ in range(5):
                push(10_000)
            eventually(lambda: told() == 50_000)
            link.set(parse_conditions("delay=10ms,rate=1mbit"))
            # 5.5 MB, which would take three quarters of a minute.
            push(20_000)
            eventually(lambda: told() > 50_500)
            before, began_s = told(), time.monotonic()
            time.sleep(6.0)
            rate = (told() - before) * 276 * 8 / (time.monotonic() - began_s)
            print(f"{rate / 1e6:.2f} Mbit/s of 1")
            assert rate > 0.5e6
            link.set(parse_conditions("delay=10ms,rate=100mbit"))
            eventually(lambda: told() == 70_000)


@pytest.mark.slow
def test_dense_weights_of_megabytes_cross_a_slow_link(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0, generation_s=3_600.0)
    (address,) = home.addresses.values()
    with emulated(address, parse_conditions("delay=20ms,rate=8mbit")) as link:
        region = Region(tmp_path, "eu", 1, SyncSettings(upstreams=(link.address,)))
        with running(home, region), home.client() as at_home, region.client() as reader:
            dense = TableSpec(
                "dense", 1_000, Initialiser.uniform(0.1), Optimiser("sgd", 0.1), "single", 2_000
            )
            at_home.declare("main", (SPECS[0], dense), "fp-1")
            declared(reader)
            parts = {"dense": (np.arange(2_000, dtype=np.uint64), np.full((2_000, 1_000), 0.5, np.float32))}
            at_home.push("main", SOURCE, 0, dict.fromkeys(range(2), -1), 0, None, parts)
            began_s = time.monotonic()
            assert at_home.publish("main") >= 1
            # Eight megabytes take eight seconds, longer than anybody waits for one answer.
            took_s = same(at_home, reader, 40.0)
            print(f"8 MB over 8 Mbit/s in {time.monotonic() - began_s:.1f} s")
            assert took_s > 5.0
            assert counted(reader, r'headwater_sync_upstream_faults_total\{upstream=".*"\}') == 0


def test_a_region_that_restarts_catches_up_by_what_it_knows(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    region = following(home, tmp_path)
    with running(home, region), home.client() as at_home:
        at_home.declare("main", SPECS, "fp-1")
        trainer = Trainer(at_home, keys=150)
        trainer.step(20)
        with region.client() as reader:
            declared(reader)
            same(at_home, reader)
        before: Seen = seen(at_home)
        (server,) = region.servers.values()
        # What was not on disk yet would have to come again.
        time.sleep(0.5)
        server.kill()
        few = Trainer(at_home, keys=3)
        few.offset = trainer.offset
        few.step(2)
        told = counted(at_home, "headwater_sync_fed_rows_total")
        server.start()
        region.ready()
        with region.client() as reader:
            same(at_home, reader)
        assert seen(at_home) != before
        # Only what changed, found without a look at all rows.
        assert 1 <= counted(at_home, "headwater_sync_fed_rows_total") - told <= 12
        assert found_by(at_home, "scan") == 0
        # From an empty folder it gets everything, while pushes go on.
        server.kill()
        shutil.rmtree(region.folder)
        region.folder.mkdir()
        (region.folder / "run").mkdir()
        region.follow(tuple(home.addresses.values()))
        region.start()
        trainer.offset = few.offset
        trainer.step(10)
        region.ready()
        with region.client() as reader:
            declared(reader)
            trainer.step(10)
            same(at_home, reader)


def test_two_regions_that_write_different_shards_follow_each_other(tmp_path: Path) -> None:
    one = Region(tmp_path, "one", 1, SyncSettings(writes="0"))
    other = Region(tmp_path, "two", 2, SyncSettings(writes="1"))
    one.follow(tuple(other.addresses.values()))
    other.follow(tuple(one.addresses.values()))
    with running(one, other), one.client() as here, other.client() as there:
        here.declare("main", SPECS, "fp-1")
        declared(there)
        # Every push has a part on both shards; what belongs to the other region is forwarded there.
        trainer = Trainer(here)
        trainer.step(10)
        same(here, there)
        second = Trainer(there)
        second.offset = trainer.offset
        second.step(10)
        same(here, there)
        assert trainer.lost == second.lost == 0
        applied = {shard: found.applied for shard, found in here.applied("main", SOURCE).items()}
        assert applied == {0: second.offset, 1: second.offset}
        assert {shard: found.applied for shard, found in there.applied("main", SOURCE).items()} == applied


def test_a_push_in_a_region_that_writes_nothing_goes_home(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0, servers=2)
    region = following(home, tmp_path)
    third = Region(tmp_path, "asia", 2, SyncSettings(upstreams=tuple(region.addresses.values())))
    with running(home, region, third), home.client() as at_home, third.client() as far:
        at_home.declare("main", SPECS, "fp-1")
        declared(far)
        # By way of the region in between, to both servers at home.
        trainer = Trainer(far)
        trainer.step(5)
        same(at_home, far)
        assert trainer.offset == 4
        assert {found.applied for found in at_home.applied("main", SOURCE).values()} == {4}
        undisturbed = np.frombuffer(seen(at_home)[0], np.float32)
        assert np.isfinite(undisturbed).all()
