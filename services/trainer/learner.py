"""From a micro-batch to its gradients: rows and dense weights are pulled in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from featurestore.schema import SchemaMismatch
from models.parameters import DENSE, Floats
from models.samples import MicroBatch, SampleFormatError, Watermark, decode_batch
from models.training import RecommenderModel
from services.freshness.stages import Stage
from services.freshness.stamps import Stamp, Stamps, Unstamped
from services.messagelog.contract import Record
from services.parameter_server.types import Bound, Keys, Pulled, Rows
from services.tables import require_same
from services.trainer.metrics import TrainerMetrics

log = logging.getLogger(__name__)

Parts = Mapping[str, tuple[Keys, Rows]]


class Rowstore(Protocol):
    """Who holds the rows (``ParameterClient`` asks them)."""

    def pull(self, model: str, keys: Mapping[str, Keys]) -> Pulled: ...


@dataclass(frozen=True, slots=True)
class Learned:
    """The events position and the gradients of a micro-batch; none of what cannot be learned from.

    ``parts``: keys ``[U]`` and gradients ``[U, d]`` per table. ``seen``: by shard, its ``moves`` at the pull.
    ``samples``: how many were learned from. ``marked``: whether there were probes among the samples.
    """

    watermark: Watermark | None = None
    parts: Parts = field(default_factory=dict)
    seen: Mapping[int, int] = field(default_factory=dict)
    samples: int = 0
    marked: bool = False

    def bound(self, staleness: int) -> Bound | None:
        """How stale the push may be; None where no gradient can be."""
        return Bound(self.seen, staleness) if self.seen else None


class Learner:
    """Computes the gradients of one model. One thread."""

    def __init__(
        self,
        rows: Rowstore,
        model: RecommenderModel,
        name: str,
        metrics: TrainerMetrics,
        stamps: Stamps | None = None,
    ) -> None:
        """``name`` is the model's. ``stamps``: told when probes were trained, and when they are applied."""
        self._rows, self._model, self._name, self._metrics = rows, model, name, metrics
        self._stamps = stamps or Unstamped()

    @property
    def name(self) -> str:
        """The model's."""
        return self._name

    def learn(self, record: Record, dense: Floats | None = None) -> Learned:
        """Gradients on the present rows, and on ``dense`` ``[chunks, chunk]`` (None: on the servers' weights).

        What cannot be learned from gives none, so that its offset counts as done once it is pushed. Raises
        ParameterError.
        """
        try:
            batch = decode_batch(record.value)
        except SampleFormatError as error:
            self._skip(record, "undecodable", str(error))
            return Learned()
        if len(batch) == 0 or not self._is_ours(record, batch):
            return self._trained(Learned(batch.watermark, marked=batch.marked))
        keys: dict[str, Keys] = self._model.keys(batch)
        own = self._model.needs.dense.keys
        pulled = self._rows.pull(self._name, keys if dense is not None else {**keys, DENSE: own})
        weights = pulled.rows[DENSE] if dense is None else dense
        gradients = self._model.gradients(batch, {table: pulled.rows[table] for table in keys}, weights)
        # Where nothing counts, the mean loss is that of no sample.
        for name, loss in gradients.losses.items() if batch.weight.any() else ():
            self._metrics.loss.labels(name).set(loss)
        parts = {table: (keys[table], gradient) for table, gradient in gradients.tables.items()}
        parts[DENSE] = (own, gradients.dense)
        if not batch.marked:
            return Learned(batch.watermark, parts, pulled.moves, len(batch))
        return self._trained(self._without_probes(batch, parts, pulled.moves))

    def applied(self, learned: Learned) -> None:
        """Every shard has applied ``learned``."""
        if learned.marked:
            self._stamp("applied", learned)

    def _trained(self, learned: Learned) -> Learned:
        if learned.marked:
            self._stamp("trained", learned)
        return learned

    def _without_probes(self, batch: MicroBatch, parts: Parts, seen: Mapping[int, int]) -> Learned:
        """What was learned from the samples that count. The others' gradient is 0, but even that would make a row of a
        key, or move it (momentum and decay do), so what they alone name is not pushed."""
        counting = np.flatnonzero(batch.weight > 0)
        if not len(counting):
            return Learned(batch.watermark, marked=True)
        wanted = self._model.keys(batch.take(counting))
        kept = {DENSE: parts[DENSE]}
        for table, of in wanted.items():
            keys, gradients = parts[table]
            mine = np.isin(keys, of, assume_unique=True)
            kept[table] = keys[mine], gradients[mine]
        return Learned(batch.watermark, kept, seen, len(counting), marked=True)

    def _stamp(self, stage: Stage, learned: Learned) -> None:
        mark = learned.watermark
        assert mark is not None, "what is marked was decoded"
        at_ms = time.time() * 1e3
        self._stamps.put(Stamp(stage, "event", mark.log, mark.partition, mark.offset, at_ms))

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
        log.warning("%s cannot be learned from: %s", place(record), reason)


def place(record: Record) -> str:
    """Where a record stands, for messages."""
    return f"{record.topic}/{record.partition}@{record.offset}"
