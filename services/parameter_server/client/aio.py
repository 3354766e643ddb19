"""The asyncio client of the parameter servers, for one event loop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Final, TypeVar

from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Member
from services.parameter_server.client import operations
from services.parameter_server.client.descriptions import ServerDescription
from services.parameter_server.client.directory import Directory, MapMissing, same_process
from services.parameter_server.client.hotkeys import HotCounts
from services.parameter_server.client.operations import Operation
from services.parameter_server.client.pulling import Pulls
from services.parameter_server.client.readers import FROM_LEADERS, Reading
from services.parameter_server.client.retries import (
    ELSEWHERE_S,
    LOOK_S,
    RESEND_S,
    Elsewhere,
    Replan,
    judge,
    pause_s,
)
from services.parameter_server.client.routing import Route
from services.parameter_server.messages import ShardCursor
from services.parameter_server.types import (
    DenseSnapshot,
    Keys,
    ModelUnknown,
    ParameterError,
    ParametersUnavailable,
    Pulled,
    ShardChanges,
)
from services.rpc.aio import AsyncRpcClient
from services.rpc.codec import Failure, Reply
from services.rpc.errors import NoAnswer, QueueFull, RemoteFailure
from services.rpc.security import Security

T = TypeVar("T")
POLL_S: Final = 10.0
"""How long a long poll waits at the server before it is made anew."""
FOLLOW_QUEUE: Final = 64
"""Batches of changes read ahead of whoever consumes them."""
FOLLOW_ROWS: Final = 16_384
"""Rows per shard in one batch."""
DECLARED_S: Final = 0.25
_Batch = tuple[ShardCursor, ShardChanges] | Exception
_log = logging.getLogger(__name__)


class AsyncParameterClient:
    """Asyncio client of all parameter servers, for one event loop.

    Every call retries until ``deadline_s`` and then raises ParametersUnavailable naming the servers.
    """

    def __init__(
        self,
        coordination: Coordination,
        *,
        deadline_s: float = 5.0,
        security: Security | None = None,
        reading: Reading = FROM_LEADERS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._directory = Directory(coordination)
        self._pulls = Pulls(self._directory, reading)
        self._deadline_s = deadline_s
        self._random = jitter
        self._rpc = AsyncRpcClient(security)

    async def pull(
        self,
        model: str,
        keys: Mapping[str, Keys],
        *,
        deadline_s: float | None = None,
        followers: bool | None = None,
        unasked: bool = True,
    ) -> Pulled:
        """The rows of ``keys [N]`` per table.

        ``followers``: any replica may answer, not only leaders (None: as the client was told). Their rows may be
        older by as much as they lag; ``watermarks`` are of those who answered, and ``moves`` are not known.
        ``unasked``: rows of the client's cache may be used without asking, as their age allows.
        """
        return await self._routed("pull", model, self._pulls.plan(keys, followers, unasked), deadline_s)

    @property
    def cached(self) -> HotCounts:
        """What the client's cache of rows did so far."""
        return self._pulls.counts

    async def dense(self, model: str, published: bool = True, table: str = "dense") -> DenseSnapshot:
        """The dense weights: the newest published generation, or the live values."""
        return await self._routed("dense", model, lambda route: operations.dense(route, table, published))

    async def describe(self) -> list[ServerDescription]:
        """What every server says of itself, by name."""

        return await self._run(
            "describe",
            None,
            lambda: operations.describe(self._directory.everyone(), self._directory.address),
        )

    async def metrics(self) -> dict[str, str]:
        """The metrics of every server, by name, in Prometheus' text form."""
        return await self._run("metrics", None, lambda: operations.metrics(self._directory.everyone()))

    async def follow(self, model: str, tables: Sequence[str]) -> AsyncGenerator[ShardChanges]:
        """Follow the change streams of all shards for ever, by long polls that reconnect.

        Starts with all rows of every shard (``restarted``), then yields what changed, within
        milliseconds. A batch may carry no rows: watermarks or the dense generation moved.
        A model that is not declared yet is waited for. Raises ParametersRefused where the servers refuse.
        """
        cursors: dict[int, ShardCursor] = {}
        while True:
            route = await self._declared(model)
            batches: asyncio.Queue[_Batch] = asyncio.Queue(FOLLOW_QUEUE)
            readers = [
                asyncio.create_task(
                    self._follow_server(route, server, tables, dict(cursors), batches),
                    name=f"follow-{server}",
                )
                for server in route.servers
            ]
            try:
                while True:
                    batch = await batches.get()
                    if isinstance(batch, Replan):
                        break
                    if isinstance(batch, Exception):
                        raise batch
                    cursor, changes = batch
                    yield changes
                    # Where a shard gets another leader, the others are followed on from here.
                    cursors[cursor.shard] = cursor
            finally:
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
            self._directory.forget_map()

    async def close(self) -> None:
        """Close the connections. The coordination store stays open."""
        self._rpc.close()

    async def _follow_server(
        self,
        route: Route,
        server: str,
        tables: Sequence[str],
        known: Mapping[int, ShardCursor],
        batches: asyncio.Queue[_Batch],
    ) -> None:
        """Put the changes of one server's shards into ``batches`` until cancelled; errors that stay, too."""
        cursors = {shard: known.get(shard, ShardCursor(shard)) for shard in route.map.owned_by(server)}
        while True:
            operation = operations.changes(route, server, tables, cursors, FOLLOW_ROWS, round(POLL_S * 1_000))
            try:
                found = await self._ask(operation, POLL_S + self._deadline_s)
                for cursor, batch in found:
                    cursors[cursor.shard] = cursor
                    await batches.put((cursor, batch))
            except ParametersUnavailable as error:
                _log.warning("following %s: %s", server, error)
            except (ParameterError, Replan) as error:
                await batches.put(error)
                return

    async def _declared(self, model: str) -> Route:
        while True:
            try:
                return await asyncio.to_thread(self._directory.route, model)
            except (ModelUnknown, CoordinationError) as error:
                _log.debug("%s: %s", model, error)
            await asyncio.sleep(DECLARED_S)

    async def _routed(
        self,
        what: str,
        model: str,
        plan: Callable[[Route], Operation[T]],
        deadline_s: float | None = None,
    ) -> T:
        return await self._run(what, model, lambda: plan(self._directory.route(model)), deadline_s)

    async def _run(
        self,
        what: str,
        model: str | None,
        plan: Callable[[], Operation[T]],
        deadline_s: float | None = None,
    ) -> T:
        """Plan an operation and ask until it is answered; plan anew when the shard map changed."""
        allowed_s = self._deadline_s if deadline_s is None else deadline_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + allowed_s
        attempt = 0
        while True:
            attempt += 1
            try:
                if not self._directory.cached(model):
                    await asyncio.to_thread(self._directory.load, model)
                return await self._ask(plan(), deadline - clock(), allowed_s)
            except Elsewhere:
                await asyncio.to_thread(self._directory.look_again)
                continue
            except Replan:
                self._directory.forget_map()
            except MapMissing as error:
                if clock() >= deadline:
                    raise ParametersUnavailable(what, (), allowed_s) from error
            except CoordinationError as error:
                if clock() >= deadline:
                    raise ParametersUnavailable(f"{what}: {error}", ("coordination",), allowed_s) from error
            await asyncio.sleep(min(pause_s(attempt, self._random), max(0.0, deadline - clock())))

    async def _ask(self, operation: Operation[T], remaining_s: float, allowed_s: float | None = None) -> T:
        deadline = asyncio.get_running_loop().time() + remaining_s
        allowed_s = remaining_s if allowed_s is None else allowed_s
        asked = [self._ask_one(operation, server, deadline, allowed_s) for server in operation.requests]
        # One server is the usual case, and a task costs as much as half the round trip.
        replies = [await asked[0]] if len(asked) == 1 else await _all(asked)
        return operation.merge(dict(zip(operation.requests, replies, strict=True)))

    async def _ask_one(
        self, operation: Operation[T], server: str, deadline: float, allowed_s: float
    ) -> Reply:
        clock = asyncio.get_running_loop().time
        attempt = 0
        while True:
            if attempt:
                await asyncio.to_thread(self._directory.refresh)
                if await asyncio.to_thread(self._directory.map_changed):
                    raise Replan
                await asyncio.sleep(min(pause_s(attempt, self._random), max(0.0, deadline - clock())))
            remaining = deadline - clock()
            if remaining <= 0:
                raise ParametersUnavailable(operation.what, (server,), allowed_s)
            attempt += 1
            answer = await self._attempt(operation, server, remaining)
            if answer is not None:
                verdict = judge(operation.what, server, operation.incarnations.get(server, 0), answer)
                if verdict == "done":
                    assert isinstance(answer, Reply)
                    return answer
                if verdict == "declare":
                    await self._declare_again(server)
                elif verdict == "replan" and server not in operation.spared:
                    raise Replan
            if server in operation.spared:
                self._pulls.readers.avoid(server)
                raise Elsewhere

    async def _attempt(
        self, operation: Operation[T], server: str, remaining: float
    ) -> Reply | Failure | None:
        """One request to ``server`` and its answer; None if it is not there, or does not answer in time."""
        member = self._directory.member(server)
        if member is None:
            return None
        limit_s = ELSEWHERE_S if server in operation.spared else RESEND_S
        timeout_s = remaining if operation.patient else min(remaining, limit_s)
        watch = _Later(LOOK_S, lambda: self._forget_when_replaced(server, member))
        try:
            return await self._rpc.call(member.address, operation.requests[server], timeout_s)
        except RemoteFailure as failure:
            return Failure(0, failure.code, failure.message)
        except (NoAnswer, QueueFull):
            self._rpc.forget(member.address)
            return None
        finally:
            watch.cancel()

    async def _forget_when_replaced(self, server: str, member: Member) -> None:
        """End the calls that wait for ``member`` once another process has taken its name."""
        while same_process(member, (await asyncio.to_thread(self._directory.refresh)).get(server)):
            await asyncio.sleep(LOOK_S)
        self._rpc.forget(member.address)

    async def _declare_again(self, server: str) -> None:
        """Tell a server of every model that this client knows: it started before they were declared."""
        for declaration in self._directory.declarations():
            outgoing = operations.declare([server], declaration, again=True).requests[server]
            try:
                await self._rpc.call(self._directory.address(server), outgoing, RESEND_S)
            except (NoAnswer, QueueFull) as error:
                _log.warning("declaring %s: %s", declaration.model, error)
            except RemoteFailure as failure:
                operations.raise_failure("declare", server, failure.code, failure.message, 0)


class _Later:
    """Starts a task after a while, unless cancelled before; cancelling ends it, too."""

    def __init__(self, delay_s: float, start: Callable[[], Coroutine[None, None, None]]) -> None:
        self._start = start
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._start())

    def cancel(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def _all(asked: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """The results of all; the first error cancels the others."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
