"""What a gradient usually is: the running mean of a table's gradient norms, which the push guard compares
with.

    mean ← mean + (|g| - mean) / min(count, longest)       longest = half_life / ln 2

for each row of each push that was applied, in order: the plain mean at first, then an exponential one in
which a row's weight halves every ``half_life`` rows. A push with one row above ``factor`` times the mean is
refused as exploded. Until ``armed_after`` rows were seen nothing is; ``max_norm`` alone protects till then.

A model whose gradients really grow is followed, as long as they grow by less than the factor from one push
to the next: a row at the very limit moves the mean by a factor of 1 + factor/longest, 7 % with the usual
numbers. A jump beyond it is what the guard is for; where it is wanted (the loss was rescaled, say) the table
is to be declared with a larger factor or none. Attackers who know the limit can raise it in the same way;
``max_norm`` bounds them.

Rows with a norm below ``LEAST`` are not counted: a table that has mostly converged pushes zeros, and would
soon refuse everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import f32, f64, i64, inp, kernel, out

LEAST: Final = 1e-6
"""Smaller norms count as none."""
HALF_LIFE: Final = 10_000
ARMED_AFTER: Final = 1_000
_MAX_SQUARE: Final = 3e38

Squares = npt.NDArray[np.float32]


@kernel(i64(inp(f32), out(f64), i64, i64, f64))
def _follow(squares: Squares, mean: npt.NDArray[np.float64], count: int, longest: int, least: float) -> int:
    """Move ``mean`` [1] on by each row of ``squares`` [N]; returns the new count."""
    current = mean[0]
    for i in range(squares.shape[0]):
        norm = np.sqrt(np.float64(squares[i]))
        if norm >= least:
            count = min(count + 1, longest)
            current += (norm - current) / count
    mean[0] = current
    return count


@dataclass(frozen=True, slots=True)
class NormState:
    """A running norm at rest. ``mean``: as long as it is a float, every bit counts. ``count``: rows seen, up to
    where the weight of a row no longer depends on it."""

    mean: float = 0.0
    count: int = 0


class RunningNorm:
    """The running mean of one table's gradient norms, and the limit that follows from it.

    ``factor``: how many times the mean a norm may be (0: any). ``half_life``, ``armed_after``: rows.
    """

    __slots__ = ("_armed_after", "_count", "_factor", "_longest", "_mean")

    def __init__(self, factor: float, half_life: int = HALF_LIFE, armed_after: int = ARMED_AFTER) -> None:
        if half_life < 1 or armed_after < 1:
            raise ValueError(f"half_life {half_life} and armed_after {armed_after} must be at least 1")
        self._factor = factor
        self._armed_after = armed_after
        # Never shorter than what arms, or the count would not get there.
        self._longest = max(math.ceil(half_life / math.log(2)), armed_after)
        self._mean = np.zeros(1)
        self._count = 0

    @property
    def mean(self) -> float:
        """The running mean, 0 while no row was seen."""
        return float(self._mean[0])

    def limit(self) -> float:
        """The largest norm squared that a row may have, exact or infinite in float32; infinity where anything
        may pass."""
        if self._factor == 0.0 or self._count < self._armed_after:
            return math.inf
        limit = (self._factor * self.mean) ** 2
        return float(np.float32(limit)) if limit < _MAX_SQUARE else math.inf

    def update(self, squares: Squares) -> None:
        """Count the rows of an applied push: their norms squared [N] float32, finite, as they were pushed."""
        self._count = _follow(squares, self._mean, self._count, self._longest, LEAST)

    def state(self) -> NormState:
        """For a snapshot; ``load`` of it goes on bit for bit."""
        return NormState(self.mean, self._count)

    def load(self, state: NormState) -> None:
        """Go on from ``state``. Raises ValueError where none can be so."""
        if not (0.0 <= state.mean < math.inf and state.count >= 0):
            raise ValueError(f"no running norm has mean {state.mean} and count {state.count}")
        self._mean[0] = state.mean
        self._count = min(state.count, self._longest)
