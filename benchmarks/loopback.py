"""Pulls and pushes over loopback by one client, against rows in Redis that its client updates itself.

Ours acknowledges a push once it is applied and writes it to a log on disk a little later; Redis keeps nothing on
disk here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from rich.console import Console

from benchmarks.draws import SCALE, Keys, distinct, gradients, ranges, table
from benchmarks.redis_peer import INSTALL, NAME, RedisRows, available, names, redis_server
from benchmarks.report import Row
from benchmarks.servers import MODEL, Pusher, parameter_servers
from benchmarks.turns import Block, Figures, faced, in_turn
from services.parameter_server.client import ParameterClient

T = TypeVar("T")

ASKED: Final = 4_096
AIM_PULL: Final = 6.0
AIM_SET: Final = 15.0
AIM_MSET: Final = 6.0
_DIM: Final = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: ``rows`` of ``_DIM`` floats, ascending, and other widths ``dims`` at ``dim_rows`` rows;
    ``calls`` of ``ASKED`` rows in a block."""

    rows: Sequence[int]
    dims: Sequence[int]
    dim_rows: int
    calls: int
    rounds: int


@dataclass(slots=True)
class _Ours:
    """A client whose servers hold one table for each width, ``rows-DIM``."""

    client: ParameterClient
    pusher: Pusher = field(init=False)
    held: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pusher = Pusher(self.client)

    def grow(self, dim: int, rows: int) -> None:
        for keys in ranges(self.held.get(dim, 0), rows, ASKED):
            self.pusher.push(f"rows-{dim}", keys, gradients(len(keys), dim))
        self.held[dim] = rows

    def pull(self, dim: int) -> Callable[[Keys], object]:
        return lambda keys: self.client.pull(MODEL, {f"rows-{dim}": keys})

    def push(self, dim: int) -> Callable[[Keys], object]:
        some = gradients(ASKED, dim)
        return lambda keys: self.pusher.push(f"rows-{dim}", keys, some)


@dataclass(slots=True)
class _Peer:
    """Redis with a database for the values of each width, and one for values with state."""

    port: int
    stack: ExitStack
    held: dict[int, tuple[RedisRows, RedisRows, int]] = field(default_factory=dict)

    def grow(self, dim: int, rows: int) -> None:
        if dim not in self.held:
            stores = [
                self.stack.enter_context(closing(RedisRows(self.port, 2 * len(self.held) + more, dim + more)))
                for more in (0, 1)
            ]
            self.held[dim] = (stores[0], stores[1], 0)
        values, with_state, held = self.held[dim]
        some = np.random.default_rng(1).uniform(-SCALE, SCALE, (ASKED, dim + 1)).astype(np.float32)
        some[:, -1] = 0.5
        for keys in ranges(held, rows, ASKED):
            values.put(names(keys), some[: len(keys), :-1])
            with_state.put(names(keys), some[: len(keys)])
        self.held[dim] = (values, with_state, rows)

    def pull(self, dim: int) -> Callable[[list[bytes]], object]:
        return self.held[dim][0].get

    def push(self, dim: int, *, pipelined: bool) -> Callable[[list[bytes]], object]:
        some, rows = gradients(ASKED, dim), self.held[dim][1]
        return lambda keys: rows.step(keys, some, pipelined=pipelined)


def measure(sizes: Sizes, folder: Path, console: Console) -> Iterator[Row]:
    """Rows for each number of rows, the last one in full; then for each width."""
    specs = [table(f"rows-{dim}", dim) for dim in (_DIM, *sizes.dims)]
    keys = [f"rpc.keys={folder / 'keys'}", "rpc.create_keys=true"]
    with ExitStack() as stack:
        plain = _Ours(stack.enter_context(parameter_servers(folder / "plain", specs)))
        curve = _Ours(stack.enter_context(parameter_servers(folder / "curve", specs, overrides=keys)))
        peer = None
        if available():
            peer = _Peer(stack.enter_context(redis_server(folder / "redis")), stack)
        for rows in sizes.rows:
            console.print(f"loopback: {rows:,} rows of {_DIM}")
            last = rows == sizes.rows[-1]
            for side in (plain, peer, curve if last else None):
                if side is not None:
                    side.grow(_DIM, rows)
            yield from _compare(_DIM, plain, curve if last else None, peer, sizes)
        for dim in sizes.dims:
            console.print(f"loopback: {sizes.dim_rows:,} rows of {dim}")
            plain.grow(dim, sizes.dim_rows)
            if peer is not None:
                peer.grow(dim, sizes.dim_rows)
            yield from _compare(dim, plain, None, peer, sizes)


def _compare(dim: int, plain: _Ours, curve: _Ours | None, peer: _Peer | None, sizes: Sizes) -> Iterator[Row]:
    """Pulls, then pushes; with ``curve`` in full, aims included."""
    rows, full = plain.held[dim], curve is not None
    generator = np.random.default_rng(rows + dim)

    def ours(call: Callable[[Keys], object]) -> Block:
        return lambda: _rate(call, [distinct(generator, rows, ASKED) for _ in range(sizes.calls)])

    def theirs(call: Callable[[list[bytes]], object]) -> Block:
        # The names of the rows are made beforehand: theirs is the time of the store and its client alone.
        return lambda: _rate(call, [names(distinct(generator, rows, ASKED)) for _ in range(sizes.calls)])

    def turns(kind: str, *peers: Callable[[list[bytes]], object]) -> tuple[list[Figures], list[Figures]]:
        """Figures of ours, and of the peers, if there are any."""
        sides = [side for side in (plain, curve) if side is not None]
        mine = [ours(side.pull(dim) if kind == "pull" else side.push(dim)) for side in sides]
        found = in_turn([*mine, *(theirs(one) for one in peers)], sizes.rounds)
        return found[: len(sides)], found[len(sides) :]

    where = f"{ASKED:,} x {dim} of {rows:,} rows over loopback"
    found, others = turns("pull", *([peer.pull(dim)] if peer else []))
    yield from _faced(
        f"pull {where}", found, others[0] if others else None, "MGET", AIM_PULL if full else None
    )
    ways = [("MSET", False, AIM_MSET)]
    if full:
        ways.insert(0, ("pipelined SETs", True, AIM_SET))
    peers = [peer.push(dim, pipelined=pipelined) for _, pipelined, _ in ways] if peer else []
    found, others = turns("push", *peers)
    for place, (name, _, aim) in enumerate(ways):
        work = f"push {where}, row-wise Adagrad, against {name}"
        against = others[place] if others else None
        yield from _faced(work, found, against, f"MGET, NumPy, {name}", aim if full else None)


def _faced(
    work: str, found: Sequence[Figures], peer: Figures | None, how: str, aim: float | None
) -> Iterator[Row]:
    """A row for plain calls, which the aim is for, and where they were measured one for encrypted ones."""
    for figures, way in zip(found, ("", ", CURVE"), strict=False):
        yield faced(
            work + way, "rows/s", figures, peer, _name(how), aim=None if way else aim, note=_calls(figures)
        )


def _rate(call: Callable[[T], object], asked: Sequence[T]) -> float:
    """Rows a second of ``call`` on each of ``asked``."""
    started_s = time.perf_counter()
    for keys in asked:
        call(keys)
    return len(asked) * ASKED / (time.perf_counter() - started_s)


def _calls(figures: Figures) -> str:
    return f"{1e3 * ASKED / figures.median:.2f} ms a call"


def _name(how: str) -> str:
    return f"{NAME}, {how}" if available() else f"{NAME} ({INSTALL})"
