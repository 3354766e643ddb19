"""Memory of a simulation of many clients: the most that a process of its own has held, for each size.

Clients keep a residual between rounds (error feedback), so what is kept for a client is measured, too.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from benchmarks.federated_work import digits, everyone, simulated
from benchmarks.report import Row

COHORT: Final = 500
_MB: Final = 1_000_000
_KB: Final = 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Populations, ascending, and rounds of each."""

    populations: tuple[int, ...] = (1_000, 10_000, 100_000)
    rounds: int = 10


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process, in bytes: the most resident, and as much before there was a client."""

    most: int
    before: int
    clients_per_s: float


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    found: list[Held] = []
    for population in sizes.populations:
        console.print(f"federated: memory of {population:,} clients")
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as alone:
            found.append(alone.submit(held_by, population, sizes.rounds).result())
        one = found[-1]
        note = (
            f"of which {one.before / _MB:.0f} MB is what was loaded before there was a client; "
            f"{one.clients_per_s:,.0f} clients/s over {sizes.rounds} rounds, top_k and its residuals included"
        )
        yield Row(f"largest memory of a process with {population:,} clients, cohort {COHORT}", "MB",
                  one.most / _MB, note=note)  # fmt: skip
    if len(found) > 1:
        more = sizes.populations[-1] - sizes.populations[0]
        each = (found[-1].most - found[0].most) / more
        work = f"memory for each client more, from {sizes.populations[0]:,} to {sizes.populations[-1]:,}"
        yield Row(work, "kB", each / _KB, note="the rows of the data are numbers of common rows")


def held_by(population: int, rounds: int) -> Held:
    """What this process holds; run in one of its own."""
    before = _resident()
    federation = digits(population, 0)
    cohort = min(COHORT, population)
    settings = remembering(everyone(cohort, rounds))
    with simulated(settings, federation, evaluated=False) as built:
        began = time.perf_counter()
        trained = sum(row.trained for row in built.simulation.run())
        took_s = time.perf_counter() - began
    return Held(_resident(), before, trained / took_s)


def remembering(rounds: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A job of ``rounds`` whose clients remember what they did not send."""
    return {
        "rounds": rounds,
        "model": {"name": "perceptron", "hidden": [64]},
        "training": {"steps": 10, "batch_size": 20},
        "compression": {"upload": "top_k:0.05,quantise:2:nearest,deflate"},
        "simulation": {"checkpoint_every": 0, "evaluate_every": 0},
    }


def _resident() -> int:
    # Linux says kilobytes.
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
