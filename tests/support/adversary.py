"""Everything that may go wrong among parameter servers, at random, and what has to hold all the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from support.cluster import Node, World

from services.parameter_server.replication.election import Replication
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

SPECS = (
    TableSpec("rows", 3, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5)),
    TableSpec("dense", 4, Initialiser.uniform(0.1), Optimiser("adagrad", 0.5), placement="single", rows=4),
)


@cache
def parts(offset: int) -> tuple[tuple[str, np.ndarray, np.ndarray], ...]:
    """The gradients of one micro-batch."""
    rng = np.random.default_rng(offset)
    keys = rng.integers(0, 30, 4).astype(np.uint64)
    return (
        ("rows", keys, rng.standard_normal((4, 3)).astype(np.float32)),
        ("dense", np.array([offset % 4], np.uint64), rng.standard_normal((1, 4)).astype(np.float32)),
    )


def content(shard: Shard) -> bytes:
    """What two replicas agree on: every row with its state and version, and how far every source is."""
    rows = sorted(
        (
            page.table,
            key,
            page.values[i].tobytes(),
            page.state[i].tobytes(),
            int(page.time[i]),
            int(page.writer[i]),
        )
        for page in shard.state().rows
        for i, key in enumerate(page.keys.tolist())
    )
    return repr((rows, sorted(shard.pushes.progress().items()))).encode()


def values(shard: Shard) -> bytes:
    """Rows and optimiser state, without versions."""
    return repr(
        sorted(
            (page.table, key, page.values[i].tobytes(), page.state[i].tobytes())
            for page in shard.state().rows
            for i, key in enumerate(page.keys.tolist())
        )
    ).encode()


def undisturbed(offsets: int) -> bytes:
    """The values after ``offsets`` pushes, each applied once."""
    shard = Shard(0, SPECS, 1, HybridClock(lambda: 0))
    for offset in range(offsets):
        shard.push(Push(Source("s", 0), offset, offset - 1, None, parts(offset)))
    return values(shard)


@dataclass
class Client:
    """Pushes offset after offset to whoever says that it leads, also to a deposed one; sends again what was not
    answered, and goes back where a server lacks something. ``lost``: acknowledged, and the leader lacks it."""

    world: World
    model: str
    shard: int
    acknowledged: int = -1
    next: int = 0
    lost: int = 0
    answered_s: float = 0.0
    _waiting: tuple[Node, dict[int, tuple[int, int]], int, float] | None = None

    @property
    def source(self) -> Source:
        return Source(f"samples of {self.model}", self.shard)

    def turn(self) -> None:
        world = self.world
        if self._waiting is not None:
            node, pending, offset, until_s = self._waiting
            gone = world.nodes.get(node.name) is not node
            settled = False if gone or node.paused else node.cluster.settled(pending)
            if settled:
                self._acknowledge(offset)
            elif settled is None or gone or world.now_s > until_s:
                self._waiting = None
            return
        node_ = self._leading()
        if node_ is None or node_.cluster.takes_pushes(self.shard):
            return
        shard = node_.declare(self.model, self.shard)
        applied = shard.applied(self.source)
        if world.random.random() < 0.2:
            # As after a change of leaders: what it says it has is not sent again.
            self.next = max(self.next, applied + 1)
        offset = self.next
        outcome = shard.push(Push(self.source, offset, offset - 1, None, parts(offset)))
        if outcome.status == "gap":
            if node_ is world.leader(self.shard):
                self.lost = max(self.lost, self.acknowledged - applied)
                self.next = applied + 1
            return
        pending = node_.cluster.pending([self.shard])
        self._waiting = node_, dict(pending), offset, world.now_s + 2.0
        if not pending:
            self._acknowledge(offset)

    def _acknowledge(self, offset: int) -> None:
        self.acknowledged = max(self.acknowledged, offset)
        self.next = max(self.next, offset + 1)
        self.answered_s, self._waiting = self.world.now_s, None

    def _leading(self) -> Node | None:
        found = [
            node
            for node in self.world.nodes.values()
            if not node.paused
            and (replica := node.cluster.replicas.get(self.shard)) is not None
            and replica.leading
        ]
        if not found:
            return None
        real = self.world.leader(self.shard)
        return real if real in found and self.world.random.random() < 0.7 else self.world.random.choice(found)


@dataclass
class Adversary:
    """Kills one server after another, pauses any, cuts links, keeps the store away, moves shards, at once."""

    replication: Replication
    seed: int
    names: tuple[str, ...] = ("a", "b", "c", "d")
    shards: int = 2
    replicas: int = 3
    world: World = field(init=False)
    clients: list[Client] = field(init=False)
    killed: str = ""
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rough = self.seed % 3
        self.world = World(
            SPECS,
            self.names,
            self.replication,
            self.seed,
            self.shards,
            self.replicas,
            loss=(0.0, 0.01, 0.05)[rough],
            late=(0.0, 0.01, 0.05)[rough],
            lease_s=1.0,
            skew_us={"a": 60_000_000, "b": -60_000_000},
        )
        self.clients = [Client(self.world, "one", shard) for shard in range(self.shards)]

    def run(self, deeds: int) -> None:
        """Do so many things, with a little time between; then let all be well, and check."""
        for deed in range(deeds):
            self.pass_time(self.world.random.choice([3, 30, 100, 300]))
            self.act()
            if deed == deeds // 2:
                self.clients += [Client(self.world, "two", shard) for shard in range(self.shards)]
        self.heal()
        self.check()

    def pass_time(self, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick()
            for client in self.clients:
                client.turn()

    def act(self) -> None:
        """One deed."""
        world, random = self.world, self.world.random
        name = random.choice(self.names)
        if random.random() < 0.5:
            name = world.place(random.randrange(self.shards)).leader
        deed = random.choice(["kill", "kill", "pause", "cut", "store", "flaky", "move", "mend", "lose-disk"])
        self.log.append(f"{world.now_s:.3f} {deed} {name}")
        if deed in ("kill", "lose-disk"):
            self._kill(name, lose_disk=deed == "lose-disk")
        elif deed == "pause" and name in world.nodes:
            world.pause(name, random.choice([0.3, 1.5, 3.0]))
        elif deed == "cut":
            world.cut.add(frozenset(random.sample(self.names, 2)))
        elif deed == "store":
            world.without_store.add(name)
        elif deed == "flaky":
            world.store.failing = random.choice([0.0, 0.3])
        elif deed == "move":
            failing, world.store.failing = world.store.failing, 0.0
            world.move(random.randrange(self.shards), name)
            world.store.failing = failing
        elif deed == "mend":
            world.cut.clear()
            world.without_store.clear()
            world.store.failing = 0.0

    def _kill(self, name: str, *, lose_disk: bool) -> None:
        """One after another: nobody else is killed before the last one has everything again."""
        world, random = self.world, self.world.random
        if self.killed:
            if self.killed not in world.nodes:
                world.start(self.killed)
                self.log.append(f"    start {self.killed}")
            if self._whole(self.killed):
                self.killed = ""
            return
        if name not in world.nodes or not self._spared(name):
            return
        self.killed = name
        world.kill(name, lease_ends=random.random() < 0.3)
        if lose_disk and self.replicas > 1:
            world.lose_disk(name)
        if random.random() < 0.5:
            world.start(name)
            self.log.append(f"    start {name}")

    def _spared(self, name: str) -> bool:
        """Whether each chain that ``name`` stands in has another member that lacks nothing: a chain may come down to
        one server, and what that one had not synced would be gone with it."""
        return all(
            any(
                other != name
                and other in self.world.nodes
                and (replica := self.world.nodes[other].cluster.replicas.get(shard)) is not None
                and not replica.restarted
                and replica.whole
                for other in place.chain
            )
            for shard, place in enumerate(self.world.map.places)
            if name in place.chain
        )

    def _whole(self, name: str) -> bool:
        """Whether a server that was killed holds what it held, on all of its shards."""
        world = self.world
        node = world.nodes[name]
        for shard, place in enumerate(world.map.places):
            if name not in place.replicas:
                continue
            replica = node.cluster.replicas.get(shard)
            if replica is None or replica.restarted or not replica.whole:
                return False
            if replica.place.fence != place.fence or world.leader(shard) is None:
                return False
        return True

    def heal(self) -> None:
        """Everything is well again."""
        world = self.world
        self.log.append(f"{world.now_s:.3f} heal")
        world.cut.clear()
        world.without_store.clear()
        world.store.failing = world.loss = world.late = 0.0
        for name in self.names:
            if name not in world.nodes:
                world.start(name)
            world.nodes[name].paused_until_s = 0.0

    def check(self) -> None:
        """Pushes go on, all replicas come to agree, and nothing acknowledged is missing."""
        world = self.world
        aims = {id(client): client.acknowledged + 3 for client in self.clients}

        def further() -> bool:
            for client in self.clients:
                client.turn()
            return all(client.acknowledged >= aims[id(client)] for client in self.clients)

        world.until(further, 12_000)
        if self.replication == "chain":
            world.until(lambda: all(set(p.chain) == set(p.replicas) for p in world.map.places), 12_000)
        world.until(self._agreed, 12_000)
        for client in self.clients:
            place = world.place(client.shard)
            shards = [world.nodes[name].of(client.shard)[client.model] for name in place.replicas]
            assert len({content(one) for one in shards}) == 1, "replicas differ"
            applied = shards[0].applied(client.source)
            if self.replication != "async":
                assert client.lost == 0, f"{client.lost} acknowledged pushes of {client.model} were lost"
                assert applied >= client.acknowledged
            assert values(shards[0]) == undisturbed(applied + 1), "not each push once"
        world.until(lambda: not world.map.moves, 12_000)

    def _agreed(self) -> bool:
        world = self.world
        for client in self.clients:
            place = world.place(client.shard)
            found = [world.nodes[name].of(client.shard).get(client.model) for name in place.replicas]
            if len({None if one is None else one.position for one in found}) != 1 or found[0] is None:
                return False
            for name in place.replicas:
                replica = world.nodes[name].cluster.replicas[client.shard]
                # As many steps, but of a deposed leader, are replaced as soon as it has joined.
                joined = replica.leading or replica.session
                if not (replica.whole and joined and replica.place.fence == place.fence):
                    return False
        return True
