"""The parameter server's process: takes its place in coordination, restores its shards, serves, saves."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.backends import open_coordination, open_security
from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Member, Registration, wait_for
from services.coordination.shardmap import ShardMap, read_shard_map, settle_shard_map
from services.parameter_server.declarations import read_declarations
from services.parameter_server.holdings import HostConfig
from services.parameter_server.host import Host
from services.parameter_server.replication.cluster import Cluster, ClusterConfig
from services.parameter_server.replication.control import SERVICE, Control
from services.parameter_server.replication.election import Replication
from services.parameter_server.service import Intervals, ParameterServer
from services.parameter_server.storage.durability import Durability, DurabilityConfig
from services.parameter_server.storage.snapshots import FolderHeld, ShardFolder
from services.parameter_server.storage.writer import Pace
from services.parameter_server.syncing.declaring import Declarer
from services.parameter_server.syncing.service import SyncConfig
from services.parameter_server.types import ReplicationChanged
from services.rpc.link import Link
from services.rpc.security import Security
from services.rpc.server import RpcServer
from services.settings.checks import Address, parse_address
from services.settings.model import Settings
from services.settings.shards import parse_writes
from sync.warm import warm_up

LOCK_S: Final = 20.0
"""How long a start waits for the process before it, of the same name, to let go of its folder."""
_log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Serve the shards of server ``name`` until ``stop`` is set.

    Raises CoordinationError, KeysError, SnapshotError (FolderHeld if another process of this name does not end),
    ReplicationChanged.
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
    security = open_security(settings)
    durability = Durability(
        lambda model, shard: ShardFolder(folder, model, shard, shard_map.shards, parameters.snapshots_kept),
        DurabilityConfig(
            parameters.snapshot_interval,
            parameters.log_size,
            parameters.log_backlog,
            Pace(parameters.fsync_interval),
        ),
    )
    host = Host(
        HostConfig(
            member.name,
            shard_map.shards,
            parameters.change_stream,
            settings.region.number,
            _written(settings, shard_map.shards),
            settings.sync.optimiser_state,
            round(settings.sync.max_clock_skew * 1e6),
        ),
        durability,
        _Numbers(coordination),
    )
    fences = _Fences(folder / "fence")
    config = ClusterConfig(
        member.name, member.incarnation, parameters.replication, settings.coordination.lease_ttl
    )
    cluster = Cluster(config, host, _Links(rpc, security), fences.note)
    control = Control(coordination, cluster, fences.newest)
    with ExitStack() as stack:
        stack.callback(durability.close)
        stack.callback(cluster.close)
        declarer = Declarer(coordination)
        stack.callback(declarer.close)
        warm_up()
        for declaration in read_declarations(coordination):
            host.declare(declaration)
        server = ParameterServer(
            host,
            rpc,
            durability,
            cluster,
            Intervals(parameters.generation_interval),
            _Links(rpc, security),
            _sync_config(settings),
            declarer.settle,
        )
        stack.callback(server.close)
        control.start()
        stack.callback(control.close)
        ready = False
        while not stop.is_set() and not registration.replaced.is_set():
            server.turn()
            if not ready and cluster.in_order:
                ready = True
                registration.update(ready=True)
                held = ", ".join(map(str, sorted(host.holds))) or "none"
                _log.info("holding shards %s of %d at %s", held, shard_map.shards, member.address)
        if not registration.replaced.is_set():
            server.save_all()


def _written(settings: Settings, shards: int) -> frozenset[int] | None:
    """The shards that this region writes, None: all."""
    chosen = parse_writes(settings.sync.writes, shards)
    if chosen is None:
        return frozenset() if settings.sync.upstreams else None
    if settings.sync.upstreams and len(chosen) == shards:
        _log.warning(
            "sync.writes = %s lets this region write all shards, so nothing comes from sync.upstreams = %s; is it to "
            "follow them, set sync.writes = none (or the shards that no other region writes), else empty "
            "sync.upstreams",
            settings.sync.writes,
            ", ".join(settings.sync.upstreams),
        )
    return chosen


def _sync_config(settings: Settings) -> SyncConfig:
    sync = settings.sync
    return SyncConfig(
        settings.region.name,
        sync.upstreams,
        sync.precision,
        sync.optimiser_state,
        sync.max_bandwidth,
        sync.coalesce,
        sync.window,
        sync.max_staleness,
        sync.priority_share,
        sync.reader_wait,
        sync.max_clock_skew,
        sync.member_timeout,
    )


@dataclass(frozen=True, slots=True)
class _Links:
    """Connections to other parameter servers, in the server's own loop."""

    rpc: RpcServer
    security: Security | None

    def connect(self, address: str) -> Link:
        return self.rpc.link(address, self.security)

    def disconnect(self, connection: object) -> None:
        assert isinstance(connection, Link)
        self.rpc.unlink(connection)


class _Fences:
    """The largest fence that this server led under, as a file remembers it: should the coordination store be begun
    anew, no fence is used twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        self.newest = int(text) if text.isdecimal() else 0

    def note(self, fence: int) -> None:
        if fence > self.newest:
            self.newest = fence
            _write(self._path, str(fence))


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
    _write(note, str(number))
    return number


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


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


def _require_replication(found: ShardMap, replication: Replication) -> None:
    if found.replicated and found.chained != (replication == "chain"):
        was = "chain" if found.chained else "async or quorum"
        raise ReplicationChanged(
            f"the shard map was made for parameters.replication = {was}; it is {replication} now: set it back, or "
            "start with a new coordination store and new folders"
        )


def _shard_map(settings: Settings, coordination: Coordination, stop: threading.Event) -> ShardMap | None:
    """The map in force; the first one waits for as many servers as the settings want. None when stopped."""
    wanted = settings.parameters.servers
    while not stop.is_set():
        found = read_shard_map(coordination)
        if found is not None:
            _require_replication(found, settings.parameters.replication)
            if found.shards != settings.parameters.shards:
                _log.warning(
                    "the shard map has %d shards; parameters.shards = %d is not used",
                    found.shards,
                    settings.parameters.shards,
                )
            return found
        there = wait_for(coordination, SERVICE, lambda seen: len(seen) >= wanted, 1.0, stop=stop)
        if len(there) >= wanted:
            parameters = settings.parameters
            settle_shard_map(
                coordination,
                [member.name for member in there],
                parameters.shards,
                parameters.replicas,
                chained=parameters.replication == "chain",
            )
    return None
