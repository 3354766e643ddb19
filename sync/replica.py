"""A replica of a shard: some tables' rows, the push table, the clock and the change stream, used by one thread.

Pure state: no I/O; time comes from the clock that is passed in. A replica is read, copied, and takes over what others
wrote, in two ways. A copy of the same line of steps applies each (``apply``), in order. A replica elsewhere hears the
newest states of rows, in any order and from anybody, and the newest version wins (``merge``); that is a step of its
own line. What writes by itself is a ``Shard``.

Every step is numbered (``position``) and can be had as a ``Delta`` (``on_delta``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING, Cursor
from sync.clock import HybridClock
from sync.columns import MAX_ROWS
from sync.dense import Generations, live_values
from sync.errors import (
    BadShape,
    BadSpec,
    ClockAhead,
    OutOfOrder,
    SnapshotDamaged,
    TableFull,
    UnknownTable,
)
from sync.guard import NormState
from sync.index import KeyIndex
from sync.knowledge import Horizon, Known, joined, newer
from sync.optimisers import group
from sync.priority import Priority, UpdatePriority
from sync.pushes import Progress, PushTable, Source, Watermark
from sync.records import Delta, Generation, Graves, Head, History, Learned, Update
from sync.records import Rows as StoredRows
from sync.spec import TableSpec
from sync.stream import Changes, changes_after
from sync.table import Table

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]

CHANGE_CAPACITY: Final = 262_144
MAX_GRAVES: Final = 1_048_576
MAX_AHEAD_US: Final = 600_000_000
PAGE_ROWS: Final = 65_536
PageCursor = tuple[int, bool, int]
"""Which table by number, whether of its graves, and from which slot on."""
FIRST_PAGE: Final[PageCursor] = (0, False, 0)


@dataclass(slots=True)
class Counts:
    """Totals since this incarnation began. ``merged``: rows and graves taken over from other replicas, ``covered``:
    known already, ``lost``: to a newer version that is here."""

    pulled_rows_total: int = 0
    pushed_rows_total: int = 0
    inserted_rows_total: int = 0
    deleted_rows_total: int = 0
    applied_total: int = 0
    duplicate_total: int = 0
    gap_total: int = 0
    refused_total: int = 0
    graves_collected_total: int = 0
    merged_rows_total: int = 0
    covered_rows_total: int = 0
    lost_rows_total: int = 0
    dropped_rows_total: int = 0
    last_refusal: str = ""


@dataclass(frozen=True, slots=True)
class ShardState:
    """A shard at rest: what a whole snapshot holds."""

    head: Head
    rows: tuple[StoredRows, ...]
    graves: tuple[Graves, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """A shard version: of which incarnation of a replica, and how many changes it had seen, 16 bytes. Tokens are equal
    or not; they say nothing about other replicas."""

    incarnation: int
    counter: int


class Replica:
    """One shard of one model.

    ``writer``: the id of this start of this server, uint32, never used before; it is the shard's incarnation. 0:
    somebody else takes the steps, and this one applies them, until it ``lead``s.
    ``change_capacity``: changes that each table remembers; a reader further behind costs a scan.
    ``max_rows``: bound on each table's rows; ``max_graves`` on its tombstones. ``fingerprint``: of the feature
    schema, kept in snapshots. ``on_delta`` is told every step taken here. ``stateless``: rows have no optimiser
    state, so they can be read and merged, and not pushed. ``max_ahead_us``: a version that is further ahead of this
    machine's clock is refused.
    """

    __slots__ = (
        "_floor", "_generations", "_history", "_max_ahead_us", "_max_graves", "_sequence", "_stepped", "_tables",
        "clock", "counts", "epoch", "epochs", "fingerprint", "horizon", "knowledge", "model", "on_delta", "position",
        "priority", "pushes", "shard_id", "stateless", "writer",
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
        max_ahead_us: int = MAX_AHEAD_US,
        stateless: bool = False,
    ) -> None:
        if len({spec.name for spec in tables}) != len(tables):
            raise BadSpec("two tables have one name")
        self.shard_id = shard_id
        self.writer = _checked_writer(writer) if writer else 0
        self.clock = clock
        self.model = model
        self.fingerprint = fingerprint
        self.stateless = stateless
        self.pushes = PushTable(max_sources)
        self.counts = Counts()
        self.priority: Priority = UpdatePriority()
        self.epoch = 0
        """The fencing epoch under which the newest step was taken, or that ``lead`` was called with."""
        self.position = 0
        """How many steps were taken since the shard was born."""
        self.epochs: dict[int, int] = {writer: 0} if writer else {}
        """By writer: the fencing epoch that leads its versions."""
        self.knowledge: dict[int, int] = {}
        """By writer: every update by it up to this version time is contained here, or lost to a newer one. It speaks of
        hashed rows, graves and published generations; dense weights that are still being trained and optimiser state
        are their owner's alone."""
        self.horizon = Horizon()
        """What was forgotten here."""
        self.on_delta: Callable[[Delta], None] | None = None
        self._tables = {
            spec.name: Table(spec, change_capacity, max_rows, stateless=stateless) for spec in tables
        }
        self._max_graves, self._max_ahead_us = max_graves, max_ahead_us
        self._history: list[tuple[int, int]] = []
        self._sequence = self._stepped = BEGINNING
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

    @property
    def token(self) -> Token:
        """Changes whenever rows or knowledge do."""
        return Token(self.writer, self._sequence)

    def known(self, knowledge: Mapping[int, int] | None = None, retired: int | None = None) -> Known:
        """What this replica, or another with ``knowledge``, knows, as it is compared with versions."""
        if knowledge is None:
            return Known.of(self.knowledge, self.horizon.retired, self.epochs)
        return Known.of(knowledge, retired or 0, self.epochs)

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

    def dense(self, table: str, *, published: bool = True) -> Generation:
        """All rows of the single ``table``: the newest generation, or the live values under its number.

        Raises UnknownTable; BadSpec for a hashed table.
        """
        found = self._single(table)
        newest = self._generations.newest(found)
        if published:
            return newest
        return live_values(found, newest.number, (newest.time, newest.writer), self.watermarks())

    def generations(self) -> tuple[Generation, ...]:
        """The newest published generation of each dense table that has one."""
        return self._generations.published()

    def lead(self, writer: int, epoch: int) -> None:
        """Take the steps of this shard from now on: ``writer`` is a new incarnation, ``epoch`` fences all before.

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
        """Take no more steps: another server does, whose steps are to be applied."""
        self.writer, self.on_delta = 0, None

    def apply(self, delta: Delta) -> None:
        """Take over a step of another leader of the same shard, or of an earlier start.

        Raises OutOfOrder, having changed nothing, where it does not follow the newest step; PeerFault or
        TableFull where its rows do not fit: this shard is then to be thrown away.
        """
        if delta.position != self.position + 1 or delta.epoch < self.epoch:
            raise OutOfOrder(
                f"shard {self.shard_id}: step {delta.position} of epoch {delta.epoch} does not follow "
                f"{self.position} of {self.epoch}"
            )
        self._absorb(delta)
        self._note(delta.epoch, delta.writer, delta.position)

    def _absorb(self, delta: Delta, priority: float = 0.0) -> None:
        """Write what a step of somebody else wrote."""
        for rows in delta.rows:
            self._put(rows, priority)
        for graves in delta.graves:
            self._bury(graves)
        for table, keys in delta.dropped:
            self.table(table).drop(keys)
            # No grave tells readers of changes that these are gone: they start over.
            self._floor = self._sequence = self._sequence + 1
        for table, cut in delta.collected:
            self._collect(self.table(table), cut)
            # A copy may never have had them, as it was read after they had gone.
            self.horizon = replace(self.horizon, graves=joined(self.horizon.graves, cut))
        for table, keys in delta.counted:
            if (sketch := self.table(table).sketch) is not None:
                sketch.count(keys)
        for table, norm in delta.norms:
            self.table(table).guard.load(norm)
        for source, progress in delta.progress:
            self.pushes.advance(source, progress.applied, progress.watermark)
        self.clock.observe(delta.clock)
        self.epochs |= delta.epochs
        for generation in delta.generations:
            self._single(generation.table)
            self._sequence += 1
            self._generations.publish(generation, self._sequence)
        if delta.learned is not None:
            self._learn(delta.learned)
        elif delta.rows or delta.graves or delta.generations:
            self.knowledge[delta.writer] = delta.clock

    def _learn(self, learned: Learned) -> None:
        """Join what another replica knows, which is all here, and forget what it has forgotten."""
        self.horizon = self.horizon.joined(learned.horizon)
        retired = self.horizon.retired
        self.knowledge = {
            writer: time
            for writer, time in joined(self.knowledge, learned.knowledge).items()
            if not self.epochs.get(writer, 0) < retired
        }
        if learned.horizon.graves:
            for table in self._tables.values():
                self._collect(table, learned.horizon.graves)
        for source, progress in learned.progress:
            if progress.applied > self.pushes.applied(source):
                self.pushes.advance(source, progress.applied, progress.watermark)

    def merge(self, update: Update, whole: Mapping[str, Keys] | None = None) -> Delta | None:
        """Take over what another replica tells, as one step: of each row the newest version wins. Returns the step,
        None where nothing is new.

        ``whole``: the update ends a full replacement that named these keys, by table; all else here that the other
        knows is gone there, and goes here too. Raises PeerFault where it makes no sense, ClockAhead where a version
        is too far in the future, TableFull; then nothing changed.
        """
        self._require_writer()
        self._check(update)
        epochs = {writer: epoch for writer, epoch in update.epochs.items() if writer not in self.epochs}
        known = Known.of(self.knowledge, self.horizon.retired, self.epochs | epochs)
        rows = tuple(self._fresh(part, known, self.epochs | epochs) for part in update.rows)
        graves = tuple(self._fresh_graves(part, known, self.epochs | epochs) for part in update.graves)
        generations = tuple(one for one in update.generations if self._is_newer(one, self.epochs | epochs))
        for part in rows:
            self.table(part.table).reserve(len(part.keys))
        learned = update.learned
        dropped = () if whole is None or learned is None else self._omitted(learned, whole)
        delta = Delta(
            epoch=self.epoch,
            position=self.position + 1,
            writer=self.writer,
            clock=max([self.clock.last, *self._times(update)]),
            rows=tuple(part for part in rows if len(part.keys)),
            graves=tuple(part for part in graves if len(part.keys)),
            learned=learned or Learned({}),
            epochs=epochs,
            generations=generations,
            dropped=dropped,
        )
        if not (delta.rows or delta.graves or generations or dropped or self._is_news(learned)):
            return None
        self._absorb(delta, np.inf if update.urgent else 0.0)
        self.counts.merged_rows_total += sum(len(part.keys) for part in delta.rows)
        self.counts.merged_rows_total += sum(len(part.keys) for part in delta.graves)
        self.counts.dropped_rows_total += sum(len(keys) for _, keys in dropped)
        self._note(self.epoch, self.writer, self.position + 1)
        if self.on_delta is not None:
            self.on_delta(delta)
        return delta

    def _check(self, update: Update) -> None:
        """Nothing from another replica is trusted. Raises PeerFault, ClockAhead."""
        latest = self.clock.physical_us() + self._max_ahead_us
        if (ahead := max(self._times(update), default=0)) > latest:
            raise ClockAhead(
                f"shard {self.shard_id}: a version is {(ahead - latest + self._max_ahead_us) / 1e6:.0f} s ahead of "
                "this clock; set the clocks right, or allow more (sync.max_clock_skew)"
            )
        for part in update.versioned:
            table = self.table(part.table)
            if table.spec.placement == "single":
                raise BadShape(f"table {part.table} is dense; only its generations travel")
            keys = table.check_keys(part.keys)
            if group(keys, np.empty(len(keys), np.int32)) != len(keys) or (len(keys) and not part.time.min()):
                raise BadShape(f"table {part.table}: a key is named twice, or has no version")
        for rows in update.rows:
            self.table(rows.table).require_width(rows)
            if not (np.isfinite(rows.values).all() and np.isfinite(rows.state).all()):
                raise BadShape(f"table {rows.table}: a value is not finite")
        for one in update.generations:
            spec = self._single(one.table).spec
            if one.values.shape != (spec.rows, spec.dim) or not np.isfinite(one.values).all():
                raise BadShape(f"table {one.table}: its generation is not finite [{spec.rows}, {spec.dim}]")

    def _times(self, update: Update) -> Iterator[int]:
        yield from (int(part.time.max(initial=0)) for part in update.versioned)
        yield from (one.time for one in update.generations)
        if update.learned is not None:
            yield from update.learned.knowledge.values()

    def _fresh(self, part: StoredRows, known: Known, epochs: Mapping[int, int]) -> StoredRows:
        """The rows that are neither covered nor older than what is here."""
        wins = self._wins(part, known, epochs)
        if wins.all():
            return part
        return StoredRows(
            part.table,
            part.keys[wins],
            part.values[wins],
            part.state[wins],
            part.time[wins],
            part.writer[wins],
        )

    def _fresh_graves(self, part: Graves, known: Known, epochs: Mapping[int, int]) -> Graves:
        wins = self._wins(part, known, epochs)
        return Graves(part.table, part.keys[wins], part.time[wins], part.writer[wins])

    def _wins(
        self, part: StoredRows | Graves, known: Known, epochs: Mapping[int, int]
    ) -> npt.NDArray[np.bool_]:
        uncovered = known.above(part.time, part.writer)
        wins = newer((part.time, part.writer), self.table(part.table).latest(part.keys), epochs)
        self.counts.covered_rows_total += len(wins) - int(uncovered.sum())
        self.counts.lost_rows_total += int((uncovered & ~wins).sum())
        return uncovered & wins

    def _is_newer(self, one: Generation, epochs: Mapping[int, int]) -> bool:
        here = self.dense(one.table)
        mine, theirs = ((epochs.get(g.writer, 0), g.time, g.writer) for g in (here, one))
        return theirs > mine

    def _is_news(self, learned: Learned | None) -> bool:
        if learned is None:
            return False
        fresh = any(
            time > self.knowledge.get(writer, 0) and not self.epochs.get(writer, 0) < self.horizon.retired
            for writer, time in learned.knowledge.items()
        )
        moved = any(progress.applied > self.pushes.applied(source) for source, progress in learned.progress)
        return fresh or moved or self.horizon.joined(learned.horizon) != self.horizon

    def _omitted(self, learned: Learned, whole: Mapping[str, Keys]) -> tuple[tuple[str, Keys], ...]:
        """By table, the keys here that a full replacement did not name, and whose versions it knew."""
        theirs = self.known(learned.knowledge, learned.horizon.retired)
        found = []
        for name, table in self._tables.items():
            if table.spec.placement == "single":
                continue
            named = KeyIndex()
            named.insert(np.ascontiguousarray(whole.get(name, np.zeros(0, np.uint64))))
            keys = table.known_keys(theirs)
            slots, missing = named.find(keys)
            if missing:
                found.append((name, keys[slots < 0]))
        return tuple(found)

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
        self.horizon = head.horizon
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

    def restore(self, state: ShardState) -> None:
        """``begin`` with a whole snapshot, and its rows. Raises BadSpec, having changed nothing; SnapshotDamaged, and
        then this shard is to be thrown away."""
        self.begin(state.head)
        for rows in state.rows:
            self.put(rows)
        for graves in state.graves:
            self.bury(graves)

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
            epochs={writer: epoch for writer, epoch in self.epochs.items() if self._is_named(writer, epoch)},
            pushes=self.pushes.progress(),
            generations=self._generations.published(),
            norms={name: table.guard.state() for name, table in self._tables.items()},
            sketches={name: t.sketch.state() for name, t in self._tables.items() if t.sketch is not None},
            horizon=self.horizon,
        )

    def _is_named(self, writer: int, epoch: int) -> bool:
        """Whether a stored version may be by ``writer``."""
        return writer in self.knowledge or epoch < self.horizon.retired

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

    def _put(self, rows: StoredRows, priority: float = 0.0) -> None:
        self.table(rows.table).put(rows, self._sequence, priority)
        # Every version here was issued or observed: so a push need not look at those of its rows to exceed them.
        self.clock.observe(int(rows.time.max(initial=0)))
        self._sequence += len(rows.keys)

    def _bury(self, graves: Graves) -> None:
        self.table(graves.table).bury(graves, self._sequence)
        self.clock.observe(int(graves.time.max(initial=0)))
        self._sequence += len(graves.keys)

    def _collect(self, table: Table, cut: Mapping[int, int]) -> dict[int, int]:
        """Forget the graves that ``cut`` covers; returns the join of their versions. Readers of changes who had not
        seen them start over: nobody could tell them what is gone."""
        before = len(table.graves)
        forgotten, newest = table.graves.collect(cut)
        self.counts.graves_collected_total += before - len(table.graves)
        self.horizon = replace(self.horizon, graves=joined(self.horizon.graves, forgotten))
        self._floor = max(self._floor, newest)
        return forgotten

    def _single(self, table: str) -> Table:
        found = self.table(table)
        if found.spec.placement != "single":
            raise BadSpec(f"table {table} is spread over all shards; only a single one has generations")
        return found

    def _require_writer(self) -> None:
        if not self.writer:
            raise BadSpec(f"shard {self.shard_id} is led by another server")

    def _step(
        self,
        *,
        progress: tuple[tuple[Source, Progress], ...] = (),
        rows: Callable[[], tuple[StoredRows, ...]] = lambda: (),
        counted: tuple[tuple[str, Keys], ...] = (),
        graves: tuple[Graves, ...] = (),
        norms: tuple[tuple[str, NormState], ...] = (),
        generations: tuple[Generation, ...] = (),
        collected: tuple[tuple[str, Mapping[int, int]], ...] = (),
        learned: Learned | None = None,
    ) -> None:
        """Count a step of this shard's own, and tell it."""
        self._note(self.epoch, self.writer, self.position + 1)
        if self.on_delta is None:
            return
        self.on_delta(
            Delta(
                epoch=self.epoch,
                position=self.position,
                writer=self.writer,
                clock=self.clock.last,
                progress=progress,
                rows=rows(),
                graves=graves,
                counted=counted,
                norms=norms,
                generations=generations,
                collected=collected,
                learned=learned,
            )
        )

    def _note(self, epoch: int, writer: int, position: int) -> None:
        self.epochs[writer] = epoch
        if not self._history or self._history[-1][0] != epoch:
            self._history.append((epoch, position))
        self.epoch, self.position = epoch, position
        # A step that changed no row may have moved knowledge: the token tells.
        if self._sequence == self._stepped:
            self._sequence += 1
        self._stepped = self._sequence


def _checked_writer(writer: int) -> int:
    if not 0 < writer < 2**32:
        raise BadSpec(f"writer {writer} is not in [1, 2^32)")
    return writer
