"""Clients a second: a cohort's learning beside a plain torch loop, whole rounds beside Flower's simulator.

All do the same: every client takes the same batches from the same start, and the weighted mean of what they learned
makes the next weights. Rounds include admission, virtual time and uploads at ours, and choosing clients, messages and
the mean at Flower; start-up counts for neither.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from benchmarks import federated_flower
from benchmarks.federated_loop import LoopedClient, Work, loop_round
from benchmarks.federated_work import everyone, given_rows, simulated
from benchmarks.report import Row
from benchmarks.turns import Block, faced, in_turn
from federated.data import Federation
from federated.device import LocalTraining
from federated.simulator.build import Built, first_weights
from federated.simulator.world import Counted

LOOP: Final = "plain torch loop"
ENGINES: Final = ("batched", "torch", "numpy")
LOOP_AIM: Final = 8.0
FLOWER_AIM: Final = 50.0
POPULATION: Final = 4
"""Times the cohort, where whole rounds are timed."""
_TRIED, _CLEARLY = 4, 1.2
_ENDLESS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """``counts`` [C] rows of the clients, the hidden ``widths`` and their ``training``."""

    name: str
    counts: npt.NDArray[np.int64]
    widths: tuple[int, ...]
    training: LocalTraining
    aim: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """``cohort`` of the first case and, ``others`` of the further ones (0: left out); turns that count."""

    cohort: int = 500
    others: int = 200
    rounds: int = 5


def cases(sizes: Sizes) -> Iterator[Case]:
    """What is timed."""
    ten = LocalTraining(steps=10, batch_size=20)
    yield Case("64-64-10, 10 steps of 20", np.full(sizes.cohort, 200), (64,), ten, LOOP_AIM)
    if sizes.others:
        equal = np.full(sizes.others, 200)
        yield Case("64-256-128-10, 10 steps of 20", equal, (256, 128), ten)
        yield Case("64-512-256-10, 10 steps of 20", equal[: sizes.others // 4], (512, 256), ten)
        uneven = np.random.default_rng(5).lognormal(np.log(100.0), 1.0, sizes.others)
        epoch = LocalTraining(epochs=1, batch_size=20)
        counts = np.clip(uneven, 5, 2_000).astype(np.int64)
        yield Case(f"64-64-10, one epoch of {counts.min()} to {counts.max()} rows", counts, (64,), epoch)


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    for number, case in enumerate(cases(sizes)):
        console.print(f"federated: clients a second, {case.name}")
        federation = given_rows(case.counts)
        yield from _learning(case, federation, sizes.rounds if number == 0 else min(sizes.rounds, 3))
        if number == 0:
            yield _rounds(case, federation, min(sizes.rounds, 3))


def _learning(case: Case, federation: Federation, rounds: int) -> Iterator[Row]:
    """The engines' rows, each beside the loop."""
    with ExitStack() as stack:
        blocks: list[Block] = [
            _learned(stack.enter_context(simulated(_job(case, engine), federation, evaluated=False)))
            for engine in ENGINES
        ]
        *ours, loop = in_turn([*blocks, _looped(case, federation)], rounds)
    cohort = len(case.counts)
    for engine, figures in zip(ENGINES, ours, strict=True):
        aim = case.aim if engine == ENGINES[0] else None
        note = "learning alone"
        work = f"{case.name}, cohort {cohort}, engine {engine}"
        yield faced(work, "clients/s", figures, loop, LOOP, aim=aim, note=note)


def _rounds(case: Case, federation: Federation, rounds: int) -> Row:
    work = f"{case.name}, cohort {len(case.counts)}, whole rounds"
    with ExitStack() as stack:
        # Clients come when they like: a cohort out of more, as it is with devices. Flower has its cohort at hand.
        more = given_rows(np.tile(case.counts, POPULATION))
        built = stack.enter_context(simulated(_job(case, ENGINES[0]), more, evaluated=False))
        iterations = built.simulation.run()
        cohort = len(case.counts)

        def ours() -> float:
            began = time.perf_counter()
            next(iterations)
            return cohort / (time.perf_counter() - began)

        if not federated_flower.available():
            (figures,) = in_turn([ours], rounds)
            note = f"install it: {federated_flower.INSTALL}"
            return faced(work, "clients/s", figures, None, federated_flower.NAME, aim=FLOWER_AIM, note=note)
        start, cores = first_weights(built.simulation), os.cpu_count() or 1
        round_s, _ = stack.enter_context(
            federated_flower.flower(federation, _loop_work(case, federation), start, cores)
        )
        figures, peer = in_turn([ours, lambda: cohort / round_s()], rounds)
    return faced(work, "clients/s", figures, peer, federated_flower.NAME, aim=FLOWER_AIM)


def _job(case: Case, engine: str) -> dict[str, dict[str, Any]]:
    training = case.training
    # The reference is one client after the other, whatever the number of cores.
    threads = 1 if engine == "numpy" else os.cpu_count() or 1
    length = {"steps": training.steps} if training.steps else {"epochs": training.epochs}
    return {
        "rounds": everyone(len(case.counts), _ENDLESS),
        "model": {"name": "perceptron", "hidden": list(case.widths)},
        "training": {**length, "batch_size": training.batch_size, "rate": training.rate},
        "simulation": {"engine": engine, "threads": threads, "checkpoint_every": 0, "evaluate_every": 0},
    }


def _learned(built: Built) -> Block:
    """Trains, sums and applies a cohort of everyone; clients a second."""
    learning, version = built.simulation.learning, 0
    clients = len(built.simulation.world.held)

    def block() -> float:
        nonlocal version
        uploads = [Counted(client, version + 1, 0) for client in range(clients)]
        began = time.perf_counter()
        learning.learn(uploads, version, None)
        version += 1
        return clients / (time.perf_counter() - began)

    return block


def _looped(case: Case, federation: Federation) -> Block:
    """The plain loop, on one thread of torch, or on all where that was clearly faster when it was tried: torch's
    threads stand in each other's way on small networks, and on busy machines."""
    work = _loop_work(case, federation)
    client = LoopedClient(work)
    data = [(rows.inputs, rows.labels) for rows in map(federation.client, range(federation.clients))]
    size = sum((rows + 1) * columns for rows, columns in zip(work.sizes, work.sizes[1:], strict=False))
    weights = np.random.default_rng(0).normal(0, 0.1, size).astype(np.float32)
    every = os.cpu_count() or 1
    best = 0

    def timed(threads: int, clients: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        loop_round(client, weights, data[:clients], 1)
        took = time.perf_counter() - began
        torch.set_num_threads(1)
        return clients / took

    def block() -> float:
        nonlocal best
        if not best:
            alone, together = (timed(threads, min(_TRIED, len(data))) for threads in (1, every))
            best = every if together > _CLEARLY * alone else 1
        return timed(best, len(data))

    return block


def _loop_work(case: Case, federation: Federation) -> Work:
    return Work((federation.features, *case.widths, federation.classes), replace(case.training), 0)
