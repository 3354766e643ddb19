"""The kernels of the key index: how keys are looked for, entered, removed and moved (``index.py`` says in what).

A batch of look-ups would spend its time waiting for memory, one line after the other. So every key goes through
three steps, each some keys behind the one before: its home is computed and asked for; the first entry there that
may be its own is found, and the key in that one's slot asked for; the two keys are compared. By the time a
step reads a line, it has come.

Homes are whole lines of 16 entries, which one instruction or two compare at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import first_in_line, i32, i64, inlined, inp, kernel, mix, out, prefetch, u32, u64, void

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Entries = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]
Aims = npt.NDArray[np.uint64]
"""Keys on their way: a ring of rows, one per key."""

MISSING: Final = -1

# A place in the directory is unit << GROWN_BITS | doublings: where a segment begins, in segment sizes, and how
# often it was doubled.
GROWN_BITS: Final = np.uint64(4)
GROWN: Final = np.uint64(15)

# Numba makes a float of uint64 with int64, and looks for a negative index unless it is unsigned.
_ONE: Final = np.uint64(1)
_TWO: Final = np.uint64(2)
_LINE: Final = np.uint64(16)
_LINES: Final = np.uint64(2**64 - 16)
_ALL: Final = np.uint64(2**64 - 1)
_FULL: Final = np.uint32(2**32 - 1)

# Columns of ``Aims``, and its rows: no fewer than the keys that are on their way.
_RING: Final = 64
_RING_MASK: Final = _RING - 1
_HASH: Final = 0
_BASE: Final = 1
_MASK: Final = 2
_AT: Final = 3
_FIELDS: Final = 4

# Counts that kernels change, by place.
COUNT: Final = 0
NEXT: Final = 1
FREE_COUNT: Final = 2

_AHEAD: Final = 20
"""How many keys the steps of a look-up are apart."""


@inlined
def _candidate(
    pool: Entries, base: np.uint64, mask: np.uint64, line: np.uint64, tag: np.uint32, tag_mask: np.uint32
) -> np.uint64:
    """From ``line`` on, the first entry that is empty or has ``tag``. Every segment has empty ones."""
    while True:
        at: np.uint64 = first_in_line(pool, base + line, tag, tag_mask)
        if at < _LINE:
            return line + at
        line = (line + _LINE) & mask


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
    base = (place >> GROWN_BITS) << unit_bits
    mask = (_ONE << (unit_bits + (place & GROWN))) - _ONE
    home = key_hash & mask & _LINES
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
def find_slots(
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
        out(u32), inp(i32), out(i64), out(u64), out(u64), inp(i32), out(i64), inp(u64), out(i32), i64,
        u64, u64, u64, u32,
    )
)  # fmt: skip
def insert_keys(
    pool: Entries,
    directory: Slots,
    filled: Counts,
    column: Keys,
    live: Keys,
    free: Slots,
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
    next_slot, free_count = counts[NEXT], counts[FREE_COUNT]
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
            free_count -= 1
            slot = np.int64(free[free_count])
            live[slot >> 6] |= _ONE << np.uint64(slot & 63)
        else:
            slot = next_slot
            next_slot += 1
        added += 1
        filled[unit] += 1
        column[slot] = keys[i]
        pool[base + at] = tag | np.uint32(slot + 1)
        slots[i] = ~slot
    # The slots that are new follow each other: not one by one, as each would wait for the one before.
    at = counts[NEXT]
    while at < next_slot:
        last = min((at | 63) + 1, next_slot)
        live[at >> 6] |= (_ALL >> np.uint64(64 - (last - at))) << np.uint64(at & 63)
        at = last
    counts[NEXT], counts[FREE_COUNT] = next_slot, free_count
    counts[COUNT] += added
    return stopped


@kernel(
    void(
        out(u32), inp(i32), out(i64), out(u64), out(u64), out(i32), out(i64), inp(u64), out(i32),
        u64, u64, u64, u32,
    )
)  # fmt: skip
def delete_keys(
    pool: Entries,
    directory: Slots,
    filled: Counts,
    column: Keys,
    live: Keys,
    free: Slots,
    counts: Counts,
    keys: Keys,
    slots: Slots,
    salt: np.uint64,
    shift: np.uint64,
    unit_bits: np.uint64,
    tag_mask: np.uint32,
) -> None:
    """Remove ``keys``; ``slots`` gets the slot that each had (MISSING where unknown). There must be
    room for them in ``free``."""
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
        hole = _locate(pool, column, keys[i], base, mask, aims[j, _HASH] & mask & _LINES, tag, tag_mask)
        slot = np.int64(pool[base + hole] & ~tag_mask) - 1
        slots[i] = slot
        if slot < 0:
            continue
        # An entry may fill the hole unless its home lies cyclically after the hole (Knuth, 6.4, algorithm R);
        # within one line it never does.
        at = hole
        while True:
            at = (at + _ONE) & mask
            entry = pool[base + at]
            if entry == 0:
                break
            if (at ^ hole) >= _LINE:
                home = mix(column[np.uint64(entry & ~tag_mask) - _ONE] ^ salt) & mask & _LINES
                if ((at - home) & mask) < ((at - hole) & mask):
                    continue
            pool[base + hole] = entry
            hole = at
        pool[base + hole] = 0
        filled[base >> unit_bits] -= 1
        counts[COUNT] -= 1
        live[slot >> 6] &= ~(_ONE << np.uint64(slot & 63))
        free[counts[FREE_COUNT]] = slot
        counts[FREE_COUNT] += 1


@kernel(i64(out(u32), out(u32), inp(u64), u64, u64, u64, u64, u64, u32))
def distribute(
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
        # A tag of 0 under a full mask: the first empty one.
        at = _candidate(pool, base, mask, key_hash & mask & _LINES, np.uint32(0), _FULL)
        pool[base + at] = entry
    return int(raised)


@kernel(i64(inp(u64), i64, i64, out(i32)))
def live_slots(live: Keys, first: int, last: int, slots: Slots) -> int:
    """Fill ``slots`` with those of [first, last) whose bit is set; returns how many."""
    found = 0
    for slot in range(first, last):
        slots[found] = slot
        found += int((live[slot >> 6] >> np.uint64(slot & 63)) & _ONE != 0)
    return found
