"""From 64-bit keys to slots: open addressing with linear probing, vectorised over a batch.

An entry is two uint64 side by side, (key, slot + 1), so a look-up that hits touches one cache line; 0 in
the second marks an empty one, and every key is legal. Deletion shifts entries back instead of leaving
tombstones, so look-ups never slow down. The array doubles when more than 5/8 full.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sync.columns import MAX_ROWS
from sync.errors import TableFull
from sync.kernel import i32, i64, inp, kernel, mix, out, u64, void

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]

MISSING: Final = -1
_FIRST_ENTRIES: Final = 256


@kernel(i64(inp(u64, 2), inp(u64), out(i32)))
def _find(entries: Keys, keys: Keys, slots: Slots) -> int:
    """Fill ``slots`` (MISSING where unknown); returns how many are missing."""
    mask = np.uint64(entries.shape[0] - 1)
    one = np.uint64(1)
    missing = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        at = mix(key) & mask
        while entries[at, 1] != 0 and entries[at, 0] != key:
            at = (at + one) & mask
        slots[i] = np.int64(entries[at, 1]) - 1
        missing += slots[i] < 0
    return missing


@kernel(i64(out(u64, 2), inp(u64), out(i32), inp(i32), i64, i64))
def _insert(entries: Keys, keys: Keys, slots: Slots, free: Slots, free_count: int, next_slot: int) -> int:
    """Fill ``slots``, giving unknown keys a free slot (last freed first) or the next; returns how many were
    unknown. There must be room."""
    mask = np.uint64(entries.shape[0] - 1)
    one = np.uint64(1)
    added = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        at = mix(key) & mask
        while entries[at, 1] != 0 and entries[at, 0] != key:
            at = (at + one) & mask
        if entries[at, 1] == 0:
            slot = (
                next_slot + added - free_count
                if added >= free_count
                else np.int64(free[free_count - 1 - added])
            )
            entries[at, 0] = key
            entries[at, 1] = np.uint64(slot + 1)
            added += 1
        slots[i] = np.int64(entries[at, 1]) - 1
    return added


@kernel(i64(out(u64, 2), inp(u64), out(i32)))
def _delete(entries: Keys, keys: Keys, slots: Slots) -> int:
    """Remove ``keys``; ``slots`` gets the slot that each had (MISSING where unknown). Returns how many
    went."""
    mask = np.uint64(entries.shape[0] - 1)
    one = np.uint64(1)
    removed = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        at = mix(key) & mask
        while entries[at, 1] != 0 and entries[at, 0] != key:
            at = (at + one) & mask
        slots[i] = np.int64(entries[at, 1]) - 1
        if slots[i] < 0:
            continue
        removed += 1
        # An entry may fill the hole unless its home lies cyclically after the hole (Knuth, 6.4, algorithm R).
        hole = at
        while True:
            at = (at + one) & mask
            if entries[at, 1] == 0:
                break
            home = mix(entries[at, 0]) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                entries[hole, 0] = entries[at, 0]
                entries[hole, 1] = entries[at, 1]
                hole = at
        entries[hole, 1] = 0
    return removed


@kernel(void(inp(u64, 2), out(u64, 2)))
def _rehash(old: Keys, new: Keys) -> None:
    mask = np.uint64(new.shape[0] - 1)
    one = np.uint64(1)
    for i in range(old.shape[0]):
        if old[i, 1] != 0:
            at = mix(old[i, 0]) & mask
            while new[at, 1] != 0:
                at = (at + one) & mask
            new[at, 0] = old[i, 0]
            new[at, 1] = old[i, 1]


class KeyIndex:
    """The slot of every key. Slots are dense: freed ones are given out again before new ones."""

    __slots__ = ("_count", "_entries", "_free", "_free_count", "_next")

    def __init__(self) -> None:
        self._entries: Keys = np.zeros((_FIRST_ENTRIES, 2), np.uint64)
        self._count = 0
        self._next = 0
        self._free: Slots = np.zeros(0, np.int32)
        self._free_count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def slots(self) -> int:
        """One more than the largest slot ever given out."""
        return self._next

    def find(self, keys: Keys) -> tuple[Slots, int]:
        """The slot of each key ``[N]``, int32 (MISSING where unknown), and how many are unknown."""
        slots = np.empty(len(keys), np.int32)
        return slots, _find(self._entries, keys, slots)

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more keys. Raises TableFull, and then nothing changed."""
        count = self._count + extra
        if count > MAX_ROWS:
            raise TableFull(f"{count} keys are needed, {MAX_ROWS} are allowed")
        size = len(self._entries)
        while size * 5 < count * 8:
            size *= 2
        if size > len(self._entries):
            entries = np.zeros((size, 2), np.uint64)
            _rehash(self._entries, entries)
            self._entries = entries

    def insert(self, keys: Keys) -> Slots:
        """The slot of each key ``[N]``; unknown keys get one, in the order of their first occurrence."""
        self.reserve(len(keys))
        slots = np.empty(len(keys), np.int32)
        added = _insert(self._entries, keys, slots, self._free, self._free_count, self._next)
        reused = min(added, self._free_count)
        self._free_count -= reused
        self._next += added - reused
        self._count += added
        return slots

    def delete(self, keys: Keys) -> Slots:
        """Remove ``keys`` ``[N]``; returns the slot that each had (MISSING where unknown), now free."""
        slots = np.empty(len(keys), np.int32)
        removed = _delete(self._entries, keys, slots)
        if self._free_count + removed > len(self._free):
            self._free = np.resize(self._free, max(2 * len(self._free), self._free_count + removed))
        self._free[self._free_count : self._free_count + removed] = slots[slots >= 0]
        self._free_count += removed
        self._count -= removed
        return slots
