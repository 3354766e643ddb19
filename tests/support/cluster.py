"""Parameter servers in virtual time: real shards, real replication and elections, a network and disks that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from services.coordination.contract import Conflict, CoordinationError, Entry, Unavailable
from services.coordination.membership import Member, member_key
from services.coordination.shardmap import KEY as MAP_KEY
from services.coordination.shardmap import Place, ShardMap, assign, change_shard_map, read_shard_map
from services.parameter_server import messages as wire
from services.parameter_server.declarations import Declaration
from services.parameter_server.holdings import Held, Holdings, HostConfig
from services.parameter_server.replication.cluster import Cluster, ClusterConfig, Connection
from services.parameter_server.replication.control import Control
from services.parameter_server.replication.election import Replication
from services.parameter_server.replication.following import Foreign
from services.rpc.calls import Outgoing
from services.rpc.codec import Failure, Reply, Request
from sync.clock import HybridClock
from sync.records import Delta, Head
from sync.replica import ShardState
from sync.shard import Shard
from sync.spec import TableSpec


class Store:
    """A coordination store in memory: what ``Control`` asks of one. No time passes in it."""

    def __init__(self, rng: random.Random) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.failing = 0.0
        """How often a call fails; a write that fails may have been done all the same."""
        self._random = rng

    def _fail(self) -> None:
        if self.failing and self._random.random() < self.failing:
            raise Unavailable("the store is away")

    def get(self, key: str) -> Entry | None:
        self._fail()
        return self.entries.get(key)

    def scan(self, prefix: str) -> list[Entry]:
        self._fail()
        return [entry for key, entry in sorted(self.entries.items()) if key.startswith(prefix)]

    def put(self, key: str, value: bytes, *, lease: object = None, expect_revision: int | None = None) -> int:
        self._fail()
        known = self.entries.get(key)
        if expect_revision is not None and expect_revision != (known.revision if known else 0):
            raise Conflict(key)
        self.revision += 1
        self.entries[key] = Entry(key, value, self.revision)
        self._fail()
        return self.revision

    def delete(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None


@dataclass
class Disk:
    """What survives a crash: a state, and the deltas after it up to where they were synced."""

    base: ShardState | None = None
    deltas: list[Delta] = field(default_factory=list)
    synced: int = 0
    """Position up to which nothing is lost."""

    def crash(self) -> None:
        """What was not synced is gone."""
        self.deltas = [delta for delta in self.deltas if delta.position <= self.synced]


class StoreOf:
    """The store as one server reaches it, or does not (``World.without_store``)."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def __getattr__(self, method: str) -> object:
        if self._name in self._world.without_store:
            raise Unavailable("the store cannot be reached from here")
        return getattr(self._world.store, method)


class Disks:
    """Keeps the shards of one server on its simulated disks. Provides ``Keeper``."""

    def __init__(self, disks: dict[tuple[str, int], Disk]) -> None:
        self.disks = disks
        self.kept: dict[tuple[str, int], Held] = {}
        self._renewing: set[tuple[str, int]] = set()

    def open(
        self, model: str, shard_id: int, make: Callable[[], Shard], check: Callable[[Head], None]
    ) -> Held:
        disk = self.disks.setdefault((model, shard_id), Disk())
        disk.crash()
        shard = make()
        if disk.base is not None:
            shard.restore(disk.base)
        for delta in disk.deltas:
            shard.apply(delta)
        held = self.kept[model, shard_id] = Held(shard)
        return held

    def record(self, held: Held, delta: Delta) -> None:
        key = (held.shard.model, held.shard.shard_id)
        if key not in self._renewing:
            self.disks[key].deltas.append(delta)

    def renew(self, held: Held) -> None:
        key = (held.shard.model, held.shard.shard_id)
        self._renewing.add(key)
        self.disks[key].crash()

    def forget(self, held: Held) -> None:
        key = (held.shard.model, held.shard.shard_id)
        self._renewing.discard(key)
        self.disks[key].crash()
        del self.kept[key]

    def sync(self) -> None:
        """The disk caught up."""
        for key, held in self.kept.items():
            if not held.whole:
                continue
            if key in self._renewing:
                self._renewing.discard(key)
                self.disks[key] = Disk(held.shard.state(), [], held.shard.position)
            self.disks[key].synced = held.shard.position


class Node:
    """One server: the shards of its models, its disk, its cluster and control."""

    def __init__(self, world: World, name: str, incarnation: int, disks: dict[tuple[str, int], Disk]) -> None:
        self.world, self.name, self.incarnation = world, name, incarnation
        skew_us = world.skew_us.get(name, 0)
        self.disks = Disks(disks)
        self.holdings = Holdings(
            HostConfig(name, len(world.map.places), 1_024),
            self.disks,
            lambda model, table: world.number(),
            HybridClock(lambda: world.now_us + skew_us),
        )
        for model in sorted({model for model, _ in disks}):
            self.holdings.declare(Declaration(model, "", world.specs))
        config = ClusterConfig(name, incarnation, world.replication, lease_s=world.lease_s)
        self.cluster = Cluster(config, self.holdings, self, monotonic=lambda: world.now_s)
        self.holdings.on_step = self.cluster.took
        self.control = Control(StoreOf(world, name), self.cluster, monotonic=lambda: world.now_s)  # type: ignore[arg-type]
        self.parked: list[tuple[str, int, Request, float]] = []
        self.paused_until_s = 0.0
        self.renew_s = 0.0

    @property
    def paused(self) -> bool:
        """Whether the process was stopped (SIGSTOP) and not continued yet."""
        return self.world.now_s < self.paused_until_s

    def of(self, shard: int) -> Mapping[str, Shard]:
        return self.holdings.of(shard)

    def declare(self, model: str, number: int) -> Shard:
        self.holdings.declare(Declaration(model, "", self.world.specs))
        return self.of(number)[model]

    def connect(self, address: str) -> Wire:
        return Wire(self.world, self.name, address)

    def disconnect(self, connection: Connection) -> None:
        assert isinstance(connection, Wire)
        self.world.wires.pop(connection.id, None)

    def sync(self) -> None:
        """The disk caught up."""
        self.disks.sync()

    def serve(self, sender: str, call: int, request: Request) -> None:
        """Answer a request of another server, or park it."""
        if request.method == "copy":
            try:
                message, arrays = self.cluster.copy(wire.unpack(request.body, wire.CopyRequest))
            except (*Foreign,) as error:
                self.world.reply(self.name, sender, Failure(call, "refused", str(error)))
                return
            self.world.reply(self.name, sender, Reply(call, wire.pack(message), arrays))
            return
        self.parked = [one for one in self.parked if one[0] != sender]
        if not self._tail(sender, call, request):
            self.parked.append(
                (
                    sender,
                    call,
                    request,
                    self.world.now_s + wire.unpack(request.body, wire.TailRequest).wait_ms / 1_000,
                )
            )

    def _tail(self, sender: str, call: int, request: Request) -> bool:
        answer = self.cluster.tail(wire.unpack(request.body, wire.TailRequest))
        if answer is None:
            return False
        self.world.reply(self.name, sender, Reply(call, wire.pack(answer[0]), answer[1]))
        return True

    def turn(self) -> None:
        self.cluster.turn()
        self.parked = [one for one in self.parked if not self._tail(*one[:3])]
        for sender, call, _, until_s in self.parked:
            if until_s <= self.world.now_s:
                self.world.reply(self.name, sender, Reply(call, wire.pack(wire.TailReply([]))))
        self.parked = [one for one in self.parked if one[3] > self.world.now_s]


@dataclass
class _Sent:
    at_s: float
    sender: str
    receiver: str
    incarnation: int
    message: Request | Reply | Failure


class Wire:
    """A connection of the simulated network."""

    def __init__(self, world: World, owner: str, address: str) -> None:
        self.world, self.owner, self.address = world, owner, address
        self.last = 0
        self.id = world.number()
        self.open: dict[int, float] = {}
        self.arrived: list[tuple[int, Reply | Failure]] = []
        world.wires[self.id] = self

    def ask(self, outgoing: Outgoing, timeout_s: float) -> int:
        self.last += 1
        call = self.id * 1_000_000 + self.last
        self.open[call] = self.world.now_s + timeout_s
        self.world.send(
            self.owner, self.address, Request(call, outgoing.method, 1, outgoing.body, outgoing.arrays)
        )
        return call

    def receive(self) -> list[tuple[int, Reply | Failure]]:
        found, self.arrived = self.arrived, []
        return [(call, answer) for call, answer in found if self.open.pop(call, None) is not None]

    def expired(self) -> list[int]:
        late = [call for call, until in self.open.items() if until <= self.world.now_s]
        for call in late:
            del self.open[call]
        return late


class World:
    """Servers ``names`` with shards of ``specs``; everything random comes from ``seed``."""

    def __init__(
        self,
        specs: tuple[TableSpec, ...],
        names: tuple[str, ...],
        replication: Replication,
        seed: int,
        shards: int = 1,
        replicas: int | None = None,
        loss: float = 0.0,
        lease_s: float = 5.0,
        skew_us: Mapping[str, int] | None = None,
        late: float = 0.0,
    ) -> None:
        self.specs, self.replication, self.loss, self.lease_s = specs, replication, loss, lease_s
        self.random = random.Random(seed)
        self.now_s = 1_000.0
        self.store = Store(self.random)
        self.nodes: dict[str, Node] = {}
        self.without_store: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        """Pairs of servers that do not reach each other."""
        self.skew_us = dict(skew_us or {})
        self.late = late
        """How many messages come up to a second too late."""
        self.leases: dict[str, float] = {}
        """By server, when its entry in the store goes."""
        self.disks: dict[str, dict[tuple[str, int], Disk]] = {name: {} for name in names}
        self.incarnations = 0
        self.numbers = 0
        self.wires: dict[int, Wire] = {}
        self.queue: list[_Sent] = []
        first = assign(names, shards, replicas or len(names), chained=replication == "chain")
        self.store.put(MAP_KEY, msgspec.json.encode(first))
        for name in names:
            self.start(name)

    @property
    def now_us(self) -> int:
        return int(self.now_s * 1e6)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def start(self, name: str) -> None:
        """A new process of the name; its entry takes the place of one that is still there."""
        self.incarnations += 1
        self._register(name, self.incarnations)
        self.nodes[name] = Node(self, name, self.incarnations, self.disks.setdefault(name, {}))

    def _register(self, name: str, incarnation: int) -> None:
        failing, self.store.failing = self.store.failing, 0.0
        member = Member(name, "parameter-server", name, 1, incarnation, 0, ready=True)
        self.store.put(member_key("parameter-server", name), msgspec.json.encode(member))
        self.store.failing = failing
        self.leases[name] = self.now_s + self.lease_s

    def kill(self, name: str, *, lease_ends: bool = True) -> None:
        """As by SIGKILL; its lease ends at once, or when its time is up."""
        node = self.nodes.pop(name)
        node.cluster.close()
        if lease_ends:
            self._leave(name)

    def _leave(self, name: str) -> None:
        self.leases.pop(name, None)
        self.store.delete(member_key("parameter-server", name))

    def lose_disk(self, name: str) -> None:
        """The folder of a server that does not run is deleted."""
        assert name not in self.nodes
        self.disks[name] = {}

    def pause(self, name: str, seconds: float) -> None:
        """As by SIGSTOP, and SIGCONT after ``seconds``."""
        self.nodes[name].paused_until_s = self.now_s + seconds

    def _keep_leases(self) -> None:
        for name, node in self.nodes.items():
            if not node.paused and name not in self.without_store and node.renew_s <= self.now_s:
                node.renew_s = self.now_s + self.lease_s / 3
                self._register(name, node.incarnation)
        for name in [name for name, until_s in self.leases.items() if until_s <= self.now_s]:
            self._leave(name)

    @property
    def map(self) -> ShardMap:
        failing, self.store.failing = self.store.failing, 0.0
        found = read_shard_map(self.store)  # type: ignore[arg-type]
        self.store.failing = failing
        assert found is not None
        return found

    def place(self, shard: int = 0) -> Place:
        return self.map.places[shard]

    def leader(self, shard: int = 0) -> Node | None:
        place = self.place(shard)
        node = self.nodes.get(place.leader)
        replica = node.cluster.replicas.get(shard) if node else None
        return node if node and replica and replica.leading and replica.place.fence == place.fence else None

    def move(self, shard: int, to: str) -> None:
        change_shard_map(self.store, lambda now: now.change({}, {**now.moves, shard: to}))  # type: ignore[arg-type]

    def send(self, sender: str, receiver: str, message: Request | Reply | Failure) -> None:
        if self.random.random() < self.loss or frozenset((sender, receiver)) in self.cut:
            return
        node = self.nodes.get(receiver)
        if node is not None:
            slowest_s = 1.0 if self.random.random() < self.late else 0.003
            at_s = self.now_s + self.random.uniform(0.0001, slowest_s)
            self.queue.append(_Sent(at_s, sender, receiver, node.incarnation, message))

    def reply(self, sender: str, receiver: str, message: Reply | Failure) -> None:
        self.send(sender, receiver, message)

    def _deliver(self) -> None:
        waiting = {name for name, node in self.nodes.items() if node.paused}
        ready = [one for one in self.queue if one.at_s <= self.now_s and one.receiver not in waiting]
        due = sorted(ready, key=lambda one: one.at_s)
        self.queue = [one for one in self.queue if one.at_s > self.now_s or one.receiver in waiting]
        for sent in due:
            node = self.nodes.get(sent.receiver)
            # What a socket had not sent yet when the other process died goes to the one after it.
            resent = isinstance(sent.message, Request) and self.random.random() < 0.5
            if node is None or (node.incarnation != sent.incarnation and not resent):
                continue
            if isinstance(sent.message, Request):
                node.serve(sent.sender, sent.message.id, sent.message)
            else:
                wire_of = self.wires.get(sent.message.id // 1_000_000)
                if wire_of is not None and wire_of.owner == sent.receiver:
                    wire_of.arrived.append((sent.message.id, sent.message))

    def tick(self, seconds: float = 0.002) -> None:
        """A little time passes; everyone gets a turn, in random order."""
        self.now_s += seconds
        self._keep_leases()
        self._deliver()
        for node in self._shuffled():
            node.turn()
        if self.random.random() < 0.2:
            for node in self._shuffled():
                self._control(node)
        if self.random.random() < 0.05:
            for node in self._shuffled():
                node.sync()

    def _control(self, node: Node) -> None:
        while not node.cluster.reports.empty():
            node.control._take(node.cluster.reports.get_nowait())
        with suppress(CoordinationError):
            node.control.look()

    def _shuffled(self) -> Iterator[Node]:
        nodes = [node for node in self.nodes.values() if not node.paused]
        self.random.shuffle(nodes)
        return iter(nodes)

    def until(self, condition: object, ticks: int = 8_000) -> None:
        """Let time pass until ``condition()``; fails where that does not come."""
        assert callable(condition)
        for _ in range(ticks):
            if condition():
                return
            self.tick()
        raise AssertionError(f"did not come to be: {condition}")
