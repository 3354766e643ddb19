"""Three regions of real parameter servers: how old parameters are there, how long an empty region takes to catch up,
and what that does to those who read there.

Home writes; ``near`` follows it through a link without conditions, ``far`` through one with a delay and a rate. All
times are those of one process, which pushes and watches all servers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import uvloop
from rich.console import Console

from benchmarks.draws import Floats, Keys, distinct, gradients, keys_of, ranges, table
from benchmarks.region_reads import KEYS, Reads, reader
from benchmarks.region_watch import MODEL, TABLE, Numbered, Seen, Sender, latencies_ms, settled, watching
from benchmarks.region_world import World, world
from benchmarks.report import Row, at_most
from services.parameter_server.client.directory import Directory
from services.parameter_server.client.routing import Route
from services.settings.model import SyncSettings
from sync.pushes import Source

DIM: Final = 32
DELAY_S: Final = 0.08
LINK: Final = "delay=80ms,rate=100mbit"
LINK_BYTES_S: Final = 100e6 / 8
INSIDE_MS: Final = 100.0
FAR_MS: Final = DELAY_S * 1e3 + 300.0
LEVEL_S: Final = 1.0
"""A region has caught up once it has what was pushed this long ago."""
LIMIT_S: Final = 90.0
CHUNK: Final = 4_096
COMPARED: Final = 2_000
HOME: Final = "home"
FOLLOWER: Final = "home's follower"
LatencyMs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rate:
    """``rows_s`` row updates a second, ``each`` in a push, for ``seconds``."""

    rows_s: int
    each: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """``rows`` that are stored; the ``rates`` of pushes, of which ``usual`` has the aims and goes on while a region
    catches up; how the far region is read."""

    rows: int
    rates: Sequence[Rate]
    usual: Rate
    reads_s: float
    reads_per_s: float


@dataclass(slots=True)
class _Run:
    """What lasts while the regions do."""

    world: World
    route: Route
    sizes: Sizes
    pushes: Numbered
    generator: np.random.Generator

    @asynccontextmanager
    async def watching(
        self, *names: str, follower: bool = False
    ) -> AsyncIterator[tuple[Sender, dict[str, Seen]]]:
        """A sender, and what is seen meanwhile in regions."""
        home = self.world.home
        followers = {FOLLOWER: (home.address("parameter-server-1"), self.route)} if follower else {}
        with ExitStack() as stack:
            # Opened anew: a region that begins with nothing has another store.
            regions = {HOME: home, **self.world.regions}
            stores = {name: stack.enter_context(regions[name].store()) for name in names}
            async with watching(stores, followers) as (rpc, seen):
                yield Sender(self.route, home.address(), rpc, self.pushes), seen

    def batches(self, rate: Rate) -> list[tuple[Keys, Floats]]:
        """Enough different pushes to be sent over and over."""
        some = gradients(rate.each, DIM)
        return [(distinct(self.generator, self.sizes.rows, rate.each), some) for _ in range(500)]

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of each region so far."""
        return {one.name: one.cpu_s() for one in (self.world.home, *self.world.regions.values())}


def measure(sizes: Sizes, folder: Path, console: Console) -> Iterator[Row]:
    """Freshness at each rate, then catching up, then readers meanwhile."""
    followers = {"near": ("", SyncSettings()), "far": (LINK, SyncSettings())}
    with world(folder, followers, home_servers=2) as found, ExitStack() as stack:
        home = stack.enter_context(found.home.client())
        home.declare(MODEL, [table(TABLE, DIM)], "benchmark")
        console.print(f"regions: {sizes.rows:,} rows of {DIM}")
        _grow(home.push, sizes.rows, home.shards)
        route = Directory(stack.enter_context(found.home.store())).route(MODEL)
        run = _Run(found, route, sizes, Numbered(), np.random.default_rng(6))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_level(run))
            usual: dict[str, LatencyMs] = {}
            for rate in sizes.rates:
                console.print(f"regions: {rate.rows_s:,} rows/s for {rate.seconds:g} s")
                rows, latencies = runner.run(_freshness(run, rate))
                yield from rows
                if rate == sizes.usual:
                    usual = latencies
            _compare(run)
            yield from _catching_up(runner, run, usual, console)
            _compare(run)


def _grow(push: Callable[..., object], rows: int, shards: int) -> None:
    source = Source("growing", 0)
    for number, keys in enumerate(ranges(0, rows, CHUNK)):
        before = dict.fromkeys(range(shards), number - 1)
        parts = {TABLE: (keys, gradients(len(keys), DIM))}
        push(MODEL, source, number, before, time.time_ns() // 1_000_000, None, parts)


async def _level(run: _Run) -> None:
    """Wait until every server has everything."""
    async with run.watching(HOME, *run.world.regions, follower=True) as (sender, seen):
        _, last = await sender.send(run.batches(run.sizes.usual), 100.0, lambda sent: sent >= 10)
        await settled(seen, last, LIMIT_S)


async def _freshness(run: _Run, rate: Rate) -> tuple[list[Row], dict[str, LatencyMs]]:
    count = round(rate.rows_s / rate.each * rate.seconds)
    async with run.watching(HOME, *run.world.regions, follower=True) as (sender, seen):
        # Connecting does not count.
        _, first = await sender.send(run.batches(rate), rate.rows_s / rate.each, lambda sent: sent >= 10)
        await settled(seen, first, LIMIT_S)
        cpu_s, came, began_s = run.cpu_s(), run.world.links.came("far"), time.monotonic()
        first, last = await sender.send(
            run.batches(rate), rate.rows_s / rate.each, lambda sent: sent >= count
        )
        sent_s = time.monotonic() - began_s
        await settled(seen, last, LIMIT_S)
        rows = count * rate.each
        took = {name: 1e6 * (now - cpu_s[name]) / rows for name, now in run.cpu_s().items()}
        bytes_per_row = (run.world.links.came("far") - came) / rows
    latencies = {name: latencies_ms(run.pushes, one, first, last) for name, one in seen.items()}
    aims = {HOME: INSIDE_MS, FOLLOWER: INSIDE_MS, "far": FAR_MS}
    usual = rate == run.sizes.usual
    what = f"{rate.rows_s:,} rows/s"
    told = {
        HOME: "inside home, its leader's readers",
        FOLLOWER: "inside home, its follower's",
        "near": "near region (no delay)",
        "far": f"far region ({LINK})",
    }
    found = [
        _latency(f"p99 freshness at {what}, {told[name]}", latencies[name], aims.get(name) if usual else None)
        for name in told
    ]
    cpu = ", ".join(f"{name} {one:.1f}" for name, one in took.items())
    found.append(Row(f"CPU per row update at {what}, all regions", "µs", sum(took.values()), note=cpu))
    found.append(Row(f"bytes per row update at {what}, both ways of the far link", "bytes", bytes_per_row,
                     note=f"a key, a version and {DIM} float32 are {20 + 4 * DIM}"))  # fmt: skip
    found.append(Row(f"pushed at {what}", "rows/s", rows / sent_s, note=f"load {os.getloadavg()[0]:.1f}"))
    return found, latencies


def _latency(work: str, latency_ms: LatencyMs, aim: float | None = None, note: str = "") -> Row:
    p50, p95, p99 = (float(one) for one in np.percentile(latency_ms, (50, 95, 99)))
    told = f"p50 {p50:.1f}, p95 {p95:.1f}, largest {latency_ms.max():.1f}, n {len(latency_ms)}"
    met = None if aim is None else at_most(aim, p99)
    return Row(work, "ms", p99, aim, met, note=f"{told}; {note}" if note else told)


def _compare(run: _Run) -> None:
    """Whether all regions have the same bits. Raises RuntimeError."""
    keys = keys_of(run.generator.choice(run.sizes.rows, min(COMPARED, run.sizes.rows), replace=False))
    found = set()
    for region in (run.world.home, *run.world.regions.values()):
        with region.client() as client:
            found.add(client.pull(MODEL, {TABLE: keys}).rows[TABLE].tobytes())
    if len(found) != 1:
        raise RuntimeError("the regions' rows differ though all have seen the same pushes")


@dataclass(frozen=True, slots=True)
class _Caught:
    """``seconds`` until level, link ``bytes_s`` meanwhile, freshness of the ``near`` region and ``reads``."""

    seconds: float
    bytes_s: float
    near: LatencyMs
    reads: LatencyMs


async def _catch_up(run: _Run, *, brake: bool, reads: Reads) -> _Caught:
    """The far region begins with nothing while pushes go on."""
    far, rate = run.world.regions["far"], run.sizes.usual
    far.empty()
    wait_s = SyncSettings().reader_wait if brake else 0.0
    sync = far.settings.sync.model_copy(update={"reader_wait": wait_s})
    far.settings = far.settings.model_copy(update={"sync": sync})
    far.start()
    await asyncio.to_thread(far.ready)
    began_s, came = time.monotonic(), run.world.links.came("far")
    level_s, passed = None, 0
    with ExitStack() as stack:
        go = await asyncio.to_thread(stack.enter_context, reader(far.settings, reads))
        reading = asyncio.create_task(asyncio.to_thread(go))
        async with run.watching("near", "far") as (sender, seen):

            def is_done(sent: int) -> bool:
                nonlocal level_s, passed
                now, at = time.monotonic(), len(seen["far"].at_s)
                if level_s is None and at and now - run.pushes.due_s[at - 1] < LEVEL_S:
                    level_s, passed = now, run.world.links.came("far") - came
                if now > began_s + LIMIT_S:
                    raise RuntimeError(f"the far region did not catch up within {LIMIT_S:g} s")
                return level_s is not None and reading.done()

            first, last = await sender.send(run.batches(rate), rate.rows_s / rate.each, is_done)
            assert level_s is not None
            await settled(seen, last, LIMIT_S)
        near = latencies_ms(run.pushes, seen["near"], first, last)
        took_s = level_s - began_s
        return _Caught(took_s, passed / took_s, near, await reading)


def _catching_up(
    runner: asyncio.Runner, run: _Run, usual: dict[str, LatencyMs], console: Console
) -> Iterator[Row]:
    sizes = run.sizes
    reads = Reads(sizes.reads_per_s, sizes.reads_s, sizes.rows)
    console.print("regions: readers of the far region while nothing is pushed")
    with reader(run.world.regions["far"].settings, reads) as go:
        idle = go()
    work = f"p99 of reads of {KEYS} rows, {reads.per_s:g}/s, in the far region"
    yield _latency(f"{work}, no sync", idle, note="the API's client; no whole API")
    what = f"{sizes.rows:,} rows through {LINK}"
    for brake in (True, False):
        console.print(f"regions: an empty region catches up, {what}, the brake {'on' if brake else 'off'}")
        caught = runner.run(_catch_up(run, brake=brake, reads=reads))
        if brake:
            yield from _caught_up(run, caught, usual, what)
        note = f"level after {caught.seconds:.1f} s; load {os.getloadavg()[0]:.1f}"
        yield _latency(f"{work}, catching up, brake {'on' if brake else 'off'}", caught.reads, None, note)


def _caught_up(run: _Run, caught: _Caught, usual: dict[str, LatencyMs], what: str) -> Iterator[Row]:
    least_s = run.sizes.rows * (20 + 4 * DIM) / LINK_BYTES_S
    yield Row(
        f"an empty region catches up: {what}, pushed {run.sizes.usual.rows_s:,}/s and read meanwhile",
        "s",
        caught.seconds,
        note=f"the rows alone fill the link for {least_s:.1f} s; {8e-6 * caught.bytes_s:.0f} Mbit/s passed, "
        f"{run.sizes.rows / caught.seconds:,.0f} rows/s were merged; "
        f"load {os.getloadavg()[0]:.1f}",
    )
    note = f"p99 before {np.percentile(usual['near'], 99):.1f}"
    yield _latency("p99 freshness of the near region meanwhile", caught.near, note=note)
