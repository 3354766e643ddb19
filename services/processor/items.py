"""What a batch of events changes of items: attributes set by item events, counts of likes.

Attributes are written by whoever owns the item's partition of the log. Likes arrive in the partitions of
their users, and each partition's counts have a cell of their own. So no cell has two writers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np

from featurestore import counters
from featurestore.online import Cell, Value
from featurestore.schema import RESERVED_ATTRIBUTES, Schema
from services.catalogue import DELETED, FIRST_SEEN
from services.events import ItemEvent

Cells = Mapping[str, Cell]
_NO_CELLS: Final[Cells] = {}
CLEARED: Final = "@cleared_ms"
"""When an event last cleared all attributes that it did not name (Unix ms)."""


def merge_attributes(
    schema: Schema,
    entity: str,
    stored: Mapping[str, Cell],
    given: Mapping[str, object],
    time_ms: int,
    *,
    replace: bool,
) -> dict[str, Cell]:
    """The cells to write when an event at ``time_ms`` sets attributes (and, with ``replace``, clears others).

    ``given`` was validated. An attribute set by a later event stays as it is, and so does one that a later event
    cleared without its ever having been here: so late and repeated events do no harm.
    """
    written = {}
    cleared = stored.get(CLEARED)
    for name, value in given.items():
        known = stored.get(name, cleared)
        if known is None or known.event_time_ms <= time_ms:
            written[name] = schema.cell(entity, name, cast(Value, value), time_ms)
    if replace:
        if cleared is None or cleared.event_time_ms <= time_ms:
            written[CLEARED] = Cell(time_ms, time_ms)
        for name, cell in stored.items():
            if name not in given and cell.event_time_ms <= time_ms and _is_attribute(schema, entity, name):
                written[name] = Cell(None, time_ms)
    return written


def _is_attribute(schema: Schema, entity: str, name: str) -> bool:
    managed = any(f.managed and name in (f.name, f.attribute) for f in schema.of(entity))
    return not managed and "@" not in name and name not in RESERVED_ATTRIBUTES


@dataclass(slots=True)
class ItemUpdates:
    """Changes of items, collected over a batch. ``stored`` are the cells read before it."""

    schema: Schema
    stored: Mapping[str, Cells]
    written: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def cells(self, item_id: str) -> dict[str, Cell]:
        """The item's cells as of now."""
        return {**self.stored.get(item_id, _NO_CELLS), **self.written.get(item_id, _NO_CELLS)}

    def see(self, item_id: str, accepted_at_ms: int) -> None:
        """The item occurred; if it was unknown, it exists from now on."""
        if FIRST_SEEN not in self.stored.get(item_id, _NO_CELLS) and item_id not in self.written:
            self.written[item_id] = {FIRST_SEEN: Cell(accepted_at_ms, accepted_at_ms)}

    def apply(self, event: ItemEvent, time_ms: int, accepted_at_ms: int) -> None:
        """An item event. A deleted item stays hidden until an event that replaces it whole."""
        self.see(event.item_id, accepted_at_ms)
        cells = self.cells(event.item_id)
        written = merge_attributes(
            self.schema, "item", cells, event.attributes, time_ms, replace=event.replace and not event.deleted
        )
        if event.deleted or (event.replace and DELETED in cells):
            before = cells.get(DELETED, cells.get(CLEARED))
            if before is None or before.event_time_ms <= time_ms:
                written[DELETED] = Cell(event.deleted, time_ms)
        self.written.setdefault(event.item_id, {}).update(written)

    def write(self, item_id: str, name: str, cell: Cell) -> None:
        """Set one cell."""
        self.written.setdefault(item_id, {})[name] = cell


@dataclass(slots=True)
class Likes:
    """Likes of one partition, in the order of its log."""

    items: list[str] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, item_id: str, time_ms: int, offset: int) -> None:
        """One more."""
        self.items.append(item_id)
        self.times_ms.append(time_ms)
        self.offsets.append(offset)


def count_likes(
    updates: ItemUpdates, partition: int, likes: Likes, log: int, half_lives: Sequence[float]
) -> None:
    """Add a partition's likes to its counters, skipping those that were counted before."""
    name = counters.cell_name(partition)
    row_of = {item: row for row, item in enumerate(dict.fromkeys(likes.items))}
    stored = [_bytes_of(updates.stored.get(item, _NO_CELLS), name) for item in row_of]
    rows = np.fromiter((row_of[item] for item in likes.items), np.int64, len(likes.items))
    counts = counters.add(
        counters.decode(stored, half_lives),
        rows,
        np.array(likes.times_ms, np.int64),
        np.array(likes.offsets, np.int64),
        np.ones(len(rows)),
        log=log,
        half_lives=half_lives,
    )
    times: list[int] = counts.decayed.time_ms.tolist()
    for item, data, time_ms in zip(row_of, counters.encode(counts, half_lives), times, strict=True):
        updates.write(item, name, Cell(data, time_ms))


def _bytes_of(cells: Cells, name: str) -> bytes | None:
    value = cells[name].value if name in cells else None
    return value if isinstance(value, bytes) else None
