"""One supervised process: start it, see it end, decide when to start it again, stop it."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.supervisor.folder import ChildState, ProcessId
from services.supervisor.logs import RotatingLog, pump
from services.supervisor.membership import Presence
from services.supervisor.plan import ChildSpec
from services.supervisor.restarts import RestartHistory, RestartPolicy, after_end

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """A process that is kept running. The supervisor alone calls it, under its lock. Times are in seconds of
    the supervisor's monotonic clock, except ``since_ms`` (Unix time, for people)."""

    spec: ChildSpec
    log_file: Path
    environment: Mapping[str, str]
    policy: RestartPolicy
    history: RestartHistory = field(default_factory=RestartHistory)
    state: str = "stopped"
    since_ms: int = 0
    address: str = ""
    last_exit: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _id: ProcessId | None = None
    _pump: threading.Thread | None = None
    _started_s: float = 0.0
    _restart_at_s: float = 0.0

    @property
    def pid(self) -> int | None:
        """The running process, if there is one."""
        return self._process.pid if self._process else None

    def start(self, now_s: float, now_ms: int) -> None:
        """Start the process. Its standard input is a pipe that closes when the supervisor dies."""
        self._process = subprocess.Popen(
            self.spec.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self.environment),
            # Ctrl-C at the terminal is for the supervisor, which stops its children in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pump = pump(self._process.stdout, RotatingLog(self.log_file))
        self._id = ProcessId.of(self._process.pid)
        self._started_s = now_s
        self._turn("starting", now_ms)

    def step(self, now_s: float, now_ms: int) -> bool:
        """See whether the process ended, or is due to start again. True if anything changed."""
        if self._process is None:
            if self.state == "waiting" and now_s >= self._restart_at_s:
                self.start(now_s, now_ms)
                return True
            return False
        code = self._process.poll()
        if code is None:
            return False
        self._reap(code)
        delay_s, self.history = after_end(self.policy, self.history, now_s - self._started_s)
        log.warning("%s ended (%s); it starts again in %g s", self.spec.name, _how(code), delay_s)
        self._restart_at_s = now_s + delay_s
        self._turn("waiting", now_ms)
        return True

    def see(self, presence: Presence | None, now_ms: int) -> bool:
        """Take in what coordination says of this name. True if anything changed."""
        if self._process is None:
            return False
        # An entry of a former run stays until its lease ends, so it must be this very process.
        mine = presence is not None and presence.pid == self._process.pid
        ready = presence is not None and mine and presence.ready
        address = presence.address if presence is not None and mine else ""
        state = "ready" if ready else "starting"
        changed = (state, address) != (self.state, self.address)
        self.address = address
        if state != self.state:
            self._turn(state, now_ms)
        return changed

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def wait_stopped(self, timeout_s: float, now_ms: int) -> None:
        """Wait for the end of a process that was asked to, and end it by force after ``timeout_s``."""
        if self._process:
            try:
                code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %g s and is killed", self.spec.name, timeout_s)
                self._process.kill()
                code = self._process.wait()
            self._reap(code)
        self._turn("stopped", now_ms)

    def _reap(self, code: int) -> None:
        assert self._process is not None
        if self._process.stdin:
            self._process.stdin.close()
        if self._pump:
            # A grandchild may hold the pipe open; the thread then ends when that does.
            self._pump.join(timeout=1.0)
        self._process, self._id, self._pump = None, None, None
        self.address = ""
        self.last_exit = code

    def _turn(self, state: str, now_ms: int) -> None:
        self.state, self.since_ms = state, now_ms

    def snapshot(self) -> ChildState:
        """What people are shown."""
        return ChildState(
            self.spec.name,
            self.spec.service,
            self.state,
            self.since_ms,
            self.history.total,
            self.last_exit,
            self.address,
            self._id,
            self.spec.region,
        )


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
