"""A real HAProxy with the configuration of ``deploy/gateway``; tests that want one skip where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
from support.etcd import free_ports

CONFIGURATION: Final = Path(__file__).parents[2] / "deploy" / "gateway" / "haproxy.cfg"
HOW_TO_GET_ONE: Final = "no haproxy on PATH: install it (Debian: `apt-get install haproxy`)"


def program() -> str:
    """The path of haproxy; skips the test, saying how to get it, where there is none."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(HOW_TO_GET_ONE)
    return found


@contextmanager
def gateway(near: str, far: str, log: Path) -> Iterator[str]:
    """A gateway before the APIs at ``near`` and ``far`` (HOST:PORT); gives its URL."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    places = {"HEADWATER_GATEWAY": address, "HEADWATER_NEAR": near, "HEADWATER_FAR": far}
    command = [program(), "-f", str(CONFIGURATION)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env={**os.environ, **places}, stdout=sink, stderr=sink)
    try:
        _wait_for(f"http://{address}/gateway/health", process, log)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20.0
    while True:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
