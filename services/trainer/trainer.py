"""One trainer at work: a micro-batch is one step; rows are pulled, gradients pushed, once.

The identity of a push is (incarnation of the samples log, partition, offset). Each shard says how far it has
come; a trainer starts behind the shard that is furthest behind, and shards that are ahead answer "duplicate".
So it does not matter who pushed what before, or whether the answer arrived: each shard applies each offset
once, in order. What is pushed again to a shard that was behind was computed on newer rows of the others.

Steps of one process follow each other (the next pull comes after the last acknowledgement), so the same
recorded samples, read in the same order, leave the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from featurestore.schema import SchemaMismatch
from models.parameters import DENSE
from models.samples import MicroBatch, SampleFormatError, Watermark, decode_batch
from models.training import RecommenderModel
from services.messagelog.contract import Record
from services.parameter_server.types import (
    Applied,
    DenseSnapshot,
    IncarnationChanged,
    Keys,
    Pulled,
    PushReply,
    Rows,
)
from services.tables import require_same
from services.trainer.metrics import TrainerMetrics
from sync.pushes import Source

NOTHING: Final = -1

log = logging.getLogger(__name__)

Parts = Mapping[str, tuple[Keys, Rows]]


class Parameters(Protocol):
    """What a trainer asks of the parameter servers (``ParameterClient`` provides it)."""

    def pull(self, model: str, keys: Mapping[str, Keys]) -> Pulled: ...

    def dense(self, model: str, published: bool = True, table: str = DENSE) -> DenseSnapshot: ...

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
    ) -> dict[int, PushReply]: ...


@dataclass(frozen=True, slots=True)
class Rewind:
    """The step was not done: go on from ``offset``."""

    offset: int


Step = Literal["done"] | Rewind


class Trainer:
    """Turns records of the samples topic into pushes. One thread."""

    def __init__(
        self,
        parameters: Parameters,
        model: RecommenderModel,
        name: str,
        log: str,
        metrics: TrainerMetrics,
    ) -> None:
        """``name`` is the model's, ``log`` the incarnation of the samples topic."""
        self._parameters, self._model, self._name, self._log = parameters, model, name, log
        self._metrics = metrics
        self._shards: dict[int, dict[int, Applied]] = {}

    def open(self, partition: int) -> int:
        """Take over a partition: the offset to read it from. Raises ParameterError."""
        self._shards[partition] = self._parameters.applied(self._name, self._source(partition))
        return self._least_applied(partition) + 1

    def drop(self, partition: int) -> None:
        """The partition belongs to another now."""
        del self._shards[partition]

    def step(self, record: Record) -> Step:
        """Learn from one micro-batch of an open partition, and push.

        What cannot be learned from is pushed empty, so that its offset counts as done. Returns Rewind where
        a server lost pushes that it had acknowledged. Raises ParameterError; the step may then be repeated.
        """
        watermark, parts = self._learn(record)
        before = self._shards[record.partition]
        predecessors = {shard: min(state.applied, record.offset - 1) for shard, state in before.items()}
        incarnations = {shard: state.incarnation for shard, state in before.items()}
        try:
            replies = self._parameters.push(
                self._name,
                self._source(record.partition),
                record.offset,
                predecessors,
                record.accepted_at_ms,
                watermark,
                parts,
                incarnations=incarnations,
            )
        except IncarnationChanged:
            return self._rewind(record.partition)
        if any(reply.status == "gap" for reply in replies.values()):
            return self._rewind(record.partition)
        for shard, reply in replies.items():
            if reply.status == "refused":
                self._metrics.refused.inc()
                log.error("shard %d refused the push of %s: %s", shard, _place(record), reply.reason)
        self._shards[record.partition] = {
            shard: Applied(reply.applied, reply.durable, reply.incarnation)
            for shard, reply in replies.items()
        }
        self._metrics.steps.inc()
        return "done"

    def check(self, partition: int) -> Rewind | None:
        """Ask the servers how far they are (also when there is nothing to push): Rewind if one restarted and
        lost pushes, else None. Raises ParameterError."""
        before = self._shards[partition]
        now = self._parameters.applied(self._name, self._source(partition))
        self._shards[partition] = now
        lost = any(shard not in now or now[shard].applied < state.applied for shard, state in before.items())
        if not lost:
            return None
        self._metrics.rewinds.inc()
        return Rewind(self._least_applied(partition) + 1)

    def durable(self) -> dict[int, int]:
        """Per open partition the next offset that no restored snapshot would need again."""
        return {
            partition: min((state.durable for state in shards.values()), default=NOTHING) + 1
            for partition, shards in self._shards.items()
        }

    def _learn(self, record: Record) -> tuple[Watermark | None, Parts]:
        """The events position and gradients of a record; none of what cannot be used."""
        try:
            batch = decode_batch(record.value)
        except SampleFormatError as error:
            self._skip(record, "undecodable", str(error))
            return None, {}
        if len(batch) == 0 or not self._is_ours(record, batch):
            return batch.watermark, {}
        keys = self._model.keys(batch)
        rows = self._parameters.pull(self._name, keys).rows
        dense = self._parameters.dense(self._name, published=False)
        gradients = self._model.gradients(batch, rows, dense.values)
        for name, loss in gradients.losses.items():
            self._metrics.loss.labels(name).set(loss)
        self._metrics.samples.inc(len(batch))
        parts = {table: (keys[table], gradient) for table, gradient in gradients.tables.items()}
        parts[DENSE] = (self._model.needs.dense.keys, gradients.dense)
        return batch.watermark, parts

    def _is_ours(self, record: Record, batch: MicroBatch) -> bool:
        if batch.model != self._name:
            self._skip(record, "model", f"it is for model {batch.model!r}, this trainer's is {self._name!r}")
            return False
        try:
            require_same(batch, self._model.schema.fingerprint)
        except SchemaMismatch as error:
            self._skip(record, "fingerprint", str(error))
            return False
        return True

    def _skip(self, record: Record, code: str, reason: str) -> None:
        self._metrics.skipped.labels(code).inc()
        log.warning("%s cannot be learned from: %s", _place(record), reason)

    def _rewind(self, partition: int) -> Rewind:
        self._metrics.rewinds.inc()
        return Rewind(self.open(partition))

    def _least_applied(self, partition: int) -> int:
        return min((state.applied for state in self._shards[partition].values()), default=NOTHING)

    def _source(self, partition: int) -> Source:
        return Source(self._log, partition)


def _place(record: Record) -> str:
    return f"{record.topic}/{record.partition}@{record.offset}"
