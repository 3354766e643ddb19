"""An HTTP load generator for loopback: open loop (a fixed rate, whatever the answers do) or closed loop.

It runs in a process of its own, so that it does not share an interpreter with what it measures. Latency in
the open loop counts from the moment a request was *due*, so a stalled server is not flattered (Tene's
coordinated omission). Bodies come from an iterable; replies are parsed by httptools.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.freshness.http import Connection


@dataclass(frozen=True, slots=True)
class Load:
    """What to send: requests ``(path, body)`` taken in turn, by POST, over ``connections`` connections.

    ``rate`` in requests a second makes it an open loop; None a closed one.
    """

    host: str
    port: int
    requests: Sequence[tuple[str, bytes]]
    seconds: float
    connections: int
    rate: float | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back: latencies of all answered requests (ms), count by status, and seconds it took."""

    latency_ms: tuple[float, ...]
    statuses: dict[int, int]
    seconds: float
    first_failure: str = ""

    @property
    def per_second(self) -> float:
        """Answered requests a second."""
        return len(self.latency_ms) / self.seconds

    def percentile(self, q: float) -> float:
        """Latency in ms that ``q`` percent of the requests did not exceed."""
        return float(np.percentile(self.latency_ms, q)) if self.latency_ms else float("inf")


async def _drive(load: Load) -> Outcome:
    loop = asyncio.get_running_loop()
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(load.connections):
        _, connection = await loop.create_connection(Connection, load.host, load.port)
        free.put_nowait(connection)
    extra = "".join(f"{name}: {value}\r\n" for name, value in load.headers)
    wire = [
        (
            f"POST {path} HTTP/1.1\r\nHost: {load.host}\r\nContent-Type: application/json\r\n{extra}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        + body
        for path, body in load.requests
    ]
    latency_ms: list[float] = []
    statuses: Counter[int] = Counter()
    failures: list[str] = []

    async def one(connection: Connection, request: bytes, due: float) -> None:
        status, body = await connection.ask(request)
        latency_ms.append((time.perf_counter() - due) * 1e3)
        statuses[status] += 1
        if status >= 400 and not failures:
            failures.append(body.decode(errors="replace")[:500])
        free.put_nowait(connection)

    start = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    sent = 0
    while (now := time.perf_counter() - start) < load.seconds:
        due = start + now
        if load.rate is not None:
            due = start + sent / load.rate
            if due - start >= load.seconds:
                break
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        connection = await free.get()
        task = asyncio.create_task(one(connection, wire[sent % len(wire)], due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        sent += 1
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    while not free.empty():
        transport = free.get_nowait().transport
        if transport is not None:
            transport.close()
    return Outcome(tuple(latency_ms), dict(statuses), seconds, "".join(failures))


def _drive_in_child(load: Load) -> Outcome:
    return asyncio.run(_drive(load))


def run_load(load: Load) -> Outcome:
    """Drive ``load`` from a fresh process and return what it saw."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_drive_in_child, (load,))
