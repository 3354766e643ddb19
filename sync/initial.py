"""Values of rows that were never pushed: a pure function of (table seed, key, column), by a counter-based
hash.

    row    = mix(mix(key + γ) xor seed)                          γ = 0x9e3779b97f4a7c15
    h      = mix(row + γ·(column + 1))                           SplitMix64 started at ``row``
    u      = (h >> 40)·2^-23 - 1                                 in [-1, 1), 24 bits, exact in float32
    value  = float32(constant + scale·u)                         computed in float64, rounded once

``scale`` and ``constant`` are rounded to float32 first. The product of two 24-bit numbers is exact in
float64, so a compiler that fuses the multiplication and the addition gives the same bits. Every version and
platform must agree on these values, as rows that were never pushed are not stored; golden values in the
tests hold them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.kernel import f32, i32, inp, kernel, mix, out, u64, void
from sync.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]


@kernel(void(inp(u64), inp(i32), u64, inp(u64), inp(f32), inp(f32), out(f32, 2)))
def _fill_missing(
    keys: Keys, slots: Slots, seed: np.uint64, firsts: Keys, scales: Rows, constants: Rows, rows: Rows
) -> None:
    golden = np.uint64(0x9E3779B97F4A7C15)
    for i in range(keys.shape[0]):
        if slots[i] >= 0:
            continue
        low = 0
        high = firsts.shape[0]
        while high - low > 1:
            middle = (low + high) // 2
            if firsts[middle] <= keys[i]:
                low = middle
            else:
                high = middle
        scale = np.float64(scales[low])
        constant = np.float64(constants[low])
        state = mix(mix(keys[i] + golden) ^ seed)
        for column in range(rows.shape[1]):
            state += golden
            unit = np.float64(mix(state) >> np.uint64(40)) * 2.0**-23 - 1.0
            rows[i, column] = np.float32(constant + scale * unit)


class InitialValues:
    """The initial values of one table."""

    __slots__ = ("_constants", "_dim", "_firsts", "_scales", "_seed")

    def __init__(self, spec: TableSpec) -> None:
        segments = spec.initialiser.segments
        self._dim = spec.dim
        self._seed = np.uint64(spec.seed)
        self._firsts = np.array([segment.first_key for segment in segments], np.uint64)
        self._scales = np.array([segment.scale for segment in segments], np.float32)
        self._constants = np.array([segment.constant for segment in segments], np.float32)

    def rows(self, keys: Keys) -> Rows:
        """The initial values of ``keys`` ``[N]``: float32 ``[N, dim]``."""
        rows = np.empty((len(keys), self._dim), np.float32)
        self.fill(keys, rows)
        return rows

    def fill(self, keys: Keys, rows: Rows) -> None:
        """Write the initial values of ``keys`` ``[N]`` into ``rows`` ``[N, dim]``."""
        self.fill_missing(keys, np.full(len(keys), -1, np.int32), rows)

    def fill_missing(self, keys: Keys, slots: Slots, rows: Rows) -> None:
        """Write into ``rows`` ``[N, dim]`` those whose slot ``[N]`` is negative; leave the others."""
        _fill_missing(keys, slots, self._seed, self._firsts, self._scales, self._constants, rows)
