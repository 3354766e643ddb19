"""The routes of a federation server: for devices, edges and operators."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from federated.job import FederatedJob, load_job
from federated.job_sections import JobRefused
from federated.rounds import (
    Accepted,
    Closed,
    JobUnknown,
    PollRequest,
    Refused,
    Reply,
    StartRequest,
    StoreUnavailable,
    UploadRequest,
)
from federated.wire import decode_poll, decode_start, decode_upload, encode_reply
from services.api.bodies import json_response
from services.api.gate import Gate
from services.api.problems import Problem
from services.federation.access import Access, bearer
from services.federation.assembly import require_fits
from services.federation.enrolment import enrol
from services.federation.figures import Figures
from services.federation.hosted import HostedJob
from services.federation.metrics import FederationMetrics
from services.federation.outbox import Pushed
from services.federation.registry import JobConflict, Member
from services.federation.requests import (
    client_of,
    digest_in,
    framed,
    frames_refused,
    number_in,
    offset_in,
    read_within,
    ticket_in,
)

_JOB: Final = "/v1/fl/jobs/{job}"
CLIENT: Final = "/v1/fl/jobs/{job}/clients/{client}"
_JOB_BYTES: Final = 2**18
_SMALL: Final = 256
_MOST_BATCH: Final = 2**30


class Devices(Protocol):
    """What serves the devices of a job: a server's host, or an edge's relay."""

    job: HostedJob

    async def start(self, request: StartRequest, token: str) -> Reply: ...

    async def model(self, version: int, base: int | None) -> bytes: ...

    async def poll(self, request: PollRequest) -> Reply: ...

    async def upload(self, request: UploadRequest, payload: bytes | None) -> Reply: ...

    async def add_part(
        self, client: str, iteration: int, ticket: bytes, digest: bytes, offset: int, body: bytes
    ) -> int: ...

    async def parts_there(self, client: str, iteration: int, ticket: bytes, digest: bytes) -> int: ...


class CountsSums(Devices, Protocol):
    """A server's host, which also takes the sums of edges."""

    async def count_batch(self, edge: str, body: bytes) -> Mapping[str, Reply]: ...


class Jobs(Protocol):
    """What operators' routes need of the process. Methods may raise JobUnknown and StoreUnavailable."""

    async def host(self, name: str) -> CountsSums: ...

    async def create(self, job: FederatedJob) -> bool: ...

    async def definition(self, name: str) -> str: ...

    async def states(self) -> list[dict[str, Any]]: ...

    async def log(self, name: str) -> list[tuple[Closed, Figures | None, Pushed | None]]: ...

    async def epsilons(self, name: str, ended: Sequence[Closed]) -> list[float | None]: ...

    async def change(self, name: str, what: Literal["stop", "resume"]) -> dict[str, Any]: ...

    async def members(self) -> list[Member]: ...


class ClientAccess(Protocol):
    """Who may speak for a client, and (at the gate) who may ask at all. Both raise Problem."""

    def admit(self, scope: Scope) -> None: ...

    def client(self, request: Request, job: HostedJob, client: str) -> None: ...


class DeviceRoutes:
    """Routes for devices. ``host`` finds who serves a job; ``clock`` is the time of replies; a body has at most
    ``max_body`` bytes and ``body_s`` seconds."""

    def __init__(
        self,
        host: Callable[[str], Any],
        access: ClientAccess,
        clock: Callable[[], float],
        max_body: int,
        body_s: float,
    ) -> None:
        self._host = host
        self._access = access
        self._clock = clock
        self._max_body = max_body
        self._body_s = body_s

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(f"{CLIENT}/start", self.start, methods=["POST"]),
            Route(f"{CLIENT}/models/{{version:int}}", self.model, methods=["GET"]),
            Route(f"{CLIENT}/poll", self.poll, methods=["POST"]),
            Route(f"{CLIENT}/uploads", self.upload, methods=["POST"]),
            Route(f"{CLIENT}/uploads/{{digest}}", self.part_there, methods=["HEAD"]),
            Route(f"{CLIENT}/uploads/{{digest}}", self.part, methods=["PUT"]),
        ]

    async def start(self, request: Request) -> Response:
        """A client asks to take part: StartFrame in; AdmittedFrame, NotYetFrame, RefusedFrame or FinishedFrame out."""
        host, client = await self._client(request)
        body = await read_within(request, _SMALL, self._body_s)
        with frames_refused():
            asked = decode_start(body, client)
        return framed(encode_reply(await host.start(asked, bearer(request)), self._clock()))

    async def model(self, request: Request) -> Response:
        """The model of a version, as a difference from ``?held=VERSION`` where that is shorter: ModelFrame."""
        host, _ = await self._client(request)
        return framed(await host.model(request.path_params["version"], number_in(request, "held")))

    async def poll(self, request: Request) -> Response:
        """PollFrame in; StandingFrame or FinishedFrame out."""
        host, client = await self._client(request)
        body = await read_within(request, _SMALL, self._body_s)
        with frames_refused():
            asked = decode_poll(body, client)
        return framed(encode_reply(await host.poll(asked), self._clock()))

    async def upload(self, request: Request) -> Response:
        """An update: UploadFrame, or PartsFrame for one that is here already; AcceptedFrame, NotYetFrame or
        RefusedFrame out."""
        host, client = await self._client(request)
        most = min(host.job.most_payload + _SMALL, self._max_body)
        body = await read_within(request, most, self._body_s)
        with frames_refused():
            asked, payload = decode_upload(body, client)
        return framed(encode_reply(await host.upload(asked, payload), self._clock()))

    async def part_there(self, request: Request) -> Response:
        """How much of a body is here: ``Upload-Offset``."""
        host, client = await self._client(request)
        there = await host.parts_there(client, *ticket_in(request), digest_in(request))
        return Response(status_code=204, headers={"Upload-Offset": str(there)})

    async def part(self, request: Request) -> Response:
        """A part of a body, from ``Upload-Offset`` on; the reply says how much is here then."""
        host, client = await self._client(request)
        offset, digest, (iteration, ticket) = offset_in(request), digest_in(request), ticket_in(request)
        body = await read_within(request, min(host.job.part_bytes, self._max_body), self._body_s)
        there = await host.add_part(client, iteration, ticket, digest, offset, body)
        return Response(status_code=204, headers={"Upload-Offset": str(there)})

    async def _client(self, request: Request) -> tuple[Devices, str]:
        host, client = await self._host(request.path_params["job"]), client_of(request)
        self._access.client(request, host.job, client)
        return host, client


class OperatorRoutes:
    """Routes for operators, the job's file for everybody, and (``sums``) for edges."""

    def __init__(
        self,
        jobs: Jobs,
        access: Access,
        clock: Callable[[], float],
        max_body: int,
        body_s: float,
        *,
        sums: bool,
    ) -> None:
        self._jobs = jobs
        self._access = access
        self._clock = clock
        self._max_body = max_body
        self._body_s = body_s
        self._sums = sums

    def routes(self) -> list[Route]:
        """All of them."""
        routes = [
            Route("/v1/fl/jobs", self.list_jobs, methods=["GET"]),
            Route("/v1/fl/jobs", self.create_job, methods=["POST"]),
            Route(f"{_JOB}/definition", self.definition, methods=["GET"]),
            Route(f"{_JOB}/rounds", self.rounds, methods=["GET"]),
            Route(f"{_JOB}/tokens", self.token, methods=["POST"]),
            Route(f"{_JOB}/stop", self.stop, methods=["POST"]),
            Route(f"{_JOB}/resume", self.resume, methods=["POST"]),
            Route("/v1/fl/servers", self.servers, methods=["GET"]),
        ]
        return [*routes, Route(f"{_JOB}/sums", self.sum, methods=["POST"])] if self._sums else routes

    async def sum(self, request: Request) -> Response:
        """An edge's sum: ``{"wrong": {client: [what, why]}}``; nobody's: all are counted."""
        host = await self._jobs.host(request.path_params["job"])
        edge = self._access.edge(request, host.job)
        size = 8 * host.job.layout.size * len(host.job.vectors) + 2**20
        body = await read_within(request, min(size, _MOST_BATCH), self._body_s)
        wrong = await host.count_batch(edge, body)
        return json_response({"wrong": {client: _told(reply) for client, reply in wrong.items()}})

    async def definition(self, request: Request) -> Response:
        """The job's file (TOML), as devices and edges need it."""
        name = request.path_params["job"]
        self._access.reader(request, (await self._jobs.host(name)).job)
        text = await self._jobs.definition(name)
        return PlainTextResponse(text, media_type="application/toml")

    async def list_jobs(self, request: Request) -> Response:
        """All jobs and where they stand."""
        return json_response({"jobs": await self._jobs.states()})

    async def create_job(self, request: Request) -> Response:
        """Begin the job of a job's file (TOML). The same file again changes nothing."""
        body = await read_within(request, _JOB_BYTES, self._body_s)
        try:
            job = load_job(tomllib.loads(body.decode()))
            require_fits(job, self._max_body)
            created = await self._jobs.create(job)
        except JobConflict as error:
            raise Problem("job_conflict", str(error)) from error
        except (JobRefused, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Problem("invalid_value", str(error)) from error
        return json_response({"job": job.job.name, "created": created}, 201 if created else 200)

    async def rounds(self, request: Request) -> Response:
        """How each iteration ended, and what came of the valid ones."""
        ended = await self._jobs.log(request.path_params["job"])
        spent = await self._jobs.epsilons(request.path_params["job"], [closed for closed, _, _ in ended])
        rows = [
            {
                **asdict(closed),
                "why": closed.why.value,
                **({} if figures is None else asdict(figures)),
                **({} if pushed is None else {"pushed": asdict(pushed)}),
                **({} if epsilon is None else {"epsilon": epsilon}),
            }
            for (closed, figures, pushed), epsilon in zip(ended, spent, strict=True)
        ]
        return json_response({"rounds": rows})

    async def token(self, request: Request) -> Response:
        """A token for ``?client=ID`` or ``?edge=NAME``, for ``?valid=SECONDS`` (0 or nothing: for ever)."""
        host = await self._jobs.host(request.path_params["job"])
        role: Literal["client", "edge"] = "edge" if "edge" in request.query_params else "client"
        valid = number_in(request, "valid") or 0
        ends = int(self._clock()) + valid if valid else 0
        try:
            token = enrol(host.job.name, host.job.key, request.query_params.get(role, ""), role, ends)
        except ValueError as error:
            raise Problem.field("invalid_value", role, str(error)) from error
        return json_response({"token": token, "ends": ends})

    async def stop(self, request: Request) -> Response:
        """Stop a job: the iteration that clients are in is invalid."""
        return json_response(await self._jobs.change(request.path_params["job"], "stop"))

    async def resume(self, request: Request) -> Response:
        """Let a stopped job go on."""
        return json_response(await self._jobs.change(request.path_params["job"], "resume"))

    async def servers(self, request: Request) -> Response:
        """The servers that live."""
        return json_response({"servers": [asdict(member) for member in await self._jobs.members()]})


class HealthRoutes:
    """``/health/live``, ``/health/ready`` and ``/metrics``. ``faults`` says what is not well, by name."""

    def __init__(self, faults: Callable[[], Any], metrics: FederationMetrics) -> None:
        self._faults = faults
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/health/live", self.live, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def live(self, request: Request) -> Response:
        """Whether the process answers at all."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Whether what it depends on is reached (503 if not)."""
        faults: Mapping[str, str] = await self._faults()
        status = "not_ready" if faults else "ready"
        return json_response({"status": status, "faults": faults}, 503 if faults else 200)

    async def metrics(self, request: Request) -> Response:
        """All metrics in Prometheus' text format."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def assemble(routes: list[Route], access: ClientAccess, metrics: FederationMetrics) -> ASGIApp:
    """``routes`` with problems answered as such, behind the gate."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            Problem: _problem,
            HTTPException: _http,
            JobUnknown: _unknown,
            StoreUnavailable: _unavailable,
        },
    )
    app.router.redirect_slashes = False
    return _encoded_paths(Gate(app, {}, access.admit, metrics, _route_of))


def _told(reply: Reply) -> list[str]:
    """Why an edge's member is not counted now: ``counted`` before, or the refusal's code, and the reason."""
    if isinstance(reply, Accepted):
        return ["counted", ""]
    if isinstance(reply, Refused):
        return ["counted" if reply.code == "different_body" else reply.code, reply.reason]
    return ["later", type(reply).__name__]


async def _problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    response = problem.response(request.scope["request_id"])
    if problem.kind.status in (408, 413):
        # What is still on its way is not read: the connection ends with the reply.
        response.headers["Connection"] = "close"
    return response


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return Problem(code).response(request.scope["request_id"])


async def _unknown(request: Request, error: Exception) -> Response:
    return Problem("unknown_job").response(request.scope["request_id"])


async def _unavailable(request: Request, error: Exception) -> Response:
    return Problem("unavailable", retry_after_s=1.0).response(request.scope["request_id"])


def _route_of(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "unmatched"


def _encoded_paths(app: ASGIApp) -> ASGIApp:
    """Route on the path as it was sent: a slash inside an id (``%2F``) must not look like one between parts."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path")
        if raw is not None:
            scope["path"] = raw.partition(b"?")[0].decode("latin-1")
        await app(scope, receive, send)

    return asgi
