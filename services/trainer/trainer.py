"""Asynchronous training: a micro-batch is one step; rows are pulled, gradients pushed, once.

Steps of one process follow each other (the next pull comes after the last acknowledgement), so the same
recorded samples, read in the same order, leave the same bits. Several trainers push between each other's pull
and push: a shard that more than ``staleness`` other pushes moved in between answers ``stale``, applies nothing
and keeps its offset; the trainer pulls again and computes again. No sample is lost by that. A trainer that is
too slow for the bound would never get a push in, and its partition would stand still: after ``PATIENCE`` stale
answers to one micro-batch it pushes without the bound, which is counted as overdue.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, Literal, Protocol

from models.samples import Watermark
from models.training import RecommenderModel
from services.freshness.stamps import Stamps
from services.messagelog.contract import Record
from services.parameter_server.types import Applied, Bound, IncarnationChanged, Keys, Pulled, PushReply
from services.trainer.learner import Learned, Learner, Parts, place
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Partitions, Rewind
from sync.pushes import Source

__all__ = ["Parameters", "Rewind", "Trainer"]

PATIENCE: Final = 8
UNBOUNDED: Final = 2**62

log = logging.getLogger(__name__)

Step = Literal["done"] | Rewind


class Parameters(Protocol):
    """What a trainer asks of the parameter servers (``ParameterClient`` provides it)."""

    def pull(self, model: str, keys: Mapping[str, Keys]) -> Pulled: ...

    def applied(self, model: str, source: Source) -> dict[int, Applied]: ...

    def push(
        self,
        model: str,
        source: Source,
        offset: int,
        predecessors: Mapping[int, int],
        accepted_at_ms: int,
        watermark: Watermark | None,
        parts: Parts,
        *,
        incarnations: Mapping[int, int] | None = None,
        bound: Bound | None = None,
    ) -> dict[int, PushReply]: ...


class Trainer:
    """Turns records of the samples topic into pushes. One thread."""

    def __init__(
        self,
        parameters: Parameters,
        model: RecommenderModel,
        name: str,
        log: str,
        metrics: TrainerMetrics,
        staleness: int = UNBOUNDED,
        stamps: Stamps | None = None,
    ) -> None:
        """``name`` is the model's, ``log`` the incarnation of the samples topic, ``stamps`` as for Learner."""
        self._parameters, self._name, self._metrics, self._staleness = parameters, name, metrics, staleness
        self._learner = Learner(parameters, model, name, metrics, stamps)
        self.partitions = Partitions(parameters, name, log)

    def open(self, partition: int) -> int:
        """Take over a partition: the offset to read it from. Raises ParameterError."""
        return self.partitions.open(partition)

    def drop(self, partition: int) -> None:
        """The partition belongs to another now."""
        self.partitions.drop(partition)

    def step(self, record: Record) -> Step:
        """Learn from one micro-batch of an open partition, and push.

        What cannot be learned from is pushed empty, so that its offset counts as done. Returns Rewind where
        a server lost pushes that it had acknowledged. Raises ParameterError; the step may then be repeated.
        """
        try:
            replies, learned = self._push(record)
        except IncarnationChanged:
            return self._rewind(record.partition)
        if any(reply.status == "gap" for reply in replies.values()):
            return self._rewind(record.partition)
        for shard, reply in replies.items():
            if reply.status == "refused":
                self._metrics.refused.inc()
                log.error("shard %d refused the push of %s: %s", shard, place(record), reply.reason)
        self._metrics.steps.inc()
        self._metrics.samples.inc(learned.samples)
        self._learner.applied(learned)
        return "done"

    def _push(self, record: Record) -> tuple[dict[int, PushReply], Learned]:
        """Push until no shard says ``stale``. Those that applied it answer ``duplicate`` the next time."""
        tries = 0
        while True:
            tries += 1
            learned = self._learner.learn(record)
            if tries == PATIENCE + 1:
                self._metrics.overdue.inc()
                log.warning("%s was stale %d times in a row: this trainer is too slow for a staleness of %d",
                            place(record), PATIENCE, self._staleness)  # fmt: skip
            replies = self._parameters.push(
                self._name,
                self.partitions.source(record.partition),
                record.offset,
                self.partitions.predecessors(record),
                record.accepted_at_ms,
                learned.watermark,
                learned.parts,
                incarnations=self.partitions.incarnations(record.partition),
                bound=learned.bound(self._staleness) if tries <= PATIENCE else None,
            )
            self.partitions.update(record.partition, replies)
            if all(reply.status != "stale" for reply in replies.values()):
                return replies, learned
            self._metrics.stale.inc()

    def check(self, partition: int) -> Rewind | None:
        """Ask the servers how far they are (also when there is nothing to push): Rewind if one restarted and
        lost pushes, else None. Raises ParameterError."""
        rewind = self.partitions.check(partition)
        if rewind is not None:
            self._metrics.rewinds.inc()
        return rewind

    def durable(self) -> dict[int, int]:
        """Per open partition the next offset that no restored snapshot would need again."""
        return self.partitions.durable()

    def _rewind(self, partition: int) -> Rewind:
        self._metrics.rewinds.inc()
        return Rewind(self.open(partition))
