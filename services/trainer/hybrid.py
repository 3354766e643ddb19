"""Hybrid training: dense gradients are summed between the trainers, embeddings go to the servers as they come.

In each round a member learns from one micro-batch, or from none; the dense gradients are summed by AllReduce,
and every member steps its own copy of the dense weights with the sum. Embedding gradients are pushed to each
shard as in asynchronous training. The one shard that holds the dense weights takes a round as one step: its
share of everybody's embeddings, with the dense sum that rank 0 brings, all offsets together. So the identity of
a push stays what it is in every mode, serving sees the dense weights move, and whoever starts goes on from the
servers.

A member leaves its gradient out of the sum where that shard has applied the offset before; should the shard find
otherwise, it applies nothing of the step. Trouble with the sum or with that shard ends in a new generation, in
which all load the weights anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.parameters import DENSE, Floats
from services.messagelog.contract import Record
from services.parameter_server.client.steps import Contributed, Seat, StepClient, StepPush
from services.parameter_server.types import IncarnationChanged
from services.trainer.allreduce import AllReduce, Broken, Meeting
from services.trainer.feed import Feed
from services.trainer.group import GroupFollower
from services.trainer.learner import Learned, Learner, Parts, place
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Partitions
from services.trainer.replica import DenseReplica
from services.trainer.trainer import PATIENCE
from services.workers import now_ms
from sync.placement import shard_of

UNSEATED_S: Final = 0.02
LONGEST_IDLE_S: Final = 0.1
"""How far the rounds of an idle group draw apart: the most that a first sample waits for the others."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Round:
    """What one generation of the group has come to."""

    seat: Seat
    sums: AllReduce
    weights: Floats
    dense_shard: int
    incarnation: int
    """Of the server with the dense weights."""
    step: int = 1
    wait_s: float = 0.0


class Hybrid:
    """One member of a group that sums its dense gradients. One thread.

    ``patience_s``: how long a broken generation waits for the group to lose a member, before it is renewed with
    all of them.
    """

    def __init__(
        self,
        client: StepClient,
        learner: Learner,
        partitions: Partitions,
        feed: Feed,
        group: GroupFollower,
        meeting: Meeting,
        replica: DenseReplica,
        metrics: TrainerMetrics,
        *,
        staleness: int,
        step_wait_s: float,
        patience_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._learner, self._partitions, self._feed = client, learner, partitions, feed
        self._group, self._meeting, self._replica, self._metrics = group, meeting, replica, metrics
        self._staleness, self._step_wait_s, self._monotonic = staleness, step_wait_s, monotonic
        self._patience_s = patience_s
        self._round: _Round | None = None
        self._over: Seat | None = None
        self._over_s = 0.0

    def turn(self, timeout_s: float, stop: threading.Event) -> int:
        """Take part in one round; how many micro-batches were learned from (0 or 1)."""
        round_ = self._sit(stop)
        if round_ is None:
            stop.wait(UNSEATED_S)
            return 0
        self._feed.look()
        record = self._feed.next(min(timeout_s, round_.wait_s))
        try:
            return int(self._go(round_, record, stop))
        except (Broken, IncarnationChanged) as trouble:
            log.warning("round %d of generation %d: %s", round_.step, round_.seat.generation, trouble)
            self._end(round_, renew=isinstance(trouble, IncarnationChanged))
            return 0

    def commit(self) -> None:
        """Commit what is in durable snapshots on every shard."""
        self._feed.commit()

    def _sit(self, stop: threading.Event) -> _Round | None:
        """Follow the group: in a new generation meet the others, load the weights, go on where the servers
        are."""
        seat = self._group.seat()
        if self._round is not None and self._round.seat == seat:
            return self._round
        if seat is not None and seat == self._over and self._monotonic() > self._over_s + self._patience_s:
            self._group.renew(seat)
        if seat is None or seat == self._over:
            return None
        self._round = None
        self._metrics.groups.inc()
        try:
            sums = self._meeting.join(seat, lambda: not stop.is_set() and self._group.seat() == seat)
        except Broken as broken:
            log.warning("%s", broken)
            # Whoever did not come is dropped when its lease ends; if it lives, all try again.
            self._group.renew(seat)
            return None
        state = self._client.dense_state(self._learner.name, seat, DENSE)
        if state is None:
            return None
        self._replica.load(state)
        self._feed.reopen()
        shard = self._client.dense_shard(self._learner.name, DENSE)
        self._round = _Round(seat, sums, self._replica.values, shard, state.incarnation)
        self._round.wait_s = self._step_wait_s
        return self._round

    def _end(self, round_: _Round, *, renew: bool) -> None:
        """This generation is over for this member, and by that for the others."""
        self._meeting.close()
        self._round, self._over, self._over_s = None, round_.seat, self._monotonic()
        self._metrics.repeats.inc()
        if renew:
            self._group.renew(round_.seat)

    def _go(self, round_: _Round, record: Record | None, stop: threading.Event) -> bool:
        """One round with ``record``; whether it was learned from. Raises Broken, IncarnationChanged."""
        started_s = self._monotonic()
        learned = Learned() if record is None else self._learner.learn(record, round_.weights)
        counts = self._counts_in(round_, record)

        def still() -> bool:
            return not stop.is_set() and self._group.seat() == round_.seat

        busy = round_.sums.sum(np.array([counts, record is not None, self._feed.more], np.float32), still)
        if not busy[1]:
            round_.wait_s = min(max(2 * round_.wait_s, self._step_wait_s), LONGEST_IDLE_S)
            return False
        # Where anyone has a backlog, nobody holds it up by waiting for samples of its own.
        round_.wait_s = 0.0 if busy[2] else self._step_wait_s
        fine = True
        if busy[0]:
            fine = self._step_together(round_, record if counts else None, learned, still)
        if record is None:
            return False
        if not fine or not self._push_apart(round_, record, learned):
            self._feed.rewind(record.partition, self._partitions.open(record.partition))
            return False
        self._metrics.steps.inc()
        self._metrics.samples.inc(learned.samples)
        self._learner.applied(learned)
        self._metrics.step_seconds.observe(self._monotonic() - started_s)
        self._metrics.age_seconds.set((now_ms() - record.accepted_at_ms) / 1_000)
        return True

    def _counts_in(self, round_: _Round, record: Record | None) -> bool:
        """Whether the shard with the dense weights has yet to apply the record."""
        if record is None:
            return False
        return self._partitions.applied(record.partition, round_.dense_shard) < record.offset

    def _step_together(
        self, round_: _Round, record: Record | None, learned: Learned, still: Callable[[], bool]
    ) -> bool:
        """Sum the dense gradients and take the step on their shard; whether it was applied, or refused for
        good. ``record`` None: nothing of this member is in it."""
        own = np.zeros_like(round_.weights)
        if record is not None and DENSE in learned.parts:
            own = learned.parts[DENSE][1]
        total = round_.sums.sum(own.reshape(-1), still).reshape(own.shape)
        # Where nobody learned anything (probes alone), decay and momentum must not move the weights either.
        learned_any = bool(total.any())
        shared = {DENSE: (self._replica.keys, total)} if round_.seat.rank == 0 and learned_any else {}
        push = None
        if record is not None:
            push = self._push(round_, record, learned, on_dense_shard=True)
        found = self._contribute(round_, push, shared, still)
        round_.step += 1
        if found.verdict == "again":
            self._metrics.repeats.inc()
            return False
        if record is not None:
            self._partitions.update(record.partition, found.shards)
        refused = [reply for reply in found.shards.values() if reply.status == "refused"]
        if refused:
            self._metrics.refused.inc()
            log.error("the step of %s was refused: %s", record and place(record), refused[0].reason)
        elif learned_any:
            self._replica.apply(total)
        if self._replica.digest != found.digest:
            self._reload(round_)
        round_.weights = self._replica.values
        return True

    def _reload(self, round_: _Round) -> None:
        """Load the weights again. No step can be taken meanwhile, as none is without this member."""
        self._metrics.reloads.inc()
        log.warning("the dense weights after step %d differ from the server's", round_.step - 1)
        state = self._client.dense_state(self._learner.name, round_.seat, DENSE)
        if state is None:
            raise Broken("the group changed")
        self._replica.load(state)

    def _contribute(
        self, round_: _Round, push: StepPush | None, shared: Parts, still: Callable[[], bool]
    ) -> Contributed:
        while True:
            found = self._client.contribute(
                self._learner.name,
                round_.seat,
                round_.step,
                push,
                shared=shared,
                shards=(round_.dense_shard,),
                incarnations={round_.dense_shard: round_.incarnation},
                digest=True,
            )
            if found.verdict == "regrouped" or (found.verdict == "pending" and not still()):
                raise Broken("the group changed")
            if found.verdict != "pending":
                return found

    def _push_apart(self, round_: _Round, record: Record, learned: Learned) -> bool:
        """Push to every other shard, computing again where it was stale; whether all have the offset now."""
        for tries in range(1, PATIENCE + 2):
            push = self._push(round_, record, learned, on_dense_shard=False)
            if not push.predecessors:
                return True
            try:
                replies = self._client.push_apart(
                    self._learner.name,
                    push,
                    incarnations=self._partitions.incarnations(record.partition),
                    bound=learned.bound(self._staleness) if tries <= PATIENCE else None,
                )
            except IncarnationChanged as changed:
                # Another server than that of the dense weights: the micro-batch is done again there alone.
                log.warning("%s: %s is repeated", changed, place(record))
                return False
            self._partitions.update(record.partition, replies)
            statuses = {reply.status for reply in replies.values()}
            if "gap" in statuses:
                return False
            self._metrics.refused.inc("refused" in statuses)
            if "stale" not in statuses:
                return True
            self._metrics.stale.inc()
            learned = self._learner.learn(record, round_.weights)
            if tries == PATIENCE:
                self._metrics.overdue.inc()
        raise AssertionError("a push without a bound is never stale")

    def _push(self, round_: _Round, record: Record, learned: Learned, *, on_dense_shard: bool) -> StepPush:
        """The embedding gradients of the dense shard, or of all others."""
        shards = self._client.shards
        predecessors = {
            shard: before
            for shard, before in self._partitions.predecessors(record).items()
            if (shard == round_.dense_shard) == on_dense_shard
        }
        parts = {}
        for table, (keys, gradients) in learned.parts.items():
            if table == DENSE:
                continue
            mine = (shard_of(keys, shards) == round_.dense_shard) == on_dense_shard
            if mine.any():
                parts[table] = keys[mine], gradients[mine]
        push = StepPush(
            self._partitions.source(record.partition),
            record.offset,
            predecessors,
            record.accepted_at_ms,
            learned.watermark,
            parts,
        )
        return push
