"""Ways of synchronising that the core itself runs, in the world of ``scale``: who pulls from whom, how often, how a
source finds what changed, and what that costs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.charges import DIM, TABLE, Constants, spec
from benchmarks.outcomes import Outcome, summed, traffic
from benchmarks.scale import NIC, OWNER, Floats, Plan, Scale, lay_links, names
from sync.clock import HybridClock
from sync.exchange import Batch, FeedConfig, PaceConfig, Pull, ShardName
from sync.pushes import Push, Source
from sync.records import Delta
from sync.shard import Shard
from sync.simulator.machine import Costs, MachineClock
from sync.simulator.node import Node, NodeConfig
from sync.simulator.queue import EventQueue

Finding = Literal["scan", "cache", "token"]

CORE_ROW: Final = 20 + 4 * DIM
"""Bytes by which the core reckons one simulated row."""
SHARD: Final[ShardName] = ("m", 0)


@dataclass(frozen=True, slots=True)
class Way:
    """How replicas hear of what changed. ``finding``: how a source finds it; ``leaders``: whether one replica of a
    region pulls over the wide area for the others; ``parked``: whether pulls wait at the source, else everybody polls;
    ``priority_share``: of recent updates, what overtakes."""

    name: str
    finding: Finding = "token"
    leaders: bool = True
    parked: bool = True
    priority_share: float = 0.0
    fan_out: int = 0


@dataclass(frozen=True, slots=True)
class Charges(Costs):
    """What the work of one server takes, at the scale that it stands for."""

    scale: Scale = field(default_factory=Scale)
    finding: Finding = "token"
    constants: Constants | None = None

    def serving_s(self, batch: Batch, looked: int, found: int) -> float:
        c, scale = self.constants, self.scale
        if c is None:
            return 0.0
        rows = found * scale.each
        spent = c.message + told_shards(scale, batch) * c.told_shard + rows * c.told_row
        if looked or self.finding == "scan":
            # Of a cache that does not reach back so far a scan is the rest.
            spent += scale.real_rows * c.scanned_row
        if self.finding == "cache":
            spent += scale.shards * c.cached_shard + scale.cached * scale.real_rows * c.cached_entry
        return spent + scale.shards * c.level_shard

    def taking_s(self, batch: Batch, merged: int) -> float:
        c, scale = self.constants, self.scale
        if c is None:
            return 0.0
        rows = merged * scale.each
        return c.message + told_shards(scale, batch) * c.merged_shard + rows * c.merged_row


def told_rows(batch: Batch) -> int:
    """Simulated rows in a batch."""
    return sum(len(part.keys) for piece in batch.pieces for part in piece.update.versioned)


def told_shards(scale: Scale, batch: Batch) -> float:
    """In how many of a server's shards the rows of a batch are: of all shards that changed, the same share as of all
    rows that are to be told, since a batch without room for all takes one shard after the other."""
    if not batch.pieces:
        return 0.0
    rows, left = told_rows(batch), batch.pieces[-1].left
    return max(1.0, scale.told_shards((rows + left) * scale.each) * rows / max(1, rows + left))


def weight(scale: Scale, finding: Finding, parked: bool, message: Pull | Batch) -> int:
    """Bytes of a message on the wire.

    A poll names all shards, by a vector each or by a token of 16 bytes; a stream need not, but each of its batches
    lists the shards that are served. A shard that has news comes with its vector, to be claimed.
    """
    vector = 12 * scale.writers
    if isinstance(message, Pull):
        named = 0 if parked else scale.shards * (16 if finding == "token" else 32 + vector)
        return 40 + named + (scale.shards * (16 + vector) if message.held else 0)
    served = 12 * scale.shards if parked else 0
    told = round(told_shards(scale, message) * (160 + vector))
    return 48 + served + told + told_rows(message) * scale.each * scale.row_bytes


class Observer:
    """When one replica had each of ``plan``'s rows, or a newer state of it: ``held_s`` [N], infinite if never."""

    def __init__(self, queue: EventQueue, written: dict[int, list[tuple[int, int]]], rows: int) -> None:
        self.held_s: Floats = np.full(rows, np.inf)
        self._queue, self._written = queue, written
        self._seen: dict[int, int] = {}

    def __call__(self, delta: Delta) -> None:
        """Hear of a step of the replica."""
        now_s = self._queue.now_s
        for rows in delta.rows:
            for key, time in zip(rows.keys.tolist(), rows.time.tolist(), strict=True):
                at, told = self._seen.get(key, 0), self._written[key]
                while at < len(told) and told[at][0] <= time:
                    self.held_s[told[at][1]] = now_s
                    at += 1
                self._seen[key] = at


class World:
    """One way of synchronising, run by the core."""

    def __init__(
        self,
        scale: Scale,
        way: Way,
        plan: Plan,
        constants: Constants,
        *,
        seed: int = 0,
        slowed: float = 1.0,
        observed: int = 2,
        wait_s: float = 1.0,
        max_staleness_s: float = 60.0,
    ) -> None:
        self.scale, self.way, self.plan = scale, way, plan
        self.queue = EventQueue()
        self.network = lay_links(scale, self.queue, slowed)
        self._written: dict[int, list[tuple[int, int]]] = {}
        self._lengths: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        unit = scale.row_bytes * scale.each / CORE_ROW
        if way.parked:
            pace = PaceConfig(round(65_536 / unit), round(8 * 2**20 / unit))
        else:
            # A poll is answered by all there is, at once.
            pace = PaceConfig(2**40, 2**40, window=1, max_window=1)
        self._config = NodeConfig(
            FeedConfig(priority_share=way.priority_share, max_staleness_s=max_staleness_s),
            pace,
            wait_s=wait_s if way.parked else 0.0,
            patience_s=1e9,
            costs=Charges(
                message_s=constants.message,
                scanned_row_s=constants.scanned_row,
                scale=scale,
                finding=way.finding,
                constants=constants,
            ),
            poll_s=0.0 if way.parked else scale.poll_s,
            unit=unit,
            weigh=lambda message: weight(scale, way.finding, way.parked, message),
        )
        rng = random.Random(seed)
        self.regions = [
            [self._node(place, name, rng) for name in members]
            for place, members in ((f"r{i}", one) for i, one in enumerate(names(scale)))
        ]
        self.observers = [self._observe(members, observed) for members in self.regions]
        self._follow(rng)
        owner = self.regions[0][0].shards[SHARD]
        owner.priority = lambda squares, first, now_us: np.sqrt(squares)
        for push, at_s in enumerate(plan.at_s.tolist()):
            self.queue.at(at_s, partial(self._write, push))

    def _node(self, place: str, name: str, rng: random.Random) -> Node:
        self.network.limit(name, NIC, NIC)
        clock = MachineClock(self.queue)
        seed = random.Random(rng.random())
        node = Node(name, place, self.queue, self.network, clock, seed, self._config)
        owns = name == OWNER
        shard = Shard(
            0,
            (spec(),),
            1 if owns else 2,
            HybridClock(clock),
            model=SHARD[0],
            change_capacity=max(64, round(self.scale.cached * self.scale.held)),
            stateless=not owns,
        )
        node.start({SHARD: shard})
        return node

    def _observe(self, members: Sequence[Node], count: int) -> list[Observer]:
        """Watch replicas of a region that are not its leader, if there are others."""
        found = []
        for node in members[-min(count, max(1, len(members) - 1)) :]:
            observer = Observer(self.queue, self._written, len(self.plan.keys))
            node.shards[SHARD].on_delta = observer
            found.append(observer)
        return found

    def _follow(self, rng: random.Random) -> None:
        owner = self.regions[0][0]
        for members in self.regions:
            led = self.way.leaders or members[0] is owner
            for number, node in enumerate(members):
                above = (number - 1) // self.way.fan_out if self.way.fan_out else 0
                source = members[above] if led and number else owner
                if node is not owner:
                    # Nobody begins at the same moment as another.
                    starts_s = rng.random() * self.scale.poll_s if not self.way.parked else 0.0
                    self.queue.at(starts_s, partial(node.follow, [source]))

    def _write(self, push: int) -> None:
        part = self.plan.part(push)
        keys = self.plan.keys[part]
        if not len(keys):
            return
        owner = self.regions[0][0]
        shard = owner.shards[SHARD]
        gradients = np.zeros((len(keys), DIM), np.float32)
        gradients[:, 0] = self.plan.lengths[part]
        offset = shard.applied(Source("log", 0)) + 1
        shard.push(Push(Source("log", 0), offset, offset - 1, None, ((TABLE, keys, gradients),)))
        time = shard.knowledge[shard.writer]
        for number, key in enumerate(keys.tolist(), part.start):
            self._written.setdefault(key, []).append((time, number))
        owner.changed()

    def run(self, first_s: float, last_s: float, until_s: float) -> Outcome:
        """Run until ``until_s``; what counts are rows written from ``first_s`` up to ``last_s``, and the traffic
        meanwhile."""
        self.queue.run(first_s)
        counts = traffic(self.network)
        self.queue.run(last_s)
        wide, messages = (after - before for after, before in zip(traffic(self.network), counts, strict=True))
        self.queue.run(until_s)
        held = [[observer.held_s for observer in observers] for observers in self.observers]
        return summed(
            self.way.name, self.scale, self.plan, held, (first_s, last_s, until_s), wide, messages,
            self.queue.events_total,
        )  # fmt: skip
