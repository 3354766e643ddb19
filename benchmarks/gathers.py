"""Rows read in this process by random keys, index included, against torch's embedding on a plain index."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

from benchmarks.draws import even, gradients, ranges, table
from benchmarks.report import Row
from benchmarks.turns import Block, faced, in_turn
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.shard import Shard

PEER: Final = "torch.nn.functional.embedding, one thread"
READ: Final = 8_192
AIM: Final = 0.45
_FILL: Final = 65_536
_SOURCE: Final = Source("benchmark", 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: ``rows`` at width 32, ascending, and other widths ``dims`` at ``dim_rows`` rows; ``calls``
    of ``READ`` rows in a block."""

    rows: Sequence[int]
    dims: Sequence[int]
    dim_rows: int
    calls: int
    rounds: int


def measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    """A row for each number of rows, then for each width."""
    torch.set_num_threads(1)
    growing = Rising(32)
    weights = torch.zeros(sizes.rows[-1], 32).uniform_(-0.05, 0.05)
    for rows in sizes.rows:
        console.print(f"gather: {rows:,} rows of 32")
        growing.grow(rows)
        yield _compare(growing, weights[:rows], sizes, AIM if rows == sizes.rows[-1] else None)
    del growing, weights
    for dim in sizes.dims:
        console.print(f"gather: {sizes.dim_rows:,} rows of {dim}")
        wide = Rising(dim)
        wide.grow(sizes.dim_rows)
        yield _compare(wide, torch.zeros(sizes.dim_rows, dim).uniform_(-0.05, 0.05), sizes, None)


class Rising:
    """A shard with one table ``rows`` of ``dim`` floats that is filled by pushes."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.rows = 0
        self.shard = Shard(0, (table("rows", dim),), 1, HybridClock())
        self._pushes = 0

    def grow(self, rows: int) -> None:
        """Push the keys of all numbers below ``rows`` that were not yet."""
        for keys in ranges(self.rows, rows, _FILL):
            part = ("rows", keys, gradients(len(keys), self.dim))
            self.shard.push(Push(_SOURCE, self._pushes, self._pushes - 1, parts=(part,)))
            self._pushes += 1
        self.rows = rows


def _compare(rising: Rising, weights: torch.Tensor, sizes: Sizes, aim: float | None) -> Row:
    generator = np.random.default_rng(rising.rows + rising.dim)
    ours, peer = in_turn(
        [_ours(rising, sizes.calls, generator), _peer(weights, sizes.calls, generator)], sizes.rounds
    )
    return faced(
        f"gather {READ:,} x {rising.dim} of {rising.rows:,} rows, in process",
        "rows/s",
        ours,
        peer,
        PEER,
        aim=aim,
        note="Shard.pull by fresh 64-bit keys; the peer gets row numbers",
    )


def _ours(rising: Rising, calls: int, generator: np.random.Generator) -> Block:
    def block() -> float:
        some = [even(generator, rising.rows, READ) for _ in range(calls)]
        started_s = time.perf_counter()
        for keys in some:
            rising.shard.pull("rows", keys)
        return calls * READ / (time.perf_counter() - started_s)

    return block


def _peer(weights: torch.Tensor, calls: int, generator: np.random.Generator) -> Block:
    def block() -> float:
        some = [torch.from_numpy(generator.integers(0, len(weights), READ)) for _ in range(calls)]
        started_s = time.perf_counter()
        with torch.inference_mode():
            for numbers in some:
                functional.embedding(numbers, weights)
        return calls * READ / (time.perf_counter() - started_s)

    return block
