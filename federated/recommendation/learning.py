"""Federated learning of an item table, whole cohorts at once; and the same model on pooled data to measure it by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from federated.device import INITIAL, device_generator
from federated.recommendation.device import Ranking, cohort_updates, rank_held_out
from federated.recommendation.liked import LeaveOneOut, Liked, Numbers
from federated.recommendation.objective import Objective, SquaredError, initial_table, ridge, table_layout
from federated.strategies import ServerState, Strategy, make_strategy, sum_for
from federated.sums import Sum, add_all
from federated.weights import Array

COHORTS = 17
"""The stream that cohorts are drawn from (``device_generator``)."""
_CHUNK_VALUES = 2**23
"""Gradients are worked on by as many devices as stay below this many values: 32 MB."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """``number`` rounds of ``cohort`` devices each (all, where there are fewer), drawn by ``seed``. With ``decay`` the
    server's rate falls linearly to zero, so that the last cohorts do not shake what was learned.

    These defaults, and those of ``SquaredError`` and ``default_strategy``, are for MovieLens-100K. First tried on the
    last items, they were then held against others on each user's last but one item, and are among the best there."""

    number: int = 200
    cohort: int = 100
    seed: int = 0
    decay: bool = True

    def __post_init__(self) -> None:
        if self.number < 1 or self.cohort < 1:
            raise ValueError(f"rounds and their cohort must be at least 1: {self}")


def default_strategy(server_rate: float = 0.05) -> Strategy:
    """FedAdam in which every device counts alike, however many items it knows: the loss is a sum over devices."""
    return make_strategy("fedadam", server_rate=server_rate, max_examples=1)


def cohort_of(liked: Liked, rounds: Rounds, number: int) -> Numbers:
    """The devices of round ``number``, ascending; only such as know an item."""
    able = np.flatnonzero(liked.counts)
    generator = device_generator(rounds.seed, 0, number, COHORTS)
    return np.sort(generator.choice(able, min(rounds.cohort, len(able)), replace=False))


def sum_of(strategy: Strategy, objective: Objective, table: Array, liked: Liked, devices: Numbers) -> Sum:
    """The sum of the devices' contributions to a table [I, d], in integers, by bounded chunks.

    Raises ValueError for a strategy that needs each update, ContributionRefused for what breaks a bound.
    """
    if strategy.needs != "sum":
        raise ValueError(f"{strategy.name} needs {strategy.needs}: it cannot learn from a sum")
    layout = table_layout(*table.shape)
    total = sum_for(strategy, layout, len(devices))
    chunk = max(1, _CHUNK_VALUES // layout.size)
    for start in range(0, len(devices), chunk):
        updates = cohort_updates(objective, table, liked, devices[start : start + chunk])
        add_all(total, [strategy.contribution(layout, update) for update in updates])
    return total


def learn(
    objective: Objective, liked: Liked, rounds: Rounds, strategy: Strategy | None = None
) -> Iterator[ServerState]:
    """The server's state after each round; the table is ``table_of(state)``. Equal arguments give equal bits on one
    machine and thread setting. Raises ValueError where no device knows an item."""
    if not liked.counts.any():
        raise ValueError("no device knows any item")
    strategy = default_strategy() if strategy is None else strategy
    layout = table_layout(liked.catalogue, objective.dim)
    generator = device_generator(rounds.seed, 0, 0, INITIAL)
    first = initial_table(liked.catalogue, objective.dim, generator)
    state = strategy.init(layout, first.reshape(-1))
    for number in range(rounds.number):
        devices = cohort_of(liked, rounds, number)
        total = sum_of(strategy, objective, table_of(state), liked, devices)
        left = 1.0 - number / rounds.number if rounds.decay else 1.0
        state = replace(strategy, server_rate=strategy.server_rate * left).apply(state, total)
        yield state


def table_of(state: ServerState) -> Array:
    """The item table [I, d] of a server's state."""
    (field,) = state.layout.fields
    return state.weights.reshape(field.shape)


def pooled(objective: SquaredError, liked: Liked, sweeps: int, seed: int) -> Array:
    """The table [I, d] that alternating least squares finds where all ratings are in one place: the same loss, solved
    exactly in turn for all private vectors and for all items."""
    generator = device_generator(seed, 0, 0, INITIAL)
    table = initial_table(liked.catalogue, objective.dim, generator)
    mask = liked.mask(np.arange(liked.devices))
    for _ in range(sweeps):
        private = objective.private_vectors(table, mask)
        table = ridge(private, np.ascontiguousarray(mask.T), objective.unobserved, objective.regularisation)
    return table


def evaluate(
    objective: Objective, table: Array, split: LeaveOneOut, negatives: Numbers, k: int = 10
) -> Ranking:
    """HR@k and NDCG@k of the held-out items among each device's ``negatives`` [C, K]; each device's vector is made from
    what it trains on. Raises ValueError where none holds an item out."""
    scores = []
    judged = np.flatnonzero((split.held_out >= 0) & (split.training.counts > 0))
    chunk = max(1, _CHUNK_VALUES // max(split.training.catalogue, 1))
    for start in range(0, len(judged), chunk):
        devices = judged[start : start + chunk]
        private = objective.private_vectors(table, split.training.mask(devices))
        candidates = np.column_stack([split.held_out[devices], negatives[devices]])
        scores.append(np.take_along_axis(objective.scores(table, private), candidates, axis=1))
    return rank_held_out(np.concatenate(scores) if scores else np.zeros((0, 1)), k)


def popular(split: LeaveOneOut, negatives: Numbers, k: int = 10) -> Ranking:
    """What the number of devices that know an item would find: the floor."""
    counts = np.bincount(split.training.items, minlength=split.training.catalogue)
    judged = np.flatnonzero(split.held_out >= 0)
    candidates = np.column_stack([split.held_out[judged], negatives[judged]])
    return rank_held_out(counts[candidates].astype(np.float64), k)
