"""The blocking client of the parameter servers, for trainers and tools. ``aio.py`` has its asyncio twin."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from models.samples import Watermark
from services.coordination.contract import Coordination, CoordinationError
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
from services.parameter_server.declarations import Declaration, settle_declaration, withdraw_declaration
from services.parameter_server.types import (
    Applied,
    Bound,
    DenseSnapshot,
    Keys,
    ModelMismatch,
    ParametersUnavailable,
    Pulled,
    PushReply,
    Rows,
)
from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Reply
from services.rpc.errors import QueueFull
from services.rpc.security import Security
from sync.pushes import Source
from sync.spec import TableSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Time:
    """What a client needs of the world beside its peers."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random


class ParameterClient:
    """Blocking client of all parameter servers. Thread-safe (one call at a time).

    Every call retries until ``deadline_s`` and then raises ParametersUnavailable naming the servers.
    """

    def __init__(
        self,
        coordination: Coordination,
        *,
        deadline_s: float = 5.0,
        security: Security | None = None,
        reading: Reading = FROM_LEADERS,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._directory = Directory(coordination)
        self._pulls = Pulls(self._directory, reading, monotonic)
        self._deadline_s = deadline_s
        self._time = _Time(monotonic, sleep, jitter)
        self._rpc = RpcClient(security, monotonic=monotonic)

    def declare(self, model: str, specs: Sequence[TableSpec], fingerprint: str) -> None:
        """Make ``model`` known to all servers. Idempotent; other tables or another schema fingerprint than
        the first time raise ModelMismatch naming both."""
        declaration = Declaration(model, fingerprint, tuple(specs))
        store = self._directory.coordination
        is_new = settle_declaration(store, declaration)
        try:
            self._run("declare", lambda: operations.declare(self._directory.servers(), declaration))
        except ModelMismatch:
            if is_new:
                # The region that writes it has it otherwise, and this one has to be able to follow.
                withdraw_declaration(store, model)
            raise

    def pull(
        self, model: str, keys: Mapping[str, Keys], *, followers: bool | None = None, unasked: bool = True
    ) -> Pulled:
        """The rows of ``keys [N]`` per table.

        ``followers``: any replica may answer, not only leaders (None: as the client was told). Their rows may be
        older by as much as they lag; ``watermarks`` are of those who answered, and ``moves`` are not known.
        ``unasked``: rows of the client's cache may be used without asking, as their age allows.
        """
        return self._routed("pull", model, self._pulls.plan(keys, followers, unasked))

    @property
    def cached(self) -> HotCounts:
        """What the client's cache of rows did so far."""
        return self._pulls.counts

    def push(
        self,
        model: str,
        source: Source,
        offset: int,
        predecessors: Mapping[int, int],
        accepted_at_ms: int,
        watermark: Watermark | None,
        parts: Mapping[str, tuple[Keys, Rows]],
        *,
        incarnations: Mapping[int, int] | None = None,
        bound: Bound | None = None,
    ) -> dict[int, PushReply]:
        """Apply gradients (``keys [N]``, ``grads [N, d]`` per table), once, on all shards.

        The push goes to every shard, also where it touches nothing, so that offsets advance everywhere.
        ``predecessors[s]`` is the offset of the push before this one from ``source`` on shard s (-1: none).
        ``watermark`` is the events position that the gradients include. With ``incarnations`` (as replies
        gave them) a restarted server does nothing and the call raises IncarnationChanged. With ``bound`` a
        shard that moved too far since the pull answers ``stale``.
        """
        gradients = operations.Gradients(
            source, offset, predecessors, accepted_at_ms, watermark, parts, incarnations, bound
        )
        return self._routed("push", model, lambda route: operations.push(route, gradients))

    def applied(self, model: str, source: Source) -> dict[int, Applied]:
        """How far each shard has applied ``source``. A restarted server may have gone back: a trainer asks
        also when idle, and rewinds to the least ``applied`` + 1."""
        return self._routed("applied", model, lambda route: operations.applied(route, source))

    def dense(self, model: str, published: bool = True, table: str = "dense") -> DenseSnapshot:
        """The dense weights: the newest published generation, or the live values."""
        return self._routed("dense", model, lambda route: operations.dense(route, table, published))

    def publish(self, model: str, table: str = "dense") -> int:
        """Publish the live dense weights as a new generation now, and return its number."""
        return self._routed("publish", model, lambda route: operations.publish(route, table))

    def describe(self) -> list[ServerDescription]:
        """What every server says of itself, by name."""
        return self._run(
            "describe", lambda: operations.describe(self._directory.everyone(), self._directory.address)
        )

    def metrics(self) -> dict[str, str]:
        """The metrics of every server, by name, in Prometheus' text form."""
        return self._run("metrics", lambda: operations.metrics(self._directory.everyone()))

    def checkpoint(self, deadline_s: float = 60.0) -> None:
        """Return once everything applied so far is on disk on every server."""
        self._run("checkpoint", lambda: operations.checkpoint(self._directory.servers()), deadline_s)

    @property
    def shards(self) -> int:
        """The number of shards (from the shard map)."""
        return self._directory.map().shards

    def close(self) -> None:
        """Close the connections. The coordination store stays open."""
        self._rpc.close()

    def _routed(self, what: str, model: str, plan: Callable[[Route], Operation[T]]) -> T:
        return self._run(what, lambda: plan(self._directory.route(model)))

    def _run(self, what: str, plan: Callable[[], Operation[T]], deadline_s: float | None = None) -> T:
        """Plan an operation and ask until it is answered; plan anew when the shard map changed."""
        allowed_s = self._deadline_s if deadline_s is None else deadline_s
        deadline = self._time.monotonic() + allowed_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._ask(plan(), deadline, allowed_s)
            except Elsewhere:
                self._directory.look_again()
                continue
            except Replan:
                self._directory.forget_map()
                if self._time.monotonic() >= deadline:
                    raise ParametersUnavailable(what, self._directory.servers(), allowed_s) from None
            except MapMissing as error:
                if self._time.monotonic() >= deadline:
                    raise ParametersUnavailable(what, (), allowed_s) from error
            except CoordinationError as error:
                if self._time.monotonic() >= deadline:
                    raise ParametersUnavailable(f"{what}: {error}", ("coordination",), allowed_s) from error
            self._pause(attempt, deadline)

    def _ask(self, operation: Operation[T], deadline: float, allowed_s: float) -> T:
        waiting = dict(operation.requests)
        replies: dict[str, Reply] = {}
        attempt = 0
        while waiting:
            if attempt:
                self._directory.refresh()
                if self._directory.map_changed():
                    raise Replan
                self._pause(attempt, deadline)
            remaining = deadline - self._time.monotonic()
            if remaining <= 0:
                raise ParametersUnavailable(operation.what, tuple(sorted(waiting)), allowed_s)
            attempt += 1
            self._attempt(operation, waiting, replies, remaining)
        return operation.merge(replies)

    def _attempt(
        self,
        operation: Operation[T],
        waiting: dict[str, Outgoing],
        replies: dict[str, Reply],
        remaining: float,
    ) -> None:
        """Send what waits to the servers that are there; move what was answered to ``replies``."""
        limit_s = ELSEWHERE_S if operation.spared else RESEND_S
        known = {server: self._directory.member(server) for server in waiting}
        there = {member.address: server for server, member in known.items() if member is not None}

        def unchanged() -> bool:
            now = self._directory.refresh()
            return all(same_process(known[server], now.get(server)) for server in there.values())

        try:
            answers = self._rpc.exchange(
                {address: operation.requests[server] for address, server in there.items()},
                remaining if operation.patient else min(remaining, limit_s),
                unchanged,
                LOOK_S,
            )
        except QueueFull:
            answers = {}
        for address, server in there.items():
            answer = answers.get(address)
            if answer is None:
                self._rpc.forget(address)
                continue
            verdict = judge(operation.what, server, operation.incarnations.get(server, 0), answer)
            if verdict == "done":
                assert isinstance(answer, Reply)
                replies[server] = answer
                del waiting[server]
            elif verdict == "declare":
                self._declare_again(server, address)
            elif verdict == "replan" and server not in operation.spared:
                raise Replan
        if failed := operation.spared & waiting.keys():
            for server in failed:
                self._pulls.readers.avoid(server)
            raise Elsewhere

    def _declare_again(self, server: str, address: str) -> None:
        """Tell a server of every model that this client knows: it started before they were declared."""
        for declaration in self._directory.declarations():
            outgoing = operations.declare([server], declaration, again=True).requests[server]
            self._rpc.exchange({address: outgoing}, RESEND_S)

    def _pause(self, attempt: int, deadline: float) -> None:
        wait = min(pause_s(attempt, self._time.random), deadline - self._time.monotonic())
        if wait > 0:
            self._time.sleep(wait)
