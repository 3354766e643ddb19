"""``sync``: how changes are found, what each part of the synchronisation between regions is worth, and how it grows.

Freshness, catching up and precision are measured with regions of real processes, and finding in this one; the ablation
and the growth are simulated in virtual time by the very core, with costs that are measured here, and say in their rows
what they assume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import ablation, charges, finding, growth_of_replicas, processes, sync_picture
from benchmarks.report import Row
from benchmarks.scale import Scale

BASELINES: Final = 4


@dataclass(frozen=True, slots=True)
class Measures:
    """How much of everything is measured."""

    finding: finding.Sizes
    scale: Scale
    ablation: ablation.Sizes
    growth: growth_of_replicas.Sizes


WHOLE: Final = Measures(
    finding.Sizes((100_000, 1_000_000, 10_000_000), rounds=7),
    Scale(),
    ablation.Sizes(),
    growth_of_replicas.Sizes(),
)
QUICK: Final = Measures(
    finding.Sizes((20_000, 200_000), rounds=3),
    replace(Scale(), copies=4, each=200),
    ablation.Sizes(crowded_s=40.0, polled_s=40.0, parked_s=10.0, congested_s=50.0, rounds=3, corners=()),
    growth_of_replicas.Sizes(((10, 0), (40, 0), (40, 10)), seconds=5.0),
)


def run(quick: bool, console: Console, plot: Path | None = None) -> list[Row]:
    """All rows of a plan, the quick one or the whole; the picture of the ablation goes to ``plot``."""
    return [*processes.measure(quick, console), *_measure(QUICK if quick else WHOLE, console, plot)]


def _measure(plan: Measures, console: Console, plot: Path | None) -> Iterator[Row]:
    yield from finding.measure(plan.finding, console)
    console.print("sync: what the work of a server takes")
    constants = charges.measure()
    found = ablation.run(plan.ablation, plan.scale, console, constants)
    yield from found.rows
    yield from growth_of_replicas.measure(plan.growth, plan.scale, constants, console)
    if plot is not None:
        sync_picture.draw(found.outcomes, BASELINES, found.title, plot)
        console.print(f"sync: {plot}")
