"""``vertical``: companies that share users but not features: how good their joint models are, and what they cost.

Each part runs in a process of its own with one thread for BLAS. Quality and speed are measured with all parties in one
process; the last part is of real processes over sockets, by the command that users have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import (
    vertical_answers,
    vertical_boosting,
    vertical_linear,
    vertical_picture,
    vertical_split,
    vertical_transfer,
)
from benchmarks.federated import alone
from benchmarks.report import Row
from benchmarks.vertical_linear import Wanted
from services.processes import limit_threads


@dataclass(frozen=True, slots=True)
class Measures:
    """How much of everything is measured."""

    linear: vertical_linear.Sizes
    boosting: vertical_boosting.Sizes
    split: vertical_split.Sizes
    transfer: vertical_transfer.Sizes
    answers: vertical_answers.Sizes


WHOLE: Final = Measures(
    vertical_linear.Sizes(),
    vertical_boosting.Sizes(),
    vertical_split.Sizes(),
    vertical_transfer.Sizes(),
    vertical_answers.Sizes(),
)
QUICK: Final = Measures(
    vertical_linear.Sizes((Wanted("breast", 0.002, False),), rounds=2),
    vertical_boosting.Sizes(("breast",), trees=3),
    vertical_split.Sizes(("breast",), epochs=5),
    vertical_transfer.Sizes((vertical_transfer.LATENT,), (0.05,), rows=4_000, seeds=(0,)),
    vertical_answers.Sizes(requests=200, kinds=("linear",)),
)


def run(quick: bool, console: Console, plot: Path | None = None) -> list[Row]:
    """All rows of a plan, the quick one or the whole; the picture of the quality goes to ``plot``."""
    # Children inherit it; this process has loaded its libraries.
    limit_threads(os.environ)
    plan = QUICK if quick else WHOLE
    parts: Sequence[tuple[Callable[[Any], list[Row]], object]] = (
        (vertical_linear.measure, plan.linear),
        (vertical_boosting.measure, plan.boosting),
        (vertical_split.measure, plan.split),
    )
    rows = [row for measure, sizes in parts for row in alone(measure, sizes)]
    learned: vertical_transfer.Learned = alone(vertical_transfer.learn, plan.transfer)
    rows += [*vertical_transfer.rows(learned), *alone(vertical_answers.measure, plan.answers)]
    if plot is not None:
        vertical_picture.draw(rows, learned.curves, plot)
        console.print(f"vertical: {plot}")
    return rows
