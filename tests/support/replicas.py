"""Replicas of one small shard for tests, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from sync.clock import HybridClock
from sync.knowledge import Horizon, Knowledge
from sync.pushes import Push, Source, Watermark
from sync.records import Graves, Learned, Rows, Update
from sync.replica import Replica
from sync.shard import Shard
from sync.snapshot import encode
from sync.spec import Initialiser, Optimiser, TableSpec

DIM = 2
ROWS = TableSpec("rows", DIM, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5))
OTHER = TableSpec("other", DIM, Initialiser.uniform(0.1), Optimiser("sgd"))
DENSE = TableSpec("dense", 3, Initialiser.uniform(0.1), Optimiser("sgd"), placement="single", rows=4)
SPECS = (ROWS, OTHER, DENSE)
SOURCE = Source("log", 0)


class Clock:
    """Physical microseconds for everybody."""

    def __init__(self) -> None:
        self.now_us = 1_000_000

    def hybrid(self) -> HybridClock:
        return HybridClock(lambda: self.now_us)

    def shard(
        self,
        writer: int,
        *,
        change_capacity: int = 1_000,
        max_graves: int = 1_000,
        max_rows: int = 1_000_000,
        stateless: bool = False,
        shard_id: int = 0,
    ) -> Shard:
        """A new replica with ``SPECS``."""
        return Shard(
            shard_id, SPECS, writer, self.hybrid(), change_capacity=change_capacity, max_graves=max_graves,
            max_rows=max_rows, stateless=stateless,
        )  # fmt: skip


def push(shard: Shard, keys: Iterable[int], scale: float = 1.0, table: str = "rows") -> None:
    """Push gradients of ``scale`` for ``keys``."""
    some = np.array(list(keys), np.uint64)
    width = shard.table(table).spec.dim
    gradients = np.full((len(some), width), scale, np.float32)
    gradients *= 1 + (some % 7).astype(np.float32)[:, None]
    offset = shard.applied(SOURCE) + 1
    mark = Watermark("events", 0, offset, 1_000 + offset)
    outcome = shard.push(Push(SOURCE, offset, offset - 1, mark, ((table, some, gradients),)))
    assert outcome.status == "applied", outcome


def rows(told: Iterable[tuple[int, int, int, float]], table: str = "rows", state: int | None = None) -> Rows:
    """Rows of (key, time, writer, value)."""
    each = list(told)
    return Rows(
        table,
        np.array([key for key, *_ in each], np.uint64),
        np.array([[value] * DIM for *_, value in each], np.float32).reshape(-1, DIM),
        np.zeros((len(each), {"rows": 1, "other": 0}[table] if state is None else state), np.float32),
        np.array([time for _, time, *_ in each], np.uint64),
        np.array([writer for _, _, writer, _ in each], np.uint32),
    )


def graves(told: Iterable[tuple[int, int, int]], table: str = "rows") -> Graves:
    """Graves of (key, time, writer)."""
    each = list(told)
    return Graves(
        table,
        np.array([key for key, _, _ in each], np.uint64),
        np.array([time for _, time, _ in each], np.uint64),
        np.array([writer for _, _, writer in each], np.uint32),
    )


def learned(knowledge: Knowledge, floor: Knowledge | None = None) -> Learned:
    """``knowledge`` of a replica that forgot graves up to ``floor``."""
    return Learned(knowledge, Horizon(floor or {}))


def update(
    *parts: Rows | Graves, epochs: Mapping[int, int] | None = None, known: Learned | None = None
) -> Update:
    """An update of ``parts``."""
    return Update(
        tuple(part for part in parts if isinstance(part, Rows)),
        tuple(part for part in parts if isinstance(part, Graves)),
        epochs=epochs or {},
        learned=known,
    )


def bits(replica: Replica) -> bytes:
    """Everything but where rows lie and who leads: two replicas with the same bits answer all questions alike."""
    state = replica.state()
    told: dict[tuple[str, int], tuple[bytes, ...]] = {}
    for page in state.rows:
        for i, key in enumerate(page.keys.tolist()):
            columns = (page.values, page.state, page.time, page.writer)
            told[page.table, key] = tuple(column[i].tobytes() for column in columns)
    buried = sorted(
        (page.table, key, int(page.time[i]), int(page.writer[i]))
        for page in state.graves
        for i, key in enumerate(page.keys.tolist())
    )
    # A writer without an epoch has 0, so whoever leads under that tells nothing.
    epochs = {writer: epoch for writer, epoch in replica.epochs.items() if epoch}
    head = replace(state.head, epochs={})
    return (
        encode(replace(state, head=head, rows=(), graves=()))
        + repr((sorted(told.items()), buried, sorted(epochs.items()))).encode()
    )
