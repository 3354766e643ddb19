"""Tombstones: the deleted keys of a table, each with the version of its deletion.

A grave costs no value. It is forgotten when its key is pushed again, and otherwise when the bound on graves is
reached (the oldest go) or when everyone who copies the shard has it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.changes import ChangeRing, Sequences, mark_changed
from sync.columns import Columns
from sync.index import KeyIndex
from sync.records import Graves

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]


class Graveyard:
    """The graves of one table in one shard. One thread uses it."""

    __slots__ = ("_columns", "_index", "_ring", "_table")

    def __init__(self, table: str, change_capacity: int) -> None:
        self._table = table
        self._index = KeyIndex()
        self._columns = Columns(0, 0)
        self._ring = ChangeRing(change_capacity)

    def __len__(self) -> int:
        """How many keys are buried."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self._index.nbytes + self._columns.nbytes

    def bury(self, keys: Keys, time: Times, writer: Writers, sequence: int) -> None:
        """Enter ``keys`` [N] with their versions [N]; they changed with the numbers after ``sequence``."""
        self._columns.reserve(self._index.slots + len(keys))
        slots = self._index.insert(keys)
        columns, ring = self._columns, self._ring
        mark_changed(
            slots, time, writer, sequence, columns.version_time, columns.version_writer, columns.changed_at,
            ring.ring_sequences, ring.ring_slots,
        )  # fmt: skip

    def exhume(self, keys: Keys) -> None:
        """Forget those of ``keys`` [N] that are buried: they live again."""
        if not len(self._index):
            return
        slots = self._index.delete(keys)
        freed = slots[slots >= 0]
        self._columns.version_time[freed] = 0
        self._columns.changed_at[freed] = 0

    def collect(self, time: int) -> tuple[int, int]:
        """Forget every grave whose version time is at most ``time``; returns how many, and the newest number
        among them."""
        died = self._columns.version_time[: self._index.slots]
        old = np.flatnonzero((died > 0) & (died <= np.uint64(time))).astype(np.int32)
        newest = int(self._columns.changed_at[old].max(initial=0))
        self.exhume(self._index.keys[old].copy())
        return len(old), newest

    def time_to_keep(self, keep: int) -> int:
        """The version time up to which to ``collect`` so that at most ``keep`` graves stay (0: nothing to do)."""
        excess = len(self._index) - keep
        if excess <= 0:
            return 0
        died = self._columns.version_time[: self._index.slots]
        return int(np.partition(died[died > 0], excess - 1)[excess - 1])

    def changed_after(self, sequence: int, limit: int) -> tuple[Sequences, Slots]:
        """The oldest ``limit`` graves dug after ``sequence``: their numbers, ascending, and places."""
        return self._ring.after(sequence, limit, self._columns.changed_at[: self._index.slots])

    def keys(self, places: Slots) -> Keys:
        """Copies of the keys at ``places`` [N]."""
        return self._index.keys[places]

    def page(self, first: int, limit: int) -> tuple[Graves, int]:
        """The graves in at most ``limit`` places from ``first`` on, and where to go on (0: at the end)."""
        last = min(first + limit, self._index.slots)
        time = self._columns.version_time[first:last]
        places = np.flatnonzero(time).astype(np.int32) + np.int32(first)
        found = Graves(
            self._table,
            self._index.keys[places],
            self._columns.version_time[places],
            self._columns.version_writer[places],
        )
        return found, last if last < self._index.slots else 0
