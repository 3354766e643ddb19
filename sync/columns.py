"""Columns that grow together in place.

Growth is amortised but in small steps, a sixteenth at a time for large tables, so that no push waits long.
``ndarray.resize`` reallocates, which the C library does for large arrays by moving pages rather than bytes
(mremap): growing needs neither a second copy nor a pause in proportion to the table. It is why no view of a
column may outlive the next push.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sync.errors import TableFull

MAX_ROWS: Final = 2**31 - 1
"""Slots are int32."""
_FIRST_ROWS: Final = 256
_STEP_ROWS: Final = 16_384


class Columns:
    """Everything a table keeps per row, by slot.

    Shapes with C rows of capacity: ``keys`` [C] uint64, ``values`` [C, dim] float32, ``state`` [C, state_dim]
    float32, ``version_time`` [C] uint64, ``version_writer`` [C] uint32, ``touched_s`` [C] uint32 (seconds
    since 1970), ``changed_at`` [C] int64 (the shard's change sequence, 0: never).
    """

    __slots__ = (
        "capacity", "changed_at", "keys", "max_rows", "state", "touched_s", "values", "version_time",
        "version_writer",
    )  # fmt: skip

    def __init__(self, dim: int, state_dim: int, max_rows: int = MAX_ROWS) -> None:
        self.capacity = 0
        self.max_rows = max_rows
        self.keys: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.values: npt.NDArray[np.float32] = np.zeros((0, dim), np.float32)
        self.state: npt.NDArray[np.float32] = np.zeros((0, state_dim), np.float32)
        self.version_time: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.version_writer: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.touched_s: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.changed_at: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows. Raises TableFull beyond the bound, and then nothing changed."""
        if rows <= self.capacity:
            return
        if rows > self.max_rows:
            raise TableFull(f"{rows} rows are needed, {self.max_rows} are allowed")
        step = max(self.capacity // 16, min(self.capacity, _STEP_ROWS), _FIRST_ROWS)
        capacity = min(max(rows, self.capacity + step), self.max_rows)
        # Views never leave this package's calls, so the reference check has nothing to protect.
        self.keys.resize(capacity, refcheck=False)
        self.values.resize((capacity, self.values.shape[1]), refcheck=False)
        self.state.resize((capacity, self.state.shape[1]), refcheck=False)
        self.version_time.resize(capacity, refcheck=False)
        self.version_writer.resize(capacity, refcheck=False)
        self.touched_s.resize(capacity, refcheck=False)
        self.changed_at.resize(capacity, refcheck=False)
        self.capacity = capacity
