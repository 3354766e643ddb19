"""A real etcd for tests.

``etcd_url`` uses HEADWATER_TEST_ETCD (a URL; every key in it is deleted), else starts the ``etcd`` found on
PATH on free ports, else skips. Import the fixture where it is used: ``from support.etcd import etcd_url``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

HOW_TO_GET_ONE = (
    "no etcd on PATH: install it (Debian: `apt-get install etcd-server`),"
    " or name one whose keys may all be deleted: HEADWATER_TEST_ETCD=http://127.0.0.1:2379"
)


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def etcd_server(folder: Path) -> Iterator[str]:
    """An etcd of our own that keeps its files in ``folder``; gives its URL."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip(HOW_TO_GET_ONE)
    folder.mkdir(parents=True, exist_ok=True)
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    # A lease lasts at least one and a half election time-outs: a short one lets tests see leases end.
    command = [
        program, "--name", "test", "--data-dir", str(folder / "data"),
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"test={peer}", "--heartbeat-interval", "20", "--election-timeout", "200",
        "--unsafe-no-fsync",
    ]  # fmt: skip
    with (folder / "etcd.log").open("wb") as log:
        if "--unsafe-no-fsync" not in _options(program):
            command.remove("--unsafe-no-fsync")
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(client)
        yield client
    finally:
        process.kill()
        process.wait()


def _options(program: str) -> str:
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return shown.stdout + shown.stderr


def _wait_for(url: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            try:
                if client.get(f"{url}/health", timeout=1.0).json().get("health") == "true":
                    return
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(0.02)
    raise TimeoutError(f"etcd at {url} did not become healthy within {timeout_s:g} s")


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if named := os.environ.get("HEADWATER_TEST_ETCD"):
        yield named
        return
    with etcd_server(tmp_path_factory.mktemp("etcd")) as url:
        yield url
