"""The trainer process: from samples to the parameter servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Final

import torch

from services.backends import open_coordination, open_log, open_security
from services.coordination.contract import CoordinationError
from services.coordination.membership import Registration
from services.messagelog.contract import Consumer, LogError, MessageLog, Record, TopicPartition
from services.modelling import build_model, open_schema
from services.parameter_server.client import ParameterClient
from services.parameter_server.types import IncarnationChanged, ParametersUnavailable
from services.settings.model import Settings
from services.tables import declare
from services.topics import SAMPLES, TRAINER_GROUP
from services.trainer.metrics import TrainerMetrics
from services.trainer.trainer import Rewind, Trainer
from services.workers import close_all, keep_trying, now_ms, registered

SERVICE: Final = "trainer"
POLL_S: Final = 0.1
MAX_RECORDS: Final = 16
"""Micro-batches read ahead: enough to keep busy, few to throw away at a rewind."""

log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Train as ``name`` until ``stop`` is set. Raises the backends' errors where one cannot be opened at the
    start, and ModelMismatch where the servers hold the model in another shape; all else it waits out."""
    torch.set_num_threads(1)
    schema, metrics = open_schema(settings), TrainerMetrics()
    model = build_model(schema, settings.model)
    with ExitStack() as stack:
        coordination, samples = open_coordination(settings), open_log(settings)
        client = ParameterClient(
            coordination, deadline_s=settings.parameters.deadline, security=open_security(settings)
        )
        close_all(stack, coordination, samples, client)
        ttl_s = settings.coordination.lease_ttl
        registration = stack.enter_context(registered(coordination, SERVICE, name, ttl_s, metrics.registry))

        def serve(progressed: Callable[[], None]) -> None:
            declare(client, settings.model.name, model.needs, settings.model.seed, schema.fingerprint)
            trainer = Trainer(client, model, settings.model.name, samples.incarnation(SAMPLES), metrics)
            interval_s = settings.trainer.commit_interval
            _serve(samples, trainer, interval_s, metrics, registration, stop, progressed)

        def failed(error: Exception) -> None:
            metrics.failures.labels(type(error).__name__).inc()

        failures = (LogError, ParametersUnavailable, IncarnationChanged, CoordinationError)
        keep_trying(serve, failures, stop, failed)


def _serve(
    samples: MessageLog,
    trainer: Trainer,
    interval_s: float,
    metrics: TrainerMetrics,
    registration: Registration,
    stop: threading.Event,
    progressed: Callable[[], None],
) -> None:
    """Train until told to stop; any error ends it, and the next attempt asks the servers where to go on."""
    member = registration.member.name
    with closing(samples.consumer(TRAINER_GROUP, [SAMPLES], member=member)) as consumer:
        loop = Loop(consumer, trainer, metrics, interval_s)
        registration.update(ready=True)
        while not stop.is_set() and not registration.replaced.is_set():
            if loop.turn(POLL_S, stop):
                progressed()
        loop.commit()
    if registration.replaced.is_set():
        stop.set()


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
        self._consumer, self._trainer, self._metrics = consumer, trainer, metrics
        self._interval_s, self._monotonic = interval_s, monotonic
        self._open: set[int] = set()
        self._committed: dict[int, int] = {}
        self._looked_s = monotonic()

    def turn(self, timeout_s: float, stop: threading.Event) -> int:
        """Wait for records, at most ``timeout_s``, and train on them; how many steps were done."""
        records = self._consumer.poll(MAX_RECORDS, timeout_s)
        moved = self._follow_assignment()
        steps = self._train([r for r in records if r.partition not in moved], stop)
        if self._monotonic() - self._looked_s >= self._interval_s:
            self._look()
            self.commit()
            self._looked_s = self._monotonic()
        return steps

    def commit(self) -> None:
        """Commit what is in durable snapshots on every shard."""
        due = {p: o for p, o in self._trainer.durable().items() if o > self._committed.get(p, 0)}
        if due:
            self._consumer.commit({TopicPartition(SAMPLES, p): offset for p, offset in due.items()})
            self._committed.update(due)

    def _follow_assignment(self) -> set[int]:
        """Open new partitions where the servers are and drop lost ones; the partitions that were moved."""
        owned = {tp.partition for tp in self._consumer.assignment()}
        for partition in self._open - owned:
            self._trainer.drop(partition)
            self._committed.pop(partition, None)
        new = owned - self._open
        for partition in sorted(new):
            self._seek(partition, self._trainer.open(partition))
        self._open = owned
        return new

    def _train(self, records: Sequence[Record], stop: threading.Event) -> int:
        steps = 0
        rewound: set[int] = set()
        for record in records:
            if stop.is_set():
                break
            if record.partition in rewound or record.partition not in self._open:
                continue
            started_s = self._monotonic()
            outcome = self._trainer.step(record)
            if isinstance(outcome, Rewind):
                rewound.add(record.partition)
                self._rewind(record.partition, outcome)
                continue
            steps += 1
            self._metrics.step_seconds.observe(self._monotonic() - started_s)
            self._metrics.age_seconds.set((now_ms() - record.accepted_at_ms) / 1_000)
        return steps

    def _look(self) -> None:
        """See whether a server restarted while there was nothing to push, and what became durable."""
        for partition in sorted(self._open):
            if rewind := self._trainer.check(partition):
                self._rewind(partition, rewind)

    def _rewind(self, partition: int, rewind: Rewind) -> None:
        log.warning(
            "partition %d goes back to %d: a server lost what it had not saved", partition, rewind.offset
        )
        self._seek(partition, rewind.offset)

    def _seek(self, partition: int, offset: int) -> None:
        self._consumer.seek(TopicPartition(SAMPLES, partition), offset)
