"""A server in a thread, for tests of calls between processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.rpc import Call, RpcServer, Security, ServerLimits

Handler = Callable[[RpcServer, Call], None]
PATIENCE_S = 60.0
"""How long what must happen may take where the machine is busy: a test that passes never waits that long."""


def echo(server: RpcServer, call: Call) -> None:
    """Answer with what was asked."""
    server.answer(call, call.request.body, call.request.arrays)


@contextmanager
def serving(
    handler: Handler = echo,
    limits: ServerLimits | None = None,
    security: Security | None = None,
    listen: str = "127.0.0.1:0",
) -> Iterator[tuple[RpcServer, str]]:
    """A server whose calls ``handler`` answers, and its address. What its loop raises is raised at the end."""
    server = RpcServer(listen, security, limits=limits)
    stop = threading.Event()
    failures: list[BaseException] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                server.wait(0.02)
                while (call := server.take()) is not None:
                    handler(server, call)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield server, f"127.0.0.1:{server.port}"
    finally:
        stop.set()
        thread.join()
        server.close()
    if failures:
        raise failures[0]


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
