"""Listening sockets and uvicorn, the same for every process of ours that serves HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from services.settings import Address

GRACE_S: Final = 5
"""How long requests under way may take once told to stop."""
BACKLOG: Final = 1_024
_WATCH_S: Final = 0.05


def listen(address: Address) -> socket.socket:
    """A listening socket; taken before backends are opened, so that a port in use shows at once."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    # Accepted sockets inherit it. Otherwise a reply's body waits for the peer to acknowledge its head, 40 ms, in loops
    # that do not set it themselves (asyncio's own, for a socket made without a protocol's number).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> Address:
    """Where ``listener`` listens, its port included where the system chose it."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)


async def serve_until(stop: threading.Event, listener: socket.socket, app: Any, **options: Any) -> None:
    """Serve ``app`` on ``listener`` until ``stop`` is set; ``options`` are uvicorn's."""
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
            **options,
        )
    )

    async def watch() -> None:
        while not stop.is_set():
            await asyncio.sleep(_WATCH_S)
        server.should_exit = True

    watching = asyncio.create_task(watch(), name="watch-stop")
    try:
        await server.serve(sockets=[listener])
    finally:
        await cancel(watching)


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel ``task`` and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has them already, and they set ``stop``."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
