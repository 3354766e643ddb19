"""Random histories: everything that can go wrong at once, and what must hold all the same.

A history is a pure function of its seed. Some nodes write, all follow each other somehow; links are slow, lose, repeat
and reorder; nodes crash and come back from older snapshots or with nothing; owners are deposed and come back with what
they had not told; graves are collected with right and with wrong cuts, incarnations retired. In the end links heal,
nobody writes, and all must agree.

Two kinds: *fenced*, where one node at a time owns a shard under a fencing epoch (though deposed owners may not know
it yet), and *free*, where several write at once and the later clock wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sync.clock import HybridClock
from sync.exchange import FeedConfig, PaceConfig, ShardName
from sync.knowledge import Knowledge, covers, joined, met
from sync.pushes import Push, Source, Watermark
from sync.records import Delta
from sync.replica import ShardState
from sync.shard import Shard
from sync.simulator.invariants import Broken, Reader, Watcher, difference
from sync.simulator.ledger import Ledger
from sync.simulator.machine import MachineClock
from sync.simulator.network import Network, Path
from sync.simulator.node import Node, NodeConfig
from sync.simulator.queue import EventQueue
from sync.simulator.regions import Region
from sync.spec import Initialiser, Optimiser, TableSpec

SPECS: Final = (
    TableSpec("rows", 2, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5)),
    TableSpec("dense", 2, Initialiser.uniform(0.1), Optimiser("sgd", 0.5), placement="single", rows=2),
)
MODEL: Final = "m"
MAX_SKEW_S: Final = 3 * 3_600.0
SETTLE_S: Final = 900.0
"""Virtual seconds in which all must agree once everything is well again."""
MAX_EVENTS: Final = 400_000


@dataclass(slots=True)
class Outcome:
    """What happened in a history. ``settled_s``: how long it took to agree at the end."""

    seed: int
    events: int = 0
    writes: int = 0
    checks: int = 0
    settled_s: float = 0.0
    did: dict[str, int] = field(default_factory=dict)
    """How often each kind of thing was done, and happened in the core."""


@dataclass(slots=True)
class _Member:
    """A node and what is around it."""

    node: Node
    number: int
    readers: dict[ShardName, Reader]
    watchers: dict[ShardName, Watcher] = field(default_factory=dict)
    disk: list[dict[ShardName, ShardState]] = field(default_factory=list)
    owns: set[ShardName] = field(default_factory=set)
    """Shards that it writes, as far as it knows."""
    starts: int = 0


class History:
    """One history. ``run`` does all of it."""

    def __init__(self, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.outcome = Outcome(seed)
        self._say = say
        self._rng = rng = random.Random(seed)
        self._values = np.random.default_rng(seed)
        self._queue = EventQueue()
        self._network = Network(self._queue, random.Random(seed + 1))
        self.ledger = Ledger([spec.name for spec in SPECS if spec.placement == "hashed"])
        self.fenced = rng.random() < 0.6
        self._keys = rng.choice([4, 12, 40])
        self._names: list[ShardName] = [(MODEL, shard) for shard in range(rng.choice([1, 1, 2]))]
        self._capacity = rng.choice([3, 8, 64])
        # Without fencing nothing guards against forgetting what somebody may still come back without.
        self._max_graves = rng.choice([2, 1_000, 1_000]) if self.fenced else 1_000
        self._epoch = 0
        self._config = NodeConfig(
            FeedConfig(
                coalesce_s=rng.choice([0.0, 0.005, 0.1]),
                priority_share=rng.choice([0.1, 0.5]),
                max_staleness_s=rng.choice([0.5, 5.0]),
                state=True,
            ),
            PaceConfig(min_bytes=rng.choice([64, 256, 65_536]), max_bytes=rng.choice([128, 1_024, 65_536])),
            wait_s=rng.choice([0.2, 1.0]),
            patience_s=rng.choice([2.0, 8.0]),
        )
        self._skewed = rng.random() < 0.5
        self._members = [self._member(number) for number in range(rng.randint(2, 6))]
        self._lay_links()
        self._duration_s = rng.uniform(4.0, 20.0)
        for member in self._members:
            self._start(member, None)
        self._overlay: dict[str, list[Node]] = {}
        self._lay_overlay()
        if self.fenced:
            for name in self._names:
                self._move_owner(name)
        self._cut: list[tuple[str, str]] = []

    # What there is

    def _member(self, number: int) -> _Member:
        skew_s = (
            self._rng.uniform(-MAX_SKEW_S, MAX_SKEW_S) if self._skewed else self._rng.uniform(-0.01, 0.01)
        )
        clock = MachineClock(self._queue, skew_s, self._rng.uniform(-1e-3, 1e-3))
        node = Node(
            f"n{number}", f"p{number}", self._queue, self._network, clock,
            random.Random(self._rng.random()), self._config,
        )  # fmt: skip
        readers = {name: Reader(self._rng.choice([1, 5, 100])) for name in self._names}
        member = _Member(node, number, readers)
        node.on_taken = lambda source, batch, taken: self._taken(member, bool(taken.rows or taken.learned))
        return member

    def _lay_links(self) -> None:
        rng = self._rng
        places = [member.node.place for member in self._members]
        bad = rng.choice([0.0, 0.0, 0.05, 0.2])
        for i, one in enumerate(places):
            for other in places[:i]:
                delay_s = rng.choice([0.001, 0.05, 0.2])
                self._network.connect(
                    one, other, Path(delay_s, rng.choice([0.0, delay_s]), bad, bad, rng.choice([0.0, bad]))
                )
            self._network.limit(one, rng.choice([0.0, 0.0, 4_000.0, 40_000.0]))

    def _lay_overlay(self) -> None:
        """Who follows whom; everybody hears of everything in the end."""
        nodes = [member.node for member in self._members]
        kind = self._rng.choice(["mesh", "ring", "star", "chain", "regions"])
        self._say(f"{'fenced' if self.fenced else 'free'}, {len(nodes)} nodes, {kind}")
        if kind == "regions" and len(nodes) > 2:
            half = len(nodes) // 2
            one, other = nodes[:half], nodes[half:]
            Region(self._queue, one, lambda: other)
            Region(self._queue, other, lambda: one)
            return
        for i, node in enumerate(nodes):
            near = [nodes[i - 1], nodes[(i + 1) % len(nodes)]]
            self._overlay[node.name] = {
                "mesh": nodes,
                "ring": [nodes[i - 1]],
                "star": nodes if i == 0 else [nodes[0]],
                "chain": [one for one in near if abs(nodes.index(one) - i) == 1],
                "regions": nodes,
            }[kind]
            node.follow(self._overlay[node.name])

    def _start(self, member: _Member, saved: dict[ShardName, ShardState] | None) -> None:
        member.starts += 1
        member.owns.clear()
        hybrid = HybridClock(member.node.clock)
        shards = {}
        for name in self._names:
            shard = shards[name] = Shard(
                name[1], SPECS, self._new_writer(), hybrid, model=MODEL, change_capacity=self._capacity,
                max_graves=self._max_graves, max_ahead_us=int(3 * MAX_SKEW_S * 1e6),
            )  # fmt: skip
            if saved is not None:
                shard.restore(saved[name])
            shard.on_delta = self._recorder(name)
        who = f"{member.node.name} (start {member.starts})"
        member.watchers = {name: Watcher(who, name, self.ledger) for name in self._names}
        member.node.start(shards)
        if not self.fenced:
            member.owns = set(self._names)

    def _new_writer(self) -> int:
        self._epoch += 1
        return self._epoch

    def _recorder(self, name: ShardName) -> Callable[[Delta], None]:
        return lambda delta: self.ledger.record(name, delta)

    # What is checked

    def _taken(self, member: _Member, news: bool) -> None:
        if news and self._rng.random() < 0.3:
            self._look(member)
        for name, shard in member.node.shards.items():
            if self._rng.random() < 0.3:
                member.readers[name].read(shard)
            newest = max(shard.horizon.retired, *shard.epochs.values())
            if self.fenced and name in member.owns and newest > shard.epochs[shard.writer]:
                # It hears of its successor.
                member.owns.discard(name)

    def _look(self, member: _Member) -> None:
        self.outcome.checks += 1
        for name, shard in member.node.shards.items():
            member.watchers[name].look(shard)

    # What happens

    def run(self) -> Outcome:
        """Raises Broken where an invariant does not hold."""
        try:
            self._happen()
            self._settle()
        finally:
            self.outcome.events = self._queue.events_total
            self.outcome.writes = self.ledger.writes_total
        return self.outcome

    def _happen(self) -> None:
        kinds: dict[str, tuple[float, Callable[[_Member], bool]]] = {
            "push": (10.0, self._push),
            "burst": (0.5, self._burst),
            "delete": (3.0, self._delete),
            "publish": (0.7, self._publish),
            "snapshot": (1.0, self._save),
            "crash": (0.7, self._crash),
            "restart": (1.5, self._restart),
            "cut": (0.5, self._cut_link),
            "heal": (0.8, self._heal_link),
            "move": (0.7 if self.fenced else 0.0, self._move),
            "collect": (1.0, self._collect_right),
            "collect too much": (0.5 if self.fenced else 0.0, self._collect_wrong),
            "retire": (1.0 if self.fenced else 0.0, self._retire),
        }
        pace_s = self._rng.choice([0.02, 0.1])
        while self._queue.now_s < self._duration_s:
            if not self._queue.run(self._queue.now_s + self._rng.expovariate(1.0) * pace_s, MAX_EVENTS):
                raise Broken(f"more than {MAX_EVENTS} events within {pace_s} s")
            [kind] = self._rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
            member = self._rng.choice(self._members)
            if kinds[kind][1](member):
                self.outcome.did[kind] = self.outcome.did.get(kind, 0) + 1
                if kind != "push":
                    self._say(f"{self._queue.now_s:8.3f} {kind} {member.node.name}")
                if member.node.alive:
                    member.node.changed()
                    if self._rng.random() < 0.1:
                        self._look(member)

    def _own_shard(self, member: _Member) -> tuple[ShardName, Shard] | None:
        if not member.node.alive or not member.owns:
            return None
        name = self._rng.choice(sorted(member.owns))
        return name, member.node.shards[name]

    def _push(self, member: _Member, rows: int = 3) -> bool:
        found = self._own_shard(member)
        if found is None:
            return False
        _, shard = found
        # Without fencing each writer has a partition of its own.
        source = Source("log", 0 if self.fenced else member.number)
        offset = shard.applied(source) + 1
        parts = [("rows", self._some_keys(rows), self._gradients(rows))]
        if self._rng.random() < 0.3:
            parts.append(("dense", np.arange(2, dtype=np.uint64), self._gradients(2)))
        mark = Watermark("events", source.partition, offset, 1_000 * offset)
        shard.push(Push(source, offset, offset - 1, mark, tuple(parts)))
        return True

    def _burst(self, member: _Member) -> bool:
        return all(self._push(member, 20) for _ in range(3))

    def _some_keys(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self._values.integers(0, self._keys, count).astype(np.uint64)

    def _gradients(self, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        scale = np.float32(self._rng.choice([0.01, 1.0, 10.0]))
        return (self._values.standard_normal((count, 2)) * scale).astype(np.float32)

    def _delete(self, member: _Member) -> bool:
        found = self._own_shard(member)
        return found is not None and found[1].delete("rows", self._some_keys(2)) > 0

    def _publish(self, member: _Member) -> bool:
        found = self._own_shard(member)
        if found is None:
            return False
        found[1].publish_dense("dense", again=self._rng.random() < 0.2)
        return True

    def _save(self, member: _Member) -> bool:
        if not member.node.alive:
            return False
        member.disk.append({name: shard.state() for name, shard in member.node.shards.items()})
        del member.disk[:-3]
        return True

    def _crash(self, member: _Member) -> bool:
        alive = [one for one in self._members if one.node.alive]
        if not member.node.alive or len(alive) < 2:
            return False
        member.node.crash()
        member.owns.clear()
        return True

    def _restart(self, member: _Member) -> bool:
        if member.node.alive:
            return False
        saved = None
        if member.disk and (not self.fenced or self._rng.random() < 0.8):
            # What is newer than what is restored is lost.
            at = self._rng.randrange(len(member.disk))
            del member.disk[at + 1 :]
            saved = member.disk[at]
        else:
            member.disk.clear()
        self._start(member, saved)
        member.node.follow(self._overlay.get(member.node.name, ()))
        return True

    def _cut_link(self, member: _Member) -> bool:
        other = self._rng.choice(self._members)
        if other is member:
            return False
        self._network.cut(member.node.place, other.node.place)
        self._cut.append((member.node.place, other.node.place))
        return True

    def _heal_link(self, member: _Member) -> bool:
        if not self._cut:
            return False
        self._network.heal(*self._cut.pop(self._rng.randrange(len(self._cut))))
        return True

    def _move(self, member: _Member) -> bool:
        return self._move_owner(self._rng.choice(self._names), member)

    def _move_owner(self, name: ShardName, member: _Member | None = None) -> bool:
        member = member or self._rng.choice(self._members)
        if not member.node.alive:
            return False
        if self._rng.random() < 0.5:
            for one in self._members:
                one.owns.discard(name)
        writer = self._new_writer()
        member.node.shards[name].lead(writer, writer)
        member.owns.add(name)
        return True

    def _knowledge(self, name: ShardName, *, reached_from: _Member | None = None) -> list[Knowledge]:
        """What each member holds; of those that are down, what they may come back with."""
        found: list[Knowledge] = []
        for member in self._members:
            if reached_from is not None and self._is_removed(reached_from, member):
                continue
            if member.node.alive:
                found.append(member.node.shards[name].knowledge)
            elif member.disk:
                found.append(member.disk[-1][name].head.knowledge)
        return found

    def _is_removed(self, here: _Member, member: _Member) -> bool:
        return not member.node.alive or self._network.is_cut(here.node.place, member.node.place)

    def _collect_right(self, member: _Member) -> bool:
        found = self._own_shard(member)
        if found is None:
            return False
        name, shard = found
        if self.fenced:
            self._retire_at(name, shard, None)
        held = self._knowledge(name)
        if not self.fenced:
            # Nothing guards against whoever comes back with less and writes: all that is durable must cover the graves.
            held += [saved[name].head.knowledge for one in self._members for saved in one.disk]
            held += [{} for one in self._members if not one.disk]
        return shard.collect(met(held)) > 0

    def _collect_wrong(self, member: _Member) -> bool:
        """As if those were gone for ever that are not reached."""
        found = self._own_shard(member)
        if found is None:
            return False
        name, shard = found
        self._retire_at(name, shard, member)
        return shard.collect(dict(shard.knowledge)) > 0

    def _retire(self, member: _Member) -> bool:
        found = self._own_shard(member)
        return found is not None and self._retire_at(*found, member if self._rng.random() < 0.5 else None)

    def _retire_at(self, name: ShardName, shard: Shard, reached_from: _Member | None) -> bool:
        """Retire whom everyone knows, or everyone that is reached; the owner has all that they have."""
        everyone = self._knowledge(name, reached_from=reached_from)
        epoch = shard.epochs[shard.writer]
        older = {
            writer: time
            for writer, time in joined(*everyone).items()
            if self.ledger.epochs[name][writer] < epoch
        }
        return covers(shard.knowledge, older) and shard.retire(epoch, met(everyone))

    # How it ends

    def _settle(self) -> None:
        self._say(f"{self._queue.now_s:8.3f} all is well again")
        self._network.heal()
        self._network.calm()
        for member in self._members:
            member.owns.clear()
            self._restart(member)
        begun_s = self._queue.now_s
        different = "not looked"
        while different and self._queue.now_s < begun_s + SETTLE_S:
            if not self._queue.run(self._queue.now_s + 2.0, MAX_EVENTS):
                raise Broken(f"more than {MAX_EVENTS} events in 2 s of rest")
            different = self._differences()
        if different:
            raise Broken(f"after {SETTLE_S:.0f} s of rest: {different}")
        self.outcome.settled_s = self._queue.now_s - begun_s
        for member in self._members:
            self._look(member)
            for name, shard in member.node.shards.items():
                member.readers[name].check(f"{member.node.name}, shard {name[1]}", shard)
            for how, count in member.node.feeds.counts.found.items():
                self.outcome.did[how] = self.outcome.did.get(how, 0) + count
            for what in ("replacements_total", "urgent_rows_total"):
                count = getattr(member.node.feeds.counts, what)
                self.outcome.did[what] = self.outcome.did.get(what, 0) + count

    def _differences(self) -> str:
        first = self._members[0].node
        for member in self._members[1:]:
            for name, shard in member.node.shards.items():
                found = difference(first.shards[name], shard, self.ledger.epochs[name])
                if found:
                    return f"{first.name} and {member.node.name}, shard {name[1]}: {found}"
        return ""
