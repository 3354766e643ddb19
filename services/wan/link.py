"""One emulated link in an event loop: it listens, connects to its target, and passes bytes as its conditions say.

A new connection costs a round trip before its first byte passes, as TCP's handshake does. A partition stops the
link's own clock: nothing is read, nothing passes, and what was under way arrives after it, just as much later. Whoever
connects meanwhile gets through to the link, not to its target: it hangs at its first byte rather than in ``connect``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from services.settings.checks import Address, parse_address
from services.wan.conditions import LinkConditions
from services.wan.connection import Connection, Direction, reset_on_close
from services.wan.shaper import Shaper
from services.wan.types import AddressUnusable, DirectionStatus, LinkPlan, LinkStatus

MAX_CONNECTIONS: Final = 1_024
"""Connections of a link at most; more wait in the system's listen queue."""
BACKLOG: Final = 128
CONNECT_S: Final = 10.0
RECEIVE_BUFFER_BYTES: Final = 256 * 2**10
"""What the system takes from a sender on its own: more would hide from it that the link is full."""
_ACCEPT_AGAIN_S: Final = 0.1

_log = logging.getLogger(__name__)


class Link:
    """Runs from ``open`` to ``close``, in the running loop of the thread that makes it."""

    def __init__(self, plan: LinkPlan, seed: int = 0) -> None:
        self.loop = asyncio.get_running_loop()
        self.plan = plan
        self.partitioned = False
        self._target = parse_address(plan.target)
        self._forward = Direction(self, Shaper(plan.forward, seed=2 * seed))
        self._back = Direction(self, Shaper(plan.back, seed=2 * seed + 1))
        self._lost_s = 0.0
        self._stopped_at_s = 0.0
        self._healed = asyncio.Event()
        self._healed.set()
        self._listener: socket.socket | None = None
        self._accepting = False
        self._connections: set[Connection] = set()
        self._establishing: set[asyncio.Task[None]] = set()
        self._total = self._resets = self._failed = 0

    def open(self) -> None:
        """Listen. Raises AddressUnusable."""
        where = parse_address(self.plan.listen)
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        try:
            listener = socket.create_server((where.host, where.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise AddressUnusable(f"link {self.plan.name} cannot listen at {where}: {error}") from error
        listener.setblocking(False)
        # Connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._listener = listener
        self._accept_when_there()

    @property
    def address(self) -> str:
        """Where it listens. Only while it is open."""
        assert self._listener is not None
        host, port, *_ = self._listener.getsockname()
        return str(Address(host, port))

    def now_s(self) -> float:
        """The link's clock: it stands still during a partition."""
        return (self._stopped_at_s if self.partitioned else self.loop.time()) - self._lost_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call at ``when_s`` of the link's clock, if that runs until then."""
        return self.loop.call_at(when_s + self._lost_s, callback)

    def set(self, forward: LinkConditions | None = None, back: LinkConditions | None = None) -> None:
        """Change the conditions of one or both directions, also of what waits to be sent."""
        chosen = ((self._forward, forward), (self._back, back))
        if not self.partitioned:
            self._suspend()
        for direction, conditions in chosen:
            if conditions is not None:
                direction.shaper.change(conditions, self.now_s())
        if not self.partitioned:
            self._go_on()

    def partition(self) -> None:
        """Let nothing pass. Connections stay open; new ones hang."""
        if not self.partitioned:
            self._suspend()
            self._stopped_at_s = self.loop.time()
            self.partitioned = True
            self._healed.clear()

    def heal(self) -> None:
        """End a partition."""
        if self.partitioned:
            self._lost_s += self.loop.time() - self._stopped_at_s
            self.partitioned = False
            self._healed.set()
            self._go_on()

    def reset(self) -> int:
        """Break every connection, on both sides; how many there were."""
        broken = len(self._connections) + len(self._establishing)
        for connection in tuple(self._connections):
            connection.abort()
        for task in tuple(self._establishing):
            task.cancel()
        self._resets += broken
        return broken

    def status(self) -> LinkStatus:
        """What it is and has done."""
        return LinkStatus(
            self.plan.name,
            self.address,
            self.plan.target,
            self.partitioned,
            len(self._connections) + len(self._establishing),
            self._total,
            self._resets,
            self._failed,
            _direction(self._forward),
            _direction(self._back),
        )

    async def close(self) -> None:
        """Stop listening and break what is open."""
        self._stop_accepting()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.reset()
        await asyncio.gather(*self._establishing, return_exceptions=True)

    def _suspend(self) -> None:
        for connection in self._connections:
            connection.suspend()

    def _go_on(self) -> None:
        # What arrives now may close some of them.
        for connection in tuple(self._connections):
            connection.start()
        self._forward.give_turns()
        self._back.give_turns()

    def _accept_when_there(self) -> None:
        room = len(self._connections) + len(self._establishing) < MAX_CONNECTIONS
        if self._listener is not None and room and not self._accepting:
            self._accepting = True
            self.loop.add_reader(self._listener, self._accept)

    def _stop_accepting(self) -> None:
        if self._accepting and self._listener is not None:
            self._accepting = False
            self.loop.remove_reader(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: it would be called again at once, for ever.
            _log.warning("link %s: cannot accept a connection now: %s", self.plan.name, error)
            self._stop_accepting()
            self.loop.call_later(_ACCEPT_AGAIN_S, self._accept_when_there)
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._total += 1
        task = self.loop.create_task(self._establish(client), name=f"link-{self.plan.name}")
        self._establishing.add(task)
        task.add_done_callback(partial(self._established, client))
        if len(self._connections) + len(self._establishing) >= MAX_CONNECTIONS:
            self._stop_accepting()

    async def _establish(self, client: socket.socket) -> None:
        """Reach the target, as a handshake would: there, and back again."""
        await self._travel(self._forward)
        try:
            async with asyncio.timeout(CONNECT_S):
                target = await self._connect()
        except OSError as error:
            _log.info("link %s: %s cannot be reached: %s", self.plan.name, self._target, error)
            await self._travel(self._back)
            self._failed += 1
            raise
        try:
            await self._travel(self._back)
        except asyncio.CancelledError:
            reset_on_close(target)
            target.close()
            raise
        connection = Connection(self._forward, self._back, client, target, self._forget)
        self._connections.add(connection)
        connection.start()

    def _established(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        self._establishing.discard(task)
        if task.cancelled() or task.exception() is not None:
            reset_on_close(client)
            client.close()
            self._accept_when_there()
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def _connect(self) -> socket.socket:
        """A connection to the target. Raises OSError."""
        host, port = self._target.host, self._target.port
        found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        last: OSError = ConnectionRefusedError(f"{host} has no address")
        for family, kind, protocol, _, where in found:
            target = socket.socket(family, kind, protocol)
            target.setblocking(False)
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            try:
                await self.loop.sock_connect(target, where)
            except OSError as error:
                target.close()
                last = error
            except asyncio.CancelledError:
                target.close()
                raise
            else:
                return target
        raise last

    async def _travel(self, direction: Direction) -> None:
        """Wait for the delay of ``direction``, on the link's clock."""
        due_s = self.now_s() + direction.shaper.conditions.delay_s
        while self.partitioned or self.now_s() < due_s:
            await self._healed.wait()
            await asyncio.sleep(max(0.0, due_s - self.now_s()))

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._accept_when_there()


def _direction(direction: Direction) -> DirectionStatus:
    shaper = direction.shaper
    return DirectionStatus(
        str(shaper.conditions),
        shaper.released_total - shaper.unread,
        shaper.under_way,
        shaper.unread,
        shaper.conditions.bound_bytes,
        len(direction.waiting),
    )
