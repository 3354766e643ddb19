"""Which updates are worth more: the order in which they cross a link that cannot carry all of them.

p = (p_g + p_u) · p_m after Ekko (Sima et al., OSDI 2022): p_g is the length of the update over the running mean of
such lengths, p_u rewards the first update of a row, and p_m is the model's share of what is served. Any function
with the signature of ``Priority`` takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import f32, f64, inp, kernel, out, u8, void

Squares = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Priority = Callable[[Squares, Mask, int], npt.NDArray[np.float32]]
"""(norms of the updates squared [N], whether each row is new [N], physical time in µs) → priorities [N]."""

MEMORY_S: Final = 60.0
NEW_ROW: Final = 10.0


@kernel(f64(inp(f32), out(f32)))
def _lengths(squares: Squares, lengths: Squares) -> float:
    """The root of each of ``squares`` [N]; returns their sum."""
    total = 0.0
    for i in range(squares.shape[0]):
        lengths[i] = np.sqrt(squares[i])
        total += lengths[i]
    return total


@kernel(void(f32, f32, f32, inp(u8), out(f32)))
def _weigh(
    usual: np.float32, new_row: np.float32, share: np.float32, first: npt.NDArray[np.uint8], lengths: Squares
) -> None:
    """Make priorities of ``lengths`` [N], in place."""
    for i in range(lengths.shape[0]):
        gained = new_row if first[i] else np.float32(0.0)
        lengths[i] = (lengths[i] / usual + gained) * share


class UpdatePriority:
    """Ekko's priority. ``share``: p_m, in (0, 1]. ``memory_s``: how long the running mean remembers."""

    __slots__ = ("_at_us", "_mean", "_memory_s", "_new_row", "share")

    def __init__(self, share: float = 1.0, memory_s: float = MEMORY_S, new_row: float = NEW_ROW) -> None:
        if not (0.0 < share <= 1.0 and memory_s > 0.0 and new_row >= 0.0):
            raise ValueError(f"share {share}, memory {memory_s} s, new row {new_row}")
        self.share, self._memory_s, self._new_row = share, memory_s, new_row
        self._mean, self._at_us = 0.0, 0

    def __call__(self, squares: Squares, first: Mask, now_us: int) -> npt.NDArray[np.float32]:
        """The priorities [N] of one push."""
        lengths = np.empty(len(squares), np.float32)
        total = _lengths(squares, lengths)
        if len(lengths):
            mean = total / len(lengths)
            elapsed_s = max(0.0, (now_us - self._at_us) / 1e6)
            kept = math.exp(-elapsed_s / self._memory_s) if self._at_us else 0.0
            self._mean, self._at_us = kept * self._mean + (1.0 - kept) * mean, now_us
        usual = np.float32(self._mean) or np.float32(1.0)
        _weigh(usual, np.float32(self._new_row), np.float32(self.share), first.view(np.uint8), lengths)
        return lengths
