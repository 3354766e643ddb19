"""Clipping to a norm, whole or field by field, so that what one client sends is bounded.

The bound holds for the float32 numbers that leave, not only in exact arithmetic: rows are scaled to 2**-22 below it,
more than rounding adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from federated.layout import Layout
from federated.weights import Array

Norm = Literal["l1", "l2"]
Flags = npt.NDArray[np.bool_]

_INSIDE: Final = 1.0 - 2.0**-22
_BLOCK: Final = 2**18  # values in work at once: their float64 copies stay in the cache


class NotFinite(ValueError):
    """A vector holds NaN or infinity: it has no norm, and clipping would make nonsense of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Coordinates ``places`` whose norm is at most ``bound``."""

    places: slice
    bound: float


def parts_of(layout: Layout, bound: float, norm: Norm, per_layer: bool) -> tuple[Part, ...]:
    """What is clipped to what: the whole vector to ``bound``, or each of the M fields of weights to its share of it,
    bound / √M in L2 and bound / M in L1 (McMahan et al. 2018), so that the norm of all of them stays within it."""
    if not per_layer:
        return (Part(slice(0, layout.size), bound),)
    weights = [field.name for field in layout.fields if field.kind == "weight"]
    share = bound / (math.sqrt(len(weights)) if norm == "l2" else len(weights)) if weights else bound
    return tuple(Part(layout.slices[name], share) for name in weights)


def clip_rows(rows: Array, parts: tuple[Part, ...], norm: Norm) -> tuple[Array, Flags]:
    """``rows`` [B, D] with every part scaled to at most its bound, and whether a part of a row was beyond it [B]. Each
    row comes out as if it were alone, bit for bit; one of zeros stays. Raises NotFinite."""
    clipped, beyond = rows.copy(), np.zeros(len(rows), np.bool_)
    for part in parts:
        width = max(1, part.places.stop - part.places.start)
        for first in range(0, len(rows), max(1, _BLOCK // width)):
            block = slice(first, first + max(1, _BLOCK // width))
            here = clipped[block, part.places]
            norms = _norms(here, norm)
            if not np.isfinite(norms).all():
                raise NotFinite("an update holds NaN or infinity: training diverged")
            longer = np.flatnonzero(norms > part.bound * _INSIDE)
            factors = (part.bound * _INSIDE) / norms[longer]
            here[longer] = here[longer] * factors[:, None]
            beyond[block][longer] = True
    return clipped, beyond


def _norms(rows: Array, norm: Norm) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64, order="C")
    if norm == "l1":
        return np.asarray(np.add.reduce(np.abs(wide), axis=1))
    return np.asarray(np.sqrt(np.add.reduce(np.square(wide), axis=1)))
