"""Model weights as named float32 arrays, and the few operations that federated averaging needs of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Weights = Mapping[str, Array]


class WeightsMismatch(ValueError):
    """Two sets of weights differ in their names or shapes."""


def require_same_shape(left: Weights, right: Weights) -> None:
    """Raise WeightsMismatch, naming the first difference, unless both have the same names and shapes."""
    if left.keys() != right.keys():
        raise WeightsMismatch(f"names differ: {sorted(left.keys() ^ right.keys())}")
    for name, array in left.items():
        if array.shape != right[name].shape:
            raise WeightsMismatch(f"{name}: shape {array.shape} against {right[name].shape}")


def subtract(left: Weights, right: Weights) -> dict[str, Array]:
    """``left − right``, array by array. Raises WeightsMismatch."""
    require_same_shape(left, right)
    return {name: array - right[name] for name, array in left.items()}


def add_scaled(base: Weights, change: Weights, factor: float) -> dict[str, Array]:
    """``base + factor · change``, array by array. Raises WeightsMismatch."""
    require_same_shape(base, change)
    return {name: array + np.float32(factor) * change[name] for name, array in base.items()}
