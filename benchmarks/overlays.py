"""The world in which ways of synchronising are compared, in virtual time: regions with slow links between them, what is
written at one of them, and when replicas elsewhere have it.

One of several equal columns of servers is simulated: a server of each replica, with its share of the rows, of the
shards and of the links. A simulated row stands for many real ones that change together: its bytes and the work on it
count as often. Rows that never changed are not stored, only counted where all are looked at.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.charges import DIM, TABLE, Constants, spec
from benchmarks.draws import Zipf, keys_of
from sync.clock import HybridClock
from sync.exchange import Batch, FeedConfig, PaceConfig, Pull, ShardName
from sync.pushes import Push, Source
from sync.records import Delta
from sync.shard import Shard
from sync.simulator.machine import Costs, MachineClock
from sync.simulator.network import Network, Path
from sync.simulator.node import Node, NodeConfig
from sync.simulator.queue import EventQueue

Floats = npt.NDArray[np.float64]
Finding = Literal["scan", "cache", "token"]

CITIES: Final = (
    ("Ashburn", 39.0, -77.5),
    ("San Jose", 37.3, -121.9),
    ("São Paulo", -23.5, -46.6),
    ("London", 51.5, -0.1),
    ("Frankfurt", 50.1, 8.7),
    ("Mumbai", 19.1, 72.9),
    ("Singapore", 1.3, 103.8),
    ("Hong Kong", 22.3, 114.2),
    ("Tokyo", 35.7, 139.7),
    ("Sydney", -33.9, 151.2),
)
"""Regions, the first is where everything is written: name, degrees north and east."""
DETOUR: Final = 1.5
"""A cable over the great circle."""
LIGHT_KM_S: Final = 200_000.0
"""In fibre."""
LAN_S: Final = 0.00025
NIC: Final = 1.25e9
"""Bytes a second of one server."""
CORE_ROW: Final = 20 + 4 * DIM
"""Bytes by which the core reckons one simulated row."""
SHARD: Final[ShardName] = ("m", 0)
OWNER: Final = "r0.0"


@dataclass(frozen=True, slots=True)
class Scale:
    """What is simulated, fixed before the run.

    ``rows``: of the whole model in one region, each of ``row_bytes`` on the wire; ``columns``: into which servers they
    are divided; ``copies``: of each row in a region; ``shards``: of one server; ``writers``: entries of a knowledge
    vector; ``cached``: of the rows, what the update cache holds; ``changed``: of the rows, what changes in an hour;
    ``exponent``: of Zipf's law, by which they are drawn; ``slowest``, ``fastest``: bytes a second of a region's link,
    the writing region has the fastest; ``each``: real rows for which a simulated one stands.
    """

    regions: int = 10
    copies: int = 10
    rows: int = 675_000_000
    row_bytes: int = 148
    columns: int = 8
    shards: int = 8
    writers: int = 10
    cached: float = 0.002
    changed: float = 0.03
    exponent: float = 1.0
    slowest: float = 12.5e6
    fastest: float = 125e6
    each: int = 50
    poll_s: float = 1.0
    pushes_a_second: float = 5.0

    @property
    def held(self) -> int:
        """Simulated rows of one server."""
        return self.rows // self.columns // self.each

    @property
    def real_rows(self) -> int:
        """Rows of one server."""
        return self.rows // self.columns

    def rates(self) -> list[float]:
        """Bytes a second of each region's link, this column's share."""
        others = np.geomspace(self.fastest, self.slowest, self.regions - 1)
        return [rate / self.columns for rate in (self.fastest, *others.tolist())]

    def told_shards(self, rows: float) -> float:
        """How many of the server's shards ``rows`` rows are in, drawn evenly."""
        return self.shards * -math.expm1(-rows / self.shards)


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


class Plan:
    """What is written when: the same for all ways of one seed. ``starts`` [P + 1]: where each push begins in ``keys``;
    ``at_s`` [P]; ``lengths`` [N] of the gradients, which make the priority."""

    def __init__(self, scale: Scale, seconds: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.at_s: Floats = np.arange(1, int(seconds * scale.pushes_a_second) + 1) / scale.pushes_a_second
        zipf = Zipf(scale.held, scale.exponent)
        self.updates_a_second = updates_a_second(scale)
        counts = rng.poisson(self.updates_a_second / scale.pushes_a_second, len(self.at_s))
        parts = [np.unique(zipf.draw(rng, int(count))) for count in counts]
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        self.keys = np.concatenate([*parts, keys_of(np.zeros(0, np.int64))])
        self.lengths = rng.lognormal(0.0, 1.0, len(self.keys))
        self.written_s = np.repeat(self.at_s, np.diff(self.starts))
        """[N], when each row was written."""
        self.high = self.lengths > np.quantile(self.lengths, 0.9) if len(self.keys) else np.zeros(0, np.bool_)
        """[N], the tenth of most priority."""

    def part(self, push: int) -> slice:
        """The rows of one push."""
        return slice(int(self.starts[push]), int(self.starts[push + 1]))


@lru_cache(maxsize=8)
def _shares(held: int, exponent: float) -> Floats:
    shares = np.arange(1, held + 1, dtype=np.float64) ** -exponent
    found: Floats = shares / shares.sum()
    return found


def distinct_rows(scale: Scale, draws: float) -> float:
    """How many simulated rows so many draws touch, on average."""
    return float(-np.expm1(-draws * _shares(scale.held, scale.exponent)).sum())


@lru_cache(maxsize=8)
def updates_a_second(scale: Scale) -> float:
    """Draws of simulated rows a second by which, of all of them, ``scale.changed`` are drawn within an hour."""
    low, high = 0.0, 100.0 * scale.held
    for _ in range(50):
        draws = (low + high) / 2.0
        low, high = (
            (draws, high) if distinct_rows(scale, draws) < scale.changed * scale.held else (low, draws)
        )
    return low / 3_600.0


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


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from written to held, of every simulated row at every replica that was watched. ``unfinished``: the share
    that was not held when the run ended, and counts with the time until then."""

    mean_s: float
    p50_s: float
    p99_s: float
    most_s: float
    unfinished: float = 0.0

    @staticmethod
    def of(latencies: Floats, unfinished: float = 0.0) -> Times:
        if not len(latencies):
            return Times(0.0, 0.0, 0.0, 0.0, 1.0)
        p50, p99 = np.percentile(latencies, [50, 99]).tolist()
        return Times(float(latencies.mean()), p50, p99, float(latencies.max()), unfinished)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way came to. ``between``: at replicas of other regions; ``inside``: of the region that writes; ``high``,
    ``low``: between, of the rows of most priority and the others; ``by_region_s``: the means. Bytes between regions and
    messages are those of this column."""

    name: str
    between: Times
    inside: Times
    high: Times
    low: Times
    by_region_s: tuple[float, ...]
    wide_bytes_a_second: float
    messages_a_second: float
    bytes_an_update: float
    """Between regions, of one real row written, all its replicas together."""
    events: int = 0


def path_s(one: int, other: int) -> float:
    """One way between two regions, seconds."""
    (_, north, east), (_, north2, east2) = CITIES[one], CITIES[other]
    a, b = math.radians(north), math.radians(north2)
    angle = math.sin(a) * math.sin(b) + math.cos(a) * math.cos(b) * math.cos(math.radians(east - east2))
    return 0.001 + 6_371.0 * math.acos(min(1.0, angle)) * DETOUR / LIGHT_KM_S


def lay_links(scale: Scale, queue: EventQueue, slowed: float = 1.0) -> Network:
    """The links of a world, each at one ``slowed``-th of its rate."""
    network = Network(queue, random.Random(0), Path(LAN_S))
    for region, rate in enumerate(scale.rates()):
        network.limit(f"r{region}", rate / slowed, rate / slowed)
        for other in range(region):
            network.connect(f"r{region}", f"r{other}", Path(path_s(region, other)))
    return network


def names(scale: Scale) -> list[list[str]]:
    """The replicas of each region."""
    return [[f"r{region}.{copy}" for copy in range(scale.copies)] for region in range(scale.regions)]


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


def traffic(network: Network) -> tuple[int, int]:
    """Bytes between regions and messages so far."""
    return network.counts.crossing_bytes_total, network.counts.messages_total


def summed(
    name: str,
    scale: Scale,
    plan: Plan,
    held: Sequence[Sequence[Floats]],
    span: tuple[float, float, float],
    wide: int,
    messages: int,
    events: int,
) -> Outcome:
    """An outcome from when observers of each region (the first is the one that writes) had each row of ``plan``."""
    first_s, last_s, until_s = span
    counted = (plan.written_s >= first_s) & (plan.written_s < last_s)
    written_s, high = plan.written_s[counted], plan.high[counted]
    waits = [[np.minimum(one[counted], until_s) - written_s for one in region] for region in held]
    missing = [[np.isinf(one[counted]).astype(np.float64) for one in region] for region in held]
    tagged = np.concatenate([high for region in waits[1:] for _ in region] or [high[:0]])
    between = _all(waits[1:])
    if not len(written_s):
        raise ValueError(f"nothing is written between {first_s} and {last_s} s")
    late, late_inside = (_all(some) for some in (missing[1:], missing[:1]))
    tenth, others = (
        Times.of(between[which], float(late[which].mean()) if which.any() else 0.0)
        for which in (tagged, ~tagged)
    )
    seconds = last_s - first_s
    return Outcome(
        name,
        Times.of(between, float(late.mean())),
        Times.of(_all(waits[:1]), float(late_inside.mean())),
        tenth,
        others,
        tuple(float(_all([region]).mean()) for region in waits),
        wide / seconds,
        messages / seconds,
        wide / max(1, len(written_s) * scale.each),
        events,
    )


def _all(regions: Sequence[Sequence[Floats]]) -> Floats:
    parts = [one for region in regions for one in region]
    return np.concatenate(parts) if parts else np.zeros(0)
