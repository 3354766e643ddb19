"""What changed lately: a bounded ring per table over one sequence per shard, and a scan for who is further
behind.

Every write of a row takes the next number of the shard's sequence, and the row's ``changed_at`` keeps the
newest. A ring entry counts only while its row still carries the entry's number; an older one was superseded
by a later entry. A reader at sequence s gets each row with ``changed_at`` > s once, at its newest value, in
the order of the sequence. So a reader that stops after any entry has missed nothing up to it.

The ring is also the update cache of replication (Ekko): every row that is written enters it, and the versions of
what is evicted join the dominator. So every stored row whose version the dominator does not cover is in the
ring, and who knows what the dominator knows can be answered from the ring alone. Entries are evicted in groups as
they were entered, whether their rows were written again or not: looking at each row would cost a push more than the
entering.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.columns import Columns
from sync.kernel import f32, i32, i64, inlined, inp, kernel, out, place_of, prefetch, u32, u64, void
from sync.knowledge import Known, joined, vector_of

Sequences = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]
Priorities = npt.NDArray[np.float32]

BEGINNING: Final = 0
_BINS: Final = 4_096
_RECENT: Final = 4_096
"""Entries that say which priorities are high at the moment."""
_AHEAD: Final = 24
"""How many rows before its turn the memory of one is asked for."""
_GROUPS: Final = 1_024
"""In how many parts, about, the ring is evicted: so much of it is thought gone a little early."""
_LEAST: Final = float(np.finfo(np.float32).smallest_subnormal)
"""The least priority that is not 0, the one of what was copied rather than written."""


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


@kernel(
    void(
        inp(i32), inp(u64), inp(u32), inp(f32), i64, out(u64), out(u32), out(i64), out(i64), out(i32), out(f32)
    )
)  # fmt: skip
def _mark(
    slots: Slots,
    time: Times,
    writer: Writers,
    priority: Priorities,
    sequence: int,
    version_time: Times,
    version_writer: Writers,
    changed_at: Sequences,
    ring_sequences: Sequences,
    ring_slots: Slots,
    ring_priorities: Priorities,
) -> None:
    """Stamp each slot [N] with its version (``time``, ``writer`` [N]) and the numbers after ``sequence``, and
    enter it into the ring, whose next place is kept in the extra last element of ``ring_sequences``."""
    capacity = ring_slots.shape[0]
    at = int(ring_sequences[capacity])
    for i in range(slots.shape[0]):
        # Rows that were not touched for long: their lines come from memory, all the faster together.
        if i + _AHEAD < slots.shape[0]:
            next_slot = int(slots[i + _AHEAD])
            prefetch(version_time, next_slot)
            prefetch(version_writer, next_slot)
            prefetch(changed_at, next_slot)
        slot = slots[i]
        version_time[slot] = time[i]
        version_writer[slot] = writer[i]
        changed_at[slot] = sequence + i + 1
        ring_sequences[at] = sequence + i + 1
        ring_slots[at] = slot
        ring_priorities[at] = priority[i]
        at = at + 1 if at + 1 < capacity else 0
    ring_sequences[capacity] = at


@inlined
def _first_after(after: int, start: int, capacity: int, ring_sequences: Sequences) -> int:
    """How many of the ring's places, from the oldest one at ``start`` on, hold no entry after ``after``."""
    # From the oldest place on, numbers ascend (unused places hold 0).
    low = 0
    high = capacity
    while low < high:
        middle = (low + high) // 2
        if ring_sequences[(start + middle) % capacity] <= after:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(i64(i64, f32, inp(i64), inp(i64), inp(i32), inp(f32), out(i64), out(i32)))
def _urgent(
    after: int,
    least: float,
    changed_at: Sequences,
    ring_sequences: Sequences,
    ring_slots: Slots,
    ring_priorities: Priorities,
    sequences: Sequences,
    slots: Slots,
) -> int:
    """The entries after ``after`` with a priority of at least ``least``, ascending, also of rows that were written
    again since, with a lower one: what they hold now contains it. Returns how many."""
    capacity = ring_slots.shape[0]
    start = int(ring_sequences[capacity])
    found = 0
    first = _first_after(after, start, capacity, ring_sequences)
    following = (start + first) % capacity
    for _ in range(first, capacity):
        at = following
        following = at + 1 if at + 1 < capacity else 0
        # A place that was freed since holds 0.
        if ring_priorities[at] >= least and changed_at[ring_slots[at]] >= ring_sequences[at]:
            sequences[found] = ring_sequences[at]
            slots[found] = ring_slots[at]
            found += 1
    return found


@kernel(
    i64(inp(u64), inp(u32), inp(i64), inp(u64), inp(u32), inp(i64), inp(i32), out(i64), out(i32))
)  # fmt: skip
def _uncovered(
    known_times: Times,
    known_writers: Writers,
    changed_at: Sequences,
    version_time: Times,
    version_writer: Writers,
    ring_sequences: Sequences,
    ring_slots: Slots,
    sequences: Sequences,
    slots: Slots,
) -> int:
    """The valid entries whose versions the vector (``known_times``, ``known_writers``) does not cover, ascending;
    returns how many."""
    capacity = ring_slots.shape[0]
    start = int(ring_sequences[capacity])
    count = known_writers.shape[0]
    known = 0
    found = 0
    first = _first_after(0, start, capacity, ring_sequences)
    following = (start + first) % capacity
    for i in range(first, capacity):
        at = following
        following = at + 1 if at + 1 < capacity else 0
        if i + _AHEAD < capacity:
            ahead = at + _AHEAD
            next_slot = int(ring_slots[ahead if ahead < capacity else ahead - capacity])
            prefetch(changed_at, next_slot)
            prefetch(version_time, next_slot)
            prefetch(version_writer, next_slot)
        slot = ring_slots[at]
        if changed_at[slot] != ring_sequences[at]:
            continue
        writer = version_writer[slot]
        if known >= count or known_writers[known] != writer:
            known = place_of(known_writers, writer)
        if known == count or version_time[slot] > known_times[known]:
            sequences[found] = ring_sequences[at]
            slots[found] = slot
            found += 1
    return found


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
    start = int(ring_sequences[capacity])
    found = 0
    first = _first_after(after, start, capacity, ring_sequences)
    following = (start + first) % capacity
    for _ in range(first, capacity):
        if found == limit:
            break
        at = following
        following = at + 1 if at + 1 < capacity else 0
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


@dataclass(slots=True)
class _Group:
    """Entries that are evicted together: the ``begin``-th to the one before the ``end``-th ever entered, and the least
    knowledge that covers their versions."""

    begin: int
    end: int
    vector: dict[int, int]


class ChangeRing:
    """The newest changes of one table."""

    __slots__ = (
        "_base", "_entered", "_groups", "dominator", "ring_priorities", "ring_sequences", "ring_slots",
    )  # fmt: skip

    def __init__(self, capacity: int, base: int = BEGINNING) -> None:
        """``base``: changes up to it were never entered."""
        self._base = base
        self._entered = 0
        self._groups: deque[_Group] = deque()
        self.ring_sequences: Sequences = np.zeros(capacity + 1, np.int64)
        self.ring_slots: Slots = np.zeros(capacity, np.int32)
        self.ring_priorities: Priorities = np.zeros(capacity, np.float32)
        self.dominator: dict[int, int] = {}
        """By writer: a row whose version is newer than this is in the ring."""

    def enter(
        self,
        slots: Slots,
        time: Times,
        writer: Writers,
        priority: Priorities,
        sequence: int,
        columns: Columns,
    ) -> None:
        """Stamp ``slots`` [N] in ``columns`` with their versions [N] and the numbers after ``sequence``, and enter
        them with their ``priority`` [N]."""
        capacity = len(self.ring_slots)
        for first in range(0, len(slots), capacity):
            some = slice(first, first + capacity)
            _mark(
                slots[some], time[some], writer[some], priority[some], sequence + first,
                columns.version_time, columns.version_writer, columns.changed_at,
                self.ring_sequences, self.ring_slots, self.ring_priorities,
            )  # fmt: skip
        if len(slots):
            self._evict(time, writer)

    def _evict(self, time: Times, writer: Writers) -> None:
        """Note the versions of what was entered just now, and of all that this drove out."""
        capacity, last = len(self.ring_slots), self._groups[-1] if self._groups else None
        begin, self._entered = self._entered, self._entered + len(time)
        vector = vector_of(time, writer)
        if last is not None and (last.end - last.begin) * _GROUPS < capacity:
            last.end, last.vector = self._entered, joined(last.vector, vector)
        else:
            self._groups.append(_Group(begin, self._entered, vector))
        while self._groups and self._groups[0].begin < self._entered - capacity:
            self.dominator = joined(self.dominator, self._groups.popleft().vector)

    def uncovered(self, known: Known, columns: Columns) -> tuple[Sequences, Slots] | None:
        """The changes whose versions ``known`` does not cover: numbers, ascending, and slots. None where the ring does
        not reach back to all of them."""
        if not known.covers(self.dominator):
            return None
        room = min(len(self.ring_slots), self._entered)
        sequences, slots = np.empty(room, np.int64), np.empty(room, np.int32)
        found = _uncovered(
            known.times, known.writers, columns.changed_at, columns.version_time, columns.version_writer,
            self.ring_sequences, self.ring_slots, sequences, slots,
        )  # fmt: skip
        return sequences[:found].copy(), slots[:found].copy()

    def urgent(self, sequence: int, least: float, changed_at: Sequences) -> tuple[Sequences, Slots]:
        """The changes after ``sequence``, as far as the ring reaches back, whose priority is at least ``least`` and not
        0: numbers, ascending, and slots. A slot that changed again since is among them, maybe several times."""
        room = self._room(sequence)
        sequences, slots = np.empty(room, np.int64), np.empty(room, np.int32)
        least = max(float(np.float32(least)), _LEAST)
        rings = self.ring_sequences, self.ring_slots, self.ring_priorities
        found = _urgent(sequence, least, changed_at, *rings, sequences, slots)
        return sequences[:found], slots[:found]

    def quantile(self, share: float) -> float:
        """The priority that ``share`` of the ring's newest entries have at least; infinite for a share of 0."""
        capacity = len(self.ring_slots)
        at = int(self.ring_sequences[capacity])
        recent = np.arange(at - min(capacity, _RECENT), at) % capacity
        known = self.ring_priorities[recent[self.ring_sequences[recent] > 0]]
        # A rank, not an interpolation: some priorities are infinite.
        rank = min(math.ceil(share * len(known)), len(known))
        return float(np.partition(known, len(known) - rank)[len(known) - rank]) if rank > 0 else math.inf

    def _room(self, sequence: int) -> int:
        """How many changes after ``sequence`` the ring may hold."""
        capacity = len(self.ring_slots)
        newest = int(self.ring_sequences[(int(self.ring_sequences[capacity]) - 1) % capacity])
        return max(0, min(capacity, newest - sequence))

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
        room = min(limit, self._room(sequence))
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
