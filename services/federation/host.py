"""A job under way in this process: its desk and clerk, its versions, the worker that sums, and what they counted."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

from federated.compression import BodyRefused
from federated.rounds import (
    Accepted,
    Desk,
    PollRequest,
    Refused,
    Reply,
    StartRequest,
    Store,
    UploadRequest,
)
from federated.sums import ContributionRefused
from federated.wire import digest_of
from services.api.problems import Problem
from services.federation.aggregation import Aggregator
from services.federation.attempts import Attempts
from services.federation.batches import batch_key, decode_batch
from services.federation.clerk import Clerk
from services.federation.hosted import HostedJob
from services.federation.metrics import FederationMetrics
from services.federation.outbox import Outbox, Stack
from services.federation.parts import Parts
from services.federation.secure import SecureRounds
from services.federation.signing import KeyTaken, certify
from services.federation.versions import VersionGone, Versions

P = ParamSpec("P")
R = TypeVar("R")


log = logging.getLogger(__name__)


class Host:
    """Serves ``job`` from ``store``. ``pool`` runs what blocks. Raises Problem for what a client did wrong,
    StoreUnavailable and JobUnknown."""

    def __init__(
        self,
        store: Store,
        job: HostedJob,
        pool: Executor,
        metrics: FederationMetrics,
        clock: Callable[[], float],
        most_waiting: int,
        name: str,
    ) -> None:
        self.job = job
        self.desk = Desk(store, job.rounds)
        self._store = store
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._clerk = Clerk(self.desk, pool, clock, most_waiting)
        self._versions = Versions(store, job, self.desk)
        self._attempts = Attempts()
        self.secure: SecureRounds | None = None
        if job.masked is not None:
            self.secure = SecureRounds(
                store,
                job,
                job.masked,
                self.desk,
                metrics,
                clock,
                self._versions.start_digest,
                lambda: self.aggregator.wake.set(),
            )
        self.aggregator = Aggregator(store, job, self.desk, name, clock, secure=self.secure)
        self._stop = threading.Event()
        self._name = name
        self._worker: threading.Thread | None = None
        self._teacher: threading.Thread | None = None

    def work(self) -> None:
        """Sum what is counted, in a thread of its own, until ``close``."""
        self._worker = threading.Thread(
            target=self.aggregator.run, args=(self._stop,), name=f"sum-{self.job.name}", daemon=True
        )
        self._worker.start()

    def teach(self, stack: Stack) -> None:
        """Push what the job learns into ``stack``, in a thread of its own, until ``close``."""
        outbox = Outbox(
            self._store, self.job, self.desk, stack, self._name,
            told=lambda outcome: self._metrics.pushes.labels(self.job.name, outcome).inc(),
            waiting=self._metrics.unpushed.labels(self.job.name).set,
            clock=self._clock,
        )  # fmt: skip
        self._teacher = threading.Thread(
            target=outbox.run, args=(self._stop,), name=f"push-{self.job.name}", daemon=True
        )
        self._teacher.start()

    def close(self) -> None:
        """End the workers."""
        self._stop.set()
        self.aggregator.wake.set()
        for worker in (self._worker, self._teacher):
            if worker is not None:
                worker.join(10.0)

    async def start(self, request: StartRequest, token: str) -> Reply:
        """A client asks to take part. ``token`` is of use to edges alone, which hand it on."""
        reply = await self._clerk.ask(request)
        self._metrics.starts.labels(self.job.name, type(reply).__name__.lower()).inc()
        return reply

    async def model(self, version: int, base: int | None) -> bytes:
        """Model ``version`` as a frame, for a client that holds version ``base``. Raises Problem version_gone."""
        try:
            form, body = await self.run(self._versions.download, version, base)
        except VersionGone as error:
            raise Problem("version_gone") from error
        self._metrics.downloads.labels(self.job.name, form).inc()
        self._metrics.download_bytes.labels(self.job.name).inc(len(body))
        return body

    async def poll(self, request: PollRequest) -> Reply:
        """Where things stand."""
        return await self._clerk.ask(request)

    async def upload(self, request: UploadRequest, payload: bytes | None) -> Reply:
        """A client's update asks to be counted; None: it is here already, from before or in parts. Raises Problem
        body_missing where it is not, upload_refused, foreign_ticket and too_many_bodies."""
        self.require_ticket(request.client, request.iteration, request.ticket)
        self._admit_body(request.client, request.iteration, request.digest)
        if self.secure is not None:
            await self.run(self.secure.require_upload, request.client, request.iteration)
        await self.run(self._keep, request, payload)
        reply = await self._clerk.ask(request)
        outcome = reply.code if isinstance(reply, Refused) else type(reply).__name__.lower()
        if isinstance(reply, Accepted):
            outcome = "repeated" if reply.repeated else "accepted"
            self.aggregator.wake.set()
            if self.secure is not None:
                await self.run(self.secure.advance)
        self._metrics.uploads.labels(self.job.name, outcome).inc()
        return reply

    async def add_part(
        self, client: str, iteration: int, ticket: bytes, digest: bytes, offset: int, body: bytes
    ) -> int:
        """A part of an update; gives how many bytes are here."""
        self.require_ticket(client, iteration, ticket)
        self._admit_body(client, iteration, digest)
        parts = Parts(self._store, self.job.keys, iteration, client, digest)
        return await self.run(parts.take, offset, body, self.job.most_payload)

    async def parts_there(self, client: str, iteration: int, ticket: bytes, digest: bytes) -> int:
        """How many bytes of an update are here."""
        self.require_ticket(client, iteration, ticket)
        return await self.run(Parts(self._store, self.job.keys, iteration, client, digest).there)

    async def count_batch(self, edge: str, body: bytes) -> Mapping[str, Reply]:
        """An edge's sum: gives whose part is wrong, and why; nobody's: all are counted."""
        return await self.run(self._count_batch, edge, body)

    def _count_batch(self, edge: str, body: bytes) -> Mapping[str, Reply]:
        try:
            batch = decode_batch(body, self.job)
        except ValueError as error:
            self._metrics.refused.labels(self.job.name, "batch").inc()
            raise Problem("upload_refused", f"{error}") from error
        if (
            self.job.settings.mode == "buffered"
            or self.job.strategy.needs == "updates"
            or self.job.masked is not None
        ):
            raise Problem("upload_refused", "This job takes no sums: it needs each update by itself.")
        strangers = [
            m.client
            for m in batch.members
            if not self.job.rounds.tickets.valid(m.ticket, m.client, m.iteration)
        ]
        if strangers:
            raise Problem("foreign_ticket", f"{len(strangers)} members have no ticket of this job.")
        digest = batch.members[0].digest
        self._store.put_blob(batch_key(self.job.keys, batch.iteration, digest), body)
        wrong = self.desk.handle_together(batch.members, self._clock(), 0.5)
        if not wrong:
            self._metrics.uploads.labels(self.job.name, "accepted").inc(len(batch.members))
            self.aggregator.wake.set()
            log.info("job %s: a sum of %d uploads from edge %s", self.job.name, len(batch.members), edge)
        return wrong

    def certify(self, client: str, public: bytes) -> bytes:
        """See ``signing.certify``. Raises Problem key_taken, and not_found where the servers certify nothing."""
        section = self.job.secure
        if not section.malicious or section.registrar:
            raise Problem("not_found", "The servers certify no signing keys of this job.")
        try:
            return certify(self._store, self.job.keys, self.job.key, client, public)
        except KeyTaken as error:
            raise Problem("key_taken", f"{error}.") from error

    def require_ticket(self, client: str, iteration: int, ticket: bytes) -> None:
        """Raise Problem foreign_ticket unless ``client`` was admitted to ``iteration``."""
        # Nothing is stored for whoever has no ticket.
        if not self.job.rounds.tickets.valid(ticket, client, iteration):
            raise Problem("foreign_ticket")

    def _admit_body(self, client: str, iteration: int, digest: bytes) -> None:
        if not self._attempts.allow(iteration, client, digest):
            raise Problem("too_many_bodies")

    def _keep(self, request: UploadRequest, payload: bytes | None) -> None:
        """Have the body in the store, checked by all rules."""
        key = self.job.keys.body(request.iteration, request.client, request.digest)
        parts = None
        if payload is None:
            if self._store.get_blob(key) is not None:
                return
            parts = Parts(self._store, self.job.keys, request.iteration, request.client, request.digest)
            payload = parts.body()
            if digest_of(payload) != request.digest:
                raise Problem("body_missing", f"{len(payload)} bytes are here.")
        try:
            self.job.require_body(payload, request.iteration, request.examples, request.steps, request.loss)
        except (BodyRefused, ContributionRefused) as error:
            rule = error.rule if isinstance(error, ContributionRefused) else "body"
            self._metrics.refused.labels(self.job.name, rule).inc()
            raise Problem("upload_refused", str(error)) from error
        self._store.put_blob(key, payload)
        self._metrics.upload_bytes.labels(self.job.name).inc(len(payload))
        if parts is not None:
            parts.drop()

    async def run(self, function: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """What ``function`` gives, run where it may block."""
        call = partial(function, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)
