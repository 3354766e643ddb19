"""How likely an update explains what was seen: the adversary's knowledge of a mechanism as a function.

Everything is a log-likelihood up to a constant of the observation. "Expected" are updates [D] as a client learned them;
what the mechanism makes of them before it adds its noise is ``clipped``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from federated.attacks.spread import Floats, Spread, squared_distances
from federated.weights import Array

Clip = Callable[[Array], Array]
"""Updates [B, D] as a mechanism bounds them."""

_BLOCK: Final = 2**22


class Likelihood(Protocol):
    """Scores of updates for rows that were seen."""

    def pairs(self, seen: Any, expected: Array) -> Floats:
        """[R, N]: every row of ``seen`` [R, ...] under every update of ``expected`` [N, D]."""
        ...

    def rows(self, seen: Any, expected: Array) -> Floats:
        """[R]: each row under its own update of ``expected`` [R, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Normal:
    """What is left over when the clipped update and ``offset`` [D] are taken away is normal, spread as ``spread``."""

    spread: Spread
    clipped: Clip
    offset: Floats | float = 0.0

    def pairs(self, seen: Array | Floats, expected: Array) -> Floats:
        """See ``Likelihood``."""
        left = self.spread.whiten(seen - self.offset)
        return -0.5 * squared_distances(left, self.spread.whiten(self.clipped(expected)))

    def rows(self, seen: Array | Floats, expected: Array) -> Floats:
        """See ``Likelihood``."""
        left = self.spread.whiten(seen - self.offset - self.clipped(expected))
        return np.asarray(-0.5 * np.square(left).sum(axis=1))


@dataclass(frozen=True, slots=True)
class Laplace:
    """What is left over is Laplace noise of ``scale`` in every coordinate."""

    scale: float
    clipped: Clip

    def pairs(self, seen: Array, expected: Array) -> Floats:
        """See ``Likelihood``."""
        return -absolute_distances(seen, self.clipped(expected)) / self.scale

    def rows(self, seen: Array, expected: Array) -> Floats:
        """See ``Likelihood``."""
        left = np.abs(seen - self.clipped(expected)).sum(axis=1, dtype=np.float64)
        return np.asarray(-left / self.scale)


@dataclass(frozen=True, slots=True)
class Pointing:
    """No likelihood but what does as well for coded updates: how far what was seen points the same way as the update,
    and as that once ``coded`` by the adversary, with coins of its own."""

    coded: Clip

    def pairs(self, seen: Array, expected: Array) -> Floats:
        """See ``Likelihood``."""
        directions = _directions(seen)
        return directions @ _directions(expected).T + directions @ _directions(self.coded(expected)).T

    def rows(self, seen: Array, expected: Array) -> Floats:
        """See ``Likelihood``."""
        agreed = _directions(expected) + _directions(self.coded(expected))
        return np.asarray((_directions(seen) * agreed).sum(axis=1))


def unchanged(updates: Array) -> Array:
    """The clip of no mechanism."""
    return updates


def absolute_distances(rows: Array, others: Array) -> Floats:
    """Σ|a − b| for every a of ``rows`` [R, D] and b of ``others`` [N, D]: [R, N]."""
    found = np.empty((len(rows), len(others)), np.float64)
    height = max(1, _BLOCK // max(1, others.size))
    for first in range(0, len(rows), height):
        part = rows[first : first + height, None]
        found[first : first + height] = np.abs(part - others).sum(axis=2, dtype=np.float64)
    return found


def _directions(rows: Array) -> Floats:
    """Rows [B, D] at length 1; zero stays."""
    wide = np.asarray(rows, np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0.0))
