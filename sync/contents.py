"""What a replica of a shard holds: some tables' rows, the push table, the clock and the change stream, as it is read
and copied. Pure; one thread uses it. How it changes stands in ``replica``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING, Cursor
from sync.clock import HybridClock
from sync.columns import MAX_ROWS
from sync.dense import Generations, live_values
from sync.errors import BadShape, BadSpec, UnknownTable
from sync.knowledge import Horizon, Known
from sync.priority import Priority, UpdatePriority
from sync.pushes import PushTable, Source, Watermark
from sync.records import Delta, Generation, Graves, Head, History
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
    """A shard version: of which start of a replica, and how many changes it had seen, 16 bytes. Tokens are equal or
    not; they say nothing about other replicas."""

    incarnation: int
    counter: int


class Contents:
    """One shard of one model, at rest or between two steps.

    ``writer``: the id of this start of this server, uint32, never used before. 0: somebody else takes the steps, and
    this one applies them, until it ``lead``s.
    ``change_capacity``: changes that each table remembers; a reader further behind costs a scan.
    ``max_rows``: bound on each table's rows; ``max_graves`` on its tombstones. ``fingerprint``: of the feature
    schema, kept in snapshots. ``on_delta`` is told every step taken here. ``stateless``: rows have no optimiser
    state, so they can be read and merged, and not pushed. ``max_ahead_us``: a version that is further ahead of this
    machine's clock is refused.
    """

    __slots__ = (
        "_floor", "_generations", "_history", "_max_graves", "_sequence", "_start", "_stepped", "_tables", "clock",
        "counts", "epoch", "epochs", "fingerprint", "horizon", "knowledge", "max_ahead_us", "model", "on_delta",
        "position", "priority", "pushes", "shard_id", "stateless", "writer",
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
        self.writer = checked_writer(writer) if writer else 0
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
        self._max_graves, self.max_ahead_us = max_graves, max_ahead_us
        self._history: list[tuple[int, int]] = []
        self._sequence = self._stepped = BEGINNING
        # Of this start, also where coordination was begun anew and gives the ids of writers for a second time.
        self._start = clock.physical_us() // 1_000 % 2**31
        self._floor = BEGINNING
        self._generations = Generations()

    @property
    def incarnation(self) -> int:
        """Changes with every start and every owner: cursors, tokens and clients notice by it."""
        return self._start << 32 | self.writer

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
    def is_empty(self) -> bool:
        """Whether nothing is held or claimed."""
        return not (self.knowledge or any(len(t) or len(t.graves) for t in self._tables.values()))

    @property
    def token(self) -> Token:
        """Changes whenever rows or knowledge do."""
        return Token(self.incarnation, self._sequence)

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
        found = self.single(table)
        newest = self._generations.newest(found)
        if published:
            return newest
        return live_values(found, newest.number, (newest.time, newest.writer), self.watermarks())

    def generations(self) -> tuple[Generation, ...]:
        """The newest published generation of each dense table that has one."""
        return self._generations.published()

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
            epochs=self._named_epochs(),
            pushes=self.pushes.progress(),
            generations=self._generations.published(),
            norms={name: table.guard.state() for name, table in self._tables.items()},
            sketches={name: t.sketch.state() for name, t in self._tables.items() if t.sketch is not None},
            horizon=self.horizon,
            stateless=self.stateless,
        )

    def _named_epochs(self) -> dict[int, int]:
        """Of the writers that a version here may be by: known, retired, or of rows that came out of turn."""
        writers = set(self.knowledge).union(*(table.writers() for table in self._tables.values()))
        writers.update(one.writer for one in self.generations())
        return {w: e for w, e in self.epochs.items() if w in writers or e < self.horizon.retired}

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

    def single(self, table: str) -> Table:
        """The dense ``table``. Raises UnknownTable; BadSpec for a hashed one."""
        found = self.table(table)
        if found.spec.placement != "single":
            raise BadSpec(f"table {table} is spread over all shards; only a single one has generations")
        return found


def checked_writer(writer: int) -> int:
    """``writer``, if it can be the id of one. Raises BadSpec."""
    if not 0 < writer < 2**32:
        raise BadSpec(f"writer {writer} is not in [1, 2^32)")
    return writer
