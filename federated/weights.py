"""Model weights as named arrays, before they become one vector (see ``federated.layout``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Weights = Mapping[str, Array]


class WeightsMismatch(ValueError):
    """Two sets of weights differ in their names, shapes or types."""


def require_same_shape(left: Mapping[str, npt.NDArray[Any]], right: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise WeightsMismatch, naming the first difference, unless both have the same names and shapes."""
    if left.keys() != right.keys():
        raise WeightsMismatch(f"names differ: {sorted(left.keys() ^ right.keys())}")
    for name, array in left.items():
        if array.shape != right[name].shape:
            raise WeightsMismatch(f"{name}: shape {array.shape} against {right[name].shape}")
