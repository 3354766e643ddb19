"""From 64-bit keys to slots, and back: extendible hashing, vectorised over a batch.

A directory, by the top bits of a key's hash, names segments of 4,096 entries inside one pool; within a segment
entries are probed from a line of 16 that the lowest bits give. A segment that is 3/4 full is split in two, so
growth costs tens of microseconds at a time and never rehashes everything (Fagin et al. 1979). Deletion shifts
entries back instead of leaving tombstones, so look-ups never slow down.

An entry is one uint32: slot + 1 in its low bits, above them the same bits of the hash as a tag; 0 is empty.
Equal tags are verified against the slot's key, so a look-up reads two lines: one of entries, one of keys.

The hash is salted with the system's randomness, as Python's own dicts are; no result depends on it. Who knows
the salt can still crowd keys into one segment: then it grows eightfold instead of being split, and at last
TableFull is raised, before probing gets slow and before the directory is larger than the entries.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.columns import MAX_ROWS
from sync.errors import TableFull
from sync.gather import gather
from sync.kernel import mix
from sync.memory import GrowingArray, grown
from sync.probing import (
    COUNT,
    FREE_COUNT,
    GROWN,
    GROWN_BITS,
    NEXT,
    delete_keys,
    distribute,
    find_slots,
    insert_keys,
    live_slots,
)

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]

_SEGMENT_BITS: Final = 12
_SLOT_BITS: Final = 24
_LOAD: Final = 0.7
"""How full segments are meant to be that begin as many: few of them then reach 3/4 by chance."""
_MAX_DOUBLINGS: Final = 3
_SPARE_DEPTH: Final = 3
"""Directory places per segment, as a power of two, beyond which the directory does not grow."""
_SLAB_ENTRIES: Final = 2**18
_SLAB_ROWS: Final = 65_536


class KeyIndex:
    """The slot of every key and the key of every slot. Freed slots are given out again, the last freed first,
    before new ones.

    ``salt``: what keys are mixed with before hashing, any 64-bit number, from the system's randomness if not
    given. ``slot_bits`` of an entry hold its slot at first, more once slots need it. ``segment_bits``: the
    base-2 logarithm of a segment's entries.
    """

    __slots__ = (
        "_column", "_counts", "_depth", "_depths", "_directory", "_filled", "_free", "_live", "_pool", "_salt",
        "_segment_bits", "_shift", "_slot_bits", "_spare", "_tag_mask", "_unit_bits", "_units",
    )  # fmt: skip

    def __init__(
        self, *, salt: int | None = None, slot_bits: int = _SLOT_BITS, segment_bits: int = _SEGMENT_BITS
    ) -> None:
        self._salt = np.uint64(secrets.randbits(64) if salt is None else salt)
        self._slot_bits = slot_bits
        self._tag_mask = _above(slot_bits)
        self._segment_bits = segment_bits
        self._unit_bits = np.uint64(segment_bits)
        self._pool: GrowingArray[np.uint32] = GrowingArray(np.uint32)
        self._pool.grow(1 << segment_bits)
        self._units = 1
        self._spare: list[tuple[int, int]] = []
        # Per unit, for the segment that begins there: its entries, and how many top bits of the hash they share.
        self._filled: Counts = np.zeros(1, np.int64)
        self._depths: Counts = np.zeros(1, np.int64)
        self._depth = 1
        self._shift = np.uint64(63)
        self._directory: Slots = np.zeros(2, np.int32)
        self._column: GrowingArray[np.uint64] = GrowingArray(np.uint64)
        self._live: GrowingArray[np.uint64] = GrowingArray(np.uint64)
        self._free: GrowingArray[np.int32] = GrowingArray(np.int32)
        self._counts: Counts = np.zeros(3, np.int64)

    def __len__(self) -> int:
        return int(self._counts[COUNT])

    @property
    def slots(self) -> int:
        """One more than the largest slot ever given out."""
        return int(self._counts[NEXT])

    def slots_with(self, extra: int) -> int:
        """What ``slots`` will be once ``extra`` new keys were inserted: free slots are given out first."""
        return self.slots + max(extra - int(self._counts[FREE_COUNT]), 0)

    @property
    def keys(self) -> Keys:
        """The key of each slot, ``[slots]``: a view that the next insertion may leave behind. Free slots keep
        the key that they had."""
        return self._column.array[: self.slots]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, room for growth and the keys of slots included."""
        arrays = self._directory.nbytes + self._filled.nbytes + self._depths.nbytes
        return self._pool.nbytes + self._column.nbytes + self._live.nbytes + self._free.nbytes + arrays

    def find(self, keys: Keys) -> tuple[Slots, int]:
        """The slot of each key ``[N]``, int32 (MISSING where unknown), and how many are unknown."""
        slots = np.empty(len(keys), np.int32)
        missing = find_slots(
            self._pool.array, self._directory, self._column.array, keys, slots,
            self._salt, self._shift, self._unit_bits, self._tag_mask,
        )  # fmt: skip
        return slots, missing

    def gather(self, keys: Keys, values: Rows, rows: Rows) -> tuple[Slots, int]:
        """What ``find`` returns, and each known key's row of ``values`` ``[C, d]``, C at least ``slots``, copied
        to ``rows`` ``[N, d]``; the rows of unknown keys stay as they are."""
        # The kernel does not look at bounds.
        if rows.shape != (len(keys), values.shape[1]) or len(values) < self.slots:
            raise ValueError(f"values {values.shape} and rows {rows.shape} do not fit {len(keys)} keys")
        slots, missing = self.find(keys)
        gather(values, slots, rows)
        return slots, missing

    def live(self, first: int, count: int) -> Slots:
        """Which of the ``count`` slots from ``first`` on hold a key: int32, ascending."""
        last = min(first + count, self.slots)
        # The kernel writes a place before it knows whether that slot counts.
        slots = np.empty(max(last - first, 0) + 1, np.int32)
        return slots[: live_slots(self._live.array, first, last, slots)]

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more keys. Raises TableFull, and then nothing changed."""
        if len(self) + extra > MAX_ROWS:
            raise TableFull(f"{len(self) + extra} keys are needed, {MAX_ROWS} are allowed")
        rows = self.slots_with(extra)
        if rows > len(self._column.array):
            capacity = grown(len(self._column.array), rows, _SLAB_ROWS)
            self._column.grow(capacity)
            self._live.grow(-(-capacity // 64))
        if not len(self) and self._units == 1:
            self._spread(extra)
        while rows >= 1 << self._slot_bits:
            # One more bit for slots is one less for tags: entries lose it.
            self._slot_bits += 1
            self._tag_mask = _above(self._slot_bits)
            np.bitwise_and(self._pool.array, ~np.uint32(1 << self._slot_bits - 1), out=self._pool.array)

    def insert(self, keys: Keys) -> Slots:
        """The slot of each key ``[N]``; unknown keys get one, in the order of their first occurrence.

        Raises TableFull, and then no key was added: there are too many keys, or so many have been chosen to
        share bits of their salted hash that their segment cannot grow.
        """
        self.reserve(len(keys))
        slots = np.empty(len(keys), np.int32)
        done = 0
        while True:
            done = insert_keys(
                self._pool.array, self._directory, self._filled, self._column.array, self._live.array,
                self._free.array, self._counts, keys, slots, done,
                self._salt, self._shift, self._unit_bits, self._tag_mask,
            )  # fmt: skip
            if done == len(keys):
                break
            try:
                self._make_room(keys[done])
            except (TableFull, MemoryError):
                # The last added first, so that freed slots stand in their old order again.
                self.delete(keys[:done][slots[:done] < 0][::-1].copy())
                raise
        np.invert(slots, out=slots, where=slots < 0)
        return slots

    def delete(self, keys: Keys) -> Slots:
        """Remove ``keys`` ``[N]``; returns the slot that each had (MISSING where unknown), now free."""
        freed = int(self._counts[FREE_COUNT]) + min(len(keys), len(self))
        if freed > len(self._free.array):
            self._free.grow(grown(len(self._free.array), freed, _SLAB_ROWS))
        slots = np.empty(len(keys), np.int32)
        delete_keys(
            self._pool.array, self._directory, self._filled, self._column.array, self._live.array,
            self._free.array, self._counts, keys, slots,
            self._salt, self._shift, self._unit_bits, self._tag_mask,
        )  # fmt: skip
        return slots

    def _spread(self, extra: int) -> None:
        """Begin with the segments that ``extra`` keys need: a table that is loaded at once splits none."""
        depth = 0
        while extra > _LOAD * (1 << self._segment_bits + depth):
            depth += 1
        if depth == 0:
            return
        self._take_units(0, (1 << depth) - 1)
        self._depths[: self._units] = depth
        self._depth = depth
        self._shift = np.uint64(64 - depth)
        self._directory = np.arange(self._units, dtype=np.int32) << int(GROWN_BITS)

    def _make_room(self, key: np.uint64) -> None:
        """Split the full segment of ``key``, or double it where the directory may not grow. Raises TableFull."""
        hashed = int(mix(key ^ self._salt))
        place = int(self._directory[hashed >> 64 - self._depth])
        unit, doublings = place >> int(GROWN_BITS), place & int(GROWN)
        depth = int(self._depths[unit])
        if depth == self._depth and self._units << _SPARE_DEPTH > len(self._directory):
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
            self._shift = np.uint64(64 - self._depth)
        first = hashed >> 64 - depth << self._depth - depth
        last = first + (1 << self._depth - depth)
        if depth < self._depth:
            middle = (first + last) // 2
            other = self._take_units(doublings)
            self._rebuild(unit, unit, other, doublings, doublings, depth + 1)
            self._directory[middle:last] = other << int(GROWN_BITS) | doublings
        elif doublings < _MAX_DOUBLINGS:
            other = self._take_units(doublings + 1)
            self._rebuild(unit, other, other, doublings, doublings + 1, depth)
            self._spare.append((unit, doublings))
            self._directory[first:last] = other << int(GROWN_BITS) | doublings + 1
        else:
            raise TableFull(
                f"{self._filled[unit]} keys share the first {depth} bits of their hash: one segment of the index "
                "holds no more"
            )

    def _take_units(self, doublings: int, segments: int = 1) -> int:
        """The first unit of empty segments, side by side."""
        for at, (unit, size) in enumerate(self._spare):
            if size == doublings:
                del self._spare[at]
                return unit
        unit, units = self._units, self._units + (segments << doublings)
        wanted = units << self._segment_bits
        if wanted > len(self._pool.array):
            self._pool.grow(grown(len(self._pool.array), wanted, _SLAB_ENTRIES))
            length = len(self._pool.array) >> self._segment_bits
            self._filled = _lengthened(self._filled, length)
            self._depths = _lengthened(self._depths, length)
        self._units = units
        return unit

    def _rebuild(
        self, unit: int, low: int, high: int, old_doublings: int, doublings: int, depth: int
    ) -> None:
        """Move the entries of segment ``unit`` to the segments ``low`` and ``high``."""
        bits = self._segment_bits
        pool = self._pool.array
        begin, size = unit << bits, 1 << bits + old_doublings
        old = pool[begin : begin + size].copy()
        pool[begin : begin + size] = 0
        count = int(self._filled[unit])
        self._filled[unit] = 0
        raised = distribute(
            old, pool, self._column.array, np.uint64(low << bits), np.uint64(high << bits),
            np.uint64((1 << bits + doublings) - 1), np.uint64(64 - depth if low != high else 0),
            self._salt, self._tag_mask,
        )  # fmt: skip
        self._filled[low] = count - raised
        self._filled[high] = raised if high != low else count
        self._depths[low] = self._depths[high] = depth


def _above(bits: int) -> np.uint32:
    """A mask of all but the lowest ``bits`` of 32."""
    return np.uint32(2**32 - (1 << bits))


def _lengthened(counts: Counts, length: int) -> Counts:
    longer = np.zeros(length, np.int64)
    longer[: len(counts)] = counts
    return longer
