"""An edge: serves the devices of a region by the protocol of servers, and hands their sum to its parent.

Devices are admitted by the parent: the edge relays their starts and remembers the tickets it saw. Updates stay here:
the edge checks them, keeps them in a store of its own, adds them up in integers, and hands the sum on with the names of
those who are in it. An update is accepted only once the parent has counted it; until then its device is told to ask
again, so a device whose edge dies takes the same update elsewhere. The parent counts everybody once: a sum with
somebody already counted is refused by name, and the edge sends it again without them. An edge that comes back finds
what it had not handed on in its store.

Synchronous jobs whose strategies work on sums alone: an edge's sum cannot be weighted by each member's staleness, nor
taken apart.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, ParamSpec, TypeVar, get_args
from urllib.parse import quote, unquote

from federated.compression import BodyRefused
from federated.frames import FrameRefused
from federated.rounds import (
    Accepted,
    Admitted,
    JobUnknown,
    NotYet,
    PollRequest,
    Refused,
    Reply,
    StartRequest,
    Store,
    StoreUnavailable,
    UploadRequest,
)
from federated.rounds.messages import RefusalCode
from federated.sums import ContributionRefused, add_all
from federated.wire import decode_reply, decode_upload, digest_of, encode_poll, encode_start, encode_upload
from services.api.problems import Problem
from services.federation.attempts import Attempts
from services.federation.batches import MOST_MEMBERS, encode_batch
from services.federation.hosted import HostedJob
from services.federation.metrics import FederationMetrics
from services.federation.parent import Parent, ParentLost
from services.federation.parts import Parts

P = ParamSpec("P")
R = TypeVar("R")

KEPT_ITERATIONS: Final = 8
_LOOK_S: Final = 0.05
_LATER_S: Final = 0.25
_MOST_MODELS: Final = 16
_CODES: Final = get_args(RefusalCode)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Upload:
    """One device's update here: ``held``, or what the parent said."""

    request: UploadRequest
    since: float
    outcome: Literal["held", "counted"] | Refused = "held"


@dataclass(slots=True)
class _Iteration:
    """What this edge knows of an iteration: its size is that of the region's cohort."""

    tickets: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, _Upload] = field(default_factory=dict)
    not_before: float = 0.0

    def waiting(self) -> list[_Upload]:
        return [upload for upload in self.uploads.values() if upload.outcome == "held"]


class Edge:
    """Serves ``job`` for its ``parent``, from a ``store`` of its own. Raises Problem, StoreUnavailable (also where the
    parent does not answer: devices then try another server)."""

    def __init__(
        self,
        job: HostedJob,
        parent: Parent,
        store: Store,
        pool: Executor,
        metrics: FederationMetrics,
        clock: Callable[[], float],
        wait_s: float,
    ) -> None:
        self.job = job
        self._parent = parent
        self._store = store
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._wait_s = wait_s
        self._iterations: OrderedDict[int, _Iteration] = OrderedDict()
        self._attempts = Attempts()
        self._models: OrderedDict[tuple[int, int | None], bytes] = OrderedDict()
        self._path = f"/v1/fl/jobs/{quote(job.name, safe='')}"

    def recover(self) -> int:
        """Find what an earlier life of this edge had not handed on; gives how many updates."""
        found = 0
        for key in self._store.blobs(self.job.keys.all):
            if "/held/" not in key:
                continue
            client, body = _client_of(key), self._store.get_blob(key)
            if body is None:
                continue
            try:
                request, _ = decode_upload(body, client)
            except FrameRefused as error:
                log.warning("%s is left alone: %s", key, error)
                continue
            iteration = self._iteration(request.iteration)
            iteration.tickets[client] = request.ticket
            iteration.uploads[client] = _Upload(request, self._clock())
            found += 1
        return found

    async def start(self, request: StartRequest, token: str) -> Reply:
        """The parent's answer; who is admitted is remembered."""
        body = await self._relay("start", request.client, encode_start(request), token)
        reply = self._read(body)
        if isinstance(reply, Admitted):
            self._iteration(reply.iteration).tickets[request.client] = reply.ticket
        self._metrics.starts.labels(self.job.name, type(reply).__name__.lower()).inc()
        return reply

    async def poll(self, request: PollRequest) -> Reply:
        """The parent's answer."""
        return self._read(await self._relay("poll", request.client, encode_poll(request), ""))

    async def model(self, version: int, base: int | None) -> bytes:
        """The parent's model, fetched once for all devices that hold the same base."""
        if (version, base) not in self._models:
            query = "" if base is None else f"?held={base}"
            path = f"{self._path}/clients/{quote(self._parent.name, safe='')}/models/{version}{query}"
            self._models[version, base] = await self._ask("GET", path, b"")
            while len(self._models) > _MOST_MODELS:
                self._models.popitem(last=False)
        body = self._models[version, base]
        self._metrics.download_bytes.labels(self.job.name).inc(len(body))
        return body

    async def upload(self, request: UploadRequest, payload: bytes | None) -> Reply:
        """Keep a device's update, or say what became of it."""
        iteration = self._known(request.client, request.iteration, request.ticket)
        there = iteration.uploads.get(request.client)
        if there is None:
            self._admit_body(request.client, request.iteration, request.digest)
            await self._run(self._keep, request, payload)
            # Another request of the same device may have come first meanwhile.
            there = iteration.uploads.setdefault(request.client, _Upload(request, self._clock()))
        now = self._clock()
        if isinstance(there.outcome, Refused):
            return there.outcome
        if there.request.digest != request.digest:
            return Refused("different_body", "another body of this client is here", now + self._wait_s)
        if there.outcome == "counted":
            return Accepted(request.iteration, now + self.job.settings.come_back_min_s)
        return NotYet(now + self._wait_s, "aggregating", "held by the edge")

    async def add_part(
        self, client: str, iteration: int, ticket: bytes, digest: bytes, offset: int, body: bytes
    ) -> int:
        """A part of an update; gives how many bytes are here."""
        self._known(client, iteration, ticket)
        self._admit_body(client, iteration, digest)
        parts = Parts(self._store, self.job.keys, iteration, client, digest)
        return await self._run(parts.take, offset, body, self.job.most_payload)

    async def parts_there(self, client: str, iteration: int, ticket: bytes, digest: bytes) -> int:
        """How many bytes of an update are here."""
        self._known(client, iteration, ticket)
        return await self._run(Parts(self._store, self.job.keys, iteration, client, digest).there)

    async def run(self) -> None:
        """Hand sums on whenever they are due; until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, iteration in list(self._iterations.items()):
                if self._due(iteration):
                    await self._hand_on(number, iteration)
            await self._run(self._prune)

    def _due(self, iteration: _Iteration) -> bool:
        now, waiting = self._clock(), iteration.waiting()
        if not waiting or now < iteration.not_before:
            return False
        everybody = len(iteration.uploads) >= len(iteration.tickets)
        return everybody or now - min(upload.since for upload in waiting) >= self._wait_s

    async def _hand_on(self, number: int, iteration: _Iteration) -> None:
        members = [upload.request for upload in iteration.waiting()[:MOST_MEMBERS]]
        body = await self._run(self._sum, members)
        try:
            told = await self._parent.json("POST", f"{self._path}/sums", body)
        except ParentLost as error:
            log.warning("iteration %d: %d updates wait for the parent: %s", number, len(members), error)
            iteration.not_before = self._clock() + self._wait_s
            return
        except Problem as problem:
            # Our sum is not taken as a whole: its devices are told to begin anew, and the round goes on.
            log.error("iteration %d: the parent refuses a sum: %s %s", number, problem.code, problem.detail)
            told = {"wrong": {member.client: ("late", "the edge's sum was refused") for member in members}}
        wrong = told.get("wrong", {}) if isinstance(told, dict) else {}
        counted = 0
        for member in members:
            upload = iteration.uploads[member.client]
            what, why = wrong.get(member.client, ("counted" if not wrong else "again", ""))
            if what == "counted":
                upload.outcome = "counted"
                counted += 1
            elif what == "later":
                iteration.not_before = self._clock() + _LATER_S
            elif what in _CODES:
                upload.outcome = Refused(what, str(why), self._clock() + self.job.settings.come_back_min_s)
            if upload.outcome != "held":
                await self._run(self._store.delete, self._key(member.iteration, member.client))
        self._metrics.uploads.labels(self.job.name, "accepted").inc(counted)
        log.info("iteration %d: %d of %d updates counted by the parent", number, counted, len(members))

    def _sum(self, members: Sequence[UploadRequest]) -> bytes:
        total = self.job.empty_sum()
        contributions = []
        for member in members:
            body = self._store.get_blob(self._key(member.iteration, member.client))
            _, payload = decode_upload(body or b"", member.client)
            assert payload is not None
            contributions.append(
                self.job.contribution(payload, member.iteration, member.examples, member.steps, member.loss)
            )
        add_all(total, contributions)
        return encode_batch(members, total)

    def _keep(self, request: UploadRequest, payload: bytes | None) -> None:
        parts = None
        if payload is None:
            parts = Parts(self._store, self.job.keys, request.iteration, request.client, request.digest)
            payload = parts.body()
            if digest_of(payload) != request.digest:
                raise Problem("body_missing", f"{len(payload)} bytes are here.")
        try:
            self.job.contribution(payload, request.iteration, request.examples, request.steps, request.loss)
        except (BodyRefused, ContributionRefused) as error:
            rule = error.rule if isinstance(error, ContributionRefused) else "body"
            self._metrics.refused.labels(self.job.name, rule).inc()
            raise Problem("upload_refused", str(error)) from error
        self._store.put_blob(self._key(request.iteration, request.client), encode_upload(request, payload))
        self._metrics.upload_bytes.labels(self.job.name).inc(len(payload))
        if parts is not None:
            parts.drop()

    def _known(self, client: str, number: int, ticket: bytes) -> _Iteration:
        iteration = self._iterations.get(number)
        known = None if iteration is None else iteration.tickets.get(client)
        if iteration is None or known is None or not hmac.compare_digest(known, ticket):
            raise Problem("not_here")
        return iteration

    def _admit_body(self, client: str, iteration: int, digest: bytes) -> None:
        if not self._attempts.allow(iteration, client, digest):
            raise Problem("too_many_bodies")

    def _iteration(self, number: int) -> _Iteration:
        return self._iterations.setdefault(number, _Iteration())

    def _prune(self) -> None:
        newest = max(self._iterations, default=0)
        for number in [number for number in self._iterations if number < newest - KEPT_ITERATIONS]:
            del self._iterations[number]
            self._store.delete(self.job.keys.iteration(number))

    def _key(self, iteration: int, client: str) -> str:
        return f"{self.job.keys.iteration(iteration)}held/{quote(client, safe='')}/"

    async def _relay(self, what: str, client: str, body: bytes, token: str) -> bytes:
        return await self._ask("POST", f"{self._path}/clients/{quote(client, safe='')}/{what}", body, token)

    async def _ask(self, method: str, path: str, body: bytes, token: str = "") -> bytes:
        try:
            return await self._parent.ask(method, path, body, token)
        except ParentLost as error:
            raise StoreUnavailable(str(error)) from error

    def _read(self, body: bytes) -> Reply:
        try:
            return decode_reply(body, self._clock())
        except FrameRefused as error:
            raise StoreUnavailable(f"the parent's reply cannot be read: {error}") from error

    async def _run(self, function: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        call = partial(function, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class OneJob:
    """Finds the edge's only job by its name."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def host(self, name: str) -> Edge:
        """The edge, for its job. Raises JobUnknown."""
        if name != self._edge.job.name:
            raise JobUnknown(f"this edge serves {self._edge.job.name}")
        return self._edge


class EdgeRefused(ValueError):
    """This edge cannot serve that job for that parent; the message says why."""


def require_edge(job: HostedJob) -> None:
    """Raise EdgeRefused with the reason unless an edge may serve ``job``."""
    if job.settings.mode == "buffered":
        raise ValueError(
            "a buffered job weighs each update by its staleness: its devices need servers, not edges"
        )
    if job.strategy.needs == "updates":
        raise EdgeRefused(f"{job.strategy.name} compares single updates: its devices need servers, not edges")
    if job.masked is not None:
        raise EdgeRefused(
            "masks cancel over a whole cohort, not over a region: devices of this job need servers, not edges"
        )


def _client_of(key: str) -> str:
    return unquote(key.rstrip("/").rpartition("/")[2])
