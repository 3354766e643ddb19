"""Copy rows by slot, at the speed of memory: while one row is copied, the lines of a later one are on their
way."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import copy_line, f32, i32, inp, kernel, out, prefetch, void

_AHEAD: Final = 16
"""How many rows ahead lines are asked for."""
_NEAR: Final = 128
"""Elements of a row to ask for; the processor itself fetches the rest of a long one."""


@kernel(void(inp(f32, 2), inp(i32), out(f32, 2)))
def gather(
    values: npt.NDArray[np.float32], slots: npt.NDArray[np.int32], rows: npt.NDArray[np.float32]
) -> None:
    """Copy the row of ``values`` [C, d] of each slot [N] into ``rows`` [N, d], leaving those with a negative
    slot. Slots must be below C: nothing looks."""
    count, dim = slots.shape[0], rows.shape[1]
    whole = dim - dim % 16
    near = min(dim, _NEAR)
    for step in range(count + _AHEAD):
        if step < count:
            start = np.int64(slots[step]) * dim
            for c in range(0, near, 16):
                prefetch(values, start + c)
            # A row that is no whole number of lines may end on one more.
            if whole != dim:
                prefetch(values, start + dim - 1)
        i = step - _AHEAD
        if i < 0 or slots[i] < 0:
            continue
        slot = np.uint64(slots[i])
        for c in range(0, whole, 16):
            copy_line(rows, i * dim + c, values, np.int64(slot) * dim + c)
        for c in range(whole, dim):
            rows[i, c] = values[slot, c]
