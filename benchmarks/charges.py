"""What the work of a synchronising server takes, measured here with the real kernels before a simulation charges it.

The core runs over 256 small shards and over one larger one: so what a shard costs by itself and what each row adds
come apart. Counted is the time of the thread alone, as other processes may have the machine meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from benchmarks.draws import keys_of
from sync.clock import HybridClock
from sync.exchange import Batch, FeedConfig, Feeds, Pace, PaceConfig, Puller
from sync.exchange.finding import missing
from sync.knowledge import Known
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

TRANSPORT_S: Final = 1e-4
"""Seconds of the thread that a message takes besides: socket, header and copies. Assumed: a fifth of the round trip of
4,096 rows by ZeroMQ over the loopback."""
TABLE: Final = "rows"
DIM: Final = 4
_SHARDS: Final = 256
_ROWS: Final = 20_000
_SCANNED: Final = 2_000_000
_ROUNDS: Final = 9


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds of a server's one thread.

    ``scanned_row``: a look at one row's version. ``cached_shard``, ``cached_entry``: an answer out of the update cache,
    and each of its entries. ``level_shard``: to see by its token that a shard has nothing new. ``told_shard``,
    ``told_row``: to tell a shard that has, and each row. ``merged_shard``, ``merged_row``: to take them over.
    ``message``: anything sent or got.
    """

    scanned_row: float
    cached_shard: float
    cached_entry: float
    level_shard: float
    told_shard: float
    told_row: float
    merged_shard: float
    merged_row: float
    message: float

    def said(self) -> str:
        """All of them, for people."""
        return ", ".join(
            f"{one.name.replace('_', ' ')} {1e9 * getattr(self, one.name):,.3g} ns" for one in fields(self)
        )


def spec() -> TableSpec:
    """The table of simulated shards."""
    return TableSpec(TABLE, DIM, Initialiser.uniform(0.05), Optimiser("sgd", 0.1))


class _Pair:
    """A source and a puller of the same shards, level with each other."""

    def __init__(self, shards: int, rows: int) -> None:
        capacity = max(1_024, 4 * rows)
        clock = HybridClock(lambda: time.time_ns() // 1_000)
        self.source, self.puller_shards = (
            {
                ("m", i): Shard(i, (spec(),), 1 + side, clock, change_capacity=capacity, stateless=bool(side))
                for i in range(shards)
            }
            for side in range(2)
        )
        self.rows, self.now_s, self.offset = rows, 0.0, 0
        self.feeds = Feeds(lambda: self.source, FeedConfig(coalesce_s=0.0))
        pace = Pace(PaceConfig(min_bytes=2**30, max_bytes=2**30, window=1, max_window=1))
        self.puller = Puller(lambda: self.puller_shards, pace, 1, random.Random(0), wait_s=0.0)
        self.write()
        self.exchange()

    def write(self) -> None:
        """A push of ``rows`` rows to each shard."""
        keys = keys_of(np.arange(self.rows))
        gradients = np.ones((self.rows, DIM), np.float32)
        for shard in self.source.values():
            shard.push(
                Push(Source("log", 0), self.offset, self.offset - 1, None, ((TABLE, keys, gradients),))
            )
        self.offset += 1

    def exchange(self) -> tuple[float, float]:
        """Seconds until the answer to a pull is there, and to take it."""
        self.now_s += 10.0
        began_s = time.thread_time()
        pull = self.puller.ask(self.now_s)
        if pull is None:
            raise RuntimeError("no pull is due")
        ended = self.feeds.take("p", pull, self.now_s)
        batch = ended or next(self.feeds.answers("p", self.now_s), None)
        answered_s = time.thread_time()
        if batch is None or batch.ended:
            raise RuntimeError("the pull was not answered")
        self._take(batch)
        return answered_s - began_s, time.thread_time() - answered_s

    def _take(self, batch: Batch) -> None:
        taken = self.puller.take(batch, batch.nbytes, self.now_s)
        if taken.fault:
            raise RuntimeError(taken.fault)

    def changed(self) -> tuple[float, float]:
        """The same after a write."""
        self.write()
        return self.exchange()

    def cached(self) -> tuple[float, float]:
        """Seconds for an answer of all shards out of the update cache alone, to who has everything; and nothing."""
        began_s = time.thread_time()
        for shard in self.source.values():
            missing(shard, shard.known(shard.knowledge), None)
        return time.thread_time() - began_s, 0.0


def measure() -> Constants:
    """Measure all of them; the least of a few rounds each."""
    many, one = _Pair(_SHARDS, 1), _Pair(1, _ROWS)
    level_s, empty_s = _least(many.exchange), _least(one.exchange)
    told_s, whole_s = _least(many.changed), _least(one.changed)
    cached_s, entries_s = (_least(pair.cached)[0] for pair in (many, one))
    return Constants(
        scanned_row=_scan_s() / _SCANNED,
        cached_shard=cached_s / _SHARDS,
        cached_entry=max(0.0, entries_s - cached_s / _SHARDS) / _ROWS,
        level_shard=max(0.0, level_s[0] - empty_s[0]) / _SHARDS,
        told_shard=told_s[0] / _SHARDS,
        told_row=whole_s[0] / _ROWS,
        merged_shard=told_s[1] / _SHARDS,
        merged_row=whole_s[1] / _ROWS,
        message=TRANSPORT_S + (empty_s[0] + empty_s[1]) / 2.0,
    )


def _least(work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    found = [work() for _ in range(_ROUNDS)]
    return min(one for one, _ in found), min(other for _, other in found)


def _scan_s() -> float:
    times = np.arange(1, _SCANNED + 1, dtype=np.uint64)
    writers = np.ones(_SCANNED, np.uint32)
    known = Known.of({1: _SCANNED})
    known.scan(times[:1], writers[:1])

    def look() -> tuple[float, float]:
        began_s = time.thread_time()
        known.scan(times, writers)
        return time.thread_time() - began_s, 0.0

    return _least(look)[0]
