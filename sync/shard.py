"""A shard: some tables' rows, the push table, the clock and the change stream, written by one thread.

Pure state: no I/O; time comes from the clock that is passed in. A push is one atomic step: its parts are
all checked and given room, then one version is issued, every row is written with it, knowledge is raised
and the sources' offsets advance. Nothing in between can fail.

Every step is numbered (``position``) and can be had as a ``Delta`` (``on_delta``), which another shard
``apply``s. A shard has one owner at a time, the one that ``lead``s it under the newest fencing epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING, Cursor
from sync.clock import HybridClock
from sync.columns import MAX_ROWS
from sync.dense import DenseValues, Generations, live_values
from sync.errors import BadPush, BadShape, BadSpec, OutOfOrder, SnapshotDamaged, TableFull, UnknownTable
from sync.pushes import NOTHING, Push, PushOutcome, PushTable, Source, Watermark
from sync.records import Delta, Graves, Head, History
from sync.records import Rows as StoredRows
from sync.spec import TableSpec
from sync.stream import Changes, changes_after
from sync.table import Prepared, Refused, Table, Touched

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Arrays = list[tuple[Keys, Rows]]

CHANGE_CAPACITY = 262_144
MAX_GRAVES = 1_048_576
PAGE_ROWS = 65_536
PageCursor = tuple[int, bool, int]
"""Which table by number, whether of its graves, and from which slot on."""
FIRST_PAGE: PageCursor = (0, False, 0)


@dataclass(slots=True)
class Counts:
    """Totals since this incarnation began."""

    pulled_rows_total: int = 0
    pushed_rows_total: int = 0
    inserted_rows_total: int = 0
    deleted_rows_total: int = 0
    applied_total: int = 0
    duplicate_total: int = 0
    gap_total: int = 0
    refused_total: int = 0
    graves_collected_total: int = 0
    last_refusal: str = ""


@dataclass(frozen=True, slots=True)
class ShardState:
    """A shard at rest: what a whole snapshot holds."""

    head: Head
    rows: tuple[StoredRows, ...]
    graves: tuple[Graves, ...] = ()


class Shard:
    """One shard of one model.

    ``writer``: the id of this start of this server, uint32, never used before; it is the shard's incarnation. 0:
    somebody else writes, and this shard takes no pushes until it ``lead``s.
    ``change_capacity``: changes that each table remembers; a reader further behind costs a scan.
    ``max_rows``: bound on each table's rows; ``max_graves`` on its tombstones. ``fingerprint``: of the feature
    schema, kept in snapshots. ``on_delta`` is told every step that this owner takes.
    """

    __slots__ = (
        "_floor", "_generations", "_history", "_max_graves", "_sequence", "_tables",
        "clock", "counts", "epoch", "epochs", "fingerprint", "knowledge", "model", "on_delta", "position",
        "pushes", "shard_id", "touched", "writer",
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
        max_graves: int = MAX_GRAVES,
    ) -> None:
        if len({spec.name for spec in tables}) != len(tables):
            raise BadSpec("two tables have one name")
        self.shard_id = shard_id
        self.writer = _checked_writer(writer) if writer else 0
        self.clock = clock
        self.model = model
        self.fingerprint = fingerprint
        self.pushes = PushTable(max_sources)
        self.counts = Counts()
        self.epoch = 0
        """The fencing epoch under which the newest step was taken, or that ``lead`` was called with."""
        self.position = 0
        """How many steps were taken since the shard was born."""
        self.epochs: dict[int, int] = {writer: 0} if writer else {}
        """By writer: the fencing epoch that leads its versions."""
        self.knowledge: dict[int, int] = {}
        """By writer: every update by it up to this version time is contained here, or lost to a newer one."""
        self.on_delta: Callable[[Delta], None] | None = None
        self.touched: tuple[Touched, ...] = ()
        """What the last push that was applied changed: norms and first pushes, for priorities."""
        self._tables = {spec.name: Table(spec, change_capacity, max_rows) for spec in tables}
        self._max_graves = max_graves
        self._history: list[tuple[int, int]] = []
        self._sequence = BEGINNING
        self._floor = BEGINNING
        self._generations = Generations()

    @property
    def incarnation(self) -> int:
        """Changes with every start and every owner: cursors and clients notice by it."""
        return self.writer

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables, in the order in which they were given."""
        return tuple(table.spec for table in self._tables.values())

    @property
    def history(self) -> History:
        """Under which epochs the steps so far were taken, each with its first position."""
        return tuple(self._history)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all tables."""
        return sum(table.nbytes for table in self._tables.values())

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
        return self.push_together((push,))[0]

    def push_together(self, pushes: Sequence[Push]) -> list[PushOutcome]:
        """Apply several pushes as one step: their gradients are summed in the order given, the optimiser steps
        once, all rows get one version and all offsets advance together.

        Duplicates and gaps are left out of the sum. If the sum has to be refused, all that are in it are.
        Raises as ``push``.
        """
        self._require_writer()
        checked = [self._checked(push) for push in pushes]
        applied: dict[Source, int] = {}
        verdicts = [self._decide(push, applied) for push in pushes]
        parts = [part for part, verdict in zip(checked, verdicts, strict=True) if verdict == "next"]
        reason = ""
        if "next" in verdicts:
            try:
                totals = [(table, table.total(*_joined(arrays))) for table, arrays in self._by_table(parts)]
            except Refused as refusal:
                reason = self.counts.last_refusal = str(refusal)
                totals = []
            # All rows of all tables find room before anything is counted, and the first is written.
            found = [(table, table.prepare(total)) for table, total in totals]
            prepared = [(table, table.admit(part)) for table, part in found]
            advanced = [push for push, verdict in zip(pushes, verdicts, strict=True) if verdict == "next"]
            for push in advanced:
                self.pushes.advance(push.source, push.offset, push.watermark)
            self._write(prepared, advanced)
        return [self._outcome(push, verdict, reason) for push, verdict in zip(pushes, verdicts, strict=True)]

    def _require_writer(self) -> None:
        if not self.writer:
            raise BadSpec(f"shard {self.shard_id} is written by another server")

    def _decide(self, push: Push, applied: dict[Source, int]) -> str:
        """The verdict on a push after those before it in the same step, whose offsets are in ``applied``."""
        fresh = sum(self.pushes.applied(source) == NOTHING for source in applied)
        verdict = self.pushes.decide(
            push.source, push.offset, push.predecessor, applied.get(push.source), fresh
        )
        if verdict == "next":
            applied[push.source] = push.offset
        return verdict

    def _outcome(self, push: Push, verdict: str, reason: str) -> PushOutcome:
        counts = self.counts
        if verdict == "duplicate":
            counts.duplicate_total += 1
            return PushOutcome("duplicate", self.pushes.applied(push.source))
        if verdict == "gap":
            counts.gap_total += 1
            return PushOutcome("gap", self.pushes.applied(push.source))
        if reason:
            counts.refused_total += 1
            return PushOutcome("refused", self.pushes.applied(push.source), reason)
        counts.applied_total += 1
        return PushOutcome("applied", self.pushes.applied(push.source))

    def delete(self, table: str, keys: Keys) -> int:
        """Delete those of ``keys`` ``[N]`` that are stored; returns how many. They read as their initial
        values from now on, and start there when they are pushed again. Raises UnknownTable, BadShape; BadSpec
        for a single table, whose rows are weights."""
        self._require_writer()
        found = self.table(table)
        if found.spec.placement == "single":
            raise BadSpec(f"table {table} is dense: its rows cannot be deleted one by one")
        checked = found.check_keys(keys)
        if not found.versions(checked)[0].any():
            return 0
        time = self.clock.tick()
        graves = found.delete(checked, time, self.writer, self._sequence)
        self._sequence += len(graves.keys)
        self.knowledge[self.writer] = time
        self.counts.deleted_rows_total += len(graves.keys)
        self._step(graves=(graves,), collected=self._bound_graves(found))
        return len(graves.keys)

    def expire(self, table: str, first_slot: int, limit: int) -> tuple[int, int]:
        """Delete the rows in ``limit`` slots from ``first_slot`` on that no push touched for the table's
        ``expiry_s``. Returns how many, and the slot to go on from (0: all were looked at)."""
        found = self.table(table)
        if not found.spec.expiry_s:
            return 0, 0
        before = self.clock.physical_us() - found.spec.expiry_s * 1_000_000
        keys, following = found.untouched(before, first_slot, limit)
        expired = self.delete(table, keys) if len(keys) else 0
        found.counts.expired_rows_total += expired
        return expired, following

    def applied(self, source: Source) -> int:
        """The last applied offset of ``source``, -1 if it never pushed."""
        return self.pushes.applied(source)

    def watermarks(self) -> dict[tuple[str, int], Watermark]:
        """By (log incarnation, partition): the newest event contained in the rows."""
        return self.pushes.watermarks()

    def cursor(self) -> Cursor:
        """The present end of the change stream."""
        return Cursor(self.incarnation, self._sequence, self._floor)

    def changes(self, cursor: Cursor, tables: Sequence[str], limit: int) -> Changes:
        """At most ``limit`` rows of ``tables`` that changed after ``cursor``, the longest unchanged first.

        Reading again from the returned cursor, with the same tables, until ``complete`` misses no row. A
        cursor of another incarnation starts from the beginning, as does one from before graves were collected:
        it gets all rows in the order in which they are stored, then what changed since it began.
        Raises UnknownTable; ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit {limit} is not at least 1")
        asked = [self.table(name) for name in tables]
        return changes_after(cursor, self.cursor(), asked, limit, self.watermarks)

    def publish_dense(self, table: str, generation: int | None = None) -> int:
        """Make the live values of the single ``table`` its next generation; returns the generation.

        The same one as before if nothing changed since; else ``generation``, or the next number. Raises
        UnknownTable; BadSpec for a hashed table or a number that does not grow.
        """
        found = self._single(table)
        before = self._generations.newest(found, self.incarnation).generation
        if self._generations.outdated(found):
            number = before + 1 if generation is None else generation
            if number <= before:
                raise BadSpec(f"generation {number} of {table} is not above {before}")
            self._publish(table, number)
            self._step(published=((table, number),))
        return self._generations.numbers[table]

    def _publish(self, table: str, generation: int) -> None:
        live = live_values(self._single(table), generation, self.incarnation, self.watermarks())
        self._generations.publish(live, table, self._sequence)

    def dense(self, table: str, *, published: bool = True) -> DenseValues:
        """All rows of the single ``table``: the newest generation, or the live values under its number.

        Raises UnknownTable; BadSpec for a hashed table.
        """
        found = self._single(table)
        newest = self._generations.newest(found, self.incarnation)
        if published:
            return newest
        return live_values(found, newest.generation, self.incarnation, self.watermarks())

    def lead(self, writer: int, epoch: int) -> None:
        """Own the shard from now on: ``writer`` is a new incarnation, ``epoch`` fences all owners before.

        Raises BadSpec, having changed nothing, where the epoch is not newer or the writer not new.
        """
        if epoch <= self.epoch or writer in self.epochs:
            raise BadSpec(
                f"shard {self.shard_id}: epoch {epoch} (writer {writer}) does not follow {self.epoch}"
            )
        self.writer, self.epoch = _checked_writer(writer), epoch
        self.epochs[writer] = epoch

    def announce(self) -> None:
        """Take a step that changes nothing, so that whoever has it has all steps of the owners before, too."""
        self._require_writer()
        self._step()

    def resign(self) -> None:
        """Write no more: the shard has another owner, whose steps are to be applied."""
        self.writer, self.on_delta = 0, None

    def apply(self, delta: Delta) -> None:
        """Take over a step of another owner, or of an earlier start. ``touched`` says nothing of it.

        Raises OutOfOrder, having changed nothing, where it does not follow the newest step; PeerFault or
        TableFull where its rows do not fit: this shard is then to be thrown away.
        """
        if delta.position != self.position + 1 or delta.epoch < self.epoch:
            raise OutOfOrder(
                f"shard {self.shard_id}: step {delta.position} of epoch {delta.epoch} does not follow "
                f"{self.position} of {self.epoch}"
            )
        for rows in delta.rows:
            self._put(rows)
        for graves in delta.graves:
            self._bury(graves)
        for table, time in delta.collected:
            self._collect(self.table(table), time)
        for table, keys in delta.counted:
            if (sketch := self.table(table).sketch) is not None:
                sketch.count(keys)
        for table, norm in delta.norms:
            self.table(table).guard.load(norm)
        for source, progress in delta.progress:
            self.pushes.advance(source, progress.applied, progress.watermark)
        self.clock.observe(delta.clock)
        self._note(delta.epoch, delta.writer, delta.position)
        if delta.rows or delta.graves:
            self.knowledge[delta.writer] = delta.clock
        for table, generation in delta.published:
            self._publish(table, generation)

    def begin(self, head: Head) -> None:
        """Take over everything but the rows; this shard must be new and have the head's tables. The rows come
        by ``put`` and ``bury``, then what happened since by ``apply``.

        The clock passes every version restored. Raises BadSpec, having changed nothing.
        """
        if self.pushes or self._sequence != BEGINNING or self.writer in head.epochs:
            raise BadSpec(
                f"shard {self.shard_id}, writer {self.writer}: only a new start can take a snapshot over"
            )
        if self.specs != head.specs:
            raise BadSpec(f"shard {self.shard_id}: the snapshot's tables are {head.specs}, not {self.specs}")
        self.clock.observe(head.clock)
        self.knowledge = dict(head.knowledge)
        self.epochs |= head.epochs
        self.epoch, self.position, self._history = head.epoch, head.position, list(head.history)
        for source, progress in head.pushes.items():
            self.pushes.advance(source, progress.applied, progress.watermark)
        self._generations.load(head.generations)
        for name, norm in head.norms.items():
            self.table(name).guard.load(norm)
        for name, counts in head.sketches.items():
            if (sketch := self.table(name).sketch) is not None:
                sketch.load(counts)

    def put(self, rows: StoredRows) -> None:
        """Take over rows of a snapshot. Raises SnapshotDamaged where they do not fit the table."""
        try:
            self._put(rows)
        except (UnknownTable, BadShape, TableFull) as error:
            raise SnapshotDamaged(str(error)) from error

    def bury(self, graves: Graves) -> None:
        """Take over graves of a snapshot. Raises SnapshotDamaged for an unknown table."""
        try:
            self._bury(graves)
        except UnknownTable as error:
            raise SnapshotDamaged(str(error)) from error

    def settle(self) -> None:
        """After ``begin`` and what followed: publish each dense table whose published values are not known, under
        a generation of its own, so that nobody sees one number for two sets of values."""
        for table, generation in self._generations.unknown():
            self._publish(table, generation + 1)

    def restore(self, state: ShardState) -> None:
        """``begin`` with a whole snapshot, its rows, and ``settle``. Raises BadSpec, having changed nothing;
        SnapshotDamaged, and then this shard is to be thrown away."""
        self.begin(state.head)
        for rows in state.rows:
            self.put(rows)
        for graves in state.graves:
            self.bury(graves)
        self.settle()

    def head(self) -> Head:
        """Everything but the rows, as it is now."""
        return Head(
            model=self.model,
            shard_id=self.shard_id,
            fingerprint=self.fingerprint,
            specs=self.specs,
            epoch=self.epoch,
            position=self.position,
            clock=self.clock.last,
            history=self.history,
            knowledge=dict(self.knowledge),
            epochs={writer: self.epochs[writer] for writer in self.epochs if writer in self.knowledge},
            pushes=self.pushes.progress(),
            generations=dict(self._generations.numbers),
            norms={name: table.guard.state() for name, table in self._tables.items()},
            sketches={name: t.sketch.state() for name, t in self._tables.items() if t.sketch is not None},
        )

    def page(
        self, cursor: PageCursor, limit: int = PAGE_ROWS
    ) -> tuple[StoredRows | Graves, PageCursor | None]:
        """Copies of at most ``limit`` rows or graves from ``cursor`` on, maybe of none, and where to go on.

        Pushes may go on between two pages; the copy is then whole once the deltas since ``head`` were applied
        to it. Raises BadShape for a cursor that leads nowhere.
        """
        number, graves, first = cursor
        if not 0 <= number < len(self._tables) or first < 0:
            raise BadShape(f"no page at {cursor}: there are {len(self._tables)} tables")
        table = list(self._tables.values())[number]
        found, following = table.graves.page(first, limit) if graves else table.page(first, limit)
        if following:
            return found, (number, graves, following)
        if not graves:
            return found, (number, True, 0)
        return found, (number + 1, False, 0) if number + 1 < len(self._tables) else None

    def pages(self, limit: int = PAGE_ROWS) -> Iterator[StoredRows | Graves]:
        """All pages that hold something, one after the other."""
        cursor: PageCursor | None = FIRST_PAGE if self._tables else None
        while cursor is not None:
            found, cursor = self.page(cursor, limit)
            if len(found.keys):
                yield found

    def state(self) -> ShardState:
        """Everything at once: consistent, and independent of later writes."""
        pages = list(self.pages())
        return ShardState(
            self.head(),
            tuple(page for page in pages if isinstance(page, StoredRows)),
            tuple(page for page in pages if isinstance(page, Graves)),
        )

    def _put(self, rows: StoredRows) -> None:
        self.table(rows.table).put(rows, self._sequence)
        # Every version here was issued or observed: so a push need not look at those of its rows to exceed them.
        self.clock.observe(int(rows.time.max(initial=0)))
        self._sequence += len(rows.keys)

    def _bury(self, graves: Graves) -> None:
        self.table(graves.table).bury(graves, self._sequence)
        self.clock.observe(int(graves.time.max(initial=0)))
        self._sequence += len(graves.keys)

    def _bound_graves(self, table: Table) -> tuple[tuple[str, int], ...]:
        """Forget the oldest half of a table's graves once there are too many."""
        if len(table.graves) <= self._max_graves:
            return ()
        time = table.graves.time_to_keep(self._max_graves // 2)
        self._collect(table, time)
        return ((table.spec.name, time),)

    def _collect(self, table: Table, time: int) -> None:
        """Forget graves. Readers of changes who had not seen them start over: nobody could tell them what is
        gone."""
        collected, newest = table.graves.collect(time)
        self.counts.graves_collected_total += collected
        self._floor = max(self._floor, newest)

    def _single(self, table: str) -> Table:
        found = self.table(table)
        if found.spec.placement != "single":
            raise BadSpec(f"table {table} is spread over all shards; only a single one has generations")
        return found

    def _checked(self, push: Push) -> dict[str, tuple[Keys, Rows]]:
        """The parts by table, as kernels take them. Raises PeerFault."""
        parts = {}
        for name, keys, gradients in push.parts:
            table = self.table(name)
            found = table.check_keys(keys)
            parts[name] = (found, table.check_gradients(gradients, len(found)))
        # Both parts of a table would be prepared on the rows as they were before either.
        if len(parts) != len(push.parts):
            raise BadPush("a table is named by two parts; concatenate them")
        return parts

    def _by_table(self, pushes: Sequence[dict[str, tuple[Keys, Rows]]]) -> Iterator[tuple[Table, Arrays]]:
        names = dict.fromkeys(name for parts in pushes for name in parts)
        for name in names:
            yield self._tables[name], [parts[name] for parts in pushes if name in parts]

    def _write(self, prepared: Sequence[tuple[Table, Prepared]], pushes: Sequence[Push]) -> None:
        """Write what was prepared under one version, and take the step that advances the pushes' sources."""
        self.touched = ()
        if any(len(part.total.keys) for _, part in prepared):
            time = self.clock.tick()
            touched = []
            for table, part in prepared:
                touched.append(table.apply(part, time, self.writer, self._sequence))
                self._sequence += len(part.total.keys)
                self.counts.pushed_rows_total += len(part.total.keys)
                self.counts.inserted_rows_total += part.missing
            self.touched = tuple(touched)
            self.knowledge[self.writer] = time
        counted = tuple((t.spec.name, part.counted) for t, part in prepared if part.counted is not None)
        self._step(pushes=pushes, counted=counted)

    def _step(
        self,
        *,
        pushes: Sequence[Push] = (),
        counted: tuple[tuple[str, Keys], ...] = (),
        graves: tuple[Graves, ...] = (),
        published: tuple[tuple[str, int], ...] = (),
        collected: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Count a step, and tell it."""
        self._note(self.epoch, self.writer, self.position + 1)
        if self.on_delta is None:
            return
        progress = self.pushes.progress_of({push.source for push in pushes})
        touched = self.touched if pushes else ()
        self.on_delta(
            Delta(
                epoch=self.epoch,
                position=self.position,
                writer=self.writer,
                clock=self.clock.last,
                progress=progress,
                rows=tuple(self._tables[one.table].stored(one.slots) for one in touched),
                graves=graves,
                counted=counted,
                norms=tuple((one.table, self._tables[one.table].guard.state()) for one in touched),
                published=published,
                collected=collected,
            )
        )

    def _note(self, epoch: int, writer: int, position: int) -> None:
        self.epochs[writer] = epoch
        if not self._history or self._history[-1][0] != epoch:
            self._history.append((epoch, position))
        self.epoch, self.position = epoch, position


def _joined(arrays: Arrays) -> tuple[Keys, Rows]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([keys for keys, _ in arrays]), np.concatenate([rows for _, rows in arrays])


def _checked_writer(writer: int) -> int:
    if not 0 < writer < 2**32:
        raise BadSpec(f"writer {writer} is not in [1, 2^32)")
    return writer
