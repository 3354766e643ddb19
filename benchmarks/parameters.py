"""``parameters``: rows read, written and added a second, here and over loopback, and an epoch that lives on them.

Each against a peer in the same run, in turn with ours. ``ratio`` is ours over the peer's, larger is better for us;
where an aim is a ratio, the note says so. Servers and peers have their files in a temporary folder and are killed
at the end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import epoch, gathers, growth, hot_keys, loopback
from benchmarks.report import Row
from services.processes import limit_threads

_ROWS: Final = (500_000, 1_000_000, 2_000_000, 4_000_000)
_DIMS: Final = (8, 16, 64, 128)
"""Beside 32, the width of everything else."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything is measured."""

    gathers: gathers.Sizes
    loopback: loopback.Sizes
    growth: growth.Sizes
    epoch: epoch.Sizes
    hot_keys: hot_keys.Sizes


WHOLE: Final = Plan(
    gathers.Sizes(_ROWS, _DIMS, 1_000_000, calls=50, rounds=15),
    loopback.Sizes(_ROWS, _DIMS, 500_000, calls=25, rounds=9),
    growth.Sizes(10_000_000, _DIMS, 2_000_000, rounds=3),
    epoch.Sizes(100_000, rounds=5),
    hot_keys.Sizes(1_000_000, calls=25, rounds=7),
)
QUICK: Final = Plan(
    gathers.Sizes((100_000, 500_000, 1_000_000), (8, 128), 100_000, calls=20, rounds=5),
    loopback.Sizes((50_000, 200_000), (128,), 50_000, calls=4, rounds=3),
    growth.Sizes(1_000_000, (128,), 200_000, rounds=1),
    epoch.Sizes(3_000, rounds=1),
    hot_keys.Sizes(50_000, calls=4, rounds=3, ways=hot_keys.WAYS[::3]),
)


def run(quick: bool, console: Console) -> list[Row]:
    """All rows of a plan, the quick one or the whole."""
    # Children inherit it; this process has loaded its libraries, and torch is told where it is used.
    limit_threads(os.environ)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        return list(_measure(QUICK if quick else WHOLE, Path(folder), console))


def _measure(plan: Plan, folder: Path, console: Console) -> Iterator[Row]:
    yield from gathers.measure(plan.gathers, console)
    yield from loopback.measure(plan.loopback, folder / "loopback", console)
    yield from growth.measure(plan.growth, console)
    yield from epoch.measure(plan.epoch, folder / "epoch", console)
    yield from hot_keys.measure(plan.hot_keys, folder / "hot-keys", console)
