"""A real Kafka broker for tests: one that is there already, or one started for the session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HOW = (
    "set HEADWATER_TEST_KAFKA=host:port to a broker, or HEADWATER_KAFKA_HOME to a folder with bin/start PORT DATA_DIR "
    "(Java 17)"
)
_START_S = 60.0


def _home() -> Path | None:
    beside = Path(__file__).parents[3] / "shared" / "kafka"
    for home in (os.environ.get("HEADWATER_KAFKA_HOME"), beside):
        if home and (Path(home) / "bin" / "start").exists():
            return Path(home)
    return None


def _two_free_ports() -> int:
    """A free port whose successor (the controller's) is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def kafka_broker(folder: Path) -> Iterator[str]:
    """``host:port`` of a broker; skips the test, saying how to get one, where there is none."""
    given = os.environ.get("HEADWATER_TEST_KAFKA")
    if given:
        yield given
        return
    home = _home()
    if home is None or shutil.which("java") is None:
        pytest.skip(f"no Kafka: {HOW}")
    port = _two_free_ports()
    with (folder / "broker.log").open("wb") as log:
        broker = subprocess.Popen(
            [home / "bin" / "start", str(port), str(folder / "data")], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if broker.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the broker did not start: {(folder / 'broker.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        broker.terminate()
        broker.wait(30)
