"""Several models' scores as one (stacked generalisation, Wolpert 1992): a logistic regression on their scores of rows
that none of them was trained on, with weights of at least 0 that are drawn towards each other.

Where rows are few the weights are nearly alike, as in a mean of all models; where they are many, what the rows say
counts. Against the best of the models alone it costs little at the worst: that model's weight can grow as needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

ALIKE: Final = 10.0
"""Weight of Σ (w − mean w)², beside the loss of all rows together: as ten rows or so that want the weights alike."""
_STEPS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Stack:
    """``centre``, ``scale``, ``weights``: [M], of M models' scores."""

    centre: Values
    scale: Values
    weights: Values

    @classmethod
    def of(cls, scores: Values, labels: Values) -> Stack:
        """From ``scores`` [n, M] of rows that no model has seen, and their ``labels``, −1 or 1 [n].

        Raises ValueError where there are none, or labels of one class.
        """
        if len(np.unique(labels)) != 2:
            raise ValueError("labels of one class tell nothing of scores")
        centre, spread = scores.mean(axis=0), scores.std(axis=0)
        # A model that gives everybody the same score has no say.
        scale = np.where(spread > 1e-12, spread, np.inf)
        inputs = np.hstack([(scores - centre) / scale, np.ones((len(scores), 1))])
        found = _minimum(inputs, labels)
        return cls(centre, scale, found[:-1])

    def apply(self, scores: Values) -> Values:
        """One score for each of [N, M], without the intercept: [N]."""
        return np.asarray((scores - self.centre) / self.scale @ self.weights)


def _minimum(inputs: Values, labels: Values) -> Values:
    """Weights [M + 1], the intercept's last, by accelerated projected descent (Beck and Teboulle 2009)."""
    models = inputs.shape[1] - 1
    # The loss's second derivative is at most a quarter, and that of the pull 2.
    rate = 1 / (0.25 * np.linalg.eigvalsh(inputs.T @ inputs)[-1] + 2 * ALIKE)
    found = np.append(np.full(models, 1 / models), 0.0)
    ahead, before = found, 1.0
    for _ in range(_STEPS):
        slopes = -0.5 * labels * (1 - np.tanh(labels * (inputs @ ahead) / 2))
        gradient = inputs.T @ slopes
        gradient[:-1] += 2 * ALIKE * (ahead[:-1] - ahead[:-1].mean())
        moved = ahead - rate * gradient
        moved[:-1] = np.maximum(moved[:-1], 0.0)
        weight = (1 + np.sqrt(1 + 4 * before**2)) / 2
        ahead, before, found = moved + (before - 1) / weight * (moved - found), weight, moved
    return found
