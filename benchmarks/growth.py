"""A table that grows by pushes of new rows, and the key index alone, each against what Python itself offers.

Each growth happens in a fresh process, so that none finds memory that another left behind.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
from rich.console import Console

from benchmarks.draws import gradients, ranges, table
from benchmarks.report import Row, at_most
from benchmarks.turns import Figures, faced
from sync.clock import HybridClock
from sync.index import KeyIndex
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.warm import warm_up

T = TypeVar("T")

PUSH: Final = 4_096
INDEXED: Final = 65_536
AIM_RATIO: Final = 2.0
AIM_INDEX: Final = 30e6
AIM_PAUSE_MS: Final = 50.0
AIM_BYTES: Final = 40.0
_SOURCE: Final = Source("benchmark", 0)
_DICT: Final = "dict of NumPy rows (views of the batch's matrix; stored as given, no optimiser)"
_INTS: Final = "dict of ints, from keys that are ints already"


@dataclass(frozen=True, slots=True)
class Grown:
    """How a growth went. ``pushes_s``: for each push, its wall-clock time; ``worst_cpu_s``: the most processor time of
    one. ``allocated`` and ``resident``: bytes a row beyond its values and state, as told by the table, and by the
    system of the whole process."""

    rows: int
    pushes_s: npt.NDArray[np.float64]
    worst_cpu_s: float
    allocated: float
    resident: float

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / float(self.pushes_s.sum())


Fill = Callable[[int, int], Grown]
"""Grows to so many rows of such a width."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ``rows`` tables grow to at ``dim`` 32, and other widths ``dims`` at ``dim_rows``."""

    rows: int
    dims: Sequence[int]
    dim_rows: int
    rounds: int


def measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    """Rates of insertion, bytes a row, the worst pause; then how the rate changes with rows and width."""
    ours: list[Grown] = []
    peers: list[Grown] = []
    for number in range(sizes.rounds):
        console.print(f"insert: {sizes.rows:,} rows of 32, round {number + 1} of {sizes.rounds}")
        ours.append(_apart(grow_shard, sizes.rows, 32))
        peers.append(_apart(grow_dict, sizes.rows, 32))
    yield faced(
        f"insert {sizes.rows:,} x 32 by pushes of {PUSH:,} new rows",
        "rows/s",
        Figures(tuple(one.rate for one in ours)),
        Figures(tuple(one.rate for one in peers)),
        _DICT,
        aim=AIM_RATIO,
    )
    yield _memory(ours, peers)
    yield _pause(ours)
    yield from _by_rows(ours, peers)
    yield from _index(sizes, console)
    for dim in sizes.dims:
        console.print(f"insert: {sizes.dim_rows:,} rows of {dim}")
        yield faced(
            f"insert {sizes.dim_rows:,} x {dim} by pushes of {PUSH:,} new rows",
            "rows/s",
            Figures((_apart(grow_shard, sizes.dim_rows, dim).rate,)),
            Figures((_apart(grow_dict, sizes.dim_rows, dim).rate,)),
            _DICT,
            note="measured once",
        )


def _memory(ours: Sequence[Grown], peers: Sequence[Grown]) -> Row:
    allocated = Figures(tuple(one.allocated for one in ours))
    row = faced(
        f"memory of {ours[0].rows:,} x 32, beyond values and optimiser state",
        "bytes/row",
        allocated,
        Figures(tuple(one.resident for one in peers)),
        _DICT + ", resident memory",
        less_is_better=True,
    )
    resident = float(np.median([one.resident for one in ours]))
    said = f"allocated, room for growth included; resident {resident:.1f}; {row.note}"
    note = f"{said}; the aim is in bytes/row, the ratio is the peer's bytes over ours"
    return replace(row, aim=AIM_BYTES, met=at_most(AIM_BYTES, row.ours), note=note)


def _pause(ours: Sequence[Grown]) -> Row:
    worst = Figures(tuple(1e3 * float(one.pushes_s.max()) for one in ours))
    cpu = max(one.worst_cpu_s for one in ours) * 1e3
    usual = float(np.median(np.concatenate([one.pushes_s for one in ours]))) * 1e3
    # The worst of all rounds is what counts, not their median.
    value = worst.spread[1]
    return Row(
        f"worst push of {PUSH:,} new rows while a table grows to {ours[0].rows:,} x 32",
        "ms",
        value,
        AIM_PAUSE_MS,
        at_most(AIM_PAUSE_MS, value),
        worst.spread,
        note=f"of {len(ours)} growths; median push {usual:.2f} ms; most processor time of one push {cpu:.1f} ms",
    )


def _by_rows(ours: Sequence[Grown], peers: Sequence[Grown]) -> Iterator[Row]:
    """The rates between the halves of the way: from which size on anything gets slower."""
    total = ours[0].rows
    edges = [PUSH * (total // PUSH * part // 16) for part in (0, 1, 2, 4, 8, 16)]
    for first, last in itertools.pairwise(edges):

        def rates(grown: Sequence[Grown], part: slice) -> Figures:
            return Figures(
                tuple(len(one.pushes_s[part]) * PUSH / float(one.pushes_s[part].sum()) for one in grown)
            )

        part = slice(first // PUSH, last // PUSH)
        yield faced(
            f"insert rows {first:,} to {last:,} of these",
            "rows/s",
            rates(ours, part),
            rates(peers, part),
            _DICT,
        )


def _index(sizes: Sizes, console: Console) -> Iterator[Row]:
    console.print(f"index: {sizes.rows:,} keys")
    found: dict[Fill, list[float]] = {grow_index: [], fill_index: [], fill_dict: []}
    for _ in range(sizes.rounds):
        for fill, rates in found.items():
            rates.append(_apart(fill, sizes.rows, 0).rate)
    peer = Figures(tuple(found[fill_dict]))
    for fill, how in ((grow_index, "growing"), (fill_index, "room reserved at once")):
        row = faced(
            f"insert {sizes.rows:,} keys into the index alone, {how}", "rows/s", Figures(tuple(found[fill])),
            peer, _INTS, note=f"{INDEXED:,} at a time; the aim is {AIM_INDEX:,.0f} rows/s",
        )  # fmt: skip
        yield replace(row, aim=AIM_INDEX, met=row.ours >= AIM_INDEX)


def _apart(grow: Fill, rows: int, dim: int) -> Grown:
    """What ``grow(rows, dim)`` returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(grow, (rows, dim))


def grow_shard(rows: int, dim: int) -> Grown:
    """A shard that takes pushes of new rows. Kernels are warmed up before, as servers do."""
    warm_up()
    shard = Shard(0, (table("rows", dim),), 1, HybridClock())
    some = gradients(PUSH, dim)
    resident = _resident()
    pushes_s, worst_cpu_s = [], 0.0
    for number, keys in enumerate(ranges(0, rows, PUSH)):
        push = Push(_SOURCE, number, number - 1, parts=(("rows", keys, some[: len(keys)]),))
        cpu_s, started_s = time.thread_time(), time.perf_counter()
        shard.push(push)
        pushes_s.append(time.perf_counter() - started_s)
        worst_cpu_s = max(worst_cpu_s, time.thread_time() - cpu_s)
    own = 4 * (dim + shard.specs[0].state_dim)
    return Grown(
        rows,
        np.array(pushes_s),
        worst_cpu_s,
        shard.nbytes / rows - own,
        (_resident() - resident) / rows - own,
    )


def grow_dict(rows: int, dim: int) -> Grown:
    """A dict from key to row that takes batches of given rows: its memory beyond values is all else."""
    held: dict[int, npt.NDArray[np.float32]] = {}
    some = gradients(PUSH, dim)
    resident = _resident()
    pushes_s = []
    for keys in ranges(0, rows, PUSH):
        started_s = time.perf_counter()
        # Iterating over a matrix gives views; the matrix lives as long as one of them.
        held.update(zip(keys.tolist(), some[: len(keys)].copy(), strict=True))
        pushes_s.append(time.perf_counter() - started_s)
    return Grown(rows, np.array(pushes_s), 0.0, 0.0, (_resident() - resident) / rows - 4 * dim)


def grow_index(rows: int, _dim: int) -> Grown:
    """The key index alone; its segments split as it grows."""
    warm_up()
    return _timed(rows, KeyIndex().insert, ranges(0, rows, INDEXED))


def fill_index(rows: int, _dim: int) -> Grown:
    """The same with room for all keys from the start, as when a snapshot is loaded."""
    warm_up()
    index = KeyIndex()
    index.reserve(rows)
    return _timed(rows, index.insert, ranges(0, rows, INDEXED))


def fill_dict(rows: int, _dim: int) -> Grown:
    """A dict from key to row number."""
    held: dict[int, int] = {}

    def insert(keys: list[int]) -> None:
        held.update(zip(keys, range(len(held), len(held) + len(keys)), strict=True))

    return _timed(rows, insert, (keys.tolist() for keys in ranges(0, rows, INDEXED)))


def _timed(rows: int, insert: Callable[[T], object], batches: Iterable[T]) -> Grown:
    calls_s = []
    for batch in batches:
        started_s = time.perf_counter()
        insert(batch)
        calls_s.append(time.perf_counter() - started_s)
    return Grown(rows, np.array(calls_s), 0.0, 0.0, 0.0)


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)
