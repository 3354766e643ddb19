"""A table's rows in one shard: index, columns, initial values and optimiser behind pull and push.

A push has three steps. ``total`` sums the gradients of repeated keys and looks for what must be refused;
``prepare`` finds the rows and makes room; neither changes a row, and between them they are where everything
that can fail does. ``apply`` only writes. So a shard can prepare all parts of a push before it applies the
first.

Rows leave by ``delete``, which leaves a grave, and come back by the next push. ``put`` and ``bury`` take over
what another shard wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.admission import CountSketch
from sync.changes import ChangeRing, Sequences
from sync.columns import MAX_ROWS, Columns
from sync.errors import BadShape
from sync.gather import gather
from sync.graves import Graveyard
from sync.guard import RunningNorm
from sync.index import KeyIndex
from sync.initial import InitialValues
from sync.kernel import f32, i32, inp, kernel, out, void
from sync.knowledge import Known, vector_of
from sync.optimisers import APPLY, measure, regularise, settings_of, sum_repeated
from sync.priority import Priority
from sync.records import Graves
from sync.records import Rows as StoredRows
from sync.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]
Versions = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]
"""(times [N], writers [N])."""

SKETCH_WIDTH: Final = 2**20
"""Keys that a table without room for them remembers the pushes of: four MiB."""


@kernel(void(inp(f32, 2), inp(i32), out(f32, 2)))
def _scatter(rows: Rows, slots: Slots, values: Rows) -> None:
    """Copy each of ``rows`` [N, dim] to its slot [N]."""
    for i in range(slots.shape[0]):
        for column in range(rows.shape[1]):
            values[slots[i], column] = rows[i, column]


@dataclass(frozen=True, slots=True)
class Total:
    """The gradients of a push for one table, none of which must be refused: distinct keys [U], summed
    gradients [U, dim] and their sums of squares [U]."""

    keys: Keys
    gradients: Rows
    squares: Rows


@dataclass(frozen=True, slots=True)
class Prepared:
    """A total that may be applied. ``slots`` [U]: negative where no row exists yet, ``missing`` of them;
    ``counted``: the keys without a row whose pushes were counted for admission."""

    total: Total
    slots: Slots
    missing: int
    counted: Keys | None = None


@dataclass(frozen=True, slots=True)
class Touched:
    """What a push changed in one table: keys [U], where their rows are now, each one's gradient norm squared,
    and whether this was its first push."""

    table: str
    keys: Keys
    slots: Slots
    squares: Rows
    first: npt.NDArray[np.bool_]


@dataclass(slots=True)
class TableCounts:
    """Rows since this process began to hold the table: written by pushes of its own, left out of a push as not
    admitted yet, expired."""

    pushed_rows_total: int = 0
    unadmitted_rows_total: int = 0
    expired_rows_total: int = 0


class Refused(Exception):
    """The gradients must not reach a row: one is not finite, or has exploded. The message names its key."""


class Table:
    """The rows of one table in one shard. One thread uses it."""

    __slots__ = (
        "_apply", "_columns", "_index", "_initial", "_limit", "_settings", "counts", "graves", "guard", "ring",
        "sketch", "spec", "state_dim",
    )  # fmt: skip

    def __init__(
        self, spec: TableSpec, change_capacity: int, max_rows: int = MAX_ROWS, *, stateless: bool = False
    ) -> None:
        """``stateless``: without optimiser state, for rows that are only read here."""
        self.spec = spec
        self.state_dim = 0 if stateless else spec.state_dim
        self.graves = Graveyard(spec.name, change_capacity)
        self.counts = TableCounts()
        self._columns = Columns(spec.dim, self.state_dim, max_rows)
        self._index = KeyIndex()
        self._initial = InitialValues(spec)
        self.ring = ChangeRing(change_capacity)
        self._apply = APPLY[spec.optimiser.kind]
        self._settings = settings_of(spec.optimiser)
        self.guard = RunningNorm(spec.guard)
        self.sketch = CountSketch(SKETCH_WIDTH) if spec.admission > 1 else None
        self._limit = np.float32(spec.max_norm) * np.float32(spec.max_norm)

    def __len__(self) -> int:
        """How many rows are stored."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Allocated bytes: rows with their state, versions and index, room for growth included, and graves."""
        rows = self._columns.nbytes + self._index.nbytes
        return rows + self.graves.nbytes + (self.sketch.nbytes if self.sketch else 0)

    @property
    def slots(self) -> int:
        """How many slots there are to look at: those of the rows, and freed ones."""
        return self._index.slots

    @property
    def row_nbytes(self) -> int:
        """Bytes of the rows themselves: their values and optimiser state."""
        return 4 * (self.spec.dim + self.state_dim) * len(self)

    @property
    def waiting(self) -> int:
        """About how many keys were pushed and have no row yet, as far as the sketch can tell."""
        return 0 if self.sketch is None else self.sketch.waiting(self.spec.admission)

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
        rows = np.empty((len(keys), self.spec.dim), np.float32)
        slots, missing = self._index.gather(keys, self._columns.values, rows)
        if missing:
            self._initial.fill_missing(keys, slots, rows)
        return rows

    def initial(self, keys: Keys) -> Rows:
        """The values that ``keys`` ``[N]`` have before their first push: float32 ``[N, dim]``."""
        return self._initial.rows(keys)

    def total(self, keys: Keys, gradients: Rows) -> Total:
        """Sum checked ``keys`` ``[N]`` and ``gradients`` ``[N, dim]`` by key.

        Raises Refused naming the key whose gradient is not finite, exceeds ``max_norm``, or ``guard`` times
        the table's running norm. Nothing changes.
        """
        # Repeated keys could hide a NaN from nobody, but two finite gradients may overflow when summed; so
        # the sums are what is measured, and they contain every NaN and infinity of their terms.
        keys, gradients = sum_repeated(keys, gradients)
        squares = np.empty(len(keys), np.float32)
        usual = np.float32(min(self.guard.limit(), float(self._limit)))
        bad = measure(gradients, usual, squares)
        if bad >= 0:
            fault = self._fault(gradients[bad])
            raise Refused(f"table {self.spec.name}: the gradient of key {int(keys[bad])} has {fault}")
        return Total(keys, gradients, squares)

    def _fault(self, gradient: Rows) -> str:
        norm = float(np.sqrt(np.sum(np.square(gradient.astype(np.float64)))))
        if not np.isfinite(norm):
            return "NaN or infinity"
        if norm > self.spec.max_norm:
            return f"norm {norm:.3g} above {self.spec.max_norm:g}"
        return f"norm {norm:.3g}, more than {self.spec.guard:g} times the usual {self.guard.mean:.3g}"

    def prepare(self, total: Total) -> Prepared:
        """Find the rows of a total and make room for new ones. Raises TableFull; no row changes."""
        slots, missing = self._index.find(total.keys)
        self._reserve(missing)
        return Prepared(total, slots, missing)

    def admit(self, part: Prepared) -> Prepared:
        """Leave out the keys that have no row and were not pushed often enough yet for the table's
        ``admission``. Counts this push for them, and changes no row."""
        if self.sketch is None or not part.missing:
            return part
        total, kept = part.total, part.slots >= 0
        counted = total.keys[~kept]
        kept[~kept] = self.sketch.count(counted) >= self.spec.admission
        self.counts.unadmitted_rows_total += len(kept) - int(kept.sum())
        slots = part.slots[kept]
        total = Total(total.keys[kept], total.gradients[kept], total.squares[kept])
        return Prepared(total, slots, int((slots < 0).sum()), counted)

    def apply(
        self, part: Prepared, time: int, writer: int, sequence: int, priority: Priority, now_us: int
    ) -> Touched:
        """Write a part: new rows start at their initial values with zero state, the optimiser steps, every
        row gets the version (``time``, ``writer``), one of the numbers after ``sequence``, and a priority."""
        columns, total = self._columns, part.total
        slots, first = part.slots, part.slots < 0
        if part.missing:
            slots = self._insert_missing(total.keys, first)
        gradients, squares = self._regularised(total, slots)
        self._apply(columns.values, columns.state, slots, gradients, squares, self._settings)
        self.guard.update(total.squares)
        self.counts.pushed_rows_total += len(slots)
        versions = _full(len(slots), time), np.full(len(slots), writer, np.uint32)
        self.ring.enter(slots, *versions, priority(total.squares, first, now_us), sequence, self._columns)
        return Touched(self.spec.name, total.keys, slots, total.squares, first)

    def delete(self, keys: Keys, time: int, writer: int, sequence: int) -> Graves:
        """Delete those of ``keys`` ``[N]`` that are stored; their graves have the version and numbers given."""
        slots, _ = self._index.find(keys)
        stored = np.unique(keys[slots >= 0])
        graves = Graves(
            self.spec.name, stored, _full(len(stored), time), np.full(len(stored), writer, np.uint32)
        )
        self.bury(graves, sequence)
        return graves

    def bury(self, graves: Graves, sequence: int) -> None:
        """Take over deletions; they change with the numbers after ``sequence``."""
        self._free(graves.keys)
        self.graves.bury(graves.keys, graves.time, graves.writer, sequence)

    def drop(self, keys: Keys) -> None:
        """Forget the rows and graves of ``keys`` ``[N]``, as if they had never been here."""
        self._free(keys)
        self.graves.exhume(keys)

    def _free(self, keys: Keys) -> None:
        slots = self._index.delete(keys)
        freed = slots[slots >= 0]
        self._columns.version_time[freed] = 0
        self._columns.changed_at[freed] = 0

    def reserve(self, keys: Keys) -> None:
        """Make room for those of ``keys`` ``[N]`` that are not stored. Raises TableFull, and then nothing changed."""
        # Most often there is room for all of them, and nothing to look for.
        if len(keys) and self._index.slots_with(len(keys)) > self._columns.capacity:
            self._reserve(self._index.find(keys)[1])

    def _reserve(self, extra: int) -> None:
        self._columns.reserve(self._index.slots_with(extra))
        self._index.reserve(extra)

    def require_width(self, rows: StoredRows) -> None:
        """Raises BadShape unless ``rows`` have as many values and floats of state as this table's."""
        width = (rows.values.shape[1], rows.state.shape[1])
        if width != (self.spec.dim, self.state_dim):
            raise BadShape(
                f"table {self.spec.name}: rows of {width[0]} values and {width[1]} of state, "
                f"not {self.spec.dim} and {self.state_dim}"
            )

    def put(self, rows: StoredRows, sequence: int, priority: float = 0.0) -> None:
        """Take over rows as they are, whatever was there; they change with the numbers after ``sequence``.
        Raises BadShape, TableFull, and then nothing changed."""
        self.require_width(rows)
        self.reserve(rows.keys)
        self.graves.exhume(rows.keys)
        slots = self._index.insert(rows.keys)
        _scatter(rows.values, slots, self._columns.values)
        _scatter(rows.state, slots, self._columns.state)
        priorities = np.full(len(slots), priority, np.float32)
        self.ring.enter(slots, rows.time, rows.writer, priorities, sequence, self._columns)

    def stored(self, slots: Slots) -> StoredRows:
        """Copies of the rows in ``slots`` ``[N]``."""
        columns = self._columns
        values = np.empty((len(slots), self.spec.dim), np.float32)
        state = np.empty((len(slots), self.state_dim), np.float32)
        gather(columns.values, slots, values)
        gather(columns.state, slots, state)
        return StoredRows(
            self.spec.name,
            self._index.keys[slots],
            values,
            state,
            columns.version_time[slots],
            columns.version_writer[slots],
        )

    def page(self, first: int, limit: int) -> tuple[StoredRows, int]:
        """The rows in at most ``limit`` slots from ``first`` on, and the slot to go on from (0: at the end)."""
        last = min(first + limit, self._index.slots)
        slots = np.flatnonzero(self._columns.version_time[first:last]).astype(np.int32) + np.int32(first)
        return self.stored(slots), last if last < self._index.slots else 0

    def values_from(self, first: int, limit: int) -> tuple[Keys, Rows, int]:
        """Keys and values of the rows in at most ``limit`` slots from ``first`` on, and the slot to go on from (0: at
        the end)."""
        last = min(first + limit, self._index.slots)
        slots = np.flatnonzero(self._columns.version_time[first:last]).astype(np.int32) + np.int32(first)
        keys, rows = self.read(slots)
        return keys, rows, last if last < self._index.slots else 0

    def untouched(self, before: int, first: int, limit: int) -> tuple[Keys, int]:
        """The keys in at most ``limit`` slots from ``first`` on whose version time is below ``before``, and
        the slot to go on from (0: at the end)."""
        last = min(first + limit, self._index.slots)
        time = self._columns.version_time[first:last]
        slots = np.flatnonzero((time > 0) & (time < np.uint64(max(before, 0)))) + first
        return self._index.keys[slots], last if last < self._index.slots else 0

    def changed_after(self, sequence: int, limit: int) -> tuple[Sequences, Slots]:
        """The oldest ``limit`` rows and graves that changed after ``sequence``: their numbers, ascending, and
        where they are, for ``read`` (a grave in place p is -1 - p)."""
        sequences, slots = self.ring.after(sequence, limit, self._columns.changed_at[: self._index.slots])
        if not len(self.graves):
            return sequences, slots
        dug, places = self.graves.changed_after(sequence, limit)
        sequences, slots = np.concatenate([sequences, dug]), np.concatenate([slots, ~places])
        order = np.argsort(sequences, kind="stable")[:limit]
        return sequences[order], slots[order]

    def located(self, keys: Keys) -> Slots:
        """Where the rows and graves of those of ``keys`` ``[N]`` are that have one, as ``changed_after`` tells it."""
        slots, missing = self._index.find(keys)
        if missing:
            dug = self.graves.find(keys[slots < 0])
            return np.concatenate([slots[slots >= 0], ~dug[dug >= 0]])
        return slots

    def written_at(self, slots: Slots) -> Sequences:
        """The number of the newest change of what ``changed_after`` found in each of ``slots`` ``[N]``."""
        gone = slots < 0
        if not gone.any():
            return self._columns.changed_at[slots]
        sequences = np.empty(len(slots), np.int64)
        sequences[~gone] = self._columns.changed_at[slots[~gone]]
        sequences[gone] = self.graves.written_at(~slots[gone])
        return sequences

    def told(self, slots: Slots) -> tuple[StoredRows, Graves]:
        """Copies of what ``changed_after`` found in ``slots`` ``[N]``."""
        gone = slots < 0
        return self.stored(slots[~gone]), self.graves.at(~slots[gone])

    def reaches(self, sequence: int) -> bool:
        """Whether the update caches alone tell what changed after ``sequence``."""
        return sequence >= max(self.ring.floor, self.graves.ring.floor)

    def urgent(self, sequence: int, least: float) -> tuple[Sequences, Slots]:
        """What changed after ``sequence`` with a priority of at least ``least``: numbers, ascending, and where it is,
        as ``changed_after`` tells it; maybe several times what changed again since, whatever the priority then."""
        sequences, slots = self.ring.urgent(sequence, least, self._columns.changed_at[: self._index.slots])
        dug, places = self.graves.urgent(sequence, least)
        if not len(dug):
            return sequences, slots
        sequences, slots = np.concatenate([sequences, dug]), np.concatenate([slots, ~places])
        order = np.argsort(sequences, kind="stable")
        return sequences[order], slots[order]

    def cached(self, known: Known) -> Slots | None:
        """Where everything is that ``known`` does not cover, the longest unchanged first, as ``changed_after`` tells
        it, out of the update caches alone; None where these do not reach back so far."""
        rows, buried = self.ring.uncovered(known, self._columns), self.graves.uncovered(known)
        if rows is None or buried is None:
            return None
        (sequences, slots), (dug, places) = rows, buried
        if not len(dug):
            return slots
        return np.concatenate([slots, ~places])[np.argsort(np.concatenate([sequences, dug]), kind="stable")]

    def scan(self, known: Known) -> Keys:
        """The keys of all rows and graves whose versions ``known`` does not cover: a look at each."""
        last = self._index.slots
        slots = known.scan(self._columns.version_time[:last], self._columns.version_writer[:last])
        return np.concatenate([self._index.keys[slots], self.graves.keys(self.graves.scan(known))])

    def writers(self) -> set[int]:
        """Who wrote the rows and graves here, and maybe some that are gone."""
        last = self._index.slots
        rows = vector_of(self._columns.version_time[:last], self._columns.version_writer[:last])
        return rows.keys() | self.graves.writers()

    def known_keys(self, known: Known) -> Keys:
        """The keys of all rows and graves whose versions ``known`` covers."""
        last = self._index.slots
        time, writer = self._columns.version_time[:last], self._columns.version_writer[:last]
        slots = np.flatnonzero((time > 0) & ~known.above(time, writer))
        return np.concatenate([self._index.keys[slots], self.graves.known_keys(known)])

    def keys_at(self, slots: Slots) -> Keys:
        """The keys of what ``changed_after`` found in ``slots`` ``[N]``."""
        gone = slots < 0
        if not gone.any():
            return self._index.keys[slots]
        keys = np.empty(len(slots), np.uint64)
        keys[~gone] = self._index.keys[slots[~gone]]
        keys[gone] = self.graves.keys(~slots[gone])
        return keys

    def read(self, slots: Slots) -> tuple[Keys, Rows]:
        """Copies of the keys and values of ``slots`` ``[N]``; what was deleted has its initial value again."""
        rows = np.empty((len(slots), self.spec.dim), np.float32)
        gather(self._columns.values, slots, rows)
        keys = self.keys_at(slots)
        self._initial.fill_missing(keys, slots, rows)
        return keys, rows

    def versions_at(self, slots: Slots) -> Versions:
        """Version time and writer of what ``changed_after`` found in ``slots`` ``[N]``."""
        columns, gone = self._columns, slots < 0
        if not gone.any():
            return columns.version_time[slots], columns.version_writer[slots]
        time, writer = np.empty(len(slots), np.uint64), np.empty(len(slots), np.uint32)
        time[~gone], writer[~gone] = columns.version_time[slots[~gone]], columns.version_writer[slots[~gone]]
        graves = self.graves.at(~slots[gone])
        time[gone], writer[gone] = graves.time, graves.writer
        return time, writer

    def latest(self, keys: Keys) -> Versions:
        """Version time and writer of the row or grave of each of ``keys`` ``[N]``; (0, 0) where there is neither."""
        time, writer = self.versions(keys)
        gone = time == 0
        if len(self.graves) and gone.any():
            time[gone], writer[gone] = self.graves.versions(keys[gone])
        return time, writer

    def versions(self, keys: Keys) -> Versions:
        """Version time and writer of ``keys`` ``[N]``; (0, 0) where no row is stored."""
        slots, _ = self._index.find(keys)
        known = slots >= 0
        time, writer = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint32)
        time[known] = self._columns.version_time[slots[known]]
        writer[known] = self._columns.version_writer[slots[known]]
        return time, writer

    def _regularised(self, total: Total, slots: Slots) -> tuple[Rows, Rows]:
        """What the optimiser takes: the gradients after clipping and decay, and their sums of squares."""
        if self.spec.clip == 0.0 and self.spec.l2 == 0.0:
            return total.gradients, total.squares
        gradients, squares = np.empty_like(total.gradients), np.empty_like(total.squares)
        clip, l2 = np.float32(self.spec.clip), np.float32(self.spec.l2)
        regularise(self._columns.values, slots, total.gradients, total.squares, clip, l2, gradients, squares)
        return gradients, squares

    def _insert_missing(self, keys: Keys, first: npt.NDArray[np.bool_]) -> Slots:
        slots = self._index.insert(keys)
        fresh, places = keys[first], slots[first]
        self.graves.exhume(fresh)
        columns, start, end = self._columns, int(places[0]), int(places[0]) + len(places)
        # New slots follow each other, unless freed ones are used again: then rows need not be made elsewhere first.
        if places[-1] == end - 1 and bool((places[1:] > places[:-1]).all()):
            columns.state[start:end] = 0.0
            self._initial.fill(fresh, columns.values[start:end])
        else:
            columns.state[places] = 0.0
            _scatter(self._initial.rows(fresh), places, columns.values)
        return slots


def _full(count: int, time: int) -> npt.NDArray[np.uint64]:
    return np.full(count, time, np.uint64)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
