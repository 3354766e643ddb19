"""What clients keep between rounds (controls, residuals, private vectors): made when first written, in a file.

A row is a slot of the file; which client has which slot is one column of int32. The file grows as clients appear and
stops at a bound. Rows go through the page cache, not through this process's memory.

Checkpoints: a slot that the last checkpoint refers to is not written again before the next one. What a killed run
wrote after its checkpoint thus lies in slots that the checkpoint does not know, and a resumed run sees its own past.
The price is up to two slots per client that changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from federated.weights import Array

Clients = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
NOBODY = -1


class StatesFull(RuntimeError):
    """As many bytes of client state as the bound allows are in use."""


class ClientStates:
    """A float32 row [D] for each of ``clients`` clients, zero until it is set.

    ``path`` is the file (made when missing), ``limit_bytes`` its largest size. ``slots`` [N] restores a checkpoint.
    """

    def __init__(
        self, path: Path, clients: int, size: int, limit_bytes: int, slots: Slots | None = None
    ) -> None:
        if slots is not None and (slots.shape != (clients,) or slots.dtype != np.int32):
            raise ValueError(f"{path}: slots of {slots.shape} are not those of {clients} clients")
        self._path, self._row_bytes = path, max(4 * size, 4)
        self._size, self._limit = size, min(limit_bytes // self._row_bytes, 2**31 - 1)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._slots: Slots = np.full(clients, NOBODY, np.int32) if slots is None else slots.copy()
        used = self._slots[self._slots != NOBODY]
        self._next = int(used.max()) + 1 if len(used) else 0
        self._free = np.setdiff1d(np.arange(self._next), used).tolist()[::-1]
        self._fresh: set[int] = set()  # slots written since the checkpoint, which may be written again
        self._replaced: list[int] = []  # slots of the checkpoint that are free after the next one

    @property
    def held(self) -> int:
        """How many clients have a row."""
        return int(np.count_nonzero(self._slots != NOBODY))

    def get(self, clients: Clients) -> Array:
        """The rows of ``clients`` [B]: [B, D], zero for those without one."""
        rows = np.zeros((len(clients), self._size), np.float32)
        for row, slot in zip(rows, self._slots[clients].tolist(), strict=True):
            if slot != NOBODY and os.preadv(self._file, [row.data], slot * self._row_bytes) != row.nbytes:
                raise OSError(f"{self._path} is shorter than its slots say")
        return rows

    def put(self, clients: Clients, rows: Array) -> None:
        """Replace the rows of ``clients`` [B] by ``rows`` [B, D]. Raises StatesFull."""
        for client, row in zip(clients.tolist(), np.ascontiguousarray(rows, np.float32), strict=True):
            slot = int(self._slots[client])
            if slot not in self._fresh:
                if slot != NOBODY:
                    self._replaced.append(slot)
                slot = self._take()
                self._fresh.add(slot)
                self._slots[client] = slot
            if os.pwritev(self._file, [row.data], slot * self._row_bytes) != row.nbytes:
                raise OSError(f"{self._path}: a row was not written whole")

    def checkpoint(self) -> Slots:
        """Make all rows durable and give the slots [N] that ``__init__`` takes; call ``committed`` once they are
        stored durably, too."""
        os.fsync(self._file)
        return self._slots.copy()

    def committed(self) -> None:
        """The last ``checkpoint`` is stored: slots that only the one before referred to are free."""
        self._free += self._replaced
        self._replaced = []
        self._fresh = set()

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._file)

    def _take(self) -> int:
        if self._free:
            return int(self._free.pop())
        if self._next >= self._limit:
            raise StatesFull(
                f"{self._path.name} would exceed {self._limit * self._row_bytes} bytes of client state: raise "
                "simulation.state_bytes, or checkpoint more often (changed rows are kept twice until then)"
            )
        self._next += 1
        return self._next - 1
