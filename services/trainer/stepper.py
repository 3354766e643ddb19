"""Synchronous training: the members of a group push step k together, then step k + 1.

A member's contribution to a step is one micro-batch. The servers sum the contributions of a step and let the
optimiser step once (``services.parameter_server.steps``); gradients are sums over samples, so M members at
batches of N / M give the weights of one at batches of N. With a share below 1 ("backup workers") a step does
not wait for the slowest: what comes late is dropped, counted, and its offset counts as done on that server.

A member without a micro-batch for ``step_wait`` abstains: it contributes nothing to the steps from then on, and
joins at the open step when there is work again. So an idle partition costs the others nothing, and an idle
group nothing at all. What is done about trouble is always the same: look how far the servers are, go on there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Literal

from services.messagelog.contract import Record
from services.parameter_server.client.steps import Contributed, Seat, StepClient, StepPush
from services.parameter_server.step_messages import ABSTAIN
from services.parameter_server.types import IncarnationChanged
from services.trainer.feed import Feed
from services.trainer.learner import Learner, place
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Partitions
from services.workers import now_ms

UNSEATED_S: Final = 0.02
JOINING_S: Final = 0.002

log = logging.getLogger(__name__)


class Stepper:
    """One member of a group that steps together. One thread.

    ``seat`` tells this trainer's place in the newest group, None while it has none. ``late``: what the servers
    do with a push whose step was taken without it.
    """

    def __init__(
        self,
        client: StepClient,
        learner: Learner,
        partitions: Partitions,
        feed: Feed,
        seat: Callable[[], Seat | None],
        metrics: TrainerMetrics,
        *,
        late: Literal["again", "drop"],
        step_wait_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._learner, self._partitions, self._feed = client, learner, partitions, feed
        self._newest_seat, self._metrics, self._late = seat, metrics, late
        self._step_wait_s, self._monotonic = step_wait_s, monotonic
        self._seat: Seat | None = None
        self._step = 0
        """The step to contribute to next; 0 while this member takes no part."""
        self._abstains = False
        self._wait_s = step_wait_s
        self._over: Seat | None = None

    def turn(self, timeout_s: float, stop: threading.Event) -> int:
        """Take part in one step if there is a micro-batch for it, waiting for one at most ``timeout_s``; how
        many steps were done (0 or 1)."""
        if not self._sit():
            stop.wait(UNSEATED_S)
            return 0
        assert self._seat is not None
        if self._feed.look() and self._abstains:
            # A server that restarted does not know of it.
            self._abstain(self._seat)
        record = self._feed.next(timeout_s if self._abstains else min(timeout_s, self._wait_s))
        if record is None:
            if not self._abstains:
                self._abstain(self._seat)
            return 0
        if (self._step or self._join(self._seat, stop)) and self._take_part(self._seat, record, stop):
            return 1
        self._feed.rewind(record.partition, self._partitions.open(record.partition))
        return 0

    def commit(self) -> None:
        """Commit what is in durable snapshots on every shard."""
        self._feed.commit()

    def _sit(self) -> bool:
        """Follow the group. In a new generation everything begins where the servers are, since what waited in
        the one before is discarded."""
        seat = self._newest_seat()
        if seat != self._seat:
            self._metrics.groups.inc()
            self._seat, self._step, self._abstains = seat, 0, False
            if seat is not None:
                self._feed.reopen()
        return seat is not None and seat != self._over

    def _lost(self, seat: Seat) -> None:
        """The servers know a newer group than this member does: nothing to do until it knows it, too."""
        self._step, self._abstains, self._over = 0, False, seat
        log.info("generation %d of the group is over", seat.generation)

    def _abstain(self, seat: Seat) -> None:
        self._step = 0
        self._abstains = self._client.attend(self._learner.name, seat, ABSTAIN).open is not None
        if not self._abstains:
            self._lost(seat)

    def _join(self, seat: Seat, stop: threading.Event) -> bool:
        """Take part from the first step on that all servers can still wait for."""
        step = 0
        while not stop.is_set() and self._newest_seat() == seat:
            opened = self._client.attend(self._learner.name, seat, step).open
            if opened is None:
                self._lost(seat)
                break
            step = max(opened)
            if min(opened) == step:
                self._step, self._abstains = step, False
                return True
            stop.wait(JOINING_S)
        return False

    def _take_part(self, seat: Seat, record: Record, stop: threading.Event) -> bool:
        """Learn from ``record`` and contribute it to the step; whether its offset is done everywhere."""
        started_s = self._monotonic()
        learned = self._learner.learn(record)
        push = StepPush(
            self._partitions.source(record.partition),
            record.offset,
            self._partitions.predecessors(record),
            record.accepted_at_ms,
            learned.watermark,
            learned.parts,
        )
        found = self._contribute(seat, push, self._partitions.incarnations(record.partition), stop)
        if found is None:
            return False
        self._step = found.open
        # Where anyone has a backlog, nobody holds it up by waiting for samples of its own.
        self._wait_s = 0.0 if found.more else self._step_wait_s
        statuses = {reply.status for reply in found.shards.values()}
        if statuses & {"again", "gap"}:
            self._metrics.repeats.inc()
            return False
        self._partitions.update(record.partition, found.shards)
        for shard, reply in found.shards.items():
            if reply.status == "refused":
                self._metrics.refused.inc()
                log.error("shard %d refused the step of %s: %s", shard, place(record), reply.reason)
        self._metrics.late.inc("late" in statuses)
        self._metrics.steps.inc()
        self._metrics.samples.inc(learned.samples)
        self._learner.applied(learned)
        self._metrics.step_seconds.observe(self._monotonic() - started_s)
        self._metrics.age_seconds.set((now_ms() - record.accepted_at_ms) / 1_000)
        return True

    def _contribute(
        self, seat: Seat, push: StepPush, incarnations: dict[int, int], stop: threading.Event
    ) -> Contributed | None:
        """Contribute until the step is taken on every server; None where it will not be."""
        while True:
            try:
                found = self._client.contribute(
                    self._learner.name, seat, self._step, push, late=self._late,
                    incarnations=incarnations, more=self._feed.more,
                )  # fmt: skip
            except IncarnationChanged as changed:
                log.warning("%s: this step is repeated", changed)
                self._metrics.repeats.inc()
                self._step = 0
                return None
            if found.verdict == "regrouped":
                self._lost(seat)
                return None
            if found.verdict != "pending":
                return found
            if stop.is_set() or self._newest_seat() != seat:
                self._step = 0
                return None
