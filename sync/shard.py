"""A shard: some tables' rows, the push table, the clock and the change stream, written by one thread.

Pure state: no I/O; time comes from the clock that is passed in. A push is one atomic step: its parts are
all checked and given room, then one version is issued, every row is written with it, knowledge is raised
and the source's offset advances. Nothing in between can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING, Cursor
from sync.clock import HybridClock
from sync.columns import MAX_ROWS
from sync.errors import BadPush, BadSpec, UnknownTable
from sync.pushes import Progress, Push, PushOutcome, PushTable, Source, Watermark
from sync.spec import TableSpec
from sync.table import Prepared, Refused, Stamp, Table

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]

CHANGE_CAPACITY = 262_144


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows that changed, each once and at its newest value.

    ``parts``: table → (keys [N] uint64, rows [N, dim] float32). ``cursor``: where to go on. ``complete``:
    nothing of the asked tables is left; else ask again at once. ``reset``: the cursor was of another
    incarnation, so everything stored is told again. ``watermarks``: what the reader now has seen; empty
    unless ``complete``.
    """

    parts: dict[str, tuple[Keys, Rows]]
    cursor: Cursor
    complete: bool
    reset: bool
    watermarks: dict[tuple[str, int], Watermark]


@dataclass(frozen=True, slots=True)
class DenseValues:
    """All rows of a single table, read-only: float32 [rows, dim].

    ``generation`` grows by one with each publication that changed something (0: the initial values). Two
    incarnations may publish different values under one number; readers compare both.
    """

    generation: int
    incarnation: int
    values: Rows
    watermarks: dict[tuple[str, int], Watermark]


@dataclass(slots=True)
class Counts:
    """Totals since this incarnation began."""

    pulled_rows_total: int = 0
    pushed_rows_total: int = 0
    inserted_rows_total: int = 0
    applied_total: int = 0
    duplicate_total: int = 0
    gap_total: int = 0
    refused_total: int = 0
    last_refusal: str = ""


@dataclass(frozen=True, slots=True)
class ShardState:
    """A shard at rest: what a snapshot holds. ``columns``: table → ``Table.export``; ``clock``: the last
    version time; ``generations``: of the single tables that were read or published."""

    model: str
    shard_id: int
    fingerprint: str
    specs: tuple[TableSpec, ...]
    clock: int
    knowledge: dict[int, int]
    pushes: dict[Source, Progress]
    generations: dict[str, int]
    columns: dict[str, dict[str, npt.NDArray[np.generic]]]


class Shard:
    """One shard of one model.

    ``writer``: the id of this start of this server, uint32, never used before; it is the shard's incarnation.
    ``change_capacity``: changes that each table remembers; a reader further behind costs a scan.
    ``max_rows``: bound on each table's rows. ``fingerprint``: of the feature schema, kept in snapshots.
    """

    __slots__ = (
        "_dense", "_dense_sequence", "_sequence", "_tables", "clock", "counts", "fingerprint", "knowledge",
        "model", "pushes", "shard_id", "writer",
    )  # fmt: skip

    def __init__(
        self,
        shard_id: int,
        tables: Sequence[TableSpec],
        writer: int,
        clock: HybridClock,
        *,
        model: str = "",
        fingerprint: str = "",
        change_capacity: int = CHANGE_CAPACITY,
        max_sources: int = 65_536,
        max_rows: int = MAX_ROWS,
    ) -> None:
        if not 0 < writer < 2**32:
            raise BadSpec(f"writer {writer} is not in [1, 2^32)")
        if len({spec.name for spec in tables}) != len(tables):
            raise BadSpec("two tables have one name")
        self.shard_id = shard_id
        self.writer = writer
        self.clock = clock
        self.model = model
        self.fingerprint = fingerprint
        self.pushes = PushTable(max_sources)
        self.counts = Counts()
        self.knowledge: dict[int, int] = {}
        """By writer: every update by it up to this version time is contained here, or lost to a newer one."""
        self._tables = {spec.name: Table(spec, change_capacity, max_rows) for spec in tables}
        self._sequence = BEGINNING
        self._dense: dict[str, DenseValues] = {}
        self._dense_sequence: dict[str, int] = {}

    @property
    def incarnation(self) -> int:
        """Changes with every start: cursors and clients notice a restart by it."""
        return self.writer

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables, in the order in which they were given."""
        return tuple(table.spec for table in self._tables.values())

    def table(self, name: str) -> Table:
        """The table ``name``. Raises UnknownTable."""
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(self._tables) or "none"
            raise UnknownTable(f"no table {name!r} in shard {self.shard_id} (tables: {known})") from None

    def pull(self, table: str, keys: Keys) -> Rows:
        """The values of ``keys`` ``[N]`` uint64: float32 ``[N, dim]``, a copy.

        Keys that were never pushed have their initial values, and are not stored. Raises UnknownTable,
        BadShape.
        """
        found = self.table(table)
        checked = found.check_keys(keys)
        self.counts.pulled_rows_total += len(checked)
        return found.pull(checked)

    def push(self, push: Push) -> PushOutcome:
        """Apply ``push`` once: all of its parts, or none.

        ``applied``; ``duplicate``: at or below the applied offset; ``gap``: its predecessor is not the
        applied offset; ``refused``: a gradient is not finite or has exploded, so nothing is applied but the
        offset advances. Raises PeerFault where the push makes no sense and TableFull where a bound is
        reached; then nothing changes and the offset stays.
        """
        parts = self._checked(push)
        verdict = self.pushes.decide(push.source, push.offset, push.predecessor)
        if verdict == "duplicate":
            self.counts.duplicate_total += 1
            return PushOutcome("duplicate", self.pushes.applied(push.source))
        if verdict == "gap":
            self.counts.gap_total += 1
            return PushOutcome("gap", self.pushes.applied(push.source))
        try:
            prepared = [(table, table.prepare(keys, gradients)) for table, keys, gradients in parts]
        except Refused as refusal:
            self.pushes.advance(push.source, push.offset, push.watermark)
            self.counts.refused_total += 1
            self.counts.last_refusal = str(refusal)
            return PushOutcome("refused", push.offset, str(refusal))
        self._write(prepared)
        self.pushes.advance(push.source, push.offset, push.watermark)
        self.counts.applied_total += 1
        return PushOutcome("applied", push.offset)

    def applied(self, source: Source) -> int:
        """The last applied offset of ``source``, -1 if it never pushed."""
        return self.pushes.applied(source)

    def watermarks(self) -> dict[tuple[str, int], Watermark]:
        """By (log incarnation, partition): the newest event contained in the rows."""
        return self.pushes.watermarks()

    def cursor(self) -> Cursor:
        """The present end of the change stream."""
        return Cursor(self.incarnation, self._sequence)

    def changes(self, cursor: Cursor, tables: Sequence[str], limit: int) -> Changes:
        """At most ``limit`` rows of ``tables`` that changed after ``cursor``, the longest unchanged first.

        Reading again from the returned cursor, with the same tables, until ``complete`` misses no row. A
        cursor of another incarnation starts from the beginning. Raises UnknownTable; ValueError for a limit
        below 1.
        """
        if limit < 1:
            raise ValueError(f"limit {limit} is not at least 1")
        reset = cursor.incarnation != self.incarnation or not BEGINNING <= cursor.sequence <= self._sequence
        after = BEGINNING if reset else cursor.sequence
        # A table's oldest changes suffice: the oldest of all tables together are among them.
        found = {name: self.table(name).changed_after(after, limit + 1) for name in tables}
        numbers = np.concatenate([sequences for sequences, _ in found.values()] or [np.zeros(0, np.int64)])
        complete = len(numbers) <= limit
        last = self._sequence if complete else int(np.partition(numbers, limit - 1)[limit - 1])
        parts = {}
        for name, (sequences, slots) in found.items():
            kept = slots[: np.searchsorted(sequences, last, side="right")]
            if len(kept):
                parts[name] = self.table(name).read(kept)
        watermarks = self.watermarks() if complete else {}
        return Changes(parts, Cursor(self.incarnation, last), complete, reset, watermarks)

    def publish_dense(self, table: str) -> int:
        """Make the live values of the single ``table`` its next generation; returns the generation.

        The same one as before if nothing changed since. Raises UnknownTable; BadSpec for a hashed table.
        """
        published = self.dense(table)
        sequences, _ = self.table(table).changed_after(self._dense_sequence.get(table, BEGINNING), 1)
        if len(sequences):
            published = self._live(table, published.generation + 1)
            self._dense[table] = published
            self._dense_sequence[table] = self._sequence
        return published.generation

    def dense(self, table: str, *, published: bool = True) -> DenseValues:
        """All rows of the single ``table``: the newest generation, or the live values under its number.

        Raises UnknownTable; BadSpec for a hashed table.
        """
        current = self._dense.get(table)
        if current is None:
            spec = self._single(table)
            values = self.table(table).initial(np.arange(spec.rows, dtype=np.uint64))
            values.flags.writeable = False
            current = self._dense[table] = DenseValues(0, self.incarnation, values, {})
        return current if published else self._live(table, current.generation)

    def restore(self, state: ShardState) -> None:
        """Take over the rows, pushes and knowledge of a snapshot; this shard must be new and have its tables.

        The clock passes every version restored, all rows count as changed, and each single table with rows is
        published under the generation after the snapshot's: nobody sees one number for two sets of values.
        Raises BadSpec, having changed nothing, where this is no new start or the tables differ; SnapshotDamaged
        where a key occurs twice, and then this shard is to be thrown away.
        """
        if self.pushes or self._sequence != BEGINNING or self.writer in state.knowledge:
            raise BadSpec(
                f"shard {self.shard_id}, writer {self.writer}: only a new start can take a snapshot over"
            )
        if self.specs != state.specs:
            raise BadSpec(f"shard {self.shard_id}: the snapshot's tables are {state.specs}, not {self.specs}")
        self.clock.observe(state.clock)
        self.knowledge = dict(state.knowledge)
        for source, progress in state.pushes.items():
            self.pushes.advance(source, progress.applied, progress.watermark)
        for name, columns in state.columns.items():
            self._sequence = self.table(name).load(columns, self._sequence)
        for name, generation in state.generations.items():
            self._dense[name] = self._live(name, generation + 1)
            self._dense_sequence[name] = self._sequence

    def state(self, *, copy: bool = True) -> ShardState:
        """Everything that a snapshot holds, consistent, and independent of later writes.

        Without ``copy`` the columns are views, which saves the memory of a second copy; they must be
        written out before the next push, which may free what they point to.
        """
        return ShardState(
            model=self.model,
            shard_id=self.shard_id,
            fingerprint=self.fingerprint,
            specs=self.specs,
            clock=self.clock.last,
            knowledge=dict(self.knowledge),
            pushes=self.pushes.progress(),
            generations={name: dense.generation for name, dense in self._dense.items()},
            columns={name: table.export(copy=copy) for name, table in self._tables.items()},
        )

    def _single(self, table: str) -> TableSpec:
        spec = self.table(table).spec
        if spec.placement != "single":
            raise BadSpec(f"table {table} is spread over all shards; only a single one has generations")
        return spec

    def _live(self, table: str, generation: int) -> DenseValues:
        values = self.table(table).pull(np.arange(self._single(table).rows, dtype=np.uint64))
        values.flags.writeable = False
        return DenseValues(generation, self.incarnation, values, self.watermarks())

    def _checked(self, push: Push) -> list[tuple[Table, Keys, Rows]]:
        """The parts with their tables and arrays as kernels take them. Raises PeerFault."""
        parts = []
        for name, keys, gradients in push.parts:
            table = self.table(name)
            found = table.check_keys(keys)
            parts.append((table, found, table.check_gradients(gradients, len(found))))
        # Both parts of a table would be prepared on the rows as they were before either.
        if len({id(table) for table, _, _ in parts}) != len(parts):
            raise BadPush("a table is named by two parts; concatenate them")
        return parts

    def _write(self, prepared: Sequence[tuple[Table, Prepared]]) -> None:
        if not any(len(part.keys) for _, part in prepared):
            return
        time = self.clock.tick(max(part.newest for _, part in prepared))
        stamp = Stamp(time, self.writer, _seconds(self.clock.physical_us()))
        for table, part in prepared:
            self._sequence = table.apply(part, stamp, self._sequence)
            self.counts.pushed_rows_total += len(part.keys)
            self.counts.inserted_rows_total += part.missing
        self.knowledge[self.writer] = time


def _seconds(time_us: int) -> int:
    return min(max(time_us // 1_000_000, 0), 2**32 - 1)
