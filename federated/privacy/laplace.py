"""Laplace noise for reports of bounded L1 norm; rounded to a grid for the reason that ``gaussian`` gives."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from federated.privacy.gaussian import grid_of, to_grid
from federated.privacy.randomness import Randomness, laplace


def scale_of(epsilon: float, sensitivity: float) -> float:
    """Δ/ε, the scale of noise that makes a value of L1 sensitivity Δ ε-private. Raises ValueError."""
    if not (0.0 < epsilon < math.inf and 0.0 < sensitivity < math.inf):
        raise ValueError(f"epsilon and sensitivity must be positive, not {epsilon} and {sensitivity}")
    return sensitivity / epsilon


def add_laplace(
    values: npt.NDArray[np.float32], scale: float, randomness: Randomness
) -> npt.NDArray[np.float32]:
    """``values`` plus Laplace noise of ``scale`` each, on the grid."""
    return to_grid(values + scale * laplace(randomness, values.size).reshape(values.shape), grid_of(scale))
