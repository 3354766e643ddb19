"""What processor and trainer share: registering, metrics over HTTP, and waiting after a failure."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, start_http_server

from services.coordination.contract import Coordination
from services.coordination.membership import Member, Registration

LOOPBACK: Final = "127.0.0.1"

log = logging.getLogger(__name__)


class _Closeable(Protocol):
    def close(self) -> None: ...


def close_all(stack: ExitStack, *things: _Closeable) -> None:
    """Close ``things``, the last one first, when ``stack`` ends."""
    for thing in things:
        stack.callback(thing.close)


@contextmanager
def registered(
    coordination: Coordination, service: str, name: str, ttl_s: float, registry: CollectorRegistry
) -> Iterator[Registration]:
    """Within the block the process is a member of ``service``, not ready at first; its address answers
    ``GET /metrics`` on the loopback. Raises CoordinationError if it cannot register."""
    server, thread = start_http_server(0, LOOPBACK, registry)
    try:
        member = Member(
            name=name,
            service=service,
            address=f"{LOOPBACK}:{server.server_port}",
            pid=os.getpid(),
            incarnation=coordination.increment(f"incarnations/{service}"),
            started_at_ms=now_ms(),
        )
        with Registration(coordination, member, ttl_s) as registration:
            yield registration
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def now_ms() -> int:
    """The wall clock, Unix ms."""
    return time.time_ns() // 1_000_000


class Backoff:
    """Growing pauses between attempts that fail: doubling from ``first_s`` to ``most_s``, each drawn from its
    upper half, so that several processes do not return in step."""

    def __init__(
        self, first_s: float = 0.05, most_s: float = 5.0, draw: Callable[[], float] = random.random
    ) -> None:
        self._first_s, self._most_s, self._draw = first_s, most_s, draw
        self._next_s = first_s

    def succeeded(self) -> None:
        """Start over with short pauses."""
        self._next_s = self._first_s

    def pause_s(self) -> float:
        """How long to wait before the next attempt."""
        pause = self._next_s * (0.5 + 0.5 * self._draw())
        self._next_s = min(2 * self._next_s, self._most_s)
        return pause


def keep_trying(
    attempt: Callable[[Callable[[], None]], None],
    failures: tuple[type[Exception], ...],
    stop: threading.Event,
    failed: Callable[[Exception], None],
) -> None:
    """Call ``attempt`` until it returns with ``stop`` set; after one of ``failures`` wait and call it again.

    ``attempt`` is given a function to call whenever it made progress, which makes the next pause short.
    ``failed`` is told of each failure.
    """
    backoff = Backoff()
    while not stop.is_set():
        try:
            attempt(backoff.succeeded)
        except failures as error:
            failed(error)
            pause_s = backoff.pause_s()
            log.warning("%s: %s; trying again in %.2f s", type(error).__name__, error, pause_s)
            stop.wait(pause_s)
