"""Tombstones: the deleted keys of a table, each with the version of its deletion.

A grave costs no value. It is forgotten when its key is pushed again, and otherwise when the bound on graves is
reached (the oldest go) or when everyone who copies the shard has it. Either way its version joins the floor: who
does not know it cannot be told any more what is gone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.changes import ChangeRing, Sequences
from sync.columns import Columns
from sync.index import KeyIndex
from sync.knowledge import Knowledge, Known, vector_of
from sync.records import Graves

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]


class Graveyard:
    """The graves of one table in one shard. One thread uses it."""

    __slots__ = ("_columns", "_index", "_table", "ring")

    def __init__(self, table: str, change_capacity: int) -> None:
        self._table = table
        self._index = KeyIndex()
        self._columns = Columns(0, 0)
        self.ring = ChangeRing(change_capacity)

    def __len__(self) -> int:
        """How many keys are buried."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self._index.nbytes + self._columns.nbytes

    def bury(self, keys: Keys, time: Times, writer: Writers, sequence: int) -> None:
        """Enter ``keys`` [N] with their versions [N]; they changed with the numbers after ``sequence``."""
        self._columns.reserve(self._index.slots_with(len(keys)))
        slots = self._index.insert(keys)
        # What is gone must not come back: of all that a region is told, it hears of this first.
        urgent = np.full(len(keys), np.inf, np.float32)
        self.ring.enter(slots, time, writer, urgent, sequence, self._columns)

    def exhume(self, keys: Keys) -> None:
        """Forget those of ``keys`` [N] that are buried: they live again."""
        if not len(self._index):
            return
        slots = self._index.delete(keys)
        freed = slots[slots >= 0]
        self._columns.version_time[freed] = 0
        self._columns.changed_at[freed] = 0

    def collect(self, cut: Knowledge) -> tuple[dict[int, int], int]:
        """Forget every grave whose version ``cut`` covers; returns the join of their versions, and the newest number
        among them."""
        places = self._live()
        time, writer = self._columns.version_time[places], self._columns.version_writer[places]
        old = places[~Known.of(cut).above(time, writer)]
        forgotten = vector_of(self._columns.version_time[old], self._columns.version_writer[old])
        newest = int(self._columns.changed_at[old].max(initial=0))
        self.exhume(self._index.keys[old].copy())
        return forgotten, newest

    def versions(self, keys: Keys) -> tuple[Times, Writers]:
        """Version time and writer of ``keys`` [N]; (0, 0) where none is buried."""
        places, _ = self._index.find(keys)
        known = places >= 0
        time, writer = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint32)
        time[known] = self._columns.version_time[places[known]]
        writer[known] = self._columns.version_writer[places[known]]
        return time, writer

    def scan(self, known: Known) -> Slots:
        """The places of the graves whose versions ``known`` does not cover: a look at each."""
        last = self._index.slots
        return known.scan(self._columns.version_time[:last], self._columns.version_writer[:last])

    def writers(self) -> set[int]:
        """Who dug the graves here, and maybe some that are gone."""
        last = self._index.slots
        return set(vector_of(self._columns.version_time[:last], self._columns.version_writer[:last]))

    def known_keys(self, known: Known) -> Keys:
        """The keys of the graves whose versions ``known`` covers."""
        places = self._live()
        time, writer = self._columns.version_time[places], self._columns.version_writer[places]
        return self._index.keys[places[~known.above(time, writer)]]

    def find(self, keys: Keys) -> Slots:
        """The place of each of ``keys`` [N], negative where it is not buried."""
        return self._index.find(keys)[0]

    def written_at(self, places: Slots) -> Sequences:
        """The number of the change that dug each of ``places`` [N]."""
        return self._columns.changed_at[places]

    def at(self, places: Slots) -> Graves:
        """Copies of the graves in ``places`` [N]."""
        columns = self._columns
        return Graves(
            self._table,
            self._index.keys[places],
            columns.version_time[places],
            columns.version_writer[places],
        )

    def _live(self) -> Slots:
        return np.flatnonzero(self._columns.version_time[: self._index.slots]).astype(np.int32)

    def cut_to_keep(self, keep: int) -> dict[int, int]:
        """What to ``collect`` so that at most ``keep`` graves stay: the oldest by time go first."""
        excess = len(self._index) - keep
        if excess <= 0:
            return {}
        places = self._live()
        died = self._columns.version_time[places]
        last = int(np.partition(died, excess - 1)[excess - 1])
        return dict.fromkeys(np.unique(self._columns.version_writer[places]).tolist(), last)

    def changed_after(self, sequence: int, limit: int) -> tuple[Sequences, Slots]:
        """The oldest ``limit`` graves dug after ``sequence``: their numbers, ascending, and places."""
        return self.ring.after(sequence, limit, self._columns.changed_at[: self._index.slots])

    def uncovered(self, known: Known) -> tuple[Sequences, Slots] | None:
        """The graves whose versions ``known`` does not cover: numbers, ascending, and places. None where the ring does
        not reach back to all of them."""
        return self.ring.uncovered(known, self._columns)

    def urgent(self, sequence: int, least: float) -> tuple[Sequences, Slots]:
        """The graves dug after ``sequence`` whose priority is at least ``least``: numbers, ascending, and places."""
        return self.ring.urgent(sequence, least, self._columns.changed_at[: self._index.slots])

    def keys(self, places: Slots) -> Keys:
        """Copies of the keys at ``places`` [N]."""
        return self._index.keys[places]

    def page(self, first: int, limit: int) -> tuple[Graves, int]:
        """The graves in at most ``limit`` places from ``first`` on, and where to go on (0: at the end)."""
        last = min(first + limit, self._index.slots)
        time = self._columns.version_time[first:last]
        places = np.flatnonzero(time).astype(np.int32) + np.int32(first)
        return self.at(places), last if last < self._index.slots else 0
