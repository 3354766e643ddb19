"""``privacy``: what secure aggregation costs beside Flower's, what differential privacy costs in accuracy, and what
travels.

Each part runs in a process of its own with one thread for BLAS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import privacy_accuracy, privacy_picture, privacy_secagg, privacy_small
from benchmarks.federated import alone
from benchmarks.report import Row
from services.processes import limit_threads


@dataclass(frozen=True, slots=True)
class Measures:
    """How much of everything is measured."""

    secagg: privacy_secagg.Sizes
    accuracy: privacy_accuracy.Sizes
    small: privacy_small.Sizes


WHOLE: Final = Measures(privacy_secagg.Sizes(), privacy_accuracy.Sizes(), privacy_small.Sizes())
QUICK: Final = Measures(
    privacy_secagg.Sizes(clients=(50,), lengths=(100_000,), whole=(), rounds=1),
    privacy_accuracy.Sizes(
        epsilons=(8.0,),
        signs_epsilons=(),
        clients=300,
        populations=(),
        widths=(13, 133),
        seeds=(0,),
        mechanisms=("none", "local_gaussian", "signds", "central_gaussian", "distributed_skellam"),
    ),
    privacy_small.Sizes(starts=("central, Poisson .05",), repeats=1),
)


def run(quick: bool, console: Console, plot: Path | None = None) -> list[Row]:
    """All rows of a plan, the quick one or the whole; the picture of the learning goes to ``plot``."""
    # Children inherit it; this process has loaded its libraries.
    limit_threads(os.environ)
    plan = QUICK if quick else WHOLE
    rows = alone(privacy_secagg.measure, plan.secagg)
    console.print("privacy: accuracy")
    learned: privacy_accuracy.Learned = alone(privacy_accuracy.learn_all, plan.accuracy)
    console.print("privacy: uploads and accounting")
    rows = [*rows, *privacy_accuracy.rows(learned), *alone(privacy_small.measure, plan.small)]
    if plot is not None:
        privacy_picture.draw(learned, plot)
        console.print(f"privacy: {plot}")
    return rows
