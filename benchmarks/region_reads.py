"""Reads at a steady rate from a region's servers, as its API makes them, by a process of its own.

It is the API's client (``AsyncParameterClient.pull``) without the rest of an API: so the share of the servers in a
request's time is measured, which is the only one that synchronisation can touch.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.draws import even
from benchmarks.region_watch import MODEL, TABLE
from benchmarks.region_world import processes
from services.backends import open_coordination
from services.parameter_server.client import AsyncParameterClient
from services.parameter_server.client.readers import Reading
from services.parameter_server.types import ModelUnknown
from services.settings.model import Settings

KEYS: Final = 300
"""Rows of one request: a user, and the items that are ranked for it."""
_RETRY_S: Final = 0.05
_READY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Reads:
    """``per_s`` requests a second for ``seconds``, each of ``KEYS`` among ``rows`` rows."""

    per_s: float
    seconds: float
    rows: int


@contextmanager
def reader(settings: Settings, reads: Reads) -> Iterator[Callable[[], npt.NDArray[np.float64]]]:
    """A reader of a region that has connected; the call makes it read, and returns the latency of each request in ms,
    from when it was due."""
    near, far = multiprocessing.Pipe()
    process = processes().Process(target=_run, args=(far, settings, reads), daemon=True)
    process.start()
    far.close()
    try:
        near.recv()

        def go() -> npt.NDArray[np.float64]:
            near.send("go")
            found: npt.NDArray[np.float64] = near.recv()
            return found

        yield go
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, settings: Settings, reads: Reads) -> None:
    asyncio.run(_read(pipe, settings, reads))


async def _read(pipe: Connection, settings: Settings, reads: Reads) -> None:
    generator = np.random.default_rng(5)
    count = round(reads.per_s * reads.seconds)
    asked = [even(generator, reads.rows, KEYS) for _ in range(min(count, 1_000))]
    with closing(open_coordination(settings)) as store:
        client = AsyncParameterClient(
            store, deadline_s=settings.parameters.deadline, reading=Reading.of(settings.parameters)
        )
        deadline_s = time.monotonic() + _READY_S
        while True:
            try:
                await client.pull(MODEL, {TABLE: asked[0]})
                break
            except ModelUnknown:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_RETRY_S)
        pipe.send("ready")
        pipe.recv()
        latency_ms = np.zeros(count)

        async def one(number: int, due_s: float) -> None:
            await client.pull(MODEL, {TABLE: asked[number % len(asked)]})
            latency_ms[number] = (time.monotonic() - due_s) * 1e3

        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                due_s = start_s + number / reads.per_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.create_task(one(number, due_s))
        await client.close()
        pipe.send(latency_ms)
