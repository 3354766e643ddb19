"""What a device does in a round: train on its own data, send back the difference. NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from federated.perceptron import Labels
from federated.weights import Array, Weights, add_scaled, subtract


class LocalModel(Protocol):
    """Anything that gives a mean loss and its gradients on a batch."""

    def loss_and_gradients(
        self, weights: Weights, inputs: Array, labels: Labels
    ) -> tuple[float, dict[str, Array]]: ...


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Local SGD: passes over the data (E), batch size (B) and step size, as in McMahan et al. 2017."""

    epochs: int = 1
    batch_size: int = 32
    rate: float = 0.1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not self.rate > 0.0:
            raise ValueError(f"epochs and batch_size must be at least 1 and rate positive, not {self}")


@dataclass(frozen=True, slots=True)
class Update:
    """A device's contribution: new weights less old ones, the examples behind it, and its mean loss."""

    difference: dict[str, Array]
    examples: int
    loss: float


def local_update(
    model: LocalModel,
    weights: Weights,
    inputs: Array,
    labels: Labels,
    training: LocalTraining,
    generator: np.random.Generator,
) -> Update:
    """Train from ``weights`` on ``inputs`` ``[N, F]`` and ``labels`` ``[N]`` in an order drawn from
    ``generator``. Raises ValueError when there is no example or the lengths differ."""
    examples = len(labels)
    if examples == 0 or len(inputs) != examples:
        raise ValueError(f"{len(inputs)} inputs and {examples} labels: need as many of both, at least one")
    current: Weights = weights
    total_loss = 0.0
    for _ in range(training.epochs):
        order = generator.permutation(examples)
        for start in range(0, examples, training.batch_size):
            batch = order[start : start + training.batch_size]
            loss, gradients = model.loss_and_gradients(current, inputs[batch], labels[batch])
            current = add_scaled(current, gradients, -training.rate)
            total_loss += loss * len(batch)
    return Update(subtract(current, weights), examples, total_loss / (examples * training.epochs))
