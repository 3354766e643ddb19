"""Writes snapshots in a background thread, one shard at a time, from copies that the loop takes.

The loop calls ``begin`` to start a round, and ``step`` every turn: it takes in what was written and hands out the
next shard. Copying one shard a turn keeps the loop's pauses short.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from services.parameter_server.host import Held
from services.parameter_server.snapshots import SnapshotSeries
from sync.pushes import Source
from sync.shard import ShardState
from sync.snapshot import encode_buffers

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SaverCounts:
    """What was written since the start. ``last_saved_s``: monotonic seconds of the newest snapshot."""

    snapshots_total: int = 0
    failures_total: int = 0
    bytes_total: int = 0
    last_saved_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    held: Held
    series: SnapshotSeries
    state: ShardState
    moves: int


@dataclass(frozen=True, slots=True)
class _Result:
    job: _Job
    size: int | None


class Saver:
    """``series(model, shard)`` says where a shard's snapshots go."""

    def __init__(
        self,
        series: Callable[[str, int], SnapshotSeries],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = SaverCounts()
        self._series, self._monotonic = series, monotonic
        self._waiting: deque[tuple[str, Held]] = deque()
        self._busy = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="snapshots", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether the round is over."""
        return not self._busy and not self._waiting

    def begin(self, shards: list[tuple[str, Held]]) -> None:
        """Start a round over those of ``shards`` that moved since they were saved; joins one under way."""
        queued = {id(held) for _, held in self._waiting}
        self._waiting.extend(
            (model, held)
            for model, held in shards
            if held.moves != held.saved_moves and id(held) not in queued
        )

    def step(self) -> None:
        """Take in a finished write, and start the next. Never waits."""
        with suppress(queue.Empty):
            self._finish(self._results.get_nowait())
        if self._busy or not self._waiting:
            return
        model, held = self._waiting.popleft()
        state = held.shard.state()
        self._busy = True
        self._jobs.put(_Job(held, self._series(model, held.shard.shard_id), state, held.moves))

    def _finish(self, result: _Result) -> None:
        self._busy = False
        if result.size is None:
            self.counts.failures_total += 1
            return
        held, job = result.job.held, result.job
        held.durable = _offsets(job.state)
        held.saved_moves = job.moves
        self.counts.snapshots_total += 1
        self.counts.bytes_total += result.size
        self.counts.last_saved_s = self._monotonic()

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            size: int | None = None
            try:
                buffers = encode_buffers(job.state)
                job.series.write(buffers)
                size = sum(len(buffer) for buffer in buffers)
            except OSError as error:
                _log.error("shard %d: the snapshot was not written: %s", job.state.head.shard_id, error)
            self._results.put(_Result(job, size))

    def finish(self, timeout_s: float) -> bool:
        """Complete the round under way; whether it was complete in time."""
        deadline = self._monotonic() + timeout_s
        while not self.idle:
            remaining = deadline - self._monotonic()
            if remaining <= 0:
                return False
            if self._busy:
                try:
                    self._finish(self._results.get(timeout=remaining))
                except queue.Empty:
                    return False
            self.step()
        return True

    def close(self) -> None:
        """End the thread after what it is writing."""
        self._jobs.put(None)
        self._thread.join()


def _offsets(state: ShardState) -> dict[Source, int]:
    return {source: progress.applied for source, progress in state.head.pushes.items()}
