"""The asynchronous trainer's loop: feeds it record by record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from services.messagelog.contract import Consumer, Record
from services.trainer.feed import MAX_RECORDS, Feed
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Rewind
from services.trainer.trainer import Trainer
from services.workers import now_ms


class Loop:
    """Feeds a trainer from a consumer: seeks, rewinds, and commits what is durable."""

    def __init__(
        self,
        consumer: Consumer,
        trainer: Trainer,
        metrics: TrainerMetrics,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer, self._metrics, self._monotonic = trainer, metrics, monotonic
        self._feed = Feed(consumer, trainer.partitions, metrics, interval_s, monotonic)

    def turn(self, timeout_s: float, stop: threading.Event) -> int:
        """Wait for records, at most ``timeout_s``, and train on them; how many steps were done."""
        steps = 0
        record = self._feed.next(timeout_s)
        while record is not None:
            steps += self._step(record)
            if stop.is_set() or steps >= MAX_RECORDS:
                break
            record = self._feed.next(0.0)
        self._feed.look()
        return steps

    def commit(self) -> None:
        """Commit what is in durable snapshots on every shard."""
        self._feed.commit()

    def _step(self, record: Record) -> int:
        started_s = self._monotonic()
        outcome = self._trainer.step(record)
        if isinstance(outcome, Rewind):
            self._feed.rewind(record.partition, outcome.offset)
            return 0
        self._metrics.step_seconds.observe(self._monotonic() - started_s)
        self._metrics.age_seconds.set((now_ms() - record.accepted_at_ms) / 1_000)
        return 1
