"""The same regression in the clear: the same columns, batches, polynomial and steps, by NumPy.

What encryption, masks and the key holder's noise change is bounded by ``gradient_error``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.vertical.linear.batches import Batches
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.plan import Labels, Own, Plan
from federated.vertical.linear.solver import ends
from federated.vertical.linear.surrogate import surrogate_of
from federated.vertical.tables import Table

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trained:
    """``parties``: the guest's columns and weights, then the hosts'. ``losses``: of each epoch."""

    parties: tuple[Own, ...]
    losses: tuple[float, ...]


def train_plain(guest: Table, hosts: Sequence[Table], options: LinearOptions, seed: int) -> Trained:
    """What ``coordinated`` and ``pair`` compute, without them. Tables are aligned; the guest's has labels."""
    assert guest.labels is not None
    surrogate = surrogate_of(options)
    labels = Labels.of(guest.labels, options).scaled
    batches = Batches.of(len(guest), options.batch, surrogate.parameters.slots, seed)
    parties = tuple(
        Own.of(table, options, surrogate.joint_curvature(1 + len(hosts)), None, intercept=table is guest)
        for table in (guest, *hosts)
    )
    losses: list[float] = []
    while not losses or not ends(losses, options):
        total = 0.0
        for rows in batches.rows:
            predictor = sum((own.predictor(rows) for own in parties), np.zeros(len(rows)))
            residual = surrogate.residual(predictor, labels[rows])
            total += float(surrogate.loss(predictor, labels[rows]).sum())
            for own in parties:
                own.solver.step(own.features[rows].T @ residual / len(rows))
        losses.append(total / len(labels) + sum(own.solver.penalty_loss for own in parties))
        for own in parties:
            own.solver.epoch += 1
    return Trained(parties, tuple(losses))


def gradient_error(plan: Plan) -> float:
    """Standard deviation of what an encrypted run's mean gradient is off by: the key holder's noise, the masks'
    rounding, and the bound on the encryption's own error."""
    encryption = plan.options.noise / plan.flooding
    return math.hypot(plan.options.noise, plan.options.precision, encryption)
