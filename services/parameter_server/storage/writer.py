"""The thread that writes the shards' logs and snapshots, so that the server's loop never waits for a disk.

Jobs are done in order. Steps are written as they come and synced together (group commit): a step waits for at most the
interval between two syncs, and any number of them shares one. What became of it comes back as reports.

A step that cannot be written (the disk is full) is tried again until it can, the jobs after it wait; the loop decides
when too many do (``give_up``). A log that cannot be synced is lost from there on, since nobody knows what of it is on
the disk: it is abandoned, and a new snapshot has to be its new beginning. A snapshot that cannot be written is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from services.parameter_server.storage.shardlog import ShardLog
from sync.records import Delta, Graves, Head, Rows

COMPLAIN_S: Final = 30.0
"""How often the process's log says that the disk fails."""
_logger = logging.getLogger(__name__)

What = Literal["log", "snapshot"]
Outcome = Literal["synced", "lost", "snapshot-done", "snapshot-failed"]


@dataclass(frozen=True, slots=True)
class Pace:
    """``fsync_s``: between two syncs of the logs; ``retry_s``: between two tries on a disk that fails."""

    fsync_s: float = 0.02
    retry_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a log: ``synced`` up to ``position``, ``lost``; or of its snapshot, of ``size`` bytes.

    ``snapshot``: that snapshot's number, or the newest that was begun before the step at ``position``.
    """

    log: ShardLog
    outcome: Outcome
    position: int = 0
    snapshot: int = 0
    size: int = 0


@dataclass(slots=True)
class WriterCounts:
    """Totals since the start."""

    log_bytes_total: int = 0
    log_steps_total: int = 0
    syncs_total: int = 0
    snapshots_total: int = 0
    snapshot_bytes_total: int = 0
    snapshot_failures_total: int = 0
    failures_total: int = 0


@dataclass(frozen=True, slots=True)
class _Append:
    log: ShardLog
    delta: Delta


@dataclass(frozen=True, slots=True)
class _Abandon:
    log: ShardLog
    renew: bool
    forget: bool


@dataclass(frozen=True, slots=True)
class _Begin:
    log: ShardLog
    number: int
    head: Head


@dataclass(frozen=True, slots=True)
class _Page:
    log: ShardLog
    page: Rows | Graves


@dataclass(frozen=True, slots=True)
class _End:
    log: ShardLog
    position: int


_Job = _Append | _Abandon | _Begin | _Page | _End


class Writer:
    """The loop's thread calls the methods; none of them waits but ``settled`` and ``close``."""

    def __init__(self, pace: Pace | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.counts = WriterCounts()
        self._pace, self._monotonic = pace or Pace(), monotonic
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._pages = 0
        self._round = 0
        self._doing: ShardLog | None = None
        self._closing = False
        self._reports: deque[Report] = deque()
        self._dirty: dict[ShardLog, None] = {}
        self._last_sync_s = -self._pace.fsync_s
        self._failing: dict[tuple[What, Path], float] = {}
        self._complained_s = -COMPLAIN_S
        self._snapshot_number = 0
        self._snapshotting: ShardLog | None = None
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="durability", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Of the steps that are not written yet."""
        return self._waiting_bytes

    @property
    def waiting_pages(self) -> int:
        """Pages of snapshots that are not written yet."""
        return self._pages

    @property
    def failing(self) -> bool:
        """Whether the last try to write a log or a snapshot failed."""
        return bool(self._failing)

    @property
    def log_failing(self) -> bool:
        """Whether the last try to write a log failed."""
        return any(what == "log" for what, _ in tuple(self._failing))

    def append(self, log: ShardLog, delta: Delta) -> None:
        self._put(_Append(log, delta))

    def begin(self, log: ShardLog, number: int, head: Head) -> None:
        """Start snapshot ``number`` (any but 0) of a log's shard."""
        self._put(_Begin(log, number, head))

    def add(self, log: ShardLog, page: Rows | Graves) -> None:
        self._put(_Page(log, page))

    def end(self, log: ShardLog, position: int) -> None:
        """Complete the snapshot under way once the steps up to ``position``, which were appended, are on disk."""
        self._put(_End(log, position))

    def abandon(self, log: ShardLog, *, renew: bool = False) -> None:
        """See ``ShardLog.abandon``. A snapshot under way is dropped without a report."""
        self._put(_Abandon(log, renew, False))

    def forget(self, log: ShardLog) -> None:
        """``abandon`` a log that nobody continues."""
        self._put(_Abandon(log, False, True))

    def settled(self, log: ShardLog, timeout_s: float) -> bool:
        """Wait until every job of ``log`` is done; whether it was so in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._doing is not log and all(job.log is not log for job in self._jobs), timeout_s
            )

    def give_up(self) -> None:
        """Forget everything that waits. All logs are to be abandoned then, since steps of theirs are missing."""
        with self._changed:
            self._round += 1
            abandoned = [job for job in self._jobs if isinstance(job, _Abandon)]
            self._jobs.clear()
            self._jobs.extend(abandoned)
            self._waiting_bytes = self._pages = 0
            self._changed.notify_all()

    def reports(self) -> list[Report]:
        """What happened since the last time. Raises RuntimeError where the thread has died of a fault of ours."""
        if self._crash is not None:
            raise RuntimeError("the thread that writes logs and snapshots has died") from self._crash
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._reports.popleft())
        return found

    def close(self) -> None:
        """Write what waits, once more where the disk fails, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _put(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._count(job, 1)
            self._changed.notify_all()

    def _count(self, job: _Job, sign: int) -> None:
        if isinstance(job, _Append):
            self._waiting_bytes += sign * job.delta.nbytes
        elif isinstance(job, _Page):
            self._pages += sign

    def _run(self) -> None:
        try:
            logs: set[ShardLog] = set()
            while (taken := self._take()) is not None:
                job, round_ = taken
                if job is not None:
                    logs.add(job.log)
                    self._do(job, round_)
                    if isinstance(job, _Abandon) and job.forget:
                        logs.discard(job.log)
                if self._sync_due_s() == 0.0:
                    self._sync()
            self._sync()
            for log in logs:
                with suppress(OSError):
                    log.close()
        except BaseException as error:
            _logger.exception("logs and snapshots are not written any more")
            self._crash = error

    def _take(self) -> tuple[_Job | None, int] | None:
        """The next job, None for it where a sync is due first; None when all is done."""
        with self._changed:
            if not self._jobs and not self._closing:
                self._changed.wait(self._sync_due_s())
            if self._jobs:
                job = self._jobs.popleft()
                self._doing = job.log
                return job, self._round
            return None if self._closing else (None, self._round)

    def _sync_due_s(self) -> float | None:
        """Seconds until the logs have to be synced; None where nothing was written."""
        if not self._dirty:
            return None
        return max(0.0, self._last_sync_s + self._pace.fsync_s - self._monotonic())

    def _do(self, job: _Job, round_: int) -> None:
        match job:
            case _Append():
                if not self._append(job):
                    self._sync()
                    self._put_back(job, round_)
                    return
            case _Abandon():
                self._forget_snapshot(job.log)
                self._abandon(job.log, renew=job.renew)
                if job.forget:
                    self._failing.pop(("log", job.log.path), None)
                    self._failing.pop(("snapshot", job.log.path), None)
            case _Begin():
                self._forget_snapshot(job.log)
                self._snapshot_number, self._snapshotting = job.number, job.log
                self._snapshot(job.log, lambda: self._begin(job))
            case _Page():
                self._snapshot(job.log, lambda: self._add(job.log, job.page))
            case _End():
                self._snapshot(job.log, lambda: self._end(job))
        self._done(job, round_)

    def _done(self, job: _Job, round_: int) -> None:
        with self._changed:
            self._doing = None
            if round_ == self._round:
                self._count(job, -1)
            self._changed.notify_all()

    def _append(self, job: _Append) -> bool:
        """Whether the step is done with."""
        try:
            size = job.log.append(job.delta)
        except OSError as error:
            if self._snapshotting is not None:
                # It may be what fills the disk.
                self._fail_snapshot(self._snapshotting)
            self._failed("log", job.log.path, error)
            return False
        if size:
            self.counts.log_bytes_total += size
            self.counts.log_steps_total += 1
            self._dirty[job.log] = None
        return True

    def _put_back(self, job: _Append, round_: int) -> None:
        """The first of all jobs again, after a while, unless all were given up meanwhile or there is no more time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._round != round_, self._pace.retry_s)
            self._doing = None
            if self._round == round_ and not self._closing:
                self._jobs.appendleft(job)
            elif self._round == round_:
                self._jobs.clear()
                self._waiting_bytes = self._pages = 0
            self._changed.notify_all()

    def _sync(self) -> None:
        for log in list(self._dirty):
            self._sync_log(log)
        self._last_sync_s = self._monotonic()

    def _sync_log(self, log: ShardLog) -> bool:
        """Whether the log is on disk. If not, it is lost."""
        self._dirty.pop(log, None)
        try:
            synced = log.sync()
        except OSError as error:
            self._failed("log", log.path, error)
            if self._snapshotting is log:
                self._fail_snapshot(log)
            self._abandon(log)
            self._report(Report(log, "lost"))
            return False
        if synced:
            self.counts.syncs_total += 1
            self._succeeded("log", log.path)
            self._report(Report(log, "synced", log.position, log.begun))
        return True

    def _abandon(self, log: ShardLog, *, renew: bool = False) -> None:
        self._dirty.pop(log, None)
        try:
            log.abandon(renew=renew)
        except OSError as error:
            self._failed("log", log.path, error)

    def _snapshot(self, log: ShardLog, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._failed("snapshot", log.path, error)
            self._fail_snapshot(log)

    def _begin(self, job: _Begin) -> None:
        if self._sync_log(job.log):
            self.counts.snapshot_bytes_total += job.log.begin(job.head, job.number)

    def _add(self, log: ShardLog, page: Rows | Graves) -> None:
        self.counts.snapshot_bytes_total += log.add(page)

    def _end(self, job: _End) -> None:
        if not job.log.snapshotting or not self._sync_log(job.log):
            return
        size = job.log.end(job.position)
        self.counts.snapshots_total += 1
        self._snapshotting = None
        self._succeeded("snapshot", job.log.path)
        self._succeeded("log", job.log.path)
        self._report(Report(job.log, "snapshot-done", job.position, self._snapshot_number, size))

    def _fail_snapshot(self, log: ShardLog) -> None:
        """Drop the snapshot under way and say so; without it, a log that had to begin anew is of no use."""
        self.counts.snapshot_failures_total += 1
        self._forget_snapshot(log)
        if log.behind:
            self._abandon(log)
        self._report(Report(log, "snapshot-failed", snapshot=self._snapshot_number))

    def _forget_snapshot(self, log: ShardLog) -> None:
        if self._snapshotting is log:
            self._snapshotting = None
        try:
            log.drop()
        except OSError as error:
            self._failed("snapshot", log.path, error)

    def _report(self, report: Report) -> None:
        self._reports.append(report)

    def _failed(self, what: What, path: Path, error: OSError) -> None:
        self.counts.failures_total += 1
        now = self._monotonic()
        self._failing.setdefault((what, path), now)
        if now - self._complained_s < COMPLAIN_S:
            return
        self._complained_s = now
        _logger.error(
            "the %s in %s cannot be written: %s. Make room on that disk, or mend it; parameters are served and trained "
            "from memory meanwhile, and what is not on disk would be lost by a restart. It is tried again by itself.",
            what,
            path,
            error,
        )

    def _succeeded(self, what: What, path: Path) -> None:
        since = self._failing.pop((what, path), None)
        if since is not None:
            _logger.info("the %s in %s is written again, after %.1f s", what, path, self._monotonic() - since)
