"""A replica of a shard, used by one thread: what it holds, and how it takes over what others wrote.

Pure state: no I/O; time comes from the clock that is passed in. There are two ways. A copy of the same line of steps
applies each (``apply``), in order. A replica elsewhere hears the newest states of rows, in any order and from anybody,
and the newest version wins (``merge``); that is a step of its own line. What writes by itself is a ``Shard``.

Every step is numbered (``position``) and can be had as a ``Delta`` (``on_delta``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING
from sync.contents import (
    FIRST_PAGE,
    PAGE_ROWS,
    Contents,
    Counts,
    PageCursor,
    ShardState,
    Token,
    checked_writer,
)
from sync.errors import BadShape, BadSpec, OutOfOrder, SnapshotDamaged, TableFull, UnknownTable, Unsettled
from sync.guard import NormState
from sync.knowledge import Horizon, joined
from sync.merging import check, is_news, omitted, times, winners
from sync.pushes import Progress, Source
from sync.records import Delta, Generation, Graves, Head, Learned, Update
from sync.records import Rows as StoredRows
from sync.retirement import unsettled
from sync.table import Table

__all__ = ["FIRST_PAGE", "PAGE_ROWS", "Counts", "PageCursor", "Replica", "ShardState", "Token"]

Keys = npt.NDArray[np.uint64]
Dropped = tuple[tuple[str, Keys], ...]


class Replica(Contents):
    """What a shard holds, with the steps that change it."""

    __slots__ = ()

    def lead(self, writer: int, epoch: int) -> None:
        """Take the steps of this shard from now on: ``writer`` is a new incarnation, ``epoch`` fences all before.

        Raises BadSpec, having changed nothing, where the epoch is not newer or the writer not new.
        """
        if epoch <= self.epoch or writer in self.epochs:
            raise BadSpec(
                f"shard {self.shard_id}: epoch {epoch} (writer {writer}) does not follow {self.epoch}"
            )
        self.writer, self.epoch = checked_writer(writer), epoch
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
            if self.table(table).spec.placement == "single":
                self._generations.drop(table)
            else:
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
            self.single(generation.table)
            self._sequence += 1
            self._generations.publish(generation, self._sequence)
        if delta.learned is not None:
            self._learn(delta.learned)
        elif delta.rows or delta.graves or delta.generations:
            self.knowledge[delta.writer] = delta.clock

    def _learn(self, learned: Learned) -> None:
        """Join what another replica knows, which is all here, and forget what it has forgotten."""
        self.horizon = self.horizon.joined(learned.horizon, self.epochs)
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
        check(self, update)
        won = winners(self, update)
        for name in {part.table for part in won.rows}:
            self.table(name).reserve(np.concatenate([part.keys for part in won.rows if part.table == name]))
        learned = update.learned
        dropped = () if whole is None or learned is None else omitted(self, learned, whole)
        if learned is not None and learned.horizon.retired > self.horizon.retired:
            dropped += self._settled(update, learned.horizon, won.epochs, dropped)
        self.counts.covered_rows_total += won.covered
        self.counts.lost_rows_total += won.lost
        if not (won.rows or won.graves or won.generations or dropped or is_news(self, learned, won.epochs)):
            return None
        delta = Delta(
            epoch=self.epoch,
            position=self.position + 1,
            writer=self.writer,
            clock=max([self.clock.last, *times(update)]),
            rows=won.rows,
            graves=won.graves,
            learned=learned or Learned({}),
            epochs=won.epochs,
            generations=won.generations,
            dropped=dropped,
        )
        self._absorb(delta, np.inf if update.urgent else 0.0)
        self.counts.merged_rows_total += won.merged
        self.counts.dropped_rows_total += sum(len(keys) for _, keys in dropped)
        self._note(self.epoch, self.writer, self.position + 1)
        if self.on_delta is not None:
            self.on_delta(delta)
        return delta

    def _settled(
        self, update: Update, horizon: Horizon, epochs: Mapping[int, int], dropped: Dropped
    ) -> Dropped:
        """What else is to be dropped with an update that tells of a retirement. Raises Unsettled where more is here of
        retired writers than there should be, and the update does not undo it: it is the last of a full replacement
        during which others told more, or the sender did not know."""
        rows, published = unsettled(self, update, dropped)
        passed = horizon.passed_by(self.knowledge, self.horizon.retired, self.epochs | dict(epochs))
        if rows or (update.final is None and (published or not passed)):
            raise Unsettled(
                f"shard {self.shard_id}: {rows} rows of retired writers are known here only; all is asked for anew"
            )
        return tuple((table, np.zeros(0, np.uint64)) for table in published)

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
            self._stepped = self._sequence
        except (UnknownTable, BadShape, TableFull) as error:
            raise SnapshotDamaged(str(error)) from error

    def bury(self, graves: Graves) -> None:
        """Take over graves of a snapshot. Raises SnapshotDamaged for an unknown table."""
        try:
            self._bury(graves)
            self._stepped = self._sequence
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

    def _put(self, rows: StoredRows, priority: float = 0.0) -> None:
        if self.stateless and rows.state.shape[1]:
            # Kept by a process that could write, which this one is not any more.
            rows = replace(rows, state=rows.state[:, :0])
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
