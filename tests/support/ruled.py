"""Shards with their feeds in one thread, with a physical clock set by hand, for tests of what breaks without a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sync.clock import HybridClock
from sync.exchange import FeedConfig, Feeds, Pace, PaceConfig, Puller, ShardName
from sync.pushes import Push, Source
from sync.records import Rows
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

SPECS = (TableSpec("rows", 2, Initialiser.uniform(0.1), Optimiser("sgd", 0.5)),)


NAME: ShardName = ("m", 0)


CONFIG = FeedConfig(coalesce_s=0.0, state=True)


Patch = pytest.MonkeyPatch


class Time:
    """A physical clock that is set by hand, and the seconds of the exchange."""

    def __init__(self) -> None:
        self.us = 1_000_000_000
        self.s = 0.0

    def __call__(self) -> int:
        self.us += 1
        return self.us


class Server:
    """A shard with its feeds. Its pullers are kept by the name of their source, as a process keeps them."""

    writers = 0

    def __init__(self, name: str, time: Time, clock: Callable[[], int] | None = None, **options: Any) -> None:
        self.name, self.time = name, time
        self._clock, self._options = clock or time, {"change_capacity": 64, **options}
        self.start()

    def start(self, saved: Any = None, writer: int | None = None, last: int = 0) -> Server:
        Server.writers += 1
        writer = writer or Server.writers
        self.shard = Shard(0, SPECS, writer, HybridClock(self._clock, last), model="m", **self._options)
        if saved is not None:
            self.shard.restore(saved)
        self.feeds = Feeds(lambda: {NAME: self.shard}, CONFIG)
        self.pullers: dict[str, Puller] = {}
        self.linked: dict[str, Feeds] = {}
        return self

    def push(self, *keys: int, amount: float = 1.0) -> int:
        """Push to ``keys``; returns the version time."""
        source = Source("log", self.shard.writer)
        offset = self.shard.applied(source) + 1
        gradients = np.full((len(keys), 2), amount, np.float32)
        parts = (("rows", np.array(keys, np.uint64), gradients),)
        assert self.shard.push(Push(source, offset, offset - 1, None, parts)).status == "applied"
        return self.shard.knowledge[self.shard.writer]

    def delete(self, *keys: int) -> None:
        assert self.shard.delete("rows", np.array(keys, np.uint64)) == len(keys)

    def pull_from(self, other: Server, batches: int = 50, budget: int = 65_536) -> int:
        """Take at most ``batches`` batches; returns how many rows and graves were new."""
        time = self.time
        if other.name not in self.pullers:
            pace = Pace(PaceConfig(min_bytes=budget, max_bytes=budget))
            stream = 1_000 * Server.writers + len(self.pullers) + 1
            Server.writers += 1
            self.pullers[other.name] = Puller(
                lambda: {NAME: self.shard}, pace, stream, random.Random(1), wait_s=0.5
            )
        puller, rows = self.pullers[other.name], 0
        if self.linked.setdefault(other.name, other.feeds) is not other.feeds:
            # The connection to the process before is gone.
            self.linked[other.name] = other.feeds
            puller.failed(time.s)
            time.s += 10.0
        for _ in range(batches):
            time.s += 0.1
            while (pull := puller.ask(time.s)) is not None:
                ended = other.feeds.take(self.name, pull, time.s)
                if ended is not None:
                    puller.take(ended, ended.nbytes, time.s)
                    time.s += 10.0
            if (batch := next(other.feeds.answers(self.name, time.s), None)) is not None:
                rows += puller.take(batch, batch.nbytes, time.s).rows
        return rows

    @property
    def rows(self) -> dict[int, tuple[int, int]]:
        """By key: version time and writer."""
        return {
            key: (time, writer)
            for page in self.shard.pages()
            if isinstance(page, Rows)
            for key, time, writer in zip(
                page.keys.tolist(), page.time.tolist(), page.writer.tolist(), strict=True
            )
        }


def servers(*names: str, **options: Any) -> tuple[Server, ...]:
    time = Time()
    return tuple(Server(name, time, **options) for name in names)


def differs(check: Callable[[], None]) -> bool:
    """Whether what ``check`` asserts does not hold."""
    try:
        check()
    except AssertionError:
        return True
    return False
