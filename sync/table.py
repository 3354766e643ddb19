"""A table's rows in one shard: index, columns, initial values and optimiser behind pull and push.

A push has two halves. ``prepare`` checks it, sums the gradients of repeated keys, finds the rows and makes
room; it changes no row and is where everything that can fail does. ``apply`` only writes. So a shard can
prepare all parts of a push before it applies the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.changes import ChangeRing, Sequences, mark_changed
from sync.columns import MAX_ROWS, Columns
from sync.errors import BadShape, SnapshotDamaged
from sync.index import KeyIndex
from sync.initial import InitialValues
from sync.kernel import f32, i32, inp, kernel, out, void
from sync.optimisers import APPLY, group, measure, sum_groups
from sync.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]

STORED: Final = ("keys", "values", "state", "version_time", "version_writer", "touched_s")
"""The columns that a snapshot holds."""


@kernel(void(inp(f32, 2), inp(i32), out(f32, 2)))
def _gather(values: Rows, slots: Slots, rows: Rows) -> None:
    """Copy the values of each slot [N] into ``rows`` [N, dim], leaving those with a negative slot."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot >= 0:
            for column in range(rows.shape[1]):
                rows[i, column] = values[slot, column]


@kernel(void(inp(f32, 2), inp(i32), out(f32, 2)))
def _scatter(rows: Rows, slots: Slots, values: Rows) -> None:
    """Copy each of ``rows`` [N, dim] to its slot [N]."""
    for i in range(slots.shape[0]):
        for column in range(rows.shape[1]):
            values[slots[i], column] = rows[i, column]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A part that may be applied: distinct keys [U], summed gradients [U, dim], their sums of squares [U],
    the slots of the rows that exist (negative where they do not), and the newest version time among
    those."""

    keys: Keys
    gradients: Rows
    squares: Rows
    slots: Slots
    missing: int
    newest: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every row of one push is marked with: its version (time, writer) and when it was touched."""

    time: int
    writer: int
    touched_s: int


class Refused(Exception):
    """The gradients must not reach a row: one is not finite, or has exploded. The message names its key."""


class Table:
    """The rows of one table in one shard. One thread uses it."""

    __slots__ = ("_apply", "_columns", "_epsilon", "_index", "_initial", "_limit", "_rate", "_ring", "spec")

    def __init__(self, spec: TableSpec, change_capacity: int, max_rows: int = MAX_ROWS) -> None:
        self.spec = spec
        self._columns = Columns(spec.dim, spec.state_dim, max_rows)
        self._index = KeyIndex()
        self._initial = InitialValues(spec)
        self._ring = ChangeRing(change_capacity)
        self._apply = APPLY[spec.optimiser.kind]
        self._rate = np.float32(spec.optimiser.rate)
        self._epsilon = np.float32(spec.optimiser.epsilon)
        self._limit = np.float32(spec.max_norm) * np.float32(spec.max_norm)

    def __len__(self) -> int:
        """How many rows are stored."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, room for growth included, without the index."""
        columns = self._columns
        return columns.capacity * (4 * (self.spec.dim + self.spec.state_dim) + 8 + 8 + 4 + 4 + 8)

    def check_keys(self, keys: object) -> Keys:
        """``keys`` as kernels take them: uint64 ``[N]``, contiguous. Raises BadShape."""
        if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype != np.uint64:
            raise BadShape(f"table {self.spec.name}: keys are {_describe(keys)}, not uint64 [N]")
        found: Keys = np.require(keys, np.uint64, ["C", "A"])
        if self.spec.rows and len(found) and int(found.max()) >= self.spec.rows:
            raise BadShape(
                f"table {self.spec.name}: key {found.max()} is not below its {self.spec.rows} rows"
            )
        return found

    def check_gradients(self, gradients: object, count: int) -> Rows:
        """``gradients`` as kernels take them: float32 ``[count, dim]``, contiguous. Raises BadShape."""
        shape = (count, self.spec.dim)
        if not isinstance(gradients, np.ndarray) or gradients.shape != shape or gradients.dtype != np.float32:
            wanted = f"float32 [{count}, {self.spec.dim}]"
            raise BadShape(f"table {self.spec.name}: gradients are {_describe(gradients)}, not {wanted}")
        found: Rows = np.require(gradients, np.float32, ["C", "A"])
        return found

    def pull(self, keys: Keys) -> Rows:
        """The values of ``keys`` ``[N]``: float32 ``[N, dim]``. Unknown ones have their initial values;
        nothing is stored."""
        slots, missing = self._index.find(keys)
        rows = np.empty((len(keys), self.spec.dim), np.float32)
        _gather(self._columns.values, slots, rows)
        if missing:
            self._initial.fill_missing(keys, slots, rows)
        return rows

    def initial(self, keys: Keys) -> Rows:
        """The values that ``keys`` ``[N]`` have before their first push: float32 ``[N, dim]``."""
        return self._initial.rows(keys)

    def prepare(self, keys: Keys, gradients: Rows) -> Prepared:
        """Check and sum checked ``keys`` ``[N]`` and ``gradients`` ``[N, dim]``; make room for new rows.

        Raises Refused naming the key whose gradient is not finite or exceeds ``max_norm``, after summing as
        before; TableFull where new rows find no room. No row changes.
        """
        # Repeated keys could hide a NaN from nobody, but two finite gradients may overflow when summed; so
        # the sums are what is measured, and they contain every NaN and infinity of their terms.
        keys, gradients = _sum_repeated(keys, gradients)
        squares = np.empty(len(keys), np.float32)
        bad = measure(gradients, self._limit, squares)
        if bad >= 0:
            norm = float(np.sqrt(np.sum(np.square(gradients[bad].astype(np.float64)))))
            what = f"norm {norm:.3g} above {self.spec.max_norm:g}" if np.isfinite(norm) else "NaN or infinity"
            raise Refused(f"table {self.spec.name}: the gradient of key {int(keys[bad])} has {what}")
        slots, missing = self._index.find(keys)
        self._index.reserve(missing)
        self._columns.reserve(self._index.slots + missing)
        known = slots[slots >= 0] if missing else slots
        newest = int(self._columns.version_time[known].max()) if len(known) else 0
        return Prepared(keys, gradients, squares, slots, missing, newest)

    def apply(self, part: Prepared, stamp: Stamp, sequence: int) -> int:
        """Write a part: new rows start at their initial values with zero state, the optimiser steps, every
        row gets ``stamp`` and the next numbers after ``sequence``. Returns the last number given."""
        columns, slots = self._columns, part.slots
        if part.missing:
            slots = self._insert_missing(part)
        self._apply(
            columns.values, columns.state, slots, part.gradients, part.squares, self._rate, self._epsilon
        )
        mark_changed(
            slots,
            np.uint64(stamp.time),
            np.uint32(stamp.writer),
            np.uint32(stamp.touched_s),
            sequence,
            columns.version_time,
            columns.version_writer,
            columns.touched_s,
            columns.changed_at,
            self._ring.ring_sequences,
            self._ring.ring_slots,
        )
        return sequence + len(slots)

    def changed_after(self, sequence: int, limit: int) -> tuple[Sequences, Slots]:
        """The oldest ``limit`` rows that changed after ``sequence``: their numbers, ascending, and slots."""
        return self._ring.after(sequence, limit, self._columns.changed_at[: self._index.slots])

    def read(self, slots: Slots) -> tuple[Keys, Rows]:
        """Copies of the keys and values of ``slots`` ``[N]``."""
        rows = np.empty((len(slots), self.spec.dim), np.float32)
        _gather(self._columns.values, slots, rows)
        return self._columns.keys[slots], rows

    def versions(self, keys: Keys) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Version time and writer of ``keys`` ``[N]``; (0, 0) where no row is stored."""
        slots, _ = self._index.find(keys)
        known = slots >= 0
        time, writer = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint32)
        time[known] = self._columns.version_time[slots[known]]
        writer[known] = self._columns.version_writer[slots[known]]
        return time, writer

    def export(self, *, copy: bool = True) -> dict[str, npt.NDArray[np.generic]]:
        """All stored columns, by name, for a snapshot; slots keep their order. Without ``copy``, views that
        the next push invalidates."""
        rows = self._index.slots
        stored = {name: getattr(self._columns, name)[:rows] for name in STORED}
        return {name: column.copy() for name, column in stored.items()} if copy else stored

    def load(self, stored: dict[str, npt.NDArray[np.generic]], sequence: int) -> int:
        """Fill an empty table from ``export``'s columns. Every row counts as changed, with the numbers after
        ``sequence``; returns the last. Raises SnapshotDamaged where a key occurs twice."""
        count = len(stored["keys"])
        columns = self._columns
        columns.reserve(count)
        for name in STORED:
            getattr(columns, name)[:count] = stored[name]
        columns.changed_at[:count] = np.arange(sequence + 1, sequence + count + 1)
        slots = self._index.insert(columns.keys[:count].copy())
        if len(self._index) != count or not np.array_equal(slots, np.arange(count)):
            raise SnapshotDamaged(f"table {self.spec.name}: a key occurs more than once")
        self._ring = ChangeRing(len(self._ring.ring_slots), sequence + count)
        return sequence + count

    def _insert_missing(self, part: Prepared) -> Slots:
        slots = self._index.insert(part.keys)
        fresh = part.slots < 0
        keys, places = part.keys[fresh], slots[fresh]
        self._columns.keys[places] = keys
        self._columns.state[places] = 0.0
        _scatter(self._initial.rows(keys), places, self._columns.values)
        return slots


def _sum_repeated(keys: Keys, gradients: Rows) -> tuple[Keys, Rows]:
    groups = np.empty(len(keys), np.int32)
    distinct = group(keys, groups)
    if distinct == len(keys):
        return keys, gradients
    unique = np.empty(distinct, np.uint64)
    sums = np.empty((distinct, gradients.shape[1]), np.float32)
    sum_groups(keys, gradients, groups, unique, sums)
    return unique, sums


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
