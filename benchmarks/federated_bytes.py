"""Bytes of whole bodies, up and down, and what that costs in accuracy.

Up: a scheme's bodies with their frames, beside float32 and beside MindSpore's (a random 40 % mask and 8 bits, no
feedback, no entropy coding). Down: rounded versions, sent as differences, beside the whole model in float32. The first
download of a client is the whole model, and counts. Frames of uploads are counted, heads of HTTP are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console

from benchmarks.federated_work import digits, everyone, simulated
from benchmarks.report import Row, at_most
from benchmarks.turns import Figures, faced

FLOAT32: Final = "float32"
MINDSPORE: Final = "random_mask:0.4:unscaled,quantise:8"
UP_AIM: Final = 50.0
DOWN_AIM: Final = 4.0
POINTS_AIM: Final = 0.5
DOWN_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class Case:
    """All of ``clients``, or ``cohort`` of them, take part in each of ``rounds``; ``scheme`` suits their number."""

    clients: int
    cohort: int
    rounds: int
    scheme: str
    aims: bool


FEW: Final = "top_k:0.05,quantise:2:nearest,deflate"
MANY: Final = "rotate,random_mask:0.5,quantise:1:drive"
CASES: Final = (
    Case(10, 10, 60, FEW, True),
    Case(100, 100, 60, MANY, True),
    Case(1_000, 100, 60, MANY, False),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run, with which seeds."""

    cases: tuple[Case, ...] = CASES
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Learned:
    """Of runs with several seeds: accuracy in percent, bytes of an upload and of a download."""

    accuracy: Figures
    up: Figures
    down: Figures


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    for case in sizes.cases:
        console.print(f"federated: bytes, {case.clients:,} clients")
        plain, theirs, ours = (
            _learn(case, scheme, bits, sizes.seeds)
            for scheme, bits in (("", 0), (MINDSPORE, 0), (case.scheme, DOWN_BITS))
        )
        who = f"{case.clients:,} clients" + (
            "" if case.cohort == case.clients else f", {case.cohort} a round"
        )
        lost = _lost(plain, ours)
        yield faced(
            f"upload, {who}: {case.scheme}",
            "bytes",
            ours.up,
            plain.up,
            FLOAT32,
            aim=UP_AIM if case.aims else None,
            less_is_better=True,
            note=f"{lost:.2f} points of accuracy lost",
        )
        yield faced(
            f"upload, {who}: {case.scheme}, beside MindSpore's",
            "bytes",
            ours.up,
            theirs.up,
            MINDSPORE,
            less_is_better=True,
            note=f"MindSpore's loses {_lost(plain, theirs):.2f} points",
        )
        yield faced(
            f"download, {who}: differences of {DOWN_BITS} bits",
            "bytes",
            ours.down,
            plain.down,
            FLOAT32,
            aim=DOWN_AIM if case.aims else None,
            less_is_better=True,
        )
        yield Row(
            f"accuracy lost by compression both ways, {who}, after {case.rounds} rounds",
            "points",
            lost,
            POINTS_AIM if case.aims else None,
            at_most(POINTS_AIM, lost) if case.aims else None,
            note=f"{ours.accuracy.median:.2f} %, uncompressed {plain.accuracy.median:.2f} % (medians); "
            f"the difference is the mean of {len(sizes.seeds)} seeds",
        )


def _lost(plain: Learned, other: Learned) -> float:
    """Points of accuracy, the mean over seeds; below 0 where the other is better."""
    return float(np.mean(np.subtract(plain.accuracy.values, other.accuracy.values)))


def _learn(case: Case, scheme: str, bits: int, seeds: tuple[int, ...]) -> Learned:
    runs = [_run(case, scheme, bits, seed) for seed in seeds]
    accuracy, up, down = (Figures(values) for values in zip(*runs, strict=True))
    return Learned(accuracy, up, down)


def _run(case: Case, scheme: str, bits: int, seed: int) -> tuple[float, float, float]:
    federation = digits(case.clients, seed)
    tables = {
        "job": {"seed": seed},
        "rounds": everyone(case.cohort, case.rounds),
        "model": {"name": "perceptron", "hidden": [64]},
        "training": {"epochs": 5, "batch_size": 20, "rate": 0.3},
        "compression": {"upload": scheme, "download_bits": bits},
        "simulation": {"checkpoint_every": 0, "evaluate_every": case.rounds},
    }
    with simulated(tables, federation, evaluated=True) as built:
        rows = list(built.simulation.run())
    metrics = rows[-1].metrics
    assert metrics is not None
    uploads = sum(row.trained for row in rows)
    starts = built.simulation.world.tally.admitted
    up = sum(row.bytes_up for row in rows) / uploads
    down = sum(row.bytes_down for row in rows) / starts
    return 100.0 * metrics["accuracy"], up, down
