"""What a model is to a device: a vector, a loss with its gradient, and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from federated.layout import Layout
from federated.weights import Array

Inputs = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counts over examples, to be added up: right answers, summed cross-entropy, examples seen."""

    right: int
    loss: float
    seen: int


class Model(Protocol):
    """A network as pure functions of a float32 vector [D]."""

    @property
    def name(self) -> str:
        """Under which ``make_model`` makes it."""

    def layout(self) -> Layout:
        """How its arrays lie in the vector; the same object at every call."""

    def initial(self, generator: np.random.Generator) -> Array:
        """The first weights [D], drawn from ``generator``."""

    def loss_and_gradient(
        self, vector: Array, inputs: Inputs, labels: Labels, out: Array | None = None
    ) -> tuple[float, Array]:
        """Mean loss over the N examples and its gradient [D], written to ``out`` when given."""

    def logits(self, vector: Array, inputs: Inputs) -> Array:
        """Scores [N, C]."""

    def metrics(self, vector: Array, inputs: Inputs, labels: Labels) -> Metrics:
        """Right answers, summed loss and number of examples."""


def classification_metrics(scores: Array, labels: Labels) -> Metrics:
    """Of scores [N, C] and labels [N]; among equal scores the first class wins."""
    if len(labels) == 0:
        return Metrics(0, 0.0, 0)
    right = int((scores.argmax(axis=1) == labels).sum())
    wide = scores.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(labels)), labels]
    return Metrics(right, float(losses.sum()), len(labels))


def softmax_loss(scores: Array, labels: Labels) -> tuple[float, Array]:
    """Mean cross-entropy of ``scores`` [N, C] against ``labels`` [N], and its gradient at the scores, which takes the
    place of ``scores``. Raises IndexError for a label that is no class."""
    # A device spends its time here: ufuncs reduce without the methods' detour through Python.
    count = len(labels)
    rows = np.arange(count)
    scores -= np.maximum.reduce(scores, axis=1, keepdims=True)
    chosen = np.add.reduce(scores[rows, labels])
    np.exp(scores, out=scores)
    totals = np.add.reduce(scores, axis=1, keepdims=True)
    loss = float(np.add.reduce(np.log(totals), axis=None) - chosen) / count
    share = scores.dtype.type(1.0 / count)
    scores *= share / totals
    scores[rows, labels] -= share
    return loss, scores


def he_normal(generator: np.random.Generator, rows: int, columns: int) -> Array:
    """Normal weights [rows, columns] of variance 2 / rows (He et al. 2015)."""
    return generator.normal(0.0, np.sqrt(2.0 / rows), (rows, columns)).astype(np.float32)
