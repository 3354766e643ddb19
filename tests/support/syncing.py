"""A source and a puller in one thread, with a clock that is moved by hand and a link that does what a test says."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from support.parameters import DECLARATION, SOURCE, Kept, Numbers

from services.parameter_server.acknowledging import Acknowledging, Pending
from services.parameter_server.declarations import Declaration
from services.parameter_server.handlers import Rejected, handle
from services.parameter_server.holdings import HostConfig
from services.parameter_server.host import Host
from services.parameter_server.messages import pack
from services.parameter_server.syncing.service import METHODS, SyncConfig, Syncing
from services.rpc.calls import Outgoing
from services.rpc.codec import Array, Failure, Reply, Request, decode, encode
from services.rpc.server import Call
from sync.clock import HybridClock
from sync.pushes import Push, Watermark
from sync.replica import ShardState

SHARDS = 2
KEYS = np.arange(100, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Hands:
    """A clock for everything."""

    now_s: float = 1_000.0
    ahead_us: int = 0

    def monotonic(self) -> float:
        return self.now_s

    def physical_us(self) -> int:
        return 1_700_000_000_000_000 + round(self.now_s * 1e6) + self.ahead_us

    def worked_s(self) -> float:
        return self.now_s


@dataclass
class Server:
    """One server of one region: its shards, its part between regions, and what it answered."""

    name: str
    clock: Hands
    host: Host
    syncing: Syncing
    fed: Acknowledging
    answers: list[tuple[Call, Reply | Failure]] = field(default_factory=list)
    settled: list[Declaration] = field(default_factory=list)
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)
    allowed: bool = True
    alive: bool = True
    served: int = 0

    def handle(self, request: Request, deadline_s: float) -> None:
        """A call comes in."""
        call = Call(b"peer", request, deadline_s)
        try:
            if request.method in METHODS:
                self.syncing.answer(call)
            elif not self.syncing.forwarding.take(call, lambda: ""):
                message, arrays = handle(self.host, request)
                self.answer(call, pack(message), arrays)
        except Rejected as rejected:
            self.fail(call, rejected.code, rejected.message)

    def answer(self, call: Call, body: bytes, arrays: tuple[Array, ...] = ()) -> None:
        reply = decode([bytes(frame) for frame in encode(Reply(call.request.id, body, arrays))])
        assert isinstance(reply, Reply)
        self.answers.append((call, reply))

    def fail(self, call: Call, code: str, message: str) -> None:
        self.answers.append((call, Failure(call.request.id, code, message)))

    def push(self, offset: int, keys: int = 20) -> None:
        """Push to every shard that this region writes."""
        generator = np.random.default_rng(offset)
        model = self.host.models["main"]
        for shard, held in self.host.led(model):
            if self.host.writes(shard):
                parts = (
                    ("items", KEYS[shard::2][:keys], generator.normal(size=(keys, 4)).astype(np.float32)),
                )
                mark = Watermark("events", 0, offset, 1_000 + offset)
                outcome = held.shard.push(Push(SOURCE, offset, offset - 1, mark, parts))
                assert outcome.status == "applied"

    def rows(self) -> bytes:
        """All rows, and what they contain."""
        model = self.host.models["main"]
        found = [
            (held.shard.pull("items", KEYS).tobytes(), held.shard.watermarks())
            for _, held in self.host.led(model)
        ]
        return repr(found).encode()


class _Answers:
    """Stands for the socket, which is there before the server."""

    server: Server

    def answer(self, call: Call, body: bytes, arrays: tuple[Array, ...] = ()) -> None:
        self.server.answer(call, body, arrays)

    def fail(self, call: Call, code: str, message: str) -> None:
        self.server.fail(call, code, message)


class FakeLink:
    """A connection to a server of the world."""

    def __init__(self, world: World, address: str) -> None:
        self.world, self.address, self.closed = world, address, False
        self._calls: dict[int, float] = {}
        self._last = (len(world.links) + 1) * 1_000_000

    def ask(self, outgoing: Outgoing, timeout_s: float) -> int:
        self._last += 1
        number = self._last
        self._calls[number] = self.world.clock.now_s + timeout_s
        sent = Request(number, outgoing.method, round(timeout_s * 1e3), outgoing.body, outgoing.arrays)
        request = decode([bytes(frame) for frame in encode(sent)])
        assert isinstance(request, Request)
        server = self.world.servers.get(self.address)
        if server is not None and server.alive:
            server.served += 1
            server.handle(request, self.world.clock.now_s + timeout_s)
        return number

    def receive(self) -> list[tuple[int, Reply | Failure]]:
        server = self.world.servers.get(self.address)
        if server is None or not server.alive:
            return []
        mine = [(call, answer) for call, answer in server.answers if answer.id in self._calls]
        server.answers = [one for one in server.answers if one[1].id not in self._calls]
        for _, answer in mine:
            del self._calls[answer.id]
        return [(answer.id, self.world.spoil(answer)) for _, answer in mine]

    def expired(self) -> list[int]:
        late = [call for call, until in self._calls.items() if until <= self.world.clock.now_s]
        for call in late:
            del self._calls[call]
        return late


class World:
    """Servers by address, which is their name."""

    def __init__(self) -> None:
        self.clock = Hands()
        self.servers: dict[str, Server] = {}
        self.links: list[FakeLink] = []
        self.spoil: Callable[[Reply | Failure], Reply | Failure] = lambda answer: answer

    def connect(self, address: str) -> FakeLink:
        self.links.append(FakeLink(self, address))
        return self.links[-1]

    def disconnect(self, connection: object) -> None:
        assert isinstance(connection, FakeLink)
        connection.closed = True

    def server(
        self,
        name: str,
        number: int = 0,
        config: SyncConfig | None = None,
        *,
        written: frozenset[int] | None = None,
        shards: int = SHARDS,
        declaration: Declaration | None = DECLARATION,
        optimiser_state: bool = False,
        states: Mapping[int, ShardState] | None = None,
        fence: int = 2,
    ) -> Server:
        """A region of one server that leads all shards from ``fence`` on, and begins with the ``states`` of them."""
        clock = Hands(self.clock.now_s)
        host = Host(
            HostConfig(name, shards, 1_000, number, written, optimiser_state),
            Kept(lambda _model, shard: None if states is None else states[shard]),
            Numbers(),
            HybridClock(clock.physical_us),
        )
        answers = _Answers()

        def pending(shards: Collection[int] | None) -> Pending:
            asked = found.pending.keys() if shards is None else shards
            return {shard: found.pending[shard] for shard in asked if shard in found.pending}

        fed = Acknowledging(answers, pending, lambda waiting: not (waiting.keys() & found.pending.keys()))
        pushed = Acknowledging(answers, lambda shards: {}, lambda waiting: True)
        syncing = Syncing(
            config or SyncConfig(region=name), host, fed, pushed, self, lambda shard: found.allowed,
            lambda one: found.settled.append(one), clock, random.Random(number),
        )  # fmt: skip
        found = answers.server = Server(name, clock, host, syncing, fed)
        if declaration is not None:
            host.declare(declaration)
        for shard in range(shards):
            host.lead(shard, fence + shard)
        self.servers[name] = found
        return found

    def run(self, seconds: float, step_s: float = 0.01) -> None:
        """Let time pass."""
        for _ in range(max(1, round(seconds / step_s))):
            self.clock.now_s += step_s
            for server in self.servers.values():
                server.clock.now_s = self.clock.now_s
                if server.alive:
                    server.syncing.turn()


def two(
    world: World, *, declaration: Declaration | None = DECLARATION, **config: object
) -> tuple[Server, Server]:
    """Home, and a region that follows it."""
    home = world.server("home")
    settings = replace(SyncConfig(region="eu", upstreams=("home",)), **config)  # type: ignore[arg-type]
    return home, world.server("eu", 1, settings, written=frozenset(), declaration=declaration)


def request(method: str, message: msgspec.Struct, arrays: tuple[np.ndarray, ...] = ()) -> Request:
    return Request(7, method, 2_000, pack(message), arrays)  # type: ignore[arg-type]


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
