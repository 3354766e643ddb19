"""What stands at the two ends of an emulated link: plain sockets, and servers in threads."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from services.wan.conditions import LinkConditions

PATIENCE_S = 20.0
NONE = LinkConditions()
PAYLOAD = random.Random(7).randbytes(3_000_000)
ROUGH = [
    "",
    "delay=5ms",
    "delay=2ms,jitter=6ms,rate=200mbit",
    "rate=100mbit,queue=4KiB",
    "jitter=3ms",
]
Handler = Callable[[socket.socket], None]


def connect(address: str, timeout_s: float = PATIENCE_S) -> socket.socket:
    """A connection to ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes; fewer where the peer ended before."""
    parts: list[bytes] = []
    while size and (part := connection.recv(min(size, 2**16))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def to_the_end(connection: socket.socket) -> bytes:
    """All bytes until the peer ended."""
    parts: list[bytes] = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def break_off(connection: socket.socket) -> None:
    """Close with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def echo(connection: socket.socket) -> None:
    """Send back what comes, until the peer ends; then end too."""
    while part := connection.recv(2**16):
        connection.sendall(part)


class Listening:
    """A server whose connections ``handler`` serves, each in a thread; resets by the peer end them quietly."""

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler = handler
        self._socket = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port = self._socket.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.accepted: list[socket.socket] = []
        self.failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.settimeout(PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._handler(connection)
            except (ConnectionError, BrokenPipeError):
                pass
            except Exception as error:
                self.failures.append(error)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self.accepted:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@contextmanager
def listening(handler: Handler = echo, port: int = 0) -> Iterator[Listening]:
    """A server within the block. What a handler raised, resets aside, is raised at the end."""
    server = Listening(handler, port)
    try:
        yield server
    finally:
        server.close()
    if server.failures:
        raise server.failures[0]


def free_port() -> int:
    """A port that nobody listens at, now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def silent_for(connection: socket.socket, seconds: float) -> bool:
    """Whether nothing comes, no end either, for so long."""
    before = connection.gettimeout()
    connection.settimeout(seconds)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(before)
    return False


def until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until ``holds()``."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
