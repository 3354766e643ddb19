"""What keeps the shards of a server: recovery when one is opened, its log while it moves, snapshots now and then.

The server's loop calls ``step`` every turn. It takes in what the writing thread reports, and hands out a page of a
shard that is due for a snapshot; pushes go on between two pages, and the log has what they changed. So no turn takes
longer for it than copying one page.

What it holds in memory is bounded by the bytes that wait for the disk. At the bound a slow disk makes pushes wait
(``full``). A failing disk does not: the log is given up then, ``durable`` offsets stand still, and trainers, who commit
no further than those, would repeat what a restart loses. A snapshot is tried again and again, and once one is whole,
everything is durable as before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.parameter_server.holdings import Held
from services.parameter_server.storage.offsets import DurableOffsets
from services.parameter_server.storage.recovery import Check, recover
from services.parameter_server.storage.shardlog import ShardLog
from services.parameter_server.storage.snapshots import ShardFolder
from services.parameter_server.storage.writer import Pace, Report, Writer
from sync.records import Delta
from sync.replica import FIRST_PAGE, PAGE_ROWS, PageCursor
from sync.shard import Shard

PAGE_BYTES: Final = 4 * 2**20
"""Of a shard, copied in one turn of the loop: a few milliseconds."""
PAGES_AHEAD: Final = 2
LONGEST_RETRY_S: Final = 30.0
FINISH_S: Final = 0.002
SETTLE_S: Final = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DurabilityConfig:
    """``snapshot_s``: between two snapshots of a shard that moves; ``log_bytes``: one is also due once the log since
    the last is longer than this and than the last snapshot; ``backlog_bytes``: steps waiting for the disk."""

    snapshot_s: float = 60.0
    log_bytes: int = 256 * 2**20
    backlog_bytes: int = 256 * 2**20
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True)
class DurabilityCounts:
    """Totals since the start. ``given_up_total``: how often the log was; ``dropped_total``: steps that were not written
    for it; ``held_back_total``: pushes that had to wait; ``last_snapshot_s``: monotonic seconds."""

    held_back_total: int = 0
    given_up_total: int = 0
    dropped_total: int = 0
    last_snapshot_s: float | None = None


@dataclass(slots=True, eq=False)
class _Kept:
    """A shard and its files. ``recording``: whether steps are handed out to be written; ``base``: the number of the
    snapshot that a log which was given up begins with anew."""

    held: Held
    log: ShardLog
    snapshot: int
    due_s: float
    log_bytes: int = 0
    snapshot_bytes: int = 0
    failures: int = 0
    recording: bool = True
    base: int = 0

    @property
    def outdated(self) -> bool:
        """Whether a snapshot would say more than the last, or is what durability waits for. Of a copy that is not
        whole there is none: nothing can be started from it."""
        moved = self.held.shard.position != self.snapshot or self.held.durable.standing_still
        return moved and self.held.whole


@dataclass(slots=True)
class _Copy:
    """A snapshot under way: its number, where the shard was at its beginning, the page to go on with, and whether all
    of it was handed out."""

    number: int
    kept: _Kept
    begun: int
    cursor: PageCursor | None
    ended: bool = False


class Durability:
    """``folder(model, shard)`` says where a shard's files are. Used by the server's loop."""

    def __init__(
        self,
        folder: Callable[[str, int], ShardFolder],
        config: DurabilityConfig | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or DurabilityConfig()
        self.counts = DurabilityCounts()
        self.writer = Writer(self.config.pace, monotonic)
        self._folder, self._monotonic = folder, monotonic
        self._kept: dict[ShardLog, _Kept] = {}
        self._by_held: dict[int, _Kept] = {}
        self._left: dict[Path, ShardLog] = {}
        """By folder, the log of a shard that was here before: the thread may still be writing it."""
        self._copy: _Copy | None = None
        self._copies = 0

    def open(self, model: str, shard_id: int, make: Callable[[], Shard], check: Check) -> Held:
        """The shard as its files have it, new where there are none; ``record`` its steps from now on.

        ``make`` gives an empty shard; ``check`` looks at what is known of the stored one and raises what it finds
        wrong. Raises SnapshotError, OSError.
        """
        folder = self._folder(model, shard_id)
        left = self._left.pop(folder.path, None)
        if left is not None and not self.writer.settled(left, SETTLE_S):
            self._left[folder.path] = left
            raise OSError(f"{folder.path} is still being written; the disk is slow")
        found = recover(folder, make, check)
        shard = found.shard
        offsets = {source: progress.applied for source, progress in shard.pushes.progress().items()}
        held = Held(shard, DurableOffsets(shard.position, offsets))
        log = ShardLog(folder, shard.head())
        due_s = self._monotonic() + self.config.snapshot_s
        kept = self._kept[log] = _Kept(held, log, found.snapshot, due_s, found.log_bytes)
        self._by_held[id(held)] = kept
        return held

    def record(self, held: Held, delta: Delta) -> None:
        """Write a step that the shard of ``held`` took."""
        self._record(self._of(held), delta)

    def renew(self, held: Held) -> None:
        """Another shard was put in the place of ``held.shard``: what is on disk belongs to another line of steps, and
        gives way to a snapshot of the new one as soon as that is whole."""
        kept = self._of(held)
        held.durable.begin_anew()
        self._stop_recording(kept)
        self.writer.abandon(kept.log, renew=True)
        kept.due_s = self._monotonic()

    def forget(self, held: Held) -> None:
        """The shard is somebody else's now. Its files stay as they are: if it comes back, only what happened
        meanwhile has to be copied."""
        kept = self._by_held.pop(id(held))
        self._stop_recording(kept)
        self.writer.forget(kept.log)
        self._left[kept.log.path] = kept.log
        del self._kept[kept.log]

    @property
    def full(self) -> bool:
        """Whether pushes have to wait for the disk."""
        return self._over and not self.writer.log_failing

    @property
    def busy(self) -> bool:
        """Whether the loop should come back soon: something is being written."""
        return self._copy is not None or self.writer.waiting_bytes > 0

    @property
    def given_up(self) -> int:
        """Shards whose steps are not durable until a snapshot is whole."""
        return sum(kept.held.durable.standing_still for kept in self._kept.values())

    def step(self) -> None:
        """Take in what was written, copy the next page, begin what is due. Never waits."""
        for report in self.writer.reports():
            self._take_in(report)
        if self._over and self.writer.log_failing:
            self._give_up()
        if self._copy is None:
            self._begin_due()
        copy = self._copy
        if copy is not None and not copy.ended and self.writer.waiting_pages < PAGES_AHEAD:
            self._copy_page(copy)

    def snapshot_now(self) -> None:
        """Every shard that moved is due for a snapshot."""
        for kept in self._kept.values():
            kept.due_s = self._monotonic()

    def finish(self, timeout_s: float) -> bool:
        """Wait until every step is on disk; whether it was so in time."""
        deadline = self._monotonic() + timeout_s
        while any(
            kept.held.whole and kept.held.durable.position < kept.held.shard.position
            for kept in self._kept.values()
        ):
            if self._monotonic() >= deadline:
                return False
            self.step()
            time.sleep(FINISH_S)
        return True

    def close(self) -> None:
        """Write what waits, as far as the disk lets, and end the thread."""
        self.writer.close()

    @property
    def _over(self) -> bool:
        return self.writer.waiting_bytes >= self.config.backlog_bytes

    def _of(self, held: Held) -> _Kept:
        return self._by_held[id(held)]

    def _record(self, kept: _Kept, delta: Delta) -> None:
        if not kept.recording:
            self.counts.dropped_total += 1
            return
        kept.log_bytes += delta.nbytes
        kept.held.durable.note(delta)
        self.writer.append(kept.log, delta)

    def _take_in(self, report: Report) -> None:
        kept = self._kept.get(report.log)
        if kept is None:
            return
        if report.outcome == "synced":
            # Of a log that was given up, a report may still be on its way when its successor begins.
            if not kept.held.durable.standing_still or report.snapshot == kept.base:
                kept.held.durable.reached(report.position)
        elif report.outcome == "lost":
            self._lose(kept)
        elif self._copy is not None and self._copy.number == report.snapshot:
            begun, self._copy = self._copy.begun, None
            if report.outcome == "snapshot-done":
                self._complete(kept, begun, report.size)
            elif kept.held.durable.standing_still:
                self._lose(kept)
            else:
                self._try_later(kept)

    def _complete(self, kept: _Kept, begun: int, size: int) -> None:
        kept.held.durable.complete()
        kept.snapshot, kept.snapshot_bytes, kept.failures = begun, size, 0
        now = self.counts.last_snapshot_s = self._monotonic()
        kept.due_s = now + self.config.snapshot_s

    def _try_later(self, kept: _Kept) -> None:
        pause_s: float = min(self.config.pace.retry_s * 2**kept.failures, LONGEST_RETRY_S)
        kept.failures = min(kept.failures + 1, 16)
        kept.due_s = self._monotonic() + pause_s

    def _lose(self, kept: _Kept) -> None:
        """Steps of a log are missing: nothing more is written to it until a snapshot is its new beginning."""
        self.counts.given_up_total += kept.recording
        self._stop_recording(kept)
        self.writer.abandon(kept.log)
        self._try_later(kept)

    def _stop_recording(self, kept: _Kept) -> None:
        if self._copy is not None and self._copy.kept is kept:
            self._copy = None
        kept.recording = False
        kept.held.durable.stand_still()

    def _give_up(self) -> None:
        _log.error(
            "%d MiB wait for a disk that fails: the log is given up. Durable offsets stay where they are until the "
            "disk is back and a snapshot is whole",
            self.writer.waiting_bytes >> 20,
        )
        self._copy = None
        self.writer.give_up()
        for kept in self._kept.values():
            self._lose(kept)

    def _begin_due(self) -> None:
        now = self._monotonic()
        for kept in self._kept.values():
            if kept.outdated and (now >= kept.due_s or self._is_long(kept)):
                self._begin(kept)
                return

    def _is_long(self, kept: _Kept) -> bool:
        longest = max(self.config.log_bytes, kept.snapshot_bytes)
        return kept.log_bytes > longest and not kept.failures

    def _begin(self, kept: _Kept) -> None:
        head = kept.held.shard.head()
        self._copies += 1
        self._copy = _Copy(self._copies, kept, head.position, FIRST_PAGE if head.specs else None)
        kept.log_bytes, kept.recording = 0, True
        if kept.held.durable.standing_still:
            offsets = {source: progress.applied for source, progress in head.pushes.items()}
            kept.held.durable.restart(head.position, offsets)
            kept.base = self._copies
        self.writer.begin(kept.log, self._copies, head)

    def _copy_page(self, copy: _Copy) -> None:
        shard, log = copy.kept.held.shard, copy.kept.log
        while copy.cursor is not None:
            spec = shard.specs[copy.cursor[0]]
            row_bytes = 4 * (spec.dim + spec.state_dim) + 20
            page, copy.cursor = shard.page(copy.cursor, min(PAGE_ROWS, max(1, PAGE_BYTES // row_bytes)))
            if len(page.keys):
                self.writer.add(log, page)
                if copy.cursor is not None:
                    return
        self.writer.end(log, shard.position)
        copy.ended = True
