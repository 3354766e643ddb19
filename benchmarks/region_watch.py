"""Numbered pushes at a steady rate, and when each is visible where: one process, one event loop, one clock.

A push is visible at a server once the watermarks of all its shards have reached it. Servers that lead are asked by
long polls for changes, so what is measured has the answer's way in it; followers by reads at an interval, which is in
it, too. Times count from when a push was due, so that one that cannot be sent in time is not flattered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.draws import Floats, Keys
from models.samples import Watermark
from services.coordination.contract import Coordination
from services.parameter_server.client import operations
from services.parameter_server.client.directory import Directory
from services.parameter_server.client.routing import Route
from services.parameter_server.messages import PullReply, PullRequest, ShardCursor, pack, unpack
from services.parameter_server.types import Mark, ModelUnknown
from services.rpc.aio import AsyncRpcClient
from services.rpc.calls import Outgoing
from services.rpc.errors import NoAnswer, RemoteFailure
from sync.pushes import Source

MODEL: Final = "main"
TABLE: Final = "rows"
LOG: Final = "benchmark-events"
WHERE: Final = (LOG, 0)
OPEN: Final = 256
"""Pushes that are on their way at most."""
POLL_S: Final = 5.0
GRACE_S: Final = 10.0
LOOK_S: Final = 0.01
"""Between two looks at a follower."""
RETRY_S: Final = 0.1


class PushFailed(Exception):
    """A push was not applied, or the servers say nothing."""


@dataclass(slots=True)
class Numbered:
    """Pushes from one source; ``due_s`` of each, in the order of their numbers."""

    source: Source = field(default_factory=lambda: Source("benchmark", 0))
    due_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """``at_s`` of every push when it was first seen at a server, in the order of their numbers; ``least``: the newest
    mark of each shard."""

    at_s: list[float] = field(default_factory=list)
    least: dict[int, int] = field(default_factory=dict)

    def note(self, shard: int, mark: Mark | None, shards: int) -> None:
        """A shard has everything up to a mark."""
        if mark is None:
            return
        self.least[shard] = max(mark.offset, self.least.get(shard, -1))
        if len(self.least) == shards:
            reached = min(self.least.values()) + 1
            self.at_s += [time.monotonic()] * (reached - len(self.at_s))


def latencies_ms(pushes: Numbered, seen: Seen, first: int, last: int) -> npt.NDArray[np.float64]:
    """Of pushes ``first`` up to ``last``, in the order of their numbers, in ms; infinity where one was not seen."""
    found = np.full(last - first, np.inf)
    at = np.asarray(seen.at_s[first:last])
    found[: len(at)] = (at - np.asarray(pushes.due_s[first : first + len(at)])) * 1e3
    return found


class Sender:
    """Pushes batches to home's leader in their order, many on their way at once."""

    def __init__(self, route: Route, address: str, rpc: AsyncRpcClient, pushes: Numbered) -> None:
        (self._server,) = route.servers
        self._route, self._address, self._rpc, self._pushes = route, address, rpc, pushes
        self._room = asyncio.Semaphore(OPEN)
        self._open: set[asyncio.Task[None]] = set()
        self.failure: Exception | None = None

    async def send(
        self, batches: Sequence[tuple[Keys, Floats]], per_s: float, until: Callable[[int], bool]
    ) -> tuple[int, int]:
        """Push ``batches`` over and over, ``per_s`` a second, ``until`` that many are sent; which numbers they had."""
        first, start_s = len(self._pushes.due_s), time.monotonic()
        number = first
        while not until(number - first):
            due_s = start_s + (number - first) / per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._room.acquire()
            self._pushes.due_s.append(due_s)
            task = asyncio.create_task(self._push(number, *batches[number % len(batches)]))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            number += 1
            if self.failure is not None:
                raise self.failure
        await asyncio.gather(*self._open)
        if self.failure is not None:
            raise self.failure
        return first, number

    async def _push(self, number: int, keys: Keys, gradients: Floats) -> None:
        now_ms = time.time_ns() // 1_000_000
        before = dict.fromkeys(range(self._route.map.shards), number - 1)
        mark = Watermark(LOG, 0, number, now_ms)
        operation = operations.push(
            self._route,
            operations.Gradients(
                self._pushes.source, number, before, now_ms, mark, {TABLE: (keys, gradients)}
            ),
        )
        try:
            reply = await self._rpc.call(self._address, operation.requests[self._server], GRACE_S)
            for shard, one in operation.merge({self._server: reply}).items():
                if one.status != "applied":
                    raise PushFailed(f"shard {shard} answers {one.status} to push {number}: {one.reason}")
        except (PushFailed, NoAnswer, RemoteFailure) as error:
            self.failure = self.failure or error
        finally:
            self._room.release()


async def watch(store: Coordination, rpc: AsyncRpcClient, seen: Seen) -> None:
    """Follow a region's leader by long polls, until cancelled, also over its restarts."""
    while True:
        try:
            directory = Directory(store)
            route = await asyncio.to_thread(directory.route, MODEL)
            (server,) = route.servers
            await _follow(route, server, directory.address(server), rpc, seen)
        except (NoAnswer, RemoteFailure, ModelUnknown):
            await asyncio.sleep(RETRY_S)


async def _follow(route: Route, server: str, address: str, rpc: AsyncRpcClient, seen: Seen) -> None:
    cursors = {shard: ShardCursor(shard) for shard in range(route.map.shards)}
    while True:
        operation = operations.changes(route, server, (), cursors, 1, round(POLL_S * 1e3))
        reply = await rpc.call(address, operation.requests[server], POLL_S + GRACE_S)
        for cursor, changes in operation.merge({server: reply}):
            cursors[cursor.shard] = cursor
            seen.note(cursor.shard, changes.watermarks.get(WHERE), route.map.shards)


async def look_at(address: str, route: Route, rpc: AsyncRpcClient, seen: Seen) -> None:
    """Ask a follower how far it is, again and again, until cancelled."""
    shards = list(range(route.map.shards))
    body = pack(PullRequest(MODEL, route.map.epoch, [], followers=True, shards=shards))
    while True:
        try:
            reply = await rpc.call(address, Outgoing("pull", body), GRACE_S)
        except (NoAnswer, RemoteFailure):
            # Its copy is not whole yet.
            await asyncio.sleep(RETRY_S)
            continue
        for one in unpack(reply.body, PullReply).marks:
            marks = {(log, partition): Mark(offset, at_ms) for log, partition, offset, at_ms in one.marks}
            seen.note(one.shard, marks.get(WHERE), route.map.shards)
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def watching(
    stores: Mapping[str, Coordination], followers: Mapping[str, tuple[str, Route]]
) -> AsyncIterator[tuple[AsyncRpcClient, dict[str, Seen]]]:
    """What is seen at the leaders of regions, by name with their stores, and at ``followers``."""
    seen = {name: Seen() for name in (*stores, *followers)}
    with closing(AsyncRpcClient()) as rpc:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(watch(store, rpc, seen[name])) for name, store in stores.items()]
            tasks += [
                group.create_task(look_at(address, route, rpc, seen[name]))
                for name, (address, route) in followers.items()
            ]
            yield rpc, seen
            for task in tasks:
                task.cancel()


async def settled(seen: Mapping[str, Seen], count: int, timeout_s: float) -> None:
    """Wait until all have seen ``count`` pushes. Raises PushFailed."""
    deadline_s = time.monotonic() + timeout_s
    while late := [name for name, one in seen.items() if len(one.at_s) < count]:
        if time.monotonic() > deadline_s:
            raise PushFailed(f"{', '.join(late)} did not see {count} pushes within {timeout_s:g} s")
        await asyncio.sleep(0.02)
