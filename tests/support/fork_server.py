"""Real processes that start at once: each is forked from a server that imported its modules before.

A parameter server needs a second of processor time for its imports, a trainer two, and the tests start and kill
hundreds of both. What a test sees is a process as any other: its own memory, files and sockets, killed by
SIGKILL, started again from what is on its disk. That services start from nothing, as ``headwater service`` starts
them, is what the tests of the command line and of the supervisor show.

The server is one thread, so a fork leaves no lock behind. Between it and each process stands a keeper, which
waits for the process to end and tells the test how. As a program (run by ``start``): ``fork_server.py SOCKET
MODULE...`` listens at the descriptor SOCKET after importing the modules.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
_LONGEST_REQUEST: Final = 1 << 20


class Forked:
    """One process; the same methods as of ``subprocess.Popen``."""

    def __init__(self, told: int) -> None:
        self._told = os.fdopen(told, "rb", buffering=0)
        self._lock = threading.Lock()
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its id; waits until it runs, that is until the server has imported all."""
        with self._lock:
            return self._begun()

    def _begun(self) -> int:
        if self._pid is None:
            first = self._line()
            assert first, "the fork server ended; its output is among that of the tests"
            self._pid = int(first)
        return self._pid

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            more = self._told.read(1)
            if not more:
                return b""
            line += more
        return line

    def poll(self) -> int | None:
        """The exit status, or None while it runs; -N after signal N."""
        with self._lock:
            self._begun()
            if self.returncode is None and select.select([self._told], [], [], 0)[0]:
                self._end()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one. Raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self._pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def _end(self) -> None:
        last = self._line()
        self._told.close()
        assert last, f"the keeper of process {self._pid} was killed"
        self.returncode = int(last)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self, modules: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *modules]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._last: Forked | None = None

    def start(self, target: str, arguments: tuple[str, ...], output: Path) -> Forked:
        """Start ``target`` ("module:function", called with ``arguments``)."""
        request = [target, arguments, str(output.resolve()), os.getcwd(), dict(os.environ)]
        told, tell = os.pipe()
        forked = Forked(told)
        with self._lock:
            if self._last is not None:
                self._last.pid  # noqa: B018 - one request at a time, so that none runs into another
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [tell])
            finally:
                os.close(tell)
            self._last = forked
        return forked

    def close(self) -> None:
        """End the server; what it started goes on."""
        self._socket.close()
        self._process.wait(20)


_servers: dict[tuple[str, ...], _Server] = {}


def start(modules: tuple[str, ...], target: str, arguments: tuple[str, ...], output: Path) -> Forked:
    """Start ``target`` ("module:function", called with ``arguments``) as a process that has ``modules``
    already. What it prints is added to ``output``; its folder and environment are those of the test."""
    server = _servers.get(modules)
    if server is None:
        server = _servers[modules] = _Server(modules)
        atexit.register(server.close)
    return server.start(target, arguments, output)


def _run(target: str, arguments: list[str], output: str, folder: str, environment: dict[str, str]) -> int:
    """What the process itself does; its exit status."""
    try:
        written = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.close(written)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        module, function = target.split(":")
        getattr(import_module(module), function)(*arguments)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(status: int) -> None:
    """As ``services.processes.leave``: taking torch apart would take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _keep(listening: socket.socket, tell: int, request: list[object]) -> None:
    """Fork the process, and tell its id and how it ended."""
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if not process:
        os.close(tell)
        _leave(_run(*request))  # type: ignore[arg-type]
    # What a terminal sends goes to all of a group; the keeper ends with its process, not before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(tell, b"%d\n" % process)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(BrokenPipeError):  # Nobody asks any more.
        os.write(tell, b"%d\n" % status)
    os._exit(0)


def serve(listening: socket.socket, modules: list[str]) -> None:
    """Fork what is asked for until the other side is gone."""
    for module in modules:
        import_module(module)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, passed, _, _ = socket.recv_fds(listening, _LONGEST_REQUEST, 1)
        if not message:
            return
        while not message.endswith(b"\n"):
            message += listening.recv(_LONGEST_REQUEST)
        if not os.fork():
            _keep(listening, passed[0], json.loads(message))
        os.close(passed[0])


if __name__ == "__main__":
    # Behind the folders that are tested, after which those of the tests are named.
    sys.path.append(str(ROOT / "tests"))

    from services.processes import limit_threads

    limit_threads(os.environ)
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given, sys.argv[2:])
