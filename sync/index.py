"""From 64-bit keys to slots, and back: extendible hashing, vectorised over a batch.

A directory, by the top bits of a key's hash, names segments of 4,096 entries inside one pool; within a segment
entries are probed linearly from a home given by the lowest bits. A segment that is 3/4 full is split in two, so
growth costs tens of microseconds at a time and never rehashes everything (Fagin et al. 1979). Deletion shifts
entries back instead of leaving tombstones, so look-ups never slow down.

An entry is one uint32: slot + 1 in its low bits, above them the same bits of the hash as a tag; 0 is empty.
Equal tags are verified against the slot's key, which makes a look-up two cache lines: the kernels take keys
in blocks and prefetch one line for the whole block before they read the next.

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
from sync.kernel import i32, i64, inlined, inp, kernel, mix, out, prefetch, u32, u64, void
from sync.memory import GrowingArray, grown

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]
Entries = npt.NDArray[np.uint32]
Aims = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

MISSING: Final = -1

_SEGMENT_BITS: Final = 12
_SLOT_BITS: Final = 24
_MAX_DOUBLINGS: Final = 3
_SPARE_DEPTH: Final = 3
"""Directory places per segment, as a power of two, beyond which the directory does not grow."""
_SLAB_ENTRIES: Final = 2**18
_SLAB_ROWS: Final = 65_536
_AHEAD: Final = 20
"""How many keys the steps of a look-up are apart, for the lines that one asks for to have come when the next
reads them."""

# A place in the directory is unit << _GROWN_BITS | doublings: where a segment begins, in segment sizes, and how
# often it was doubled.
_GROWN_BITS: Final = np.uint64(4)
_GROWN: Final = np.uint64(15)

# Numba makes a float of uint64 with int64, and looks for a negative index unless it is unsigned.
_ONE: Final = np.uint64(1)
_TWO: Final = np.uint64(2)

# Look-ups on their way: a ring of rows.
_RING: Final = 64
_RING_MASK: Final = _RING - 1
_HASH: Final = 0
_BASE: Final = 1
_MASK: Final = 2
_AT: Final = 3
_FIELDS: Final = 4

# Counts that kernels change, by place.
_COUNT: Final = 0
_NEXT: Final = 1
_FREE_COUNT: Final = 2
_FREE_HEAD: Final = 3


@inlined
def _candidate(
    pool: Entries, base: np.uint64, mask: np.uint64, at: np.uint64, tag: np.uint32, tag_mask: np.uint32
) -> np.uint64:
    """From ``at`` on, the first entry that is empty or has ``tag``. Every segment has empty ones."""
    while True:
        entry = pool[base + at]
        if entry == 0 or entry & tag_mask == tag:
            return at
        at = (at + _ONE) & mask


@inlined
def _locate(
    pool: Entries,
    column: Keys,
    key: np.uint64,
    base: np.uint64,
    mask: np.uint64,
    at: np.uint64,
    tag: np.uint32,
    tag_mask: np.uint32,
) -> np.uint64:
    """From ``at`` on, the entry of ``key``, or the empty one that ends the search."""
    while True:
        entry = pool[base + at]
        if entry == 0:
            return at
        if entry & tag_mask == tag and column[np.uint64(entry & ~tag_mask) - _ONE] == key:
            return at
        at = (at + _ONE) & mask


@inlined
def _aim(
    pool: Entries,
    directory: Slots,
    key: np.uint64,
    salt: np.uint64,
    shift: np.uint64,
    unit_bits: np.uint64,
    aims: Aims,
    i: int,
) -> None:
    """The first step of a look-up: the hash, segment and home of key ``i``; asks for the home's line."""
    key_hash = mix(key ^ salt)
    place = np.uint64(directory[key_hash >> shift])
    base = (place >> _GROWN_BITS) << unit_bits
    mask = (_ONE << (unit_bits + (place & _GROWN))) - _ONE
    home = key_hash & mask
    prefetch(pool, np.int64(base + home))
    j = i & _RING_MASK
    aims[j, _HASH] = key_hash
    aims[j, _BASE] = base
    aims[j, _MASK] = mask
    aims[j, _AT] = home


@inlined
def _approach(pool: Entries, column: Keys, tag_mask: np.uint32, aims: Aims, i: int) -> None:
    """The second step: go to the first entry that may be key ``i``'s; asks for the line of the key it leads to."""
    j = i & _RING_MASK
    base, tag = aims[j, _BASE], np.uint32(aims[j, _HASH]) & tag_mask
    at = _candidate(pool, base, aims[j, _MASK], aims[j, _AT], tag, tag_mask)
    prefetch(column, np.int64(pool[base + at] & ~tag_mask) - 1)
    aims[j, _AT] = at


@inlined
def _arrive(pool: Entries, column: Keys, key: np.uint64, tag_mask: np.uint32, aims: Aims, i: int) -> np.int64:
    """The third step: the slot of ``key``, which is key ``i``, or MISSING."""
    j = i & _RING_MASK
    base, tag = aims[j, _BASE], np.uint32(aims[j, _HASH]) & tag_mask
    at = _locate(pool, column, key, base, aims[j, _MASK], aims[j, _AT], tag, tag_mask)
    return np.int64(pool[base + at] & ~tag_mask) - 1


@kernel(i64(inp(u32), inp(i32), inp(u64), inp(u64), out(i32), u64, u64, u64, u32))
def _find(
    pool: Entries,
    directory: Slots,
    column: Keys,
    keys: Keys,
    slots: Slots,
    salt: np.uint64,
    shift: np.uint64,
    unit_bits: np.uint64,
    tag_mask: np.uint32,
) -> int:
    """Fill ``slots`` (MISSING where unknown); returns how many are missing."""
    aims = np.empty((_RING, _FIELDS), np.uint64)
    count = keys.shape[0]
    missing = 0
    for step in range(count + 2 * _AHEAD):
        if step < count:
            _aim(pool, directory, keys[step], salt, shift, unit_bits, aims, step)
        i = step - _AHEAD
        if 0 <= i < count:
            _approach(pool, column, tag_mask, aims, i)
        i = step - 2 * _AHEAD
        if i >= 0:
            slot = _arrive(pool, column, keys[i], tag_mask, aims, i)
            slots[i] = slot
            missing += int(slot < 0)
    return missing


@kernel(
    i64(
        out(u32), inp(i32), out(i64), out(u64), out(u64), out(i64), inp(u64), out(i32), i64,
        u64, u64, u64, u32,
    )
)  # fmt: skip
def _insert(
    pool: Entries,
    directory: Slots,
    filled: Counts,
    column: Keys,
    live: Keys,
    counts: Counts,
    keys: Keys,
    slots: Slots,
    start: int,
    salt: np.uint64,
    shift: np.uint64,
    unit_bits: np.uint64,
    tag_mask: np.uint32,
) -> int:
    """Fill ``slots`` from ``start`` on, giving unknown keys the slot freed last or the next; where a key is
    given one, ``~slot`` is written. Returns where it stopped: at the end, or at an unknown key whose segment
    is full."""
    aims = np.empty((_RING, _FIELDS), np.uint64)
    count = keys.shape[0]
    next_slot, free_count, free_head = counts[_NEXT], counts[_FREE_COUNT], counts[_FREE_HEAD]
    added = 0
    stopped: int = count
    for step in range(start, count + 2 * _AHEAD):
        if step < count:
            _aim(pool, directory, keys[step], salt, shift, unit_bits, aims, step)
        i = step - _AHEAD
        if start <= i < count:
            _approach(pool, column, tag_mask, aims, i)
        i = step - 2 * _AHEAD
        if i < start:
            continue
        j = i & _RING_MASK
        base, mask, tag = aims[j, _BASE], aims[j, _MASK], np.uint32(aims[j, _HASH]) & tag_mask
        # Keys just before this one may have filled the place that it approached, but never emptied one.
        at = _locate(pool, column, keys[i], base, mask, aims[j, _AT], tag, tag_mask)
        entry = pool[base + at]
        if entry != 0:
            slots[i] = np.int64(entry & ~tag_mask) - 1
            continue
        unit = base >> unit_bits
        if filled[unit] >= np.int64(mask - (mask >> _TWO)):
            stopped = i
            break
        if free_count > 0:
            slot = free_head
            free_head = np.int64(column[slot])
            free_count -= 1
        else:
            slot = next_slot
            next_slot += 1
        added += 1
        filled[unit] += 1
        column[slot] = keys[i]
        live[slot >> 6] |= _ONE << np.uint64(slot & 63)
        pool[base + at] = tag | np.uint32(slot + 1)
        slots[i] = ~slot
    counts[_NEXT], counts[_FREE_COUNT], counts[_FREE_HEAD] = next_slot, free_count, free_head
    counts[_COUNT] += added
    return stopped


@kernel(
    void(out(u32), inp(i32), out(i64), out(u64), out(u64), out(i64), inp(u64), out(i32), u64, u64, u64, u32)
)
def _delete(
    pool: Entries,
    directory: Slots,
    filled: Counts,
    column: Keys,
    live: Keys,
    counts: Counts,
    keys: Keys,
    slots: Slots,
    salt: np.uint64,
    shift: np.uint64,
    unit_bits: np.uint64,
    tag_mask: np.uint32,
) -> None:
    """Remove ``keys``; ``slots`` gets the slot that each had (MISSING where unknown). A free slot's key is the
    slot freed before it."""
    aims = np.empty((_RING, _FIELDS), np.uint64)
    count = keys.shape[0]
    for step in range(count + 2 * _AHEAD):
        if step < count:
            _aim(pool, directory, keys[step], salt, shift, unit_bits, aims, step)
        i = step - _AHEAD
        if 0 <= i < count:
            _approach(pool, column, tag_mask, aims, i)
        i = step - 2 * _AHEAD
        if i < 0:
            continue
        j = i & _RING_MASK
        base, mask, tag = aims[j, _BASE], aims[j, _MASK], np.uint32(aims[j, _HASH]) & tag_mask
        # Removals just before this one may have shifted its entry back: search from its home again.
        hole = _locate(pool, column, keys[i], base, mask, aims[j, _HASH] & mask, tag, tag_mask)
        slot = np.int64(pool[base + hole] & ~tag_mask) - 1
        slots[i] = slot
        if slot < 0:
            continue
        # An entry may fill the hole unless its home lies cyclically after the hole (Knuth, 6.4, algorithm R).
        at = hole
        while True:
            at = (at + _ONE) & mask
            entry = pool[base + at]
            if entry == 0:
                break
            home = mix(column[np.uint64(entry & ~tag_mask) - _ONE] ^ salt) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                pool[base + hole] = entry
                hole = at
        pool[base + hole] = 0
        filled[base >> unit_bits] -= 1
        counts[_COUNT] -= 1
        live[slot >> 6] &= ~(_ONE << np.uint64(slot & 63))
        column[slot] = np.uint64(counts[_FREE_HEAD])
        counts[_FREE_HEAD] = slot
        counts[_FREE_COUNT] += 1


@kernel(i64(out(u32), out(u32), inp(u64), u64, u64, u64, u64, u64, u32))
def _distribute(
    old: Entries,
    pool: Entries,
    column: Keys,
    low: np.uint64,
    high: np.uint64,
    mask: np.uint64,
    bit: np.uint64,
    salt: np.uint64,
    tag_mask: np.uint32,
) -> int:
    """Enter the ``old`` entries (used up) into the empty segments that begin at ``low`` and ``high`` (may be the
    same), by the hash's bit number ``bit``. Returns how many went to ``high``."""
    # What could be branches here would be unpredictable ones.
    count = 0
    for i in range(old.shape[0]):
        entry = old[i]
        old[count] = entry
        count += int(entry != 0)
    raised = np.uint64(0)
    for i in range(count):
        # Past the last one this asks for lines of entries used up: no harm.
        prefetch(column, np.int64(old[min(i + _AHEAD, count - 1)] & ~tag_mask) - 1)
        entry = old[i]
        key_hash = mix(column[np.uint64(entry & ~tag_mask) - _ONE] ^ salt)
        upper = (key_hash >> bit) & _ONE
        raised += upper
        base = low + upper * (high - low)
        at = key_hash & mask
        while pool[base + at] != 0:
            at = (at + _ONE) & mask
        pool[base + at] = entry
    return int(raised)


@kernel(i64(inp(u64), i64, i64, out(i32)))
def _live(live: Keys, first: int, last: int, slots: Slots) -> int:
    """Fill ``slots`` with those of [first, last) whose bit is set; returns how many."""
    found = 0
    for slot in range(first, last):
        slots[found] = slot
        found += int((live[slot >> 6] >> np.uint64(slot & 63)) & _ONE != 0)
    return found


class KeyIndex:
    """The slot of every key and the key of every slot. Freed slots are given out again, the last freed first,
    before new ones.

    ``salt``: what keys are mixed with before hashing, any 64-bit number, from the system's randomness if not
    given. ``slot_bits`` of an entry hold its slot at first, more once slots need it. ``segment_bits``: the
    base-2 logarithm of a segment's entries.
    """

    __slots__ = (
        "_column", "_counts", "_depth", "_depths", "_directory", "_filled", "_live", "_pool", "_salt",
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
        self._counts: Counts = np.zeros(4, np.int64)

    def __len__(self) -> int:
        return int(self._counts[_COUNT])

    @property
    def slots(self) -> int:
        """One more than the largest slot ever given out."""
        return int(self._counts[_NEXT])

    @property
    def keys(self) -> Keys:
        """The key of each slot, ``[slots]``: a view that the next insertion may leave behind. Free slots hold
        anything."""
        return self._column.array[: self.slots]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, room for growth and the keys of slots included."""
        arrays = self._directory.nbytes + self._filled.nbytes + self._depths.nbytes
        return self._pool.nbytes + self._column.nbytes + self._live.nbytes + arrays

    def find(self, keys: Keys) -> tuple[Slots, int]:
        """The slot of each key ``[N]``, int32 (MISSING where unknown), and how many are unknown."""
        slots = np.empty(len(keys), np.int32)
        missing = _find(
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
        return slots[: _live(self._live.array, first, last, slots)]

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more keys. Raises TableFull, and then nothing changed."""
        if len(self) + extra > MAX_ROWS:
            raise TableFull(f"{len(self) + extra} keys are needed, {MAX_ROWS} are allowed")
        rows = self.slots + max(extra - int(self._counts[_FREE_COUNT]), 0)
        if rows > len(self._column.array):
            capacity = grown(len(self._column.array), rows, _SLAB_ROWS)
            self._column.grow(capacity)
            self._live.grow(-(-capacity // 64))
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
            done = _insert(
                self._pool.array, self._directory, self._filled, self._column.array, self._live.array,
                self._counts, keys, slots, done, self._salt, self._shift, self._unit_bits, self._tag_mask,
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
        slots = np.empty(len(keys), np.int32)
        _delete(
            self._pool.array, self._directory, self._filled, self._column.array, self._live.array,
            self._counts, keys, slots, self._salt, self._shift, self._unit_bits, self._tag_mask,
        )  # fmt: skip
        return slots

    def _make_room(self, key: np.uint64) -> None:
        """Split the full segment of ``key``, or double it where the directory may not grow. Raises TableFull."""
        hashed = int(mix(key ^ self._salt))
        place = int(self._directory[hashed >> 64 - self._depth])
        unit, doublings = place >> int(_GROWN_BITS), place & int(_GROWN)
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
            self._directory[middle:last] = other << int(_GROWN_BITS) | doublings
        elif doublings < _MAX_DOUBLINGS:
            other = self._take_units(doublings + 1)
            self._rebuild(unit, other, other, doublings, doublings + 1, depth)
            self._spare.append((unit, doublings))
            self._directory[first:last] = other << int(_GROWN_BITS) | doublings + 1
        else:
            raise TableFull(
                f"{self._filled[unit]} keys share the first {depth} bits of their hash: one segment of the index "
                "holds no more"
            )

    def _take_units(self, doublings: int) -> int:
        """The first unit of an empty segment."""
        for at, (unit, size) in enumerate(self._spare):
            if size == doublings:
                del self._spare[at]
                return unit
        unit, self._units = self._units, self._units + (1 << doublings)
        wanted = self._units << self._segment_bits
        if wanted > len(self._pool.array):
            self._pool.grow(grown(len(self._pool.array), wanted, _SLAB_ENTRIES))
            units = len(self._pool.array) >> self._segment_bits
            self._filled = _lengthened(self._filled, units)
            self._depths = _lengthened(self._depths, units)
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
        raised = _distribute(
            old, pool, self._column.array, np.uint64(low << bits), np.uint64(high << bits),
            np.uint64((1 << bits + doublings) - 1),
            np.uint64(64 - depth if low != high else 0), self._salt, self._tag_mask,
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
