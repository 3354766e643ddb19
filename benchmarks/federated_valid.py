"""Iterations that are valid though a third of the clients drop out or straggle, in virtual time.

The rounds are the servers' own. Whoever straggles is far too slow for the window, and is missed like a dropout. The
peer is the same federation waiting for everyone, which is MindSpore's default. What is drawn follows a binomial, so
each row says how often an iteration would be valid by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console

from benchmarks.federated_work import given_rows, simulated
from benchmarks.report import Row, at_most

CLIENTS: Final = 4_000
"""Many, since whoever straggles is busy for several iterations."""
WINDOW_S: Final = 300.0
SHARE_AIM: Final = 0.95
STARTS: Final = 100
MISSED: Final = 0.3
EVERYONE: Final = "ratio 1"
HABITS: Final = {
    "dropout": MISSED / 2,
    "stragglers": MISSED / 2 / (1.0 - MISSED / 2),  # of those who do not drop out
    "straggler_factor": 100_000.0,
    "compute_spread": 0.0,
    "network_spread": 0.0,
    "check_in_s": 200.0,
}


@dataclass(frozen=True, slots=True)
class Way:
    """``starts`` that are let in, ``uploads`` that close an iteration, and the settings that say so."""

    name: str
    starts: int
    uploads: int
    settings: Mapping[str, Any]

    @property
    def chance(self) -> float:
        """That enough of the starts are neither dropouts nor stragglers."""
        return math.fsum(
            math.comb(self.starts, count) * (1.0 - MISSED) ** count * MISSED ** (self.starts - count)
            for count in range(self.uploads, self.starts + 1)
        )


WAYS: Final = (
    Way("ratio .6", STARTS, 60, {"update_model_ratio": "0.6"}),
    Way("126 starts for 80 uploads", 126, 80, {"mode": "over_selection", "over_selection": "1.575"}),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Iterations of each way."""

    iterations: int = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """The share of ``valid`` ones among all iterations; the longest of them in seconds."""

    valid: float
    longest_s: float


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    console.print("federated: valid iterations with a third unreliable")
    waiting = _run({"update_model_ratio": 1}, max(sizes.iterations // 10, 1))
    for way in WAYS:
        found = _run(way.settings, sizes.iterations)
        yield Row(
            f"valid iterations, n = {STARTS}, {way.name}",
            "of all",
            found.valid,
            SHARE_AIM,
            found.valid >= SHARE_AIM,
            peer=waiting.valid,
            peer_name=EVERYONE,
            ratio=found.valid / waiting.valid if waiting.valid else None,
            note=f"{sizes.iterations} iterations, {MISSED:.0%} drop out or straggle; {way.chance:.3f} by chance",
        )
        # One window to start, one to upload: the bound that the settings promise.
        yield Row(
            f"longest iteration, {way.name}",
            "s",
            found.longest_s,
            2 * WINDOW_S,
            at_most(2 * WINDOW_S, found.longest_s),
            note=f"virtual; both windows are {WINDOW_S:g} s",
        )


def _run(settings: Mapping[str, Any], iterations: int) -> Ended:
    tables = {
        "rounds": {
            "start_fl_job_threshold": STARTS,
            "start_fl_job_time_window_s": WINDOW_S,
            "update_model_time_window_s": WINDOW_S,
            "fl_iteration_num": iterations,
            **settings,
        },
        "model": {"name": "softmax"},
        "training": {"steps": 1, "batch_size": 1},
        "simulation": {"checkpoint_every": 0, "evaluate_every": 0, "habits": HABITS},
    }
    with simulated(tables, given_rows(np.full(CLIENTS, 10)), evaluated=False) as built:
        rows = list(built.simulation.run())
    return Ended(sum(row.valid for row in rows) / len(rows), max(row.closed_s - row.opened_s for row in rows))
