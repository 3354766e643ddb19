"""A server or scheduler at work: the jobs of the store under way, heartbeats, and windows that run out."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal, ParamSpec, TypeVar

from federated.job import FederatedJob
from federated.rounds import Closed, Header, JobUnknown, Store, StoreUnavailable
from services.federation.figures import Figures, read_figures
from services.federation.host import Host
from services.federation.hosted import HostedJob
from services.federation.metrics import FederationMetrics
from services.federation.outbox import Pushed, Stack, read_pushes
from services.federation.privacy import epsilons, standing
from services.federation.registry import Member, Registry

P = ParamSpec("P")
R = TypeVar("R")

TICK_S: Final = 0.25

log = logging.getLogger(__name__)


class Node:
    """What the routes ask. ``devices``: whether it serves devices and sums; a scheduler does not, it only watches.

    Every node applies windows that have run out, so that a dead scheduler stops nothing. ``failed`` is called when it
    cannot go on; ``into`` gives the stack that a job's devices teach.
    """

    def __init__(
        self,
        store: Store,
        member: Member,
        metrics: FederationMetrics,
        *,
        threads: int,
        most_waiting: int,
        devices: bool,
        failed: Callable[[], None],
        into: Callable[[HostedJob], Stack] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._registry = Registry(store)
        self._member = member
        self._metrics = metrics
        self._most_waiting = most_waiting
        self._devices = devices
        self._failed = failed
        self._into = into
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, "fl")
        self._hosts: dict[str, Host] = {}
        self._opening = threading.Lock()
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._watching, name="fl-watch", daemon=True)
        self._beaten_at = 0.0

    def begin(self) -> None:
        """Join the servers, and take up the jobs that there are. Raises StoreUnavailable."""
        self._beat()
        for name in self._registry.names():
            self._open(name)
        self._watch.start()

    def close(self) -> None:
        """Leave the servers and end all threads."""
        self._stop.set()
        self._watch.join(10.0)
        for host in self._hosts.values():
            host.close()
        self._pool.shutdown(wait=True)
        try:
            self._registry.leave(self._member.name)
        except StoreUnavailable as error:
            log.warning("the store does not hear that this server leaves: %s", error)

    async def host(self, name: str) -> Host:
        """The job ``name`` under way here."""
        found = self._hosts.get(name)
        return found if found is not None else await self._run(self._open, name)

    async def create(self, job: FederatedJob) -> bool:
        """Begin a job; False when it is there already. Raises JobConflict and JobRefused."""
        _, created = await self._run(self._registry.create, job)
        await self._run(self._open, job.job.name)
        return created

    async def definition(self, name: str) -> str:
        """A job's file."""
        return await self._run(self._registry.definition, name)

    async def states(self) -> list[dict[str, Any]]:
        """All jobs and where they stand."""
        return await self._run(self._states)

    async def log(self, name: str) -> list[tuple[Closed, Figures | None, Pushed | None]]:
        """How each iteration of a job ended, what came of it, and the push that brought it to a stack."""
        host = await self.host(name)
        return await self._run(self._log, host)

    async def epsilons(self, name: str, ended: Sequence[Closed]) -> list[float | None]:
        """What a job has cost its clients after each iteration that ``ended``."""
        host = await self.host(name)
        return await self._run(epsilons, host.job, ended)

    def _log(self, host: Host) -> list[tuple[Closed, Figures | None, Pushed | None]]:
        ended = list(host.desk.log())
        figures = read_figures(self._store, host.job.keys, [closed.iteration for closed in ended])
        made = [closed.version for closed in ended if closed.valid] if host.job.into.model else []
        pushes = read_pushes(self._store, host.job.keys, made)
        return [
            (closed, figures.get(closed.iteration), pushes.get(closed.version) if closed.valid else None)
            for closed in ended
        ]

    async def change(self, name: str, what: Literal["stop", "resume"]) -> dict[str, Any]:
        """Stop or resume a job; gives where it stands."""
        host = await self.host(name)
        act = host.desk.stop if what == "stop" else host.desk.resume
        await self._run(act, self._clock())
        log.info("job %s: %s", name, what)
        return await self._run(lambda: _state(host, host.desk.header()))

    async def members(self) -> list[Member]:
        """The servers that live."""
        return await self._run(self._registry.members, self._clock())

    async def faults(self) -> Mapping[str, str]:
        """What is not well, by name."""
        try:
            async with asyncio.timeout(1.0):
                await self._run(self._registry.names)
        except TimeoutError:
            return {"store": "no answer within 1 s"}
        except StoreUnavailable as error:
            return {"store": str(error)}
        return {}

    def _states(self) -> list[dict[str, Any]]:
        found = []
        for name in self._registry.names():
            try:
                host = self._open(name)
                found.append(_state(host, host.desk.header()))
            except JobUnknown:  # dropped between the two looks
                continue
        return found

    def _open(self, name: str) -> Host:
        with self._opening:
            if name not in self._hosts:
                job = self._registry.job(name)
                host = Host(
                    self._store,
                    job,
                    self._pool,
                    self._metrics,
                    self._clock,
                    self._most_waiting,
                    self._member.name,
                )
                if self._devices:
                    host.work()
                    if job.into.model and self._into is not None:
                        host.teach(self._into(job))
                self._hosts[name] = host
                log.info("job %s: taken up", name)
            return self._hosts[name]

    def _watching(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                if self._clock() - self._beaten_at >= self._member.heartbeat_s:
                    self._beat()
                    for name in self._registry.names():
                        self._open(name)
                for host in list(self._hosts.values()):
                    self._tick(host)
            except StoreUnavailable as error:
                log.warning("%s", error)
            except Exception:
                # A server that applies no windows must not look alive.
                log.exception("watching failed; this process ends")
                self._failed()
                return

    def _tick(self, host: Host) -> None:
        try:
            for closed in host.desk.tick(self._clock()):
                log.info("job %s: iteration %d ended: %s", host.job.name, closed.iteration, closed.why.value)
            if host.secure is not None:
                host.secure.advance()
        except JobUnknown:
            log.info("job %s: dropped", host.job.name)
            with self._opening:
                self._hosts.pop(host.job.name, None)
            host.close()

    def _beat(self) -> None:
        now = self._clock()
        member = self._member
        self._registry.beat(
            Member(
                member.name,
                member.role,
                member.address,
                member.pid,
                member.started_at,
                now,
                member.heartbeat_s,
            )
        )
        self._beaten_at = now

    async def _run(self, function: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        call = partial(function, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def _state(host: Host, header: Header) -> dict[str, Any]:
    thresholds = host.job.settings.thresholds
    private = standing(host.job, header)
    return {
        "job": host.job.name,
        "phase": header.phase.value,
        "over": host.job.rounds.over(header),
        "iteration": header.iteration,
        "iterations": host.job.settings.fl_iteration_num,
        "version": header.version,
        "valid": header.valid,
        "invalid": header.invalid,
        "starts": header.starts,
        "starts_needed": thresholds.starts_close,
        "uploads": header.uploads,
        "uploads_needed": thresholds.uploads_close,
        "strategy": host.job.strategy.name,
        "parameters": host.job.layout.size,
        **({} if host.secure is None else {"stage": host.secure.stage(header)}),
        **({} if private is None else {"privacy": private}),
    }
