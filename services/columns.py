"""Columns that grow by rows and are changed in place: what an in-memory catalogue is made of."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from featurestore.encoded import Ragged

Scalar = TypeVar("Scalar", bound=np.generic)
Rows = npt.NDArray[np.int64]

_LEAST: Final = 64


class Column(Generic[Scalar]):
    """N rows of one type, ``[N]`` or ``[N, width]``, zero at first. Growing copies, amortised O(1) a row."""

    def __init__(self, kind: type[Scalar], *width: int) -> None:
        self._data: npt.NDArray[Scalar] = np.zeros((_LEAST, *width), kind)
        self._rows = 0

    @property
    def values(self) -> npt.NDArray[Scalar]:
        """A view of the rows, writable; stale once the column grew."""
        return self._data[: self._rows]

    def grow(self, rows: int) -> None:
        """Have at least ``rows`` rows; new ones are zero."""
        if rows > len(self._data):
            larger = np.zeros((max(rows, 2 * len(self._data)), *self._data.shape[1:]), self._data.dtype)
            larger[: self._rows] = self.values
            self._data = larger
        self._rows = max(rows, self._rows)


class RaggedColumn:
    """N lists of keys, each replaceable. Replaced lists leave holes; half holes and the heap is packed."""

    def __init__(self) -> None:
        self._start: Column[np.int64] = Column(np.int64)
        self._length: Column[np.int64] = Column(np.int64)
        self._heap = np.zeros(_LEAST, np.uint64)
        self._owner = np.full(_LEAST, -1, np.int64)  # row of each heap entry, -1 in holes
        self._used = 0
        self._live = 0

    def grow(self, rows: int) -> None:
        """Have at least ``rows`` lists; new ones are empty."""
        self._start.grow(rows)
        self._length.grow(rows)

    def put(self, rows: Rows, lists: Ragged) -> None:
        """Replace the lists of ``rows`` ``[M]``, each row once."""
        starts, lengths = self._start.values, self._length.values
        self._owner[self._positions(rows)] = -1
        self._live += len(lists.values) - int(lengths[rows].sum())
        self._reserve(len(lists.values))
        end = self._used + len(lists.values)
        self._heap[self._used : end] = lists.values
        lengths[rows] = np.diff(lists.offsets)
        self._owner[self._used : end] = np.repeat(rows, lengths[rows])
        starts[rows] = self._used + lists.offsets[:-1]
        self._used = end
        if self._used > 2 * self._live + _LEAST:
            self._pack()

    def take(self, rows: Rows) -> Ragged:
        """The lists of ``rows`` ``[M]``, in that order."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(self._length.values[rows], out=offsets[1:])
        return Ragged(self._heap[self._positions(rows)], offsets)

    def holding(self, wanted: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of the N lists hold at least one of the ``wanted`` keys."""
        found = np.zeros(len(self._start.values), bool)
        owner = self._owner[: self._used]
        found[owner[np.isin(self._heap[: self._used], wanted) & (owner >= 0)]] = True
        return found

    def _positions(self, rows: Rows) -> Rows:
        """Where in the heap the entries of ``rows`` lie, list by list."""
        lengths = self._length.values[rows]
        ends = np.cumsum(lengths)
        within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(ends - lengths, lengths)
        positions: Rows = np.repeat(self._start.values[rows], lengths) + within
        return positions

    def _reserve(self, more: int) -> None:
        if self._used + more > len(self._heap):
            size = max(self._used + more, 2 * len(self._heap))
            heap, owner = np.zeros(size, np.uint64), np.full(size, -1, np.int64)
            heap[: self._used], owner[: self._used] = self._heap[: self._used], self._owner[: self._used]
            self._heap, self._owner = heap, owner

    def _pack(self) -> None:
        everything = np.arange(len(self._start.values), dtype=np.int64)
        packed = self.take(everything)
        lengths = np.diff(packed.offsets)
        self._heap = packed.values.copy()
        self._owner = np.repeat(everything, lengths)
        self._start.values[:] = packed.offsets[:-1]
        self._used = self._live = len(self._heap)
