"""The trainer process: from samples to the parameter servers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from decimal import Decimal
from typing import Final, Protocol

import torch

from featurestore.schema import Schema
from models.training import RecommenderModel
from services.backends import open_coordination, open_log, open_security
from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Registration
from services.freshness.stamps import Stamper, Stamps
from services.messagelog.contract import Consumer, LogError, MessageLog
from services.modelling import build_model, open_schema
from services.parameter_server.client.steps import StepClient
from services.parameter_server.types import IncarnationChanged, ParametersUnavailable
from services.settings.checks import Address
from services.settings.model import ModelSettings, Settings
from services.tables import declare, table_specs
from services.topics import SAMPLES, TRAINER_GROUP
from services.trainer.allreduce import Meeting
from services.trainer.feed import Feed
from services.trainer.group import GroupFollower
from services.trainer.hybrid import Hybrid
from services.trainer.learner import Learner
from services.trainer.loop import Loop
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Partitions
from services.trainer.replica import DenseReplica
from services.trainer.stepper import Stepper
from services.trainer.trainer import Trainer
from services.workers import close_all, keep_trying, registered

SERVICE: Final = "trainer"
POLL_S: Final = 0.1

log = logging.getLogger(__name__)


class Turning(Protocol):
    """A loop that trains: asynchronous, in steps, or hybrid."""

    def turn(self, timeout_s: float, stop: threading.Event) -> int: ...

    def commit(self) -> None: ...


def run(
    settings: Settings,
    name: str,
    stop: threading.Event,
    make_model: Callable[[Schema, ModelSettings], RecommenderModel] = build_model,
) -> None:
    """Train as ``name`` until ``stop`` is set. Raises the backends' errors where one cannot be opened at the
    start, and ModelMismatch where the servers hold the model in another shape; all else it waits out."""
    torch.set_num_threads(1)
    schema, metrics = open_schema(settings), TrainerMetrics()
    model = make_model(schema, settings.model)
    with ExitStack() as stack:
        coordination, samples = open_coordination(settings), open_log(settings)
        client = StepClient(
            coordination, deadline_s=settings.parameters.deadline, security=open_security(settings)
        )
        stamper = Stamper(samples.producer)
        close_all(stack, coordination, samples, client, stamper)
        ttl_s = settings.coordination.lease_ttl
        registration = stack.enter_context(registered(coordination, SERVICE, name, ttl_s, metrics.registry))
        work = Work(settings, model, metrics, client, coordination, samples, registration, stamper)

        def serve(progressed: Callable[[], None]) -> None:
            declare(client, model.needs, settings.model, schema.fingerprint)
            work.serve(stop, progressed)

        def failed(error: Exception) -> None:
            metrics.failures.labels(type(error).__name__).inc()

        failures = (LogError, ParametersUnavailable, IncarnationChanged, CoordinationError)
        keep_trying(serve, failures, stop, failed)


class Work:
    """What a trainer needs, opened once; each ``serve`` is an attempt of its own."""

    def __init__(
        self,
        settings: Settings,
        model: RecommenderModel,
        metrics: TrainerMetrics,
        client: StepClient,
        coordination: Coordination,
        samples: MessageLog,
        registration: Registration,
        stamps: Stamps,
    ) -> None:
        self._settings, self._model, self._metrics, self._client = settings, model, metrics, client
        self._coordination, self._samples, self._registration = coordination, samples, registration
        self._stamps = stamps
        self._patience_s = settings.coordination.lease_ttl + 1.0
        self._meeting = Meeting(coordination, settings.trainer.host, self._patience_s)

    def serve(self, stop: threading.Event, progressed: Callable[[], None]) -> None:
        """Train until told to stop; any error ends it, and the next attempt asks the servers where to go on."""
        registration = self._registration
        member = registration.member.name
        with ExitStack() as stack:
            consumer = self._samples.consumer(TRAINER_GROUP, [SAMPLES], member=member)
            stack.enter_context(closing(consumer))
            registration.update(ready=True)
            loop = self._loop(consumer, stack)
            while not stop.is_set() and not registration.replaced.is_set():
                if loop.turn(POLL_S, stop):
                    progressed()
            loop.commit()
        if registration.replaced.is_set():
            stop.set()

    def _loop(self, consumer: Consumer, stack: ExitStack) -> Turning:
        """The loop of the mode that the settings name; what it opens is closed by ``stack``."""
        chosen, client, metrics = self._settings.trainer, self._client, self._metrics
        name, incarnation = self._settings.model.name, self._samples.incarnation(SAMPLES)
        if chosen.mode == "async":
            trainer = Trainer(client, self._model, name, incarnation, metrics, chosen.staleness, self._stamps)
            return Loop(consumer, trainer, metrics, chosen.commit_interval)
        # Binary floats would make 0.28 of 25 eight; the shortest decimal text is what was written.
        ratio = Decimal(str(chosen.backup_ratio)) if chosen.mode == "backup" else Decimal(1)
        follower = GroupFollower(self._coordination, lambda: self._registration.member, ratio)
        stack.enter_context(follower)
        learner = Learner(client, self._model, name, metrics, self._stamps)
        partitions = Partitions(client, name, incarnation)
        feed = Feed(consumer, partitions, metrics, chosen.commit_interval)
        if chosen.mode == "hybrid":
            stack.callback(self._meeting.close)
            if not Address(chosen.host, 0).loopback:
                log.warning(
                    "sums between trainers at %s are neither encrypted nor authenticated", chosen.host
                )
            replica = DenseReplica(table_specs(self._model.needs, self._settings.model)[-1])
            return Hybrid(
                client, learner, partitions, feed, follower, self._meeting, replica, metrics,
                staleness=chosen.staleness, step_wait_s=chosen.step_wait, patience_s=self._patience_s,
            )  # fmt: skip
        return Stepper(
            client, learner, partitions, feed, follower.seat, metrics,
            late="drop" if chosen.mode == "backup" else "again", step_wait_s=chosen.step_wait,
        )  # fmt: skip
