"""``federated``: simulating clients, learning from them in few rounds and few bytes, and serving real ones.

Each part runs in a process of its own with one thread for BLAS, so that none inherits another's memory or threads.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import (
    federated_bytes,
    federated_memory,
    federated_picture,
    federated_recommendation,
    federated_rounds,
    federated_servers,
    federated_speed,
    federated_valid,
)
from benchmarks.report import Row
from services.processes import limit_threads


@dataclass(frozen=True, slots=True)
class Measures:
    """How much of everything is measured."""

    speed: federated_speed.Sizes
    memory: federated_memory.Sizes
    rounds: federated_rounds.Sizes
    bytes: federated_bytes.Sizes
    valid: federated_valid.Sizes
    servers: federated_servers.Sizes
    recommendation: federated_recommendation.Sizes


WHOLE: Final = Measures(
    federated_speed.Sizes(),
    federated_memory.Sizes(),
    federated_rounds.Sizes(),
    federated_bytes.Sizes(),
    federated_valid.Sizes(),
    federated_servers.Sizes(),
    federated_recommendation.Sizes(),
)
QUICK: Final = Measures(
    federated_speed.Sizes(cohort=100, others=0, rounds=2),
    federated_memory.Sizes((10_000,), rounds=1),
    federated_rounds.Sizes(seeds=(0,), averaging=(0.3,), descending=(1.0,), most=100, scaffold=(0,)),
    federated_bytes.Sizes(federated_bytes.CASES[:1], seeds=(0,)),
    federated_valid.Sizes(iterations=100),
    federated_servers.Sizes(((federated_servers.SPARSE, 50),)),
    federated_recommendation.Sizes(seeds=(0,), rounds=20, sweeps=3, aim=None),
)


def run(quick: bool, console: Console, plot: Path | None = None) -> list[Row]:
    """All rows of a plan, the quick one or the whole; the picture of the learning goes to ``plot``."""
    # Children inherit it; this process has loaded its libraries.
    limit_threads(os.environ)
    rows = _measure(QUICK if quick else WHOLE)
    if plot is not None:
        federated_picture.draw(alone(federated_picture.learn, federated_picture.sizes(quick)), plot)
        console.print(f"federated: {plot}")
    return rows


def _measure(plan: Measures) -> list[Row]:
    parts: Sequence[tuple[Callable[[Any], list[Row]], object]] = (
        (federated_speed.measure, plan.speed),
        (federated_memory.measure, plan.memory),
        (federated_rounds.measure, plan.rounds),
        (federated_bytes.measure, plan.bytes),
        (federated_valid.measure, plan.valid),
        (federated_servers.measure, plan.servers),
        (federated_recommendation.measure, plan.recommendation),
    )
    return [row for measure, sizes in parts for row in alone(measure, sizes)]


def alone(function: Callable[[Any], Any], argument: object) -> Any:
    """What ``function`` gives for ``argument`` in a process of its own; what it raises is raised here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return pool.submit(function, argument).result()
