"""Values that travel exactly, in half the bytes or in a quarter: what a row takes, how far off it arrives, and what
that buys on a slow link.

The rows are item factors that were fitted to who watched what, not noise: a row's largest value sets int8's steps.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
import numpy.typing as npt
import uvloop
from rich.console import Console

from benchmarks.draws import Floats, distinct, gradients, keys_of, table
from benchmarks.region_watch import (
    MODEL,
    TABLE,
    Numbered,
    PushFailed,
    Sender,
    latencies_ms,
    settled,
    watching,
)
from benchmarks.region_world import World, world
from benchmarks.report import Row
from services.datasets import open_dataset
from services.datasets.dataset import Dataset
from services.datasets.download import user_cache
from services.parameter_server.client.directory import Directory
from services.parameter_server.syncing.messages import reply_of
from services.settings.model import SyncSettings
from sync.exchange import Batch, Piece
from sync.quantise import Precision, quantise, restore
from sync.records import Rows, Update

DIM: Final = 32
PRECISIONS: Final[Sequence[Precision]] = get_args(Precision)
LINK: Final = "delay=80ms,rate=1mbit"
TOP: Final = 10
PENALTY: Final = 20.0
WEIGHT: Final = 20.0
"""Of something watched, over something that was not (Hu, Koren, Volinsky 2008)."""
PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """``rounds`` of fitting; pushes of ``each`` rows, ``rows_s`` a second for ``seconds``, among ``rows``."""

    rounds: int
    rows: int
    rows_s: int
    each: int
    seconds: float


def measure(sizes: Sizes, folder: Path, console: Console) -> Iterator[Row]:
    """Bytes and errors, then freshness on a slow link."""
    console.print("precision: fitting factors")
    dataset, notes = open_dataset("ml-100k", user_cache(os.environ))
    users, items = factors(dataset, sizes.rounds)
    said = "made-up data, as the real ones cannot be reached" if dataset.generated else dataset.name
    for note in notes:
        console.print(note)
    yield from _sizes(users, items, said)
    console.print(f"precision: freshness through {LINK}")
    yield from _freshness(sizes, folder)


def factors(dataset: Dataset, rounds: int) -> tuple[Floats, Floats]:
    """Factors of users [U, d] and items [I, d] by weighted alternating least squares on what was watched."""
    watched = np.zeros((len(dataset.users), len(dataset.items)))
    watched[dataset.interactions.user, dataset.interactions.item] = 1.0
    items = np.random.default_rng(1).normal(scale=0.1, size=(watched.shape[1], DIM))
    users = np.zeros((watched.shape[0], DIM))
    for _ in range(rounds):
        users = _solve(watched, items)
        items = _solve(watched.T, users)
    return users.astype(np.float32), items.astype(np.float32)


def _solve(watched: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shared = others.T @ others + PENALTY * np.eye(DIM)
    found = np.empty((len(watched), DIM))
    for number, row in enumerate(watched):
        some = others[row > 0]
        found[number] = np.linalg.solve(shared + WEIGHT * some.T @ some, (1 + WEIGHT) * some.sum(axis=0))
    return found


def _sizes(users: Floats, items: Floats, said: str) -> Iterator[Row]:
    whole = wire_bytes(items, "float32")
    best = _top(users, items)
    for precision in PRECISIONS:
        came = restore(quantise(items, precision), precision, (len(items), DIM))
        off = came.astype(np.float64) - items
        relative = float(np.sqrt((off**2).mean() / (items.astype(np.float64) ** 2).mean()))
        kept = float(
            np.mean([len(np.intersect1d(*pair)) / TOP for pair in zip(best, _top(users, came), strict=True)])
        )
        took = wire_bytes(items, precision)
        yield Row(
            f"a row of {DIM} as {precision}, its key and version with it", "bytes", took,
            peer=whole, peer_name="float32", ratio=whole / took,
            note=f"error {relative:.2g} of the values' root mean square, {np.abs(off).max():.2g} at most; "
            f"{kept:.2%} of users' {TOP} best stay; factors of {len(items):,} items of {said}",
        )  # fmt: skip


def _top(users: Floats, items: Floats) -> npt.NDArray[np.intp]:
    """The ``TOP`` best items of each user [U, TOP]."""
    return np.argpartition(-(users @ items.T), TOP, axis=1)[:, :TOP]


def wire_bytes(values: Floats, precision: Precision) -> float:
    """Bytes of each of ``values`` [N, d] in a batch that is sent."""
    count = len(values)
    time, writer = np.ones(count, np.uint64), np.ones(count, np.uint32)
    rows = Rows(TABLE, keys_of(np.arange(count)), values, values[:, :0], time, writer)
    piece = Piece((MODEL, 0), 1, Update((rows,), epochs={1: 1}))
    body, arrays = reply_of(Batch(1, 1, (piece,)), precision)
    return (len(body) + sum(array.nbytes for array in arrays)) / count


def _freshness(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """A region for each precision, all at once, each behind a slow link of its own."""
    followers = {str(one): (LINK, SyncSettings(precision=one)) for one in PRECISIONS}
    with world(folder, followers) as found, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with found.home.client() as home:
            home.declare(MODEL, [table(TABLE, DIM)], "benchmark")
        yield from runner.run(_watched(sizes, found))


async def _watched(sizes: Sizes, found: World) -> list[Row]:
    generator, some = np.random.default_rng(8), gradients(sizes.each, DIM)
    batches = [(distinct(generator, sizes.rows, sizes.each), some) for _ in range(500)]
    count, per_s = round(sizes.rows_s * sizes.seconds / sizes.each), sizes.rows_s / sizes.each
    pushes = Numbered()
    with ExitStack() as stack:
        stores = {name: stack.enter_context(region.store()) for name, region in found.regions.items()}
        route = Directory(stack.enter_context(found.home.store())).route(MODEL)
        async with watching(stores, {}) as (rpc, seen):
            sender = Sender(route, found.home.address(), rpc, pushes)
            _, first = await sender.send(batches, 10.0, lambda sent: sent >= 5)
            await settled(seen, first, PATIENCE_S)
            came = {name: found.links.came(name) for name in stores}
            first, last = await sender.send(batches, per_s, lambda sent: sent >= count)
            passed = {name: found.links.came(name) - came[name] for name in stores}
            # One of them may be too far behind: what it did not see counts as seen at the end.
            with suppress(PushFailed):
                await settled(seen, last, PATIENCE_S)
            ended_s = time.monotonic()
    rows = []
    for name in stores:
        unseen = last - len(seen[name].at_s)
        seen[name].at_s += [ended_s] * unseen
        found_ms = latencies_ms(pushes, seen[name], first, last)
        p50, p95, p99 = (float(one) for one in np.percentile(found_ms, (50, 95, 99)))
        used = f"{8 * passed[name] / sizes.seconds / 1e6:.2f} Mbit/s were used; load {os.getloadavg()[0]:.1f}"
        rows.append(
            Row(
                f"p99 freshness as {name} at {sizes.rows_s:,} rows/s through {LINK}",
                "ms",
                p99,
                note=f"p50 {p50:.0f}, p95 {p95:.0f}, n {len(found_ms)}, of which {max(unseen, 0)} never; {used}",
            )
        )
    return rows
