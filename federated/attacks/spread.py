"""What an adversary does not know, as a normal distribution: noise, and the updates of clients that it cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.weights import Array

Floats = npt.NDArray[np.float64]

_SMALLEST: Final = 1e-9
"""Of the largest variance: directions with less are rounding."""
_EXACT: Final = 1e-12
"""The variance of what is seen without noise: float32's rounding."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Covariance U·diag(``variances``)·Uᵀ + ``floor``·I with orthonormal columns ``basis`` U [D, r]."""

    basis: Floats
    variances: Floats
    floor: float

    def whiten(self, rows: Array | Floats) -> Floats:
        """``rows`` [B, D] so that Euclidean distances between them are Mahalanobis' distances."""
        wide = np.asarray(rows, np.float64)
        plain = 1.0 / np.sqrt(self.floor)
        if not len(self.variances):
            return np.asarray(wide * plain)
        less = plain - 1.0 / np.sqrt(self.variances + self.floor)
        return np.asarray(wide * plain - ((wide @ self.basis) * less) @ self.basis.T)


def spread_of(samples: Sequence[tuple[Array, float]], noise_variance: float, size: int) -> Spread:
    """The covariance of Σ times · (a draw like ``rows``) + noise, over ``samples`` (rows [Q, D], times) and D =
    ``size``.

    Half of the rows say in which directions draws spread, the other half how much is left over elsewhere, which the
    floor gets: few rows cannot tell all directions of a long vector.
    """
    known = [(np.asarray(rows, np.float64), times) for rows, times in samples if times > 0.0]
    if not known:
        return Spread(np.zeros((size, 0)), np.zeros(0), max(noise_variance, _EXACT))
    first = [_scaled(rows[: len(rows) // 2], times) for rows, times in known]
    rest = [_scaled(rows[len(rows) // 2 :], times) for rows, times in known]
    stacked = np.concatenate(first)
    variances, vectors = np.linalg.eigh(stacked @ stacked.T)
    kept = variances > _SMALLEST * variances[-1]
    basis = stacked.T @ (vectors[:, kept] / np.sqrt(variances[kept]))
    left = sum(float(np.square(rows - (rows @ basis) @ basis.T).sum()) for rows in rest) / size
    floor = noise_variance + max(left, _SMALLEST * float(variances[-1]))
    return Spread(basis, variances[kept], floor)


def squared_distances(rows: Floats, others: Floats) -> Floats:
    """‖a − b‖² for every a of ``rows`` [R, D] and b of ``others`` [N, D]: [R, N]."""
    ends = np.square(rows).sum(axis=1)[:, None] + np.square(others).sum(axis=1)
    return np.asarray(np.maximum(ends - 2.0 * (rows @ others.T), 0.0))


def _scaled(rows: Floats, times: float) -> Floats:
    """Rows whose sum of outer products is ``times`` the covariance of a draw like ``rows``."""
    return np.asarray((rows - rows.mean(axis=0)) * np.sqrt(times / len(rows)))
