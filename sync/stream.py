"""Reading a shard's change stream: what a reader gets next, over all tables that it follows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING, Cursor
from sync.pushes import Watermark
from sync.table import Table

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Watermarks = dict[tuple[str, int], Watermark]


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows that changed, each once and at its newest value; deleted ones at their initial value.

    ``parts``: table → (keys [N] uint64, rows [N, dim] float32). ``cursor``: where to go on. ``complete``:
    nothing of the asked tables is left; else ask again at once. ``reset``: the cursor was of another
    incarnation, or older than what is known of deletions, so everything stored is told again.
    ``watermarks``: what the reader now has seen; empty unless ``complete``.
    """

    parts: dict[str, tuple[Keys, Rows]]
    cursor: Cursor
    complete: bool
    reset: bool
    watermarks: Watermarks


def changes_after(
    cursor: Cursor, end: Cursor, tables: Sequence[Table], limit: int, watermarks: Callable[[], Watermarks]
) -> Changes:
    """At most ``limit`` rows of ``tables`` that changed after ``cursor``; ``end`` is the present end of the stream.

    A cursor that does not belong to the stream starts over, with all rows in the order in which they are stored.
    """
    known = cursor.floor == end.floor or cursor.sequence >= end.floor
    inside = BEGINNING <= cursor.sequence <= end.sequence
    reset = cursor.incarnation != end.incarnation or not (known and inside)
    if reset or (0 <= cursor.table < len(tables) and cursor.slot >= 0):
        # Asking for the oldest changes of all would look at every row for every page.
        start = replace(end, table=0, slot=0) if reset else cursor
        found = _all_rows(start, end, tables, limit)
    else:
        found = _newer(cursor.sequence, end, tables, limit)
    seen = watermarks() if found.complete else {}
    return replace(found, reset=reset, watermarks=seen)


def _newer(after: int, end: Cursor, tables: Sequence[Table], limit: int) -> Changes:
    """What changed after number ``after``, the longest unchanged first."""
    # A table's oldest changes suffice: the oldest of all tables together are among them.
    found = [(table, *table.changed_after(after, limit + 1)) for table in tables]
    numbers = np.concatenate([sequences for _, sequences, _ in found] or [np.zeros(0, np.int64)])
    complete = len(numbers) <= limit
    last = end.sequence if complete else int(np.partition(numbers, limit - 1)[limit - 1])
    parts = {}
    for table, sequences, slots in found:
        kept = slots[: np.searchsorted(sequences, last, side="right")]
        if len(kept):
            parts[table.spec.name] = table.read(kept)
    return Changes(parts, replace(end, sequence=last), complete, False, {})


def _all_rows(cursor: Cursor, end: Cursor, tables: Sequence[Table], limit: int) -> Changes:
    """The rows from the cursor's table and slot on. What changes meanwhile comes after its sequence."""
    parts = {}
    number, slot, room = cursor.table, cursor.slot, limit
    while number < len(tables) and room > 0:
        keys, rows, following = tables[number].values_from(slot, room)
        if len(keys):
            parts[tables[number].spec.name] = keys, rows
        if following:
            # Fewer rows than there is room for, where slots are free; the rest of the table is the next answer.
            slot = following
            break
        room -= max(len(keys), 1)
        number, slot = number + 1, 0
    done = number >= len(tables)
    complete = done and cursor.sequence == end.sequence
    return Changes(parts, replace(cursor, table=-1 if done else number, slot=slot), complete, False, {})
