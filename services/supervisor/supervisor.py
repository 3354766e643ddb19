"""Keeps a set of local processes running: starts, watches, restarts and stops them in order.

Exceptions::

    NotReady                 a process did not become ready in time; the message shows the end of its log
    AlreadyRunning           another supervisor holds the data folder (``folder.py``)
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, Self

from services.supervisor.children import Child
from services.supervisor.folder import ChildState, ProcessId, RunFolder, SupervisorState
from services.supervisor.logs import tail
from services.supervisor.membership import Presence, Probe
from services.supervisor.orphans import end_orphans
from services.supervisor.plan import ChildSpec, child_environment
from services.supervisor.restarts import RestartPolicy

_STEP_S: Final = 0.05
_PROBE_S: Final = 0.25
# With the delays between restarts this many take about ten seconds: what is wrong does not mend itself.
_HOPELESS_RESTARTS: Final = 5

log = logging.getLogger(__name__)


class NotReady(Exception):
    """A process did not become ready in time."""


class Supervisor:
    """Runs ``specs`` from entering until leaving the block, in a thread of its own.

    Its caller holds the lock of ``folder`` meanwhile. ``probe`` says what is registered; ``grace_s`` is how
    long each group of processes may take to end.
    """

    def __init__(
        self,
        specs: Iterable[ChildSpec],
        folder: RunFolder,
        probe: Probe,
        *,
        environ: Mapping[str, str] | None = None,
        policy: RestartPolicy | None = None,
        grace_s: float = 20.0,
        monotonic: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.folder = folder
        self._probe = probe
        self._grace_s = grace_s
        self._monotonic, self._now_ms = monotonic, now_ms
        environment = child_environment(os.environ if environ is None else environ)
        restart_policy = policy or RestartPolicy()
        self._children = [
            Child(spec, folder.log_file(spec.name), environment, restart_policy) for spec in specs
        ]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._started_at_ms = 0

    def __enter__(self) -> Self:
        try:
            end_orphans(self.folder)
            self._started_at_ms = self._now_ms()
            with self._lock:
                for child in self._children:
                    child.start(self._monotonic(), self._now_ms())
                self._write_state()
        except BaseException:
            self._stop_children()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._stop_children()
        self._write_state()

    def children(self) -> tuple[ChildState, ...]:
        """All processes as they stand now."""
        with self._lock:
            return tuple(child.snapshot() for child in self._children)

    def address(self, service: str) -> str | None:
        """Where the first ready process of ``service`` is reached."""
        ready = (child for child in self.children() if child.service == service and child.state == "ready")
        return next((child.address for child in ready), None)

    def wait_ready(
        self,
        timeout_s: float,
        stop: threading.Event | None = None,
        progress: Callable[[tuple[ChildState, ...]], None] = lambda _children: None,
    ) -> None:
        """Wait until every process is ready, or ``stop`` is set.

        Raises NotReady after ``timeout_s``, or as soon as one keeps ending before it is ready.
        """
        deadline = self._monotonic() + timeout_s
        while not (stop and stop.is_set()):
            children = self.children()
            progress(children)
            if all(child.state == "ready" for child in children):
                return
            hopeless = any(c.state != "ready" and c.restarts >= _HOPELESS_RESTARTS for c in children)
            if hopeless or self._monotonic() >= deadline:
                raise NotReady(self._explain(children))
            time.sleep(_STEP_S)

    def _explain(self, children: Iterable[ChildState]) -> str:
        lines = ["these are not ready:"]
        for child in children:
            if child.state != "ready":
                path = self.folder.log_file(child.name)
                ended = f", last exit {child.last_exit}" if child.last_exit is not None else ""
                lines.append(f"  {child.name} is {child.state}{ended}; the end of {path}:")
                lines += [f"    {line}" for line in tail(path, 5)]
        return "\n".join(lines)

    def _run(self) -> None:
        next_probe_s = self._monotonic()
        while not self._closing.wait(_STEP_S):
            seen: Mapping[str, Presence] | None = None
            if self._monotonic() >= next_probe_s:
                # Outside the lock: coordination and the API may take their time to answer.
                seen = self._ask()
                next_probe_s = self._monotonic() + _PROBE_S
            with self._lock:
                self._step(seen)

    def _ask(self) -> Mapping[str, Presence] | None:
        from services.coordination.contract import CoordinationError

        try:
            return self._probe()
        except CoordinationError as error:
            log.warning("coordination cannot be asked now: %s", error)
            return None

    def _step(self, seen: Mapping[str, Presence] | None) -> None:
        changed = False
        for child in self._children:
            try:
                changed |= child.step(self._monotonic(), self._now_ms())
            except OSError as error:
                # No processes or descriptors left now: it stays "waiting", and the next step tries again.
                log.error("%s cannot be started now: %s", child.spec.name, error)
            if seen is not None:
                changed |= child.see(seen.get(child.spec.name), self._now_ms())
        if changed:
            self._write_state()

    def _write_state(self) -> None:
        me = ProcessId.of(os.getpid())
        assert me is not None, "this process runs"
        children = tuple(child.snapshot() for child in self._children)
        try:
            self.folder.write_state(SupervisorState(me, self._started_at_ms, children))
        except OSError as error:
            log.error("the state file cannot be written: %s", error)

    def _stop_children(self) -> None:
        ordered = sorted(self._children, key=lambda child: child.spec.stop_rank)
        for _rank, group in itertools.groupby(ordered, key=lambda child: child.spec.stop_rank):
            together = list(group)
            for child in together:
                child.terminate()
            deadline = self._monotonic() + self._grace_s
            for child in together:
                child.wait_stopped(max(0.0, deadline - self._monotonic()), self._now_ms())
