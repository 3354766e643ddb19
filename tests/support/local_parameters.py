"""Parameter servers in memory: real shards behind the calls that a trainer makes, with faults on request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from models.parameters import DENSE, ModelNeeds
from models.samples import Watermark
from services.parameter_server.types import (
    Applied,
    Bound,
    DenseSnapshot,
    IncarnationChanged,
    ParametersUnavailable,
    Pulled,
    PushReply,
)
from services.settings.model import ModelSettings
from services.tables import table_specs
from sync import pushes
from sync.clock import HybridClock
from sync.placement import shard_of, single_shard
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.snapshot import decode, encode


class LocalParameters:
    """Implements ``services.trainer.trainer.Parameters`` over shards in this process.

    ``history`` holds, per shard, the offsets applied, as they survive crashes. ``fault`` is asked before
    each shard of a push and may raise.
    """

    def __init__(self, needs: ModelNeeds, shards: int = 3) -> None:
        self.specs = table_specs(needs, ModelSettings())
        self.fault: Callable[[int], None] = lambda shard: None
        self._writers = itertools.count(1)
        self._ticks = itertools.count(1)
        self._shards = [self._make(n) for n in range(shards)]
        self.history: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
        self._durable: list[dict[Source, int]] = [{} for _ in range(shards)]
        self._snapshots: list[tuple[bytes, list[tuple[int, int]]] | None] = [None] * shards

    def _make(self, shard: int) -> Shard:
        return Shard(shard, self.specs, next(self._writers), HybridClock(lambda: next(self._ticks)))

    def save(self, shard: int) -> None:
        """A durable snapshot."""
        self._snapshots[shard] = encode(self._shards[shard].state()), list(self.history[shard])
        self._durable[shard] = {s: p.applied for s, p in self._shards[shard].pushes.progress().items()}

    def crash(self, shard: int) -> None:
        """The shard restarts from its last snapshot."""
        self._shards[shard] = self._make(shard)
        self.history[shard] = []
        self._durable[shard] = {}
        if saved := self._snapshots[shard]:
            self._shards[shard].restore(decode(saved[0]))
            self.history[shard] = list(saved[1])
            self._durable[shard] = {s: p.applied for s, p in self._shards[shard].pushes.progress().items()}

    def bits(self) -> list[dict[str, bytes]]:
        """All values and optimiser state, for comparing runs."""
        return [
            {
                f"{page.table}.{name}": getattr(page, name).tobytes()
                for page in shard.state().rows
                for name in ("keys", "values", "state")
            }
            for shard in self._shards
        ]

    def pull(self, model: str, keys: Mapping[str, np.ndarray]) -> Pulled:
        rows = {}
        for table, wanted in keys.items():
            dim = next(spec.dim for spec in self.specs if spec.name == table)
            rows[table] = np.zeros((len(wanted), dim), np.float32)
            for n, shard in enumerate(self._shards):
                mine = self._mine(n, table, wanted)
                rows[table][mine] = shard.pull(table, wanted[mine])
        return Pulled(rows, {}, {n: moves(shard) for n, shard in enumerate(self._shards)})

    def dense(self, model: str, published: bool = True, table: str = DENSE) -> DenseSnapshot:
        shard = self._shards[single_shard(table, len(self._shards))]
        return DenseSnapshot(0, shard.dense(table, published=published).values, {})

    def applied(self, model: str, source: Source) -> dict[int, Applied]:
        return {
            n: Applied(shard.applied(source), self._durable[n].get(source, -1), shard.incarnation)
            for n, shard in enumerate(self._shards)
        }

    def push(
        self,
        model: str,
        source: Source,
        offset: int,
        predecessors: Mapping[int, int],
        accepted_at_ms: int,
        watermark: Watermark | None,
        parts: Mapping[str, tuple[np.ndarray, np.ndarray]],
        *,
        incarnations: Mapping[int, int] | None = None,
        bound: Bound | None = None,
    ) -> dict[int, PushReply]:
        replies = {}
        for n in range(len(self._shards)):
            self.fault(n)
            shard = self._shards[n]
            if incarnations is not None and incarnations[n] != shard.incarnation:
                raise IncarnationChanged(f"shard {n}", incarnations[n], shard.incarnation)
            done = shard.applied(source)
            if bound is not None and offset > done and moves(shard) - bound.seen[n] > bound.staleness:
                durable = self._durable[n].get(source, -1)
                replies[n] = PushReply("stale", done, durable, shard.incarnation)
                continue
            mark = None
            if watermark is not None:
                mark = pushes.Watermark(
                    watermark.log, watermark.partition, watermark.offset, watermark.accepted_at_ms
                )
            mine = tuple(self._part(n, table, keys, rows) for table, (keys, rows) in parts.items())
            outcome = shard.push(Push(source, offset, predecessors[n], mark, mine))
            if outcome.status in ("applied", "refused"):
                self.history[n].append((source.partition, offset))
            durable = self._durable[n].get(source, -1)
            replies[n] = PushReply(
                outcome.status, outcome.applied, durable, shard.incarnation, outcome.reason
            )
        return replies

    def _part(self, shard: int, table: str, keys: np.ndarray, rows: np.ndarray) -> pushes.Part:
        mine = self._mine(shard, table, keys)
        return table, keys[mine], rows[mine]

    def _mine(self, shard: int, table: str, keys: np.ndarray) -> np.ndarray:
        """Which of ``keys`` live in ``shard``: bool ``[N]``."""
        spec = next(spec for spec in self.specs if spec.name == table)
        if spec.placement == "single":
            return np.full(len(keys), single_shard(table, len(self._shards)) == shard)
        return shard_of(keys, len(self._shards)) == shard

    def unavailable(self) -> ParametersUnavailable:
        return ParametersUnavailable("push", ("parameter-server-0",), 0.0)


def moves(shard: Shard) -> int:
    """How many pushes moved the shard's offsets."""
    return shard.counts.applied_total + shard.counts.refused_total
