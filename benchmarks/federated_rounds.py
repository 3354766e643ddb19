"""Rounds to an accuracy: FedAvg beside FedSGD, on digits dealt evenly and by label; and SCAFFOLD above FedAvg.

Each strategy has the best of a few rates; a run ends at the target. Accuracy is that of the test rows, which no client
has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console

from benchmarks.federated_work import Tables, digits, everyone, simulated
from benchmarks.report import Row
from benchmarks.turns import Figures, faced

CLIENTS: Final = 20
TARGETS: Final = {"iid": 0.94, "label:2": 0.90}
SCAFFOLD_CLIENTS, SCAFFOLD_COHORT, SCAFFOLD_ROUNDS = 20, 4, 50
LAST: Final = 10
"""Rounds at the end whose mean accuracy is a run's: from one to the next it jumps, where clients are unequal."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Seeds, the rates that are tried, and rounds after which a run is given up."""

    seeds: tuple[int, ...] = (0, 1, 2)
    averaging: tuple[float, ...] = (0.1, 0.3, 0.6)
    descending: tuple[float, ...] = (0.3, 1.0, 2.0)
    most: int = 1_500
    scaffold: tuple[int, ...] = (0, 1, 2, 3, 4)


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    for partition, target in TARGETS.items():
        console.print(f"federated: rounds to {target:.0%}, {partition}")
        ours, rate = _best("fedavg", partition, target, sizes.averaging, sizes)
        peer, peers_rate = _best("fedsgd", partition, target, sizes.descending, sizes)
        work = f"FedAvg, {CLIENTS} clients, digits {partition}: rounds to {target:.0%}"
        note = f"5 epochs of batches of 10 at rate {rate:g}, FedSGD's rate {peers_rate:g}"
        if max(peer.values) >= sizes.most:
            note += f"; a run of FedSGD was given up after {sizes.most} rounds"
        yield faced(work, "rounds", ours, peer, "FedSGD", aim=1.0, less_is_better=True, note=note)
    console.print("federated: SCAFFOLD above FedAvg")
    yield _scaffold(sizes)


def _best(
    strategy: str, partition: str, target: float, rates: tuple[float, ...], sizes: Sizes
) -> tuple[Figures, float]:
    """Rounds of every seed at the rate whose median is least."""
    tried = [
        (
            Figures(
                tuple(_rounds_to(strategy, partition, target, rate, seed, sizes.most) for seed in sizes.seeds)
            ),
            rate,
        )
        for rate in rates
    ]
    return min(tried, key=lambda one: one[0].median)


def _rounds_to(strategy: str, partition: str, target: float, rate: float, seed: int, most: int) -> float:
    """Rounds until the model has ``target``; ``most`` when it never had."""
    training = {"rate": rate} if strategy == "fedsgd" else {"epochs": 5, "batch_size": 10, "rate": rate}
    federation = digits(CLIENTS, seed, partition)
    # A tenth of the clients takes part in a round, as in McMahan et al. 2017.
    tables = _job(strategy, {}, training, max(1, CLIENTS // 10), most, seed)
    with simulated(tables, federation, evaluated=True) as built:
        for row in built.simulation.run():
            if row.metrics is not None and row.metrics["accuracy"] >= target:
                return float(row.iteration)
    return float(most)


def _scaffold(sizes: Sizes) -> Row:
    found = {
        strategy: Figures(tuple(100.0 * _final(strategy, options, seed) for seed in sizes.scaffold))
        for strategy, options in (("scaffold", {"population": SCAFFOLD_CLIENTS}), ("fedavg", {}))
    }
    gains = np.subtract(found["scaffold"].values, found["fedavg"].values)
    row = faced(
        f"SCAFFOLD, {SCAFFOLD_CLIENTS} clients at Dirichlet .1, {SCAFFOLD_COHORT} a round: accuracy after "
        f"{SCAFFOLD_ROUNDS} rounds of 50 steps",
        "% of the test rows",
        found["scaffold"],
        found["fedavg"],
        "FedAvg",
        aim=1.0,
        note=f"{gains.mean():+.1f} points in the mean, above in {int((gains > 0).sum())} of {len(gains)} seeds; "
        f"the mean of the last {LAST} rounds",
    )
    return row


def _final(strategy: str, options: dict[str, Any], seed: int) -> float:
    federation = digits(SCAFFOLD_CLIENTS, seed, "dirichlet:0.1")
    training = {"steps": 50, "batch_size": 20, "rate": 0.1}
    tables = _job(strategy, options, training, SCAFFOLD_COHORT, SCAFFOLD_ROUNDS, seed)
    with simulated(tables, federation, evaluated=True) as built:
        rows = list(built.simulation.run())
    return float(np.mean([row.metrics["accuracy"] for row in rows[-LAST:] if row.metrics is not None]))


def _job(
    strategy: str, options: dict[str, Any], training: dict[str, Any], cohort: int, rounds: int, seed: int
) -> Tables:
    return {
        "job": {"seed": seed},
        "rounds": everyone(cohort, rounds),
        "model": {"name": "perceptron", "hidden": [64]},
        "strategy": {"name": strategy, **options},
        "training": training,
        "simulation": {"checkpoint_every": 0},
    }
