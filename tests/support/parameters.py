"""Parameter servers for tests: hosts without a network, servers in threads, and real processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from support import fork_server

from services.coordination import Member, ShardMap
from services.coordination.shardmap import assign
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server.client import ParameterClient, operations
from services.parameter_server.client.directory import Directory
from services.parameter_server.client.operations import Gradients, Operation
from services.parameter_server.client.routing import Route
from services.parameter_server.declarations import Declaration
from services.parameter_server.handlers import handle
from services.parameter_server.holdings import Held, HostConfig, Keeper
from services.parameter_server.host import Host
from services.parameter_server.messages import pack
from services.parameter_server.replication.election import Replication
from services.parameter_server.storage.offsets import DurableOffsets
from services.parameter_server.types import Keys, Rows
from services.rpc.codec import Reply, Request, decode, encode
from services.settings.model import CoordinationSettings, DataSettings, ParameterSettings, Settings
from sync.clock import HybridClock
from sync.placement import shard_of
from sync.pushes import Source
from sync.records import Delta, Head
from sync.replica import ShardState
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

T = TypeVar("T")
DIM, CHUNK, CHUNKS = 4, 8, 3
SPECS = (
    TableSpec("items", DIM, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.1)),
    TableSpec("dense", CHUNK, Initialiser.uniform(0.1), Optimiser("adagrad", 0.1), "single", CHUNKS),
)
DECLARATION = Declaration("main", "fp-1", SPECS)
SOURCE = Source("log-1", 0)


class Numbers:
    """Generation numbers without coordination; ``available`` False: none can be had."""

    def __init__(self) -> None:
        self.last = 0
        self.available = True

    def __call__(self, model: str, table: str) -> int | None:
        if not self.available:
            return None
        self.last += 1
        return self.last


class Kept:
    """Shards that begin with a state and are kept nowhere (a ``Keeper``)."""

    def __init__(
        self, state_of: Callable[[str, int], ShardState | None] = lambda _model, _shard: None
    ) -> None:
        self._state_of = state_of

    def open(
        self, model: str, shard_id: int, make: Callable[[], Shard], check: Callable[[Head], None]
    ) -> Held:
        held = Held(make())
        state = self._state_of(model, shard_id)
        if state is not None:
            check(state.head)
            held.shard.restore(state)
            offsets = {source: progress.applied for source, progress in state.head.pushes.items()}
            held.durable = DurableOffsets(held.shard.position, offsets)
        return held

    def record(self, held: Held, delta: Delta) -> None:
        pass

    def renew(self, held: Held) -> None:
        pass

    def forget(self, held: Held) -> None:
        pass


class Fleet:
    """Hosts that a test asks directly; every message passes the codec on its way."""

    def __init__(
        self,
        names: tuple[str, ...] = ("a",),
        shards: int = 1,
        restore: Callable[[str, int], ShardState | None] = lambda _model, _shard: None,
        incarnation: int = 1,
        *,
        keeper: Keeper | None = None,
    ) -> None:
        """``restore`` gives the state of each shard; or ``keeper`` all of it. Host number n leads its shards under
        ``incarnation`` + n."""
        self.map: ShardMap = assign(names, shards)
        self.route = Route(DECLARATION, self.map)
        self.numbers = Numbers()
        self.hosts = {
            name: Host(
                HostConfig(name, shards, 1_000),
                keeper or Kept(restore),
                self.numbers,
                HybridClock(lambda: 1_000_000),
            )
            for name in sorted(names)
        }
        for number, (name, host) in enumerate(self.hosts.items()):
            for shard in self.map.owned_by(name):
                host.lead(shard, incarnation + number)
            host.declare(DECLARATION)

    def ask(self, operation: Operation[T]) -> T:
        """What a client would get."""
        return operation.merge(
            {
                server: self.answer(server, outgoing.method, outgoing.body, outgoing.arrays)
                for server, outgoing in operation.requests.items()
            }
        )

    def answer(self, server: str, method: str, body: bytes, arrays: tuple[np.ndarray, ...] = ()) -> Reply:
        """One server's reply. Raises Rejected."""
        request = decode([bytes(frame) for frame in encode(Request(1, method, 1_000, body, arrays))])
        assert isinstance(request, Request)
        message, found = handle(self.hosts[server], request)
        reply = decode([bytes(frame) for frame in encode(Reply(1, pack(message), found))])
        assert isinstance(reply, Reply)
        return reply


def gradients(
    offset: int,
    parts: Mapping[str, tuple[Keys, Rows]],
    shards: int,
    *,
    source: Source = SOURCE,
    after: int | None = None,
) -> Gradients:
    """The push at ``offset`` after ``after`` (the offset before by default)."""
    predecessor = offset - 1 if after is None else after
    return Gradients(source, offset, dict.fromkeys(range(shards), predecessor), 1_000 + offset, None, parts)


def recorded(offset: int, keys: int = 40) -> dict[str, tuple[Keys, Rows]]:
    """Gradients of micro-batch ``offset``, always the same: some keys (with repeats) and all dense chunks."""
    generator = np.random.default_rng(offset)
    some = generator.integers(0, 200, keys).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    chunks = np.arange(CHUNKS, dtype=np.uint64)
    return {
        "items": (some, generator.normal(size=(keys, DIM)).astype(np.float32)),
        "dense": (chunks, generator.normal(size=(CHUNKS, CHUNK)).astype(np.float32)),
    }


ALL_KEYS: Keys = np.arange(200, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
EVERYTHING: dict[str, Keys] = {"items": ALL_KEYS, "dense": np.arange(CHUNKS, dtype=np.uint64)}


def undisturbed(pushes: int) -> dict[str, Rows]:
    """The rows after the recorded pushes, each once and in order."""
    fleet = Fleet()
    for offset in range(pushes):
        fleet.ask(operations.push(fleet.route, gradients(offset, recorded(offset), 1)))
    return fleet.ask(operations.pull(fleet.route, EVERYTHING)).rows


def a_key_of(shard: int, shards: int) -> Keys:
    """One key that lives in ``shard``."""
    found: Keys = ALL_KEYS[shard_of(ALL_KEYS, shards) == shard][:1]
    return found


def make_settings(
    folder: Path,
    servers: int,
    shards: int,
    snapshot_s: float = 3_600.0,
    replicas: int = 1,
    replication: Replication = "async",
    lease_s: float = 5.0,
) -> Settings:
    """Embedded backends below ``folder``."""
    return Settings(
        data=DataSettings(dir=folder),
        coordination=CoordinationSettings(lease_ttl=lease_s),
        parameters=ParameterSettings(
            servers=servers,
            shards=shards,
            replicas=replicas,
            replication=replication,
            snapshot_interval=snapshot_s,
            generation_interval=3_600.0,
        ),
    )


@contextmanager
def threads(settings: Settings) -> Iterator[None]:
    """All parameter servers that ``settings`` want, in threads of this process, ready to serve."""
    from services.parameter_server.main import run

    stop = threading.Event()
    failures: list[BaseException] = []

    def serve(name: str) -> None:
        try:
            run(settings, name, stop)
        except BaseException as error:
            failures.append(error)
            stop.set()

    running = [
        threading.Thread(target=serve, args=(f"parameter-server-{number}",))
        for number in range(settings.parameters.servers)
    ]
    for thread in running:
        thread.start()
    try:
        wait_ready(settings.data.dir, settings.parameters.servers, stop)
        if not failures:
            yield
    finally:
        stop.set()
        for thread in running:
            thread.join()
    if failures:
        raise failures[0]


def wait_ready(folder: Path, servers: int, stop: threading.Event | None = None) -> dict[str, Member]:
    """Wait until as many servers say that they are ready."""
    store = SqliteCoordination(folder / "coordination.db")
    deadline = time.monotonic() + 60.0
    try:
        while stop is None or not stop.is_set():
            found = Directory(store).refresh()
            if sum(member.ready for member in found.values()) >= servers:
                return found
            assert time.monotonic() < deadline, "the parameter servers did not become ready"
            time.sleep(0.02)
        return {}
    finally:
        store.close()


class Processes:
    """Parameter servers as real processes, which a test may kill."""

    def __init__(
        self,
        folder: Path,
        servers: int,
        shards: int,
        snapshot_s: float,
        replicas: int = 1,
        replication: Replication = "async",
    ) -> None:
        self.folder = folder
        self._arguments = (str(servers), str(shards), str(snapshot_s), str(replicas), replication)
        self._running: dict[str, fork_server.Forked] = {}
        self.names = tuple(f"parameter-server-{number}" for number in range(servers))
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the server ``name``; its log goes to ``NAME.log``."""
        self._running[name] = fork_server.start(
            (__name__, "services.parameter_server.main"),
            f"{__name__}:serve",
            (str(self.folder), name, *self._arguments),
            self.folder / f"{name}.log",
        )

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would."""
        self._running[name].kill()
        self._running.pop(name).wait()

    def pause(self, name: str) -> None:
        """SIGSTOP: nothing of it runs until ``resume``, also not what keeps its lease."""
        self._running[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._running[name].send_signal(signal.SIGCONT)

    def terminate(self, name: str) -> int:
        """SIGTERM; the exit status."""
        process = self._running.pop(name)
        process.terminate()
        return process.wait(30)

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)


@contextmanager
def client_of(folder: Path, deadline_s: float = 30.0) -> Iterator[ParameterClient]:
    """A client of the servers below ``folder``."""
    store = SqliteCoordination(folder / "coordination.db")
    client = ParameterClient(store, deadline_s=deadline_s)
    try:
        yield client
    finally:
        client.close()
        store.close()


def serve(
    folder: str, name: str, servers: str, shards: str, snapshot_s: str, replicas: str, replication: str
) -> None:
    """What each of the ``Processes`` does: it is one parameter server."""
    from services.parameter_server.main import run
    from services.processes import configure_logging, stop_on_signals

    settings = make_settings(
        Path(folder),
        int(servers),
        int(shards),
        float(snapshot_s),
        int(replicas),
        cast("Replication", replication),
        1.5,
    )
    configure_logging(name)
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_on_signals(stop):
        run(settings, name, stop)
