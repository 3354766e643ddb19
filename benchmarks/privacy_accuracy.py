"""Accuracy on digits against ε, against the number of clients, and as the model grows.

ε is of a whole job at δ = 1e-5. Rounds and clip (SignDS: rate and share of coordinates) of each mechanism and ε were
chosen on rows that nobody trains or is tested on, with 1,000 clients and a seed of its own; that choice is not charged.
With fewer or more clients the same are taken, SignDS's rate so that steps stay as long. Distributed noise counts on
nine tenths of the clients and is added inside the ring; its exact sampling leaves time for eight rounds, with the clip
that was best for central noise at eight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, Final

from benchmarks.privacy_work import DELTA, Way, dealt, learn, noise_for, tables
from benchmarks.report import Row
from benchmarks.turns import Figures
from federated.privacy.accounting_statement import MEANINGLESS
from federated.privacy.gaussian import sigma_of
from federated.privacy.section import DISTRIBUTED, Mechanism

PLAIN: Final = "no privacy"
NAMES: Final[Mapping[Mechanism, str]] = {
    "none": PLAIN,
    "local_gaussian": "local, Gaussian",
    "local_laplace": "local, Laplace",
    "signds": "SignDS",
    "central_gaussian": "central, Gaussian",
    "distributed_gaussian": "distributed, discrete Gaussian",
    "distributed_skellam": "distributed, Skellam",
}
WIDE: Final[tuple[Mechanism, ...]] = ("none", "local_gaussian", "signds")
SAME_AS_SKELLAM: Final[frozenset[Mechanism]] = frozenset({"distributed_gaussian"})
"""Not run again for every number of clients: exact sampling is slow, and its curve against ε tells as much."""
WIDE_RATE, WIDE_SHARE = 0.5, 0.05
SOFTMAX_WEIGHTS: Final = 650
CHOSEN_WITH: Final = 1_000
"""Clients with which ways were chosen."""


def _ways(mechanism: Mechanism, chosen: Mapping[float, tuple[float, ...]]) -> Mapping[float, Way]:
    """From ε to (rounds, clip), or of SignDS (rounds, rate, share of the coordinates)."""
    return {
        epsilon: Way(mechanism, int(rounds), size, {"sign_k": more[0]} if more else {})
        for epsilon, (rounds, size, *more) in chosen.items()
    }


WAYS: Final[Mapping[Mechanism, Mapping[float, Way]]] = {
    "none": _ways("none", {0.0: (40, 1.0)}),
    "local_gaussian": _ways(
        "local_gaussian", {1.0: (4, 1.0), 2.0: (16, 0.5), 4.0: (16, 0.5), 8.0: (16, 0.5), 16.0: (16, 1.0)}
    ),
    "local_laplace": _ways("local_laplace", {1.0: (1, 3.0), 2.0: (1, 10.0), 4.0: (1, 10.0), 8.0: (2, 10.0)}),
    "signds": _ways(
        "signds",
        {
            1.0: (1, 10.0, 0.2),
            2.0: (2, 4.0, 0.2),
            4.0: (2, 2.0, 0.2),
            8.0: (2, 1.0, 0.2),
            16.0: (8, 0.3, 0.2),
            100.0: (32, 0.3, 0.05),
        },
    ),
    "central_gaussian": _ways(
        "central_gaussian", {1.0: (32, 1.0), 2.0: (32, 1.0), 4.0: (32, 1.0), 16.0: (32, 2.0)}
    ),
    "distributed_gaussian": _ways("distributed_gaussian", {1.0: (8, 2.0)}),
    "distributed_skellam": _ways("distributed_skellam", {1.0: (8, 2.0)}),
}
"""What was chosen, by ε; another ε takes those of the nearest."""


def way_of(mechanism: Mechanism, epsilon: float) -> Way:
    """The way at the nearest ε that one was chosen for."""
    ways = WAYS[mechanism]
    return ways[min(ways, key=lambda known: abs(known - epsilon))]


@dataclass(frozen=True, slots=True)
class Sizes:
    """``epsilons`` with ``clients`` clients, also ``signs_epsilons`` of SignDS; ``populations`` at ``fixed``;
    ``widths`` of a perceptron at ``wide_epsilon``, with one seed from ``once_from`` weights on."""

    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    signs_epsilons: tuple[float, ...] = (100.0,)
    clients: int = 1_000
    fixed: float = 8.0
    populations: tuple[int, ...] = (100, 300, 1_000, 3_000)
    widths: tuple[int, ...] = (13, 133, 1_333, 13_333)
    wide_epsilon: float = 16.0
    wide_clients: int = 500
    wide_rounds: int = 4
    once_from: int = 500_000
    seeds: tuple[int, ...] = (0, 1, 2)
    mechanisms: tuple[Mechanism, ...] = tuple(NAMES)


@dataclass(frozen=True, slots=True)
class Point:
    """% of the test rows of each seed, at ``at``: an ε, a number of clients or of weights."""

    mechanism: Mechanism
    at: float
    right: tuple[float, ...]
    note: str = ""

    @property
    def figures(self) -> Figures:
        """Median and spread."""
        return Figures(self.right)


@dataclass(frozen=True, slots=True)
class Learned:
    """All points; ``plain`` is without privacy and with ``sizes.clients``."""

    sizes: Sizes
    plain: Point
    by_epsilon: tuple[Point, ...]
    by_clients: tuple[Point, ...]
    by_weights: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    job: dict[str, Any]
    clients: int
    seed: int


def learn_all(sizes: Sizes) -> Learned:
    """Every run, on all cores."""
    private = [mechanism for mechanism in sizes.mechanisms if mechanism != "none"]
    groups = (
        [_softmax("none", 0.0, sizes.clients, 0.0, sizes)],
        [
            _softmax(mechanism, epsilon, sizes.clients, epsilon, sizes)
            for mechanism in private
            for epsilon in (*sizes.epsilons, *(sizes.signs_epsilons if mechanism == "signds" else ()))
        ],
        [
            _softmax(mechanism, sizes.fixed, clients, float(clients), sizes)
            for mechanism in sizes.mechanisms
            if mechanism not in SAME_AS_SKELLAM
            for clients in sizes.populations
        ],
        [
            _perceptron(mechanism, width, sizes)
            for mechanism in WIDE
            if mechanism in sizes.mechanisms
            for width in sizes.widths
        ],
    )
    # The longest first, so that no core waits for the last.
    different = {repr(task): task for group in groups for _, some in group for task in some}
    tasks = sorted(different.values(), key=_long, reverse=True)
    with ProcessPoolExecutor(os.cpu_count() or 1, get_context("spawn")) as pool:
        done = dict(zip(map(repr, tasks), pool.map(_run, tasks), strict=True))
    plain, by_epsilon, by_clients, by_weights = (
        tuple(replace(point, right=tuple(done[repr(task)] for task in some)) for point, some in group)
        for group in groups
    )
    return Learned(sizes, plain[0], by_epsilon, by_clients, by_weights)


def _run(task: _Task) -> float:
    return learn(task.job, dealt(task.clients, task.seed))


def _long(task: _Task) -> float:
    """Roughly the seconds it takes, in some unit."""
    rounds: int = task.job["rounds"]["fl_iteration_num"]
    width: int = task.job["model"].get("hidden", [8])[0]
    slow = 4 if task.job["privacy"]["mechanism"] in DISTRIBUTED else 1
    return float(task.clients * rounds * width * slow)


def _softmax(
    mechanism: Mechanism, epsilon: float, clients: int, at: float, sizes: Sizes
) -> tuple[Point, list[_Task]]:
    """A point ``at`` somewhere, and its runs."""
    way = way_of(mechanism, epsilon)
    if mechanism == "signds":
        # Votes are added up: so a step stays as long with other numbers of clients.
        way = replace(way, size=way.size * CHOSEN_WITH / clients)
    noise = noise_for(way, epsilon, clients, SOFTMAX_WEIGHTS)
    note = f"{way.rounds} rounds" + ("" if mechanism == "none" else f", {_said(way)}")
    if epsilon >= MEANINGLESS:
        note += "; no meaningful privacy"
    tasks = [_Task(tables(way, clients, seed, noise), clients, seed) for seed in sizes.seeds]
    return Point(mechanism, at, (), note), tasks


def _said(way: Way) -> str:
    if way.mechanism == "signds":
        return f"rate {way.size:.3g}, top {100 * way.options['sign_k']:g} %"
    return f"clip {way.size:g}"


def _perceptron(mechanism: Mechanism, width: int, sizes: Sizes) -> tuple[Point, list[_Task]]:
    """64-``width``-10. Local noise is drawn for the sum at once, since a sum of Gaussians is one: a million weights of
    every client would take hours."""
    clients, rounds = sizes.wide_clients, sizes.wide_rounds
    weights = (64 + 1) * width + (width + 1) * 10
    model = {"name": "perceptron", "hidden": [width]}
    way, noise, note = Way(mechanism, rounds), 0.0, ""
    if mechanism == "local_gaussian":
        # A report has sigma 2C sqrt(rounds) times that of the whole job; clients' noise adds up in squares.
        way = replace(way, mechanism="central_gaussian")
        noise = 2.0 * sigma_of(sizes.wide_epsilon, DELTA) * math.sqrt(rounds * clients)
        note = "noise drawn for the sum"
    elif mechanism == "signds":
        way = replace(way, size=WIDE_RATE, options={"sign_k": WIDE_SHARE})
        noise = noise_for(way, sizes.wide_epsilon, clients, weights)
        note = _said(way)
    seeds = sizes.seeds[:1] if weights >= sizes.once_from else sizes.seeds
    tasks = [_Task(tables(way, clients, seed, noise, model), clients, seed) for seed in seeds]
    return Point(mechanism, float(weights), (), note), tasks


def rows(learned: Learned) -> list[Row]:
    """All rows, in % of the test rows, beside those without privacy."""
    sizes = learned.sizes
    plain = learned.plain.figures.median
    found = [_row(f"digits, {sizes.clients:,} clients, {PLAIN}", learned.plain, None)]
    found += [
        _row(
            f"digits, {sizes.clients:,} clients, epsilon {point.at:g}: {NAMES[point.mechanism]}", point, plain
        )
        for point in learned.by_epsilon
    ]
    for who, points, model in (
        (f"epsilon {sizes.fixed:g}, {{:,}} clients", learned.by_clients, ""),
        (
            f"epsilon {sizes.wide_epsilon:g}, {sizes.wide_clients:,} clients, {{:,}} weights",
            learned.by_weights,
            f"{sizes.wide_rounds} rounds of a perceptron",
        ),
    ):
        plains = {point.at: point.figures.median for point in points if point.mechanism == "none"}
        found += [
            _row(
                f"digits, {who.format(int(point.at))}: {NAMES[point.mechanism]}",
                point,
                None if point.mechanism == "none" else plains.get(point.at),
                model,
            )
            for point in points
        ]
    return found


def _row(work: str, point: Point, plain: float | None, model: str = "") -> Row:
    note = "; ".join(each for each in (model, point.note) if each)
    median = point.figures.median
    row = Row(work, "% right", median, spread=point.figures.spread, note=note)
    return row if plain is None else replace(row, peer=plain, peer_name=PLAIN, ratio=median / plain)
