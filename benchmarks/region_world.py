"""Regions of real parameter servers, and the links between them, each a process of its own, while a block lasts.

Home has one server that leads all shards and, if wanted, a second one that follows it; every other region has one
server and reaches home through an emulated link.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import msgspec
import psutil

from services.backends import open_coordination
from services.coordination.contract import Coordination
from services.coordination.membership import members
from services.coordination.shardmap import KEY, Place, ShardMap
from services.parameter_server.client import ParameterClient
from services.processes import configure_logging
from services.settings.model import (
    CoordinationSettings,
    DataSettings,
    ParameterSettings,
    RegionSettings,
    Settings,
    SyncSettings,
)
from services.wan.conditions import parse_conditions
from services.wan.emulator import Emulator
from services.wan.types import LinkPlan, LinkStatus

SHARDS: Final = 4
LEASE_S: Final = 60.0
SERVICE: Final = "parameter-server"
LEADER: Final = f"{SERVICE}-0"
_READY_S: Final = 60.0
_DEADLINE_S: Final = 60.0


class RegionFailed(Exception):
    """A region did not come up; the text says which."""


def processes() -> ForkServerContext:
    """Where processes come from: they find the libraries loaded, and inherit nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["services.parameter_server.main", "services.wan.emulator"])
    return context


@dataclass(slots=True)
class Region:
    """One region."""

    settings: Settings
    servers: int = 1
    running: list[BaseProcess] = field(default_factory=list)

    @staticmethod
    def at(
        folder: Path, name: str, number: int, sync: SyncSettings | None = None, servers: int = 1
    ) -> Region:
        """A region with its files below ``folder``."""
        return Region(
            Settings(
                data=DataSettings(dir=folder / name),
                # Nobody is to lead in another's place because the machine was busy for a while.
                coordination=CoordinationSettings(lease_ttl=LEASE_S),
                region=RegionSettings(name=name, number=number),
                sync=sync or SyncSettings(),
                parameters=ParameterSettings(
                    servers=servers, replicas=servers, shards=SHARDS, generation_interval=3_600.0
                ),
            ),
            servers,
        )

    @property
    def name(self) -> str:
        return self.settings.region.name

    @property
    def folder(self) -> Path:
        return self.settings.data.dir

    def start(self) -> None:
        """Start its servers, without waiting."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [f"{SERVICE}-{number}" for number in range(self.servers)]
        with closing(open_coordination(self.settings)) as store:
            if store.get(KEY) is None:
                place = Place(LEADER, tuple(names))
                store.put(KEY, msgspec.json.encode(ShardMap(1, (place,) * SHARDS)), expect_revision=0)
        for name in names:
            process = processes().Process(
                target=_serve, args=(self.settings, name), name=f"{self.name}/{name}", daemon=True
            )
            process.start()
            self.running.append(process)

    def ready(self) -> None:
        """Wait until all serve. Raises RegionFailed."""
        deadline = time.monotonic() + _READY_S
        with closing(open_coordination(self.settings)) as store:
            while sum(member.ready for member in members(store, SERVICE)) < self.servers:
                ended = [process.name for process in self.running if not process.is_alive()]
                if ended or time.monotonic() > deadline:
                    raise RegionFailed(
                        f"region {self.name} is not ready after {_READY_S:g} s; ended: {ended}"
                    )
                time.sleep(0.02)

    def address(self, server: str = LEADER) -> str:
        """Where a server listens."""
        with closing(open_coordination(self.settings)) as store:
            return next(member.address for member in members(store, SERVICE) if member.name == server)

    def stop(self) -> None:
        """SIGKILL to its servers."""
        for process in self.running:
            process.kill()
            process.join()
        self.running.clear()

    def empty(self) -> None:
        """Stop, and forget everything."""
        self.stop()
        shutil.rmtree(self.folder)

    def cpu_s(self) -> float:
        """Processor seconds of its servers so far."""
        return sum(processor_s(process.pid) for process in self.running)

    @contextmanager
    def store(self) -> Iterator[Coordination]:
        """Its coordination store."""
        with closing(open_coordination(self.settings)) as store:
            yield store

    @contextmanager
    def client(self) -> Iterator[ParameterClient]:
        """A client of its servers."""
        with self.store() as store, closing(ParameterClient(store, deadline_s=_DEADLINE_S)) as client:
            yield client


def processor_s(pid: int | None) -> float:
    """Processor seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _serve(settings: Settings, name: str) -> None:
    from services.parameter_server.main import run

    configure_logging(f"{settings.region.name}/{name}", "ERROR")
    run(settings, name, threading.Event())


class Links:
    """Emulated links in a process of their own."""

    def __init__(self, pipe: Connection, addresses: Mapping[str, str]) -> None:
        self._pipe, self.addresses = pipe, addresses

    def status(self) -> dict[str, LinkStatus]:
        """What each link is and has done."""
        self._pipe.send("status")
        found: dict[str, LinkStatus] = self._pipe.recv()
        return found

    def came(self, name: str) -> int:
        """Bytes that came from home through a link so far, and those that were asked with."""
        link = self.status()[name]
        return link.back.bytes_total + link.forward.bytes_total


@contextmanager
def linked(target: str, conditions: Mapping[str, str]) -> Iterator[Links]:
    """Links to ``target``, by name with their conditions."""
    near, far = multiprocessing.Pipe()
    process = processes().Process(target=_emulate, args=(far, target, dict(conditions)), daemon=True)
    process.start()
    far.close()
    try:
        yield Links(near, near.recv())
    finally:
        process.kill()
        process.join()


def _emulate(pipe: Connection, target: str, conditions: Mapping[str, str]) -> None:
    read = {name: parse_conditions(text) for name, text in conditions.items()}
    with Emulator(LinkPlan(name, target, each, each) for name, each in read.items()) as emulator:
        pipe.send({link.name: link.address for link in emulator.status()})
        while pipe.recv() == "status":
            pipe.send({link.name: link for link in emulator.status()})


@dataclass(frozen=True, slots=True)
class World:
    """Home and the regions that follow it, by name, each through the link of its name."""

    home: Region
    regions: Mapping[str, Region]
    links: Links


@contextmanager
def world(
    folder: Path, followers: Mapping[str, tuple[str, SyncSettings]], home_servers: int = 1
) -> Iterator[World]:
    """Regions by name, each with the conditions of its link and its settings. Raises RegionFailed."""
    home = Region.at(folder, "home", 0, servers=home_servers)
    with ExitStack() as stack:
        stack.callback(home.stop)
        home.start()
        home.ready()
        conditions = {name: text for name, (text, _) in followers.items()}
        links = stack.enter_context(linked(home.address(), conditions))
        regions = {}
        for number, (name, (_, sync)) in enumerate(followers.items(), 1):
            told = sync.model_copy(update={"upstreams": (links.addresses[name],)})
            regions[name] = Region.at(folder, name, number, told)
            stack.callback(regions[name].stop)
            regions[name].start()
        for region in regions.values():
            region.ready()
        yield World(home, regions, links)
