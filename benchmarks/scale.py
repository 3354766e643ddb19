"""The world in which ways of synchronising are compared, in virtual time: regions with slow links between them, and
what is written at one of them, when.

One of several equal columns of servers is simulated: a server of each replica, with its share of the rows, of the
shards and of the links. A simulated row stands for many real ones that change together: its bytes and the work on it
count as often. Rows that never changed are not stored, only counted where all are looked at.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.draws import Zipf, keys_of
from sync.simulator.network import Network, Path
from sync.simulator.queue import EventQueue

Floats = npt.NDArray[np.float64]

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
OWNER: Final = "r0.0"
"""Who writes everything."""


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
