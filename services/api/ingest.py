"""Group commit: requests hand in events, one thread appends what waits, and each hears once it is durable.

A durable write costs about the same for one event as for hundreds. While the thread waits for the disk, the
next group gathers; so a lone event waits for one write, and under load the groups grow by themselves.

The queue is bounded by events, whatever the size of the batches; beyond it a request is refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.api.problems import Problem
from services.events import Event, encode_event, partition_key
from services.messagelog.contract import LogError, LogFull, LogUnavailable, Message, Producer, partition_of
from services.topics import EVENTS

MAX_GROUP: Final = 4_096
"""Messages in one append: bounds both its memory and how long the last of them waits."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """Where an accepted event lies in the log."""

    partition: int
    offset: int


@dataclass(slots=True)
class _Waiting:
    messages: list[Message]
    future: asyncio.Future[list[Position]]


@dataclass(slots=True)
class IngestStats:
    """What the group commit did so far, for the metrics."""

    groups: int = 0
    events: int = 0
    refused: int = 0
    failed: int = 0


def _unobserved(events: int, seconds: float) -> None:
    """Whoever measures nothing."""


class Ingest:
    """Appends events to the log for one event loop. ``start`` and ``close`` belong to that loop's thread.

    ``limit``: events waiting at most. ``observe`` is told the events and seconds of each append, on the
    appending thread. A failed append is not retried here: the client is told (503) and
    decides, since only its event ids make a repeat harmless.
    """

    def __init__(
        self,
        open_producer: Callable[[], Producer],
        partitions: int,
        limit: int,
        observe: Callable[[int, float], None] = _unobserved,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = open_producer
        self._producer: Producer | None = None
        self._partitions = partitions
        self._limit = limit
        self._observe = observe
        self._clock_s = clock_s
        self._waiting: deque[_Waiting] = deque()
        self._held = 0  # events waiting or being appended
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="ingest", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stats = IngestStats()

    def start(self) -> None:
        """Begin to append. Call inside the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._producer = self._open()
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Events accepted for the queue and not yet durable."""
        return self._held

    def message(self, event: Event, accepted_at_ms: int) -> Message:
        """The log's message for ``event``."""
        key = partition_key(event)
        return Message(EVENTS, partition_of(key, self._partitions), key, encode_event(event), accepted_at_ms)

    async def append(self, messages: Sequence[Message]) -> list[Position]:
        """Where each of ``messages`` lies, once all are durable.

        Raises Problem overloaded (nothing was queued) or unavailable (perhaps written, perhaps not).
        """
        if not messages:
            return []
        assert self._loop is not None, "start comes first"
        entry = _Waiting(list(messages), self._loop.create_future())
        with self._wake:
            if self._closing:
                raise Problem("unavailable", "The server is going down.", retry_after_s=1)
            if self._held + len(messages) > self._limit:
                self.stats.refused += len(messages)
                raise Problem("overloaded", "The queue to the event log is full.", retry_after_s=1)
            self._held += len(messages)
            self._waiting.append(entry)
            self._wake.notify()
        return await entry.future

    def _work(self) -> None:
        assert self._producer is not None, "start comes first"
        while group := self._next_group():
            messages = [message for entry in group for message in entry.messages]
            started = self._clock_s()
            outcome: list[int] | Problem
            try:
                outcome = self._producer.append(messages)
            except LogFull as error:
                log.error("the event log is full: %s", error)
                outcome = Problem("unavailable", "The event log is full.", retry_after_s=10)
            except LogUnavailable as error:
                log.warning("the event log cannot be reached: %s", error)
                outcome = Problem("unavailable", "The event log cannot be reached.", retry_after_s=1)
            except LogError:
                log.exception("the event log refused %d events", len(messages))
                outcome = Problem("unavailable", "The event log refused the events.", retry_after_s=1)
            except Exception:
                # The thread must outlive whatever a backend throws, or every later event would hang.
                log.exception("appending %d events failed", len(messages))
                outcome = Problem("internal")
            self._observe(len(messages), self._clock_s() - started)
            self._tell(group, len(messages), outcome)

    def _next_group(self) -> list[_Waiting]:
        """Wait for work; everything that waits, up to MAX_GROUP messages. Empty once closed and drained."""
        with self._wake:
            while not self._waiting and not self._closing:
                self._wake.wait()
            group: list[_Waiting] = []
            size = 0
            while self._waiting and (not group or size + len(self._waiting[0].messages) <= MAX_GROUP):
                group.append(self._waiting.popleft())
                size += len(group[-1].messages)
            return group

    def _tell(self, group: list[_Waiting], size: int, outcome: list[int] | Problem) -> None:
        with self._wake:
            self._held -= size
            self.stats.groups += 1
            if isinstance(outcome, Problem):
                self.stats.failed += size
            else:
                self.stats.events += size
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_resolve, group, outcome)
        except RuntimeError:
            log.warning("the event loop ended before %d events could be acknowledged", size)

    async def close(self) -> None:
        """Refuse what comes from now on, append what waits, and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._producer is not None:
            await asyncio.to_thread(self._thread.join)
            self._producer.close()


def _resolve(group: list[_Waiting], outcome: list[int] | Problem) -> None:
    """In the event loop: give every waiting request its part of the outcome."""
    taken = 0
    for entry in group:
        size = len(entry.messages)
        if entry.future.done():  # its request was cancelled meanwhile
            pass
        elif isinstance(outcome, Problem):
            entry.future.set_exception(
                Problem(outcome.code, outcome.detail, retry_after_s=outcome.retry_after_s)
            )
        else:
            offsets = outcome[taken : taken + size]
            entry.future.set_result(
                [Position(m.partition, offset) for m, offset in zip(entry.messages, offsets, strict=True)]
            )
        taken += size
