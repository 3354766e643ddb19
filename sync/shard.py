"""A shard that writes by itself: pushes, deletions, expiry and generations of dense weights.

A push is one atomic step: its parts are all checked and given room, then one version is issued, every row is
written with it, knowledge is raised and the sources' offsets advance. Nothing in between can fail. A shard has one
owner at a time, the one that ``lead``s it under the newest fencing epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sync.dense import live_values
from sync.errors import BadPush, BadSpec
from sync.knowledge import Horizon, Knowledge, covers
from sync.pushes import NOTHING, Push, PushOutcome, Source
from sync.records import Learned
from sync.records import Rows as StoredRows
from sync.replica import Replica
from sync.retirement import as_own, older, out_of_turn
from sync.table import Prepared, Refused, Table

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Arrays = list[tuple[Keys, Rows]]


class Shard(Replica):
    """A replica that can own its shard."""

    __slots__ = ()

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
        self._require_owner()
        if self.stateless:
            raise BadSpec(f"shard {self.shard_id} has no optimiser state here: it takes no pushes")
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
        self._require_owner()
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
        self._step(graves=(graves,))
        self._bound_graves(found)
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

    def publish_dense(self, table: str, generation: int | None = None, *, again: bool = False) -> int:
        """Make the live values of the single ``table`` its next generation; returns its number.

        The same one as before if nothing changed since, unless it is to be published ``again``; else ``generation``,
        or the next number. Raises UnknownTable; BadSpec for a hashed table or a number that does not grow.
        """
        self._require_owner()
        found = self.single(table)
        before = self.dense(table).number
        if not (again or self._generations.outdated(found)):
            return before
        number = before + 1 if generation is None else generation
        if number <= before:
            raise BadSpec(f"generation {number} of {table} is not above {before}")
        time = self.clock.tick()
        live = live_values(found, number, (time, self.writer), self.watermarks())
        self._sequence += 1
        self._generations.publish(live, self._sequence)
        self.knowledge[self.writer] = time
        self._step(generations=(live,))
        return number

    def resume_dense(self, table: str) -> bool:
        """Go on from the published generation of the single ``table``, where another replica trained it so far and its
        live values never came here. Whether it was so. What the optimiser kept of it is lost."""
        self._require_owner()
        found = self.single(table)
        newest = self.dense(table)
        if self.stateless or len(found) or not newest.number:
            return False
        keys, time = np.arange(len(newest.values), dtype=np.uint64), self.clock.tick()
        state = np.zeros((len(keys), found.state_dim), np.float32)
        versions = np.full(len(keys), time, np.uint64), np.full(len(keys), self.writer, np.uint32)
        rows = StoredRows(table, keys, newest.values.copy(), state, *versions)
        self._put(rows)
        self.knowledge[self.writer] = time
        self._step(rows=lambda: (rows,))
        return True

    def collect(self, cut: Knowledge) -> int:
        """Forget the graves that ``cut`` covers: what every other replica is known to hold. Returns how many. Who did
        not hold them gets a full replacement, so this is safe whatever ``cut`` says, and cheap if it is right.

        None before the writers of older fencing epochs are retired: an older owner may still come back with writes
        that nobody else has, and nothing would tell that a forgotten grave is newer. Where several write without
        fencing, nothing guards against that: there the cut must be right for whoever ever comes back.
        """
        self._require_owner()
        if self.horizon.retired < self.epochs[self.writer]:
            return 0
        before = self.counts.graves_collected_total
        found = [(name, self._collect(table, cut)) for name, table in self._tables.items()]
        if collected := tuple((name, forgotten) for name, forgotten in found if forgotten):
            self._step(collected=collected)
        return self.counts.graves_collected_total - before

    def retire(self, epoch: int, held: Knowledge) -> bool:
        """Take the writers of fencing epochs below ``epoch`` out of all vectors, if ``held``, what every other
        replica is known to hold, covers all that they wrote. Whether it does. What one of them wrote that is not here
        now loses wherever it turns up. At most the epoch under which this shard writes itself."""
        self._require_owner()
        epoch = min(epoch, self.epochs[self.writer])
        if epoch <= self.horizon.retired or not covers(held, older(self, epoch)):
            return False
        learned = self._close(epoch)
        self._step(learned=learned)
        return True

    def _close(self, epoch: int) -> Learned:
        """Nothing that is not here of writers of fencing epochs below ``epoch`` counts any more."""
        self._adopt(epoch)
        learned = Learned({}, Horizon({}, epoch, self.horizon.retired, older(self, epoch)))
        self._learn(learned)
        return learned

    def _adopt(self, epoch: int) -> None:
        """Write again what came here out of turn of writers of fencing epochs below ``epoch``: nobody can tell whether
        it is all of theirs, and now it is this writer's."""
        told, dug, published = out_of_turn(self, epoch)
        if not (told or dug or published):
            return
        time = self.clock.tick()
        rows = tuple(as_own(part, time, self.writer) for part in told)
        graves = tuple(as_own(part, time, self.writer) for part in dug)
        for part in rows:
            self._put(part)
        for grave in graves:
            self._bury(grave)
        generations = tuple(replace(one, time=time, writer=self.writer) for one in published)
        for one in generations:
            self._sequence += 1
            self._generations.publish(one, self._sequence)
        self.knowledge[self.writer] = time
        self._step(rows=lambda: rows, graves=graves, generations=generations)

    def _require_owner(self) -> None:
        """Raises BadSpec unless this replica may write."""
        self._require_writer()
        if self.epochs[self.writer] < self.horizon.retired:
            raise BadSpec(
                f"shard {self.shard_id}: writer {self.writer} was retired; a newer owner has taken over"
            )

    def _bound_graves(self, table: Table) -> None:
        """Forget the oldest half of a table's graves once there are too many, whoever has them or not."""
        if len(table.graves) <= self._max_graves:
            return
        if self.horizon.retired < (epoch := self.epochs[self.writer]):
            self._step(learned=self._close(epoch))
        cut = table.graves.cut_to_keep(self._max_graves // 2)
        self._step(collected=((table.spec.name, self._collect(table, cut)),))

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
        touched = []
        if any(len(part.total.keys) for _, part in prepared):
            time, now_us = self.clock.tick(), self.clock.physical_us()
            for table, part in prepared:
                touched.append(table.apply(part, time, self.writer, self._sequence, self.priority, now_us))
                self._sequence += len(part.total.keys)
                self.counts.pushed_rows_total += len(part.total.keys)
                self.counts.inserted_rows_total += part.missing
            self.knowledge[self.writer] = time
        self._step(
            progress=self.pushes.progress_of({push.source for push in pushes}),
            rows=lambda: tuple(self._tables[one.table].stored(one.slots) for one in touched),
            counted=tuple((t.spec.name, part.counted) for t, part in prepared if part.counted is not None),
            norms=tuple((one.table, self._tables[one.table].guard.state()) for one in touched),
        )


def _joined(arrays: Arrays) -> tuple[Keys, Rows]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([keys for keys, _ in arrays]), np.concatenate([rows for _, rows in arrays])
