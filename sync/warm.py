"""Compile and run every kernel once, before the first request does."""

from __future__ import annotations

import numpy as np

from sync.changes import Cursor
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec


def warm_up() -> None:
    """Pull, push and read changes of a throw-away shard. Takes seconds where numba's cache is empty."""
    specs = (
        TableSpec("sgd", 2, Initialiser.uniform(0.1), Optimiser("sgd")),
        TableSpec("rowwise", 2, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad")),
        TableSpec("elementwise", 2, Initialiser.uniform(0.1), Optimiser("adagrad"), l2=0.1, clip=1.0),
        TableSpec("adam", 2, Initialiser.uniform(0.1), Optimiser("adam")),
        TableSpec("ftrl", 2, Initialiser.uniform(0.1), Optimiser("ftrl"), admission=2),
    )
    shard = Shard(0, specs, 1, HybridClock(lambda: 0))
    keys = np.array([1, 2, 1], np.uint64)
    parts = tuple((spec.name, keys, np.ones((3, 2), np.float32)) for spec in specs)
    shard.push(Push(Source("warm-up", 0), 0, -1, parts=parts))
    for spec in specs:
        shard.pull(spec.name, keys)
    shard.changes(Cursor(), [spec.name for spec in specs], limit=10)
