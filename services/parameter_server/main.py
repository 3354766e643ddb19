"""The parameter server's process: takes its place in coordination, restores its shards, serves, saves."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from services.backends import open_coordination, open_security
from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Member, Registration, wait_for
from services.coordination.shardmap import ShardMap, read_shard_map, settle_shard_map
from services.parameter_server.declarations import read_declarations
from services.parameter_server.host import Host, HostConfig
from services.parameter_server.saver import Saver
from services.parameter_server.service import Intervals, ParameterServer
from services.parameter_server.snapshots import FolderHeld, SnapshotSeries
from services.parameter_server.types import NoShards
from services.rpc.server import RpcServer
from services.settings.checks import Address, parse_address
from services.settings.model import Settings
from sync.shard import ShardState
from sync.warm import warm_up

SERVICE: Final = "parameter-server"
LOCK_S: Final = 20.0
"""How long a start waits for the process before it, of the same name, to let go of its folder."""
_log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Serve the shards of server ``name`` until ``stop`` is set.

    Raises CoordinationError, KeysError, SnapshotError (FolderHeld if another process of this name does not end),
    NoShards.
    """
    folder = settings.data.dir / "parameters" / name
    with ExitStack() as stack:
        stack.enter_context(_locked(folder, stop))
        coordination = open_coordination(settings)
        stack.callback(coordination.close)
        rpc = RpcServer(settings.parameters.listen, open_security(settings))
        stack.callback(rpc.close)
        registration = _register(settings, name, coordination, _incarnation(coordination, folder), rpc.port)
        stack.callback(registration.close)
        shard_map = _shard_map(settings, coordination, stop)
        if shard_map is None or stop.is_set():
            return
        _serve(settings, registration, coordination, shard_map, folder, rpc, stop)


def _serve(
    settings: Settings,
    registration: Registration,
    coordination: Coordination,
    shard_map: ShardMap,
    folder: Path,
    rpc: RpcServer,
    stop: threading.Event,
) -> None:
    member, parameters = registration.member, settings.parameters
    owned = shard_map.owned_by(member.name)
    if not owned:
        raise NoShards(
            f"the shard map (epoch {shard_map.epoch}) gives {member.name} no shard; "
            f"its servers are {', '.join(sorted(set(shard_map.servers)))}"
        )
    series = _SeriesByShard(folder, shard_map.shards, parameters.snapshots_kept)
    config = HostConfig(member.name, owned, shard_map.shards, member.incarnation, parameters.change_stream)
    host = Host(config, series.restore, _Numbers(coordination))
    warm_up()
    for declaration in read_declarations(coordination):
        host.declare(declaration)
    saver = Saver(series)
    try:
        intervals = Intervals(parameters.snapshot_interval, parameters.generation_interval)
        server = ParameterServer(host, rpc, saver, intervals)
        registration.update(ready=True)
        _log.info("serving shards %s of %d at %s", list(owned), shard_map.shards, member.address)
        while not stop.is_set() and not registration.replaced.is_set():
            server.turn()
        if not registration.replaced.is_set():
            server.save_all()
    finally:
        saver.close()


class _SeriesByShard:
    """The snapshot series of each shard below a folder."""

    def __init__(self, folder: Path, shards: int, kept: int) -> None:
        self._folder, self._shards, self._kept = folder, shards, kept
        self._known: dict[tuple[str, int], SnapshotSeries] = {}

    def __call__(self, model: str, shard: int) -> SnapshotSeries:
        found = self._known.get((model, shard))
        if found is None:
            found = SnapshotSeries(self._folder, model, shard, self._shards, self._kept)
            self._known[model, shard] = found
        return found

    def restore(self, model: str, shard: int) -> ShardState | None:
        """The newest whole snapshot. Raises SnapshotError."""
        state = self(model, shard).newest()
        if state is not None:
            _log.info("shard %d of model %s: restored from its snapshot", shard, model)
        return state


class _Numbers:
    """Numbers for dense generations, from coordination, so that no start of any server repeats one."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination

    def __call__(self, model: str, table: str) -> int | None:
        try:
            return self._coordination.increment(f"generations/{model}/{table}")
        except CoordinationError as error:
            _log.warning("no generation of %s/%s is published now: %s", model, table, error)
            return None


@contextmanager
def _locked(folder: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the folder for this process alone; the kernel lets go of it however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline or stop.wait(0.05):
                    raise FolderHeld(f"{folder} is held by another process") from None
        yield


def _incarnation(coordination: Coordination, folder: Path) -> int:
    """A number that no start before this one had, also if coordination was started anew since."""
    note = folder / "incarnation"
    text = note.read_text() if note.exists() else ""
    last = int(text) if text.isdecimal() else 0
    number = coordination.increment("parameters/incarnation")
    while number <= last:
        number = coordination.increment("parameters/incarnation")
    temporary = note.with_suffix(".tmp")
    temporary.write_text(str(number))
    temporary.rename(note)
    return number


def _register(
    settings: Settings, name: str, coordination: Coordination, incarnation: int, port: int
) -> Registration:
    host = parse_address(settings.parameters.listen).host
    member = Member(
        name=name,
        service=SERVICE,
        address=settings.parameters.advertise or str(Address(host, port)),
        pid=os.getpid(),
        incarnation=incarnation,
        started_at_ms=time.time_ns() // 1_000_000,
    )
    return Registration(coordination, member, settings.coordination.lease_ttl)


def _shard_map(settings: Settings, coordination: Coordination, stop: threading.Event) -> ShardMap | None:
    """The map in force; the first one waits for as many servers as the settings want. None when stopped."""
    wanted = settings.parameters.servers
    while not stop.is_set():
        found = read_shard_map(coordination)
        if found is not None:
            if found.shards != settings.parameters.shards:
                _log.warning(
                    "the shard map has %d shards; parameters.shards = %d is not used",
                    found.shards,
                    settings.parameters.shards,
                )
            return found
        there = wait_for(coordination, SERVICE, lambda seen: len(seen) >= wanted, 1.0, stop=stop)
        if len(there) >= wanted:
            settle_shard_map(coordination, [member.name for member in there], settings.parameters.shards)
    return None
