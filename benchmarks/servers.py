"""Parameter servers as processes of their own, started by the real command, for as long as a block lasts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.draws import Floats, Keys
from services.backends import open_coordination, open_security
from services.coordination.contract import Coordination
from services.coordination.membership import members
from services.parameter_server.client import ParameterClient
from services.parameter_server.client.readers import Reading
from services.settings.load import load_settings
from sync.pushes import Source
from sync.spec import TableSpec

MODEL: Final = "main"
SERVICE: Final = "parameter-server"
_READY_S: Final = 60.0
_DEADLINE_S: Final = 60.0


class ServersFailed(Exception):
    """The servers did not come up, or refused a push; the text says what they printed last."""


@contextmanager
def parameter_servers(
    folder: Path, specs: Sequence[TableSpec], servers: int = 1, overrides: Sequence[str] = ()
) -> Iterator[ParameterClient]:
    """A client of ``servers`` parameter servers with their files in ``folder``, to which ``specs`` are declared.

    ``overrides`` are ``section.key=value``; the client reads as they say, too. The servers are killed at the end.
    Raises ServersFailed.
    """
    given = [f"data.dir={folder}", f"parameters.servers={servers}", *overrides]
    settings = load_settings(overrides=given).settings
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--set={text}" for text in given]
    with ExitStack() as stack:
        coordination = stack.enter_context(closing(open_coordination(settings)))
        running = []
        for number in range(servers):
            name = f"{SERVICE}-{number}"
            command = [sys.executable, "-m", "services.cli.app", *flags, "service", SERVICE, "--name", name]
            output = stack.enter_context((folder / f"{name}.log").open("wb"))
            # Standard input is a pipe that closes when this process dies, however it does.
            process = subprocess.Popen(
                [*command, "--with-parent"], stdin=subprocess.PIPE, stdout=output, stderr=output
            )
            stack.callback(_kill, process)
            running.append(process)
        _wait_ready(folder, coordination, running)
        reading = Reading.of(settings.parameters)
        client = ParameterClient(
            coordination, deadline_s=_DEADLINE_S, security=open_security(settings), reading=reading
        )
        stack.callback(client.close)
        client.declare(MODEL, specs, "benchmark")
        yield client


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()


def _wait_ready(folder: Path, coordination: Coordination, running: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _READY_S
    while sum(member.ready for member in members(coordination, SERVICE)) < len(running):
        ended = [process.returncode for process in running if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = sorted(folder.glob("*.log"))
            said = "\n".join(log.read_text(errors="replace")[-1_000:] for log in logs)
            why = f"ended with {ended}" if ended else f"were not ready within {_READY_S:g} s"
            raise ServersFailed(f"parameter servers {why}; they said last:\n{said}")
        time.sleep(0.02)


class Pusher:
    """A source of pushes that are numbered in the order in which they are made."""

    def __init__(self, client: ParameterClient, log: str = "benchmark") -> None:
        self._client, self._source = client, Source(log, 0)
        self._shards = range(client.shards)
        self._next = 0

    def push(self, table: str, keys: Keys, gradients: Floats) -> None:
        """Apply ``gradients`` ``[N, d]`` to ``keys`` ``[N]``, once. Raises ServersFailed where a shard does not."""
        before = dict.fromkeys(self._shards, self._next - 1)
        now_ms = time.time_ns() // 1_000_000
        replies = self._client.push(
            MODEL, self._source, self._next, before, now_ms, None, {table: (keys, gradients)}
        )
        self._next += 1
        for shard, reply in replies.items():
            if reply.status != "applied":
                raise ServersFailed(f"shard {shard} answers {reply.status} to a push: {reply.reason}")
