"""A whole Headwater on this machine for as long as a block lasts: what the demo and the benchmarks run on."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.settings.load import load_settings
from services.settings.model import Settings

_STOP_S = 30.0


class StackFailed(Exception):
    """The processes did not come up; the text ends with what they printed last."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack: its settings and the API's URL."""

    settings: Settings
    url: str


def free_port() -> int:
    """A TCP port of loopback that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def local_stack(folder: Path, overrides: Sequence[str] = (), ready_s: float = 90.0) -> Iterator[Stack]:
    """Run ``headwater up`` on the embedded backends in ``folder`` until the block ends.

    ``overrides`` are ``section.key=value``. Raises StackFailed when it is not ready within ``ready_s``.
    """
    listen = f"127.0.0.1:{free_port()}"
    given = [f"data.dir={folder}", f"api.listen={listen}", *overrides]
    stack = Stack(load_settings(overrides=given).settings, f"http://{listen}")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "up.log"
    command = [sys.executable, "-m", "services.cli.app", *(f"--set={text}" for text in given), "up"]
    with output.open("wb") as sink:
        supervisor = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        try:
            _wait_ready(stack.url, supervisor, output, ready_s)
            yield stack
        finally:
            supervisor.terminate()
            try:
                supervisor.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                supervisor.kill()
                supervisor.wait()


def _wait_ready(url: str, supervisor: subprocess.Popen[bytes], output: Path, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline and supervisor.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready", timeout=2.0).is_success:
                return
        except httpx.TransportError:
            pass  # Nothing listens yet; that is what is waited for.
        time.sleep(0.1)
    said = output.read_text(errors="replace")[-2_000:]
    ended = "" if supervisor.poll() is None else f", it ended with {supervisor.poll()}"
    raise StackFailed(f"the stack was not ready within {ready_s:g} s{ended}; it said last:\n{said}")
