"""Columns that grow together in place, in small steps (``memory.py``).

A small table starts small and doubles. Beyond one slab it grows slab by slab, so that it never holds much more
than it needs: 65,536 rows, or as many as make 8 MiB of values.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sync.errors import TableFull
from sync.memory import GrowingArray, grown

MAX_ROWS: Final = 2**31 - 1
"""Slots are int32."""
_SLAB_ROWS: Final = 65_536
_SLAB_BYTES: Final = 8 * 2**20


class Columns:
    """What a table keeps per row, by slot, besides the key, which the index has.

    Shapes with C rows of capacity: ``values`` [C, dim] float32, ``state`` [C, state_dim] float32,
    ``version_time`` [C] uint64, ``version_writer`` [C] uint32, ``changed_at`` [C] int64 (the shard's change
    sequence, 0: never). A view kept over ``reserve`` may show what the rows were before.
    """

    __slots__ = (
        "_changed_at", "_slab", "_state", "_values", "_version_time", "_version_writer", "capacity", "max_rows",
    )  # fmt: skip

    def __init__(self, dim: int, state_dim: int, max_rows: int = MAX_ROWS) -> None:
        self.capacity = 0
        self.max_rows = max_rows
        self._slab = min(_SLAB_ROWS, max(1, _SLAB_BYTES // (4 * max(dim, 1))))
        self._values = GrowingArray(np.float32, (dim,))
        self._state = GrowingArray(np.float32, (state_dim,))
        self._version_time = GrowingArray(np.uint64)
        self._version_writer = GrowingArray(np.uint32)
        self._changed_at = GrowingArray(np.int64)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        return self._values.array

    @property
    def state(self) -> npt.NDArray[np.float32]:
        return self._state.array

    @property
    def version_time(self) -> npt.NDArray[np.uint64]:
        return self._version_time.array

    @property
    def version_writer(self) -> npt.NDArray[np.uint32]:
        return self._version_writer.array

    @property
    def changed_at(self) -> npt.NDArray[np.int64]:
        return self._changed_at.array

    @property
    def nbytes(self) -> int:
        """Allocated bytes, room for growth included."""
        return self._values.nbytes + self._state.nbytes + self.overhead_nbytes

    @property
    def overhead_nbytes(self) -> int:
        """Allocated bytes but for values and optimiser state."""
        return self._version_time.nbytes + self._version_writer.nbytes + self._changed_at.nbytes

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows. Raises TableFull beyond the bound, and then nothing changed."""
        if rows <= self.capacity:
            return
        if rows > self.max_rows:
            raise TableFull(f"{rows} rows are needed, {self.max_rows} are allowed")
        capacity = min(grown(self.capacity, rows, self._slab), self.max_rows)
        for column in (
            self._values, self._state, self._version_time, self._version_writer, self._changed_at,
        ):  # fmt: skip
            column.grow(capacity)
        self.capacity = capacity
