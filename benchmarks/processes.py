"""The part of ``sync`` that is measured with regions of real processes: the whole plan and the quick one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import precision, regions
from benchmarks.report import Row
from services.processes import limit_threads


@dataclass(frozen=True, slots=True)
class Measures:
    """How much of everything is measured."""

    regions: regions.Sizes
    precision: precision.Sizes


_USUAL: Final = regions.Rate(5_000, 50, 15.0)
_BRIEF: Final = regions.Rate(5_000, 50, 3.0)
WHOLE: Final = Measures(
    regions.Sizes(
        1_000_000,
        (regions.Rate(1_000, 50, 10.0), _USUAL, regions.Rate(20_000, 100, 10.0)),
        _USUAL,
        reads_s=10.0,
        reads_per_s=100.0,
    ),
    precision.Sizes(rounds=8, rows=20_000, rows_s=1_200, each=40, seconds=15.0),
)
QUICK: Final = Measures(
    regions.Sizes(20_000, (_BRIEF,), _BRIEF, reads_s=1.0, reads_per_s=100.0),
    precision.Sizes(rounds=1, rows=20_000, rows_s=1_200, each=40, seconds=2.5),
)


def measure(quick: bool, console: Console) -> Iterator[Row]:
    """All rows of a plan."""
    # Children inherit it; this process has loaded its libraries.
    limit_threads(os.environ)
    plan = QUICK if quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        yield from regions.measure(plan.regions, Path(folder) / "regions", console)
        yield from precision.measure(plan.precision, Path(folder) / "precision", console)
