"""What changed lately: a bounded ring per table over one sequence per shard, and a scan for who is further
behind.

Every write of a row takes the next number of the shard's sequence, and the row's ``changed_at`` keeps the
newest. A ring entry counts only while its row still carries the entry's number; an older one was superseded
by a later entry. A reader at sequence s gets each row with ``changed_at`` > s once, at its newest value, in
the order of the sequence. So a reader that stops after any entry has missed nothing up to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import i32, i64, inp, kernel, out, u32, u64, void

Sequences = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

BEGINNING: Final = 0
_BINS: Final = 4_096


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader has come: a sequence number of one incarnation of a shard, compared by equality of the
    incarnation only. ``Cursor()`` stands before everything. ``floor``: the shard had forgotten the graves up to
    there when the reader began. ``table`` (-1: none): of the tables that it reads, the one in which it still goes
    through all rows, from ``slot`` on; what changes meanwhile comes after.
    """

    incarnation: int = 0
    sequence: int = BEGINNING
    floor: int = BEGINNING
    table: int = -1
    slot: int = 0


@kernel(void(inp(i32), inp(u64), inp(u32), i64, out(u64), out(u32), out(i64), out(i64), out(i32)))
def mark_changed(
    slots: Slots,
    time: npt.NDArray[np.uint64],
    writer: npt.NDArray[np.uint32],
    sequence: int,
    version_time: npt.NDArray[np.uint64],
    version_writer: npt.NDArray[np.uint32],
    changed_at: Sequences,
    ring_sequences: Sequences,
    ring_slots: Slots,
) -> None:
    """Stamp each slot [N] with its version (``time``, ``writer`` [N]) and the numbers after ``sequence``, and
    enter it into the ring, whose next place is kept in the extra last element of ``ring_sequences``."""
    capacity = ring_slots.shape[0]
    at = int(ring_sequences[capacity])
    for i in range(slots.shape[0]):
        slot = slots[i]
        version_time[slot] = time[i]
        version_writer[slot] = writer[i]
        changed_at[slot] = sequence + i + 1
        ring_sequences[at] = sequence + i + 1
        ring_slots[at] = slot
        at = at + 1 if at + 1 < capacity else 0
    ring_sequences[capacity] = at


@kernel(i64(i64, i64, inp(i64), inp(i64), inp(i32), out(i64), out(i32)))
def _collect(
    after: int,
    limit: int,
    changed_at: Sequences,
    ring_sequences: Sequences,
    ring_slots: Slots,
    sequences: Sequences,
    slots: Slots,
) -> int:
    """The oldest ``limit`` valid entries after ``after``, ascending; returns how many there are."""
    capacity = ring_slots.shape[0]
    start = ring_sequences[capacity]
    # From the oldest place on, numbers ascend (unused places hold 0): find the first above ``after``.
    low = 0
    high = capacity
    while low < high:
        middle = (low + high) // 2
        if ring_sequences[(start + middle) % capacity] <= after:
            low = middle + 1
        else:
            high = middle
    found = 0
    for i in range(low, capacity):
        if found == limit:
            break
        at = (start + i) % capacity
        slot = ring_slots[at]
        if changed_at[slot] == ring_sequences[at]:
            sequences[found] = ring_sequences[at]
            slots[found] = slot
            found += 1
    return found


@kernel(i64(i64, i64, i64, inp(i64)))
def _bound(after: int, newest: int, limit: int, changed_at: Sequences) -> int:
    """A number up to which at least ``limit`` rows (or all) changed after ``after``, and not many more:
    found by a histogram, so that a reader far behind does not sort the whole table for every page."""
    shift = 0
    while (newest - after) >> shift >= _BINS:
        shift += 1
    counts = np.zeros(_BINS, np.int64)
    for i in range(changed_at.shape[0]):
        if changed_at[i] > after:
            counts[(changed_at[i] - after - 1) >> shift] += 1
    total = 0
    for i in range(_BINS):
        total += counts[i]
        if total >= limit:
            return after + ((i + 1) << shift)
    return newest


class ChangeRing:
    """The newest changes of one table."""

    __slots__ = ("_base", "ring_sequences", "ring_slots")

    def __init__(self, capacity: int, base: int = BEGINNING) -> None:
        """``base``: changes up to it were never entered."""
        self._base = base
        self.ring_sequences: Sequences = np.zeros(capacity + 1, np.int64)
        self.ring_slots: Slots = np.zeros(capacity, np.int32)

    @property
    def floor(self) -> int:
        """Every change after this number is in the ring."""
        capacity = len(self.ring_slots)
        # The oldest entry's predecessor within this table may have been evicted, so the floor is the number
        # just before the oldest entry; an unused oldest place holds 0 and nothing was evicted.
        oldest = int(self.ring_sequences[self.ring_sequences[capacity]])
        return max(self._base, oldest - 1)

    def after(self, sequence: int, limit: int, changed_at: Sequences) -> tuple[Sequences, Slots]:
        """The oldest ``limit`` changes after ``sequence``, ascending. ``changed_at`` [R] is the table's
        column.

        Falls back to a scan of ``changed_at`` where the ring does not reach back to ``sequence``.
        """
        if sequence < self.floor:
            return scan(sequence, limit, changed_at)
        room = min(limit, len(self.ring_slots))
        sequences = np.empty(room, np.int64)
        slots = np.empty(room, np.int32)
        found = _collect(sequence, room, changed_at, self.ring_sequences, self.ring_slots, sequences, slots)
        return sequences[:found], slots[:found]


def scan(sequence: int, limit: int, changed_at: Sequences) -> tuple[Sequences, Slots]:
    """What ``ChangeRing.after`` returns, by looking at every row."""
    newest = int(changed_at.max(initial=BEGINNING))
    bound = _bound(sequence, newest, limit, changed_at) if newest > sequence else sequence
    slots = np.flatnonzero((changed_at > sequence) & (changed_at <= bound))
    order = np.argsort(changed_at[slots])[:limit]
    slots = slots[order]
    return changed_at[slots], slots.astype(np.int32)
