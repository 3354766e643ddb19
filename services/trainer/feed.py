"""The records that a trainer reads: from where the servers are, forgotten when a partition moves or goes back."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from services.messagelog.contract import Consumer, Record, TopicPartition
from services.topics import SAMPLES
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Partitions, Rewind

MAX_RECORDS: Final = 16
"""Micro-batches read ahead: enough to keep busy, few to throw away at a rewind."""

log = logging.getLogger(__name__)


class Feed:
    """One trainer's records, in the order in which the log gives them; several partitions take turns by reads of
    ``MAX_RECORDS``. Commits what is durable on every shard. One thread."""

    def __init__(
        self,
        consumer: Consumer,
        partitions: Partitions,
        metrics: TrainerMetrics,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer, self._partitions, self._metrics = consumer, partitions, metrics
        self._interval_s, self._monotonic = interval_s, monotonic
        self._open: set[int] = set()
        self._committed: dict[int, int] = {}
        self._waiting: deque[Record] = deque()
        self._looked_s = monotonic()

    def next(self, timeout_s: float) -> Record | None:
        """The next record, waiting for one at most ``timeout_s``. Raises LogError, ParameterError."""
        if not self._waiting:
            records = self._consumer.poll(MAX_RECORDS, timeout_s)
            moved = self._follow_assignment()
            if moved:
                # What came of them was read from where the group committed; they begin where the servers are.
                records = [r for r in records if r.partition not in moved]
                records = records or self._consumer.poll(MAX_RECORDS, timeout_s)
                moved = self._follow_assignment()
            self._waiting.extend(r for r in records if r.partition in self._open - moved)
        return self._waiting.popleft() if self._waiting else None

    @property
    def more(self) -> bool:
        """Whether further records have been read already."""
        return bool(self._waiting)

    def rewind(self, partition: int, offset: int) -> None:
        """Go on from ``offset`` of an open partition."""
        self._waiting = deque(record for record in self._waiting if record.partition != partition)
        self._consumer.seek(TopicPartition(SAMPLES, partition), offset)

    def went_back(self, partition: int, rewind: Rewind) -> None:
        """``rewind`` since a server lost what it had acknowledged."""
        self._metrics.rewinds.inc()
        log.warning(
            "partition %d goes back to %d: a server lost what it had not saved", partition, rewind.offset
        )
        self.rewind(partition, rewind.offset)

    def reopen(self) -> None:
        """Go on with every open partition from where the servers are. Raises ParameterError."""
        for partition in sorted(self._open):
            self.rewind(partition, self._partitions.open(partition))

    def look(self) -> bool:
        """Once an interval: see whether a server restarted while there was nothing to push, and what became
        durable, and commit it. Whether it was time to."""
        if self._monotonic() - self._looked_s < self._interval_s:
            return False
        for partition in sorted(self._open):
            if rewind := self._partitions.check(partition):
                self.went_back(partition, rewind)
        self.commit()
        self._looked_s = self._monotonic()
        return True

    def commit(self) -> None:
        """Commit what is in durable snapshots on every shard."""
        due = {p: o for p, o in self._partitions.durable().items() if o > self._committed.get(p, 0)}
        if due:
            self._consumer.commit({TopicPartition(SAMPLES, p): offset for p, offset in due.items()})
            self._committed.update(due)

    def _follow_assignment(self) -> set[int]:
        """Open new partitions where the servers are and drop lost ones; the partitions that were moved."""
        owned = {tp.partition for tp in self._consumer.assignment()}
        for partition in self._open - owned:
            self._partitions.drop(partition)
            self._committed.pop(partition, None)
            self._waiting = deque(record for record in self._waiting if record.partition != partition)
        new = owned - self._open
        for partition in sorted(new):
            self._consumer.seek(TopicPartition(SAMPLES, partition), self._partitions.open(partition))
        self._open = owned
        return new
