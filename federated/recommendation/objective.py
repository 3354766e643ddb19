"""What a device minimises: a private vector of its own and, through it, its wish for the shared item table.

The table [I, d] is all that travels. A device solves for its private vector anew in every round, from the table and
what it knows (Singhal et al. 2021, "Federated Reconstruction"): the vector is neither sent nor stored, and a new
device is served like an old one.

What an upload tells. Both objectives move every row of the table, rated or not, so the set of non-zero rows tells
nothing, and updates have one shape, as secure aggregation needs it. But **dense is not hidden**: a device's gradient is
(residuals) × (private vector), of rank one beside the regulariser, and the residuals of what was rated stand out. Who
reads a single upload reads most of the ratings (a test shows it). Sampling which unrated items take part would blur
this and not hide it. So a single upload must be seen by nobody but its device: that is what secure aggregation is for;
without it the server is trusted with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federated.layout import Layout, weight_layout
from federated.weights import Array

TABLE = "items"
Wide = npt.NDArray[np.float64]


class Objective(Protocol):
    """A loss over item vectors. Shapes: I items of width d, B devices; ``liked`` [B, I] is 1 or 0."""

    @property
    def dim(self) -> int:
        """d."""

    def private_vectors(self, table: Array, liked: Array) -> Array:
        """The devices' own vectors [B, d] that fit the table best."""

    def scores(self, table: Array, private: Array) -> Array:
        """[B, I], larger for what should be shown first."""

    def gradients(self, table: Array, private: Array, liked: Array) -> tuple[Wide, Array]:
        """Each device's loss per item that it has [B], and its gradient at the table [B, I, d]."""


def table_layout(items: int, dim: int) -> Layout:
    """How the item table lies in the vector that travels."""
    return weight_layout([(TABLE, (items, dim))])


def initial_table(items: int, dim: int, generator: np.random.Generator, scale: float = 0.1) -> Array:
    """Normal values [I, d]: with zeros no private vector could be found."""
    return generator.normal(0.0, scale, (items, dim)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class SquaredError:
    """Implicit feedback by weighted squares, as iALS has it (Hu et al. 2008, in the form of Rendle et al. 2022):

        Σ over its items (1 − p·v)² + a Σ over all items (p·v)² + λ (n + a I) |p|² + λ Σ (y + a) |v|²

    halved; n items of I are the device's (y = 1). Solved for p exactly; summed over all devices it is the loss that
    alternating least squares minimises on pooled data. Federated by gradients: Ammad-ud-din et al. 2019.
    """

    dim: int = 32
    unobserved: float = 0.3
    regularisation: float = 0.01

    def __post_init__(self) -> None:
        if self.dim < 1 or not (0.0 < self.unobserved < np.inf and 0.0 < self.regularisation < np.inf):
            raise ValueError(f"dim must be at least 1, unobserved and regularisation positive: {self}")

    def private_vectors(self, table: Array, liked: Array) -> Array:
        """The minimum [B, d], in closed form."""
        return ridge(table, liked, self.unobserved, self.regularisation)

    def scores(self, table: Array, private: Array) -> Array:
        """p · v [B, I]."""
        return private @ table.T

    def gradients(self, table: Array, private: Array, liked: Array) -> tuple[Wide, Array]:
        """Half of the loss above per item of the device [B], and its gradient [B, I, d] with p held fast: at the
        minimum over p that is the gradient of the whole (envelope theorem)."""
        scores = self.scores(table, private)
        missed = liked * (scores - 1.0)
        residuals = self.unobserved * scores + missed
        held = self.regularisation * (liked + self.unobserved)
        gradients = residuals[:, :, None] * private[:, None, :]
        gradients += held[:, :, None] * table
        counts = np.maximum(liked.sum(axis=1, dtype=np.float64), 1.0)
        fit = np.square(missed, dtype=np.float64) + self.unobserved * np.square(scores, dtype=np.float64)
        return 0.5 * fit.sum(axis=1) / counts, gradients


def ridge(fixed: Array, liked: Array, unobserved: float, regularisation: float) -> Array:
    """Rows [B, d] that minimise ``SquaredError`` against the ``fixed`` ones [I, d], of which each likes some [B, I]."""
    count, dim = fixed.shape
    squares = (fixed[:, :, None] * fixed[:, None, :]).reshape(count, dim * dim)
    normal = (liked @ squares).reshape(len(liked), dim, dim) + unobserved * (fixed.T @ fixed)
    held = regularisation * (liked.sum(axis=1) + np.float32(unobserved * count))
    normal[:, np.arange(dim), np.arange(dim)] += held[:, None]
    return np.linalg.solve(normal, (liked @ fixed)[:, :, None])[:, :, 0].astype(np.float32)


@dataclass(frozen=True, slots=True)
class Softmax:
    """The loss of a two-tower model: −mean over its items of log softmax(p · v / τ) over ALL items, + λ/2 |p|².

    The last coordinate of p is 1, so an item's last one is its bias. Public item vectors fit into a device, so nothing
    is sampled and every row has a gradient. p is found by ``steps`` of gradient descent from zero.
    """

    dim: int = 32
    temperature: float = 0.3
    regularisation: float = 0.01
    steps: int = 30
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.dim < 2 or self.steps < 1:
            raise ValueError(f"dim must be at least 2 and steps at least 1: {self}")
        if not (0.0 < self.temperature < np.inf and 0.0 < self.rate < np.inf and self.regularisation >= 0.0):
            raise ValueError(f"temperature and rate must be positive, regularisation not negative: {self}")

    def private_vectors(self, table: Array, liked: Array) -> Array:
        """Vectors [B, d] after the steps. A step is no longer than the loss's curvature allows (the largest squared
        item vector over τ²), so it cannot diverge, whatever the table."""
        shares = liked / np.maximum(liked.sum(axis=1, keepdims=True), 1.0)
        curvature = float(np.square(table, dtype=np.float64).sum(axis=1).max()) / self.temperature**2
        rate = np.float32(min(self.rate, 1.0 / (curvature + self.regularisation + 1e-12)))
        private = np.zeros((len(liked), self.dim), np.float32)
        private[:, -1] = 1.0
        for _ in range(self.steps):
            residuals = shares - self._shares(table, private)
            change = residuals @ table / np.float32(self.temperature)
            change -= np.float32(self.regularisation) * private
            private[:, :-1] += rate * change[:, :-1]
        return private

    def scores(self, table: Array, private: Array) -> Array:
        """p · v / τ [B, I]."""
        return private @ table.T / np.float32(self.temperature)

    def _shares(self, table: Array, private: Array) -> Array:
        scores = self.scores(table, private)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        return scores

    def gradients(self, table: Array, private: Array, liked: Array) -> tuple[Wide, Array]:
        """The mean negative log likelihood of a device's items [B], and its gradient [B, I, d] with p held fast."""
        counts = np.maximum(liked.sum(axis=1, keepdims=True), 1.0)
        predicted = self._shares(table, private)
        logs = np.log(np.maximum(predicted, np.finfo(np.float32).tiny), dtype=np.float64)
        losses = -(liked * logs).sum(axis=1) / counts[:, 0]
        residuals = (predicted - liked / counts) / np.float32(self.temperature)
        return losses, residuals[:, :, None] * private[:, None, :]
