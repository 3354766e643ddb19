"""Real Redis servers for tests.

``redis_url`` uses HEADWATER_TEST_REDIS (a URL; the database it names is emptied), else starts the
``redis-server`` found on PATH on a free port, else skips. ``redis_cluster_url`` always starts its own three
nodes. Import the fixtures where they are used: ``from support.redis import redis_url``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HOW_TO_GET_ONE = (
    "no redis-server on PATH: install it (Debian: `apt-get install redis-server`),"
    " or name one whose database may be emptied: HEADWATER_TEST_REDIS=redis://127.0.0.1:6379/15"
)
SLOTS = 16_384


def ask(port: int, *words: str) -> bytes:
    """Send one command to the server on ``port`` and return the start of its raw reply."""
    request = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(request.encode())
        return connection.recv(4_096)


def wait_for(port: int, expected: bytes, *words: str, timeout_s: float = 20.0) -> None:
    """Ask until the reply contains ``expected``."""
    deadline = time.monotonic() + timeout_s
    reply = b"no connection"
    while time.monotonic() < deadline:
        try:
            reply = ask(port, *words)
        except OSError:
            time.sleep(0.02)
            continue
        if expected in reply:
            return
        time.sleep(0.02)
    raise TimeoutError(f"redis-server on port {port} answers {reply[:200]!r} to {' '.join(words)}")


def free_port() -> int:
    """A port that is free now, as is the one 10,000 above it, where cluster nodes talk to each other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            if port > 55_000:
                continue
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port


@contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[int]:
    """A server of our own that keeps its files in ``folder``, on ``port`` or a free one; gives its port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip(HOW_TO_GET_ONE)
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        wait_for(port, b"PONG", "PING") if "--requirepass" not in options else wait_for(
            port, b"NOAUTH", "PING"
        )
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if named := os.environ.get("HEADWATER_TEST_REDIS"):
        yield named
        return
    with redis_server(tmp_path_factory.mktemp("redis"), "--appendonly", "yes") as port:
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(scope="session")
def redis_cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis-cluster")
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    with ExitStack() as stack:
        ports = [stack.enter_context(redis_server(folder / str(n), *options)) for n in range(3)]
        for n, port in enumerate(ports):
            first, end = n * SLOTS // 3, (n + 1) * SLOTS // 3
            ask(port, "CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
            ask(port, "CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
        for port in ports[1:]:
            ask(port, "CLUSTER", "MEET", "127.0.0.1", str(ports[0]))
        for port in ports:
            wait_for(port, b"cluster_state:ok", "CLUSTER", "INFO")
            wait_for(port, b"cluster_known_nodes:3", "CLUSTER", "INFO")
        yield f"redis+cluster://127.0.0.1:{ports[0]}"
