"""The guest's REST: ``POST /v1/predictions`` and health, as conventions for all of Headwater's REST have it."""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any, Final

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from federated.psi.ids import IdRefused
from services.api.auth import Keys, presented
from services.api.bodies import Body, json_response, read_body
from services.api.gate import Gate
from services.api.problems import FieldProblem, Problem
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.guest import Answer, ServingGuest

MOST_BODY: Final = 4 * 2**20
MOST_AT_ONCE: Final = 64
"""Requests under way; more are told to come again."""
OPEN: Final = "anybody on this machine"


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    """``ids``: of the guest's table. ``deadline_ms``: at most, and without it, that of the settings."""

    ids: list[str]
    deadline_ms: int | None = None


class Metrics:
    """Counters in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headwater_vertical_requests",
            "Requests answered, by method, route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "headwater_vertical_request_seconds",
            "Time from a request's head to its last reply byte.",
            ("route",),
            registry=self.registry,
        )
        self.rows = Counter(
            "headwater_vertical_rows", "Rows answered, by how.", ("how",), registry=self.registry
        )
        self.hosts = Counter(
            "headwater_vertical_host_answers",
            "Questions to hosts, by what became of them.",
            ("host", "outcome"),
            registry=self.registry,
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class Predictions:
    """The routes of one guest."""

    def __init__(
        self,
        guest: ServingGuest,
        audit: AuditLog,
        metrics: Metrics,
        *,
        job: str,
        run: str,
        deadline_s: float,
        most_ids: int,
    ) -> None:
        self._guest, self._audit, self._metrics = guest, audit, metrics
        self._model = {"job": job, "run": run}
        self._deadline_s, self._most_ids = deadline_s, most_ids
        self._body: Body[Ask] = Body(msgspec.json.Decoder(Ask))
        self._under_way = 0

    async def predict(self, request: Request) -> Response:
        """Scores of ids, by all parties or, past the deadline, by the guest's part alone."""
        began_s = time.perf_counter()
        ask = self._body.decode(await read_body(request, MOST_BODY))
        self._check(ask)
        who = _who(request)
        digest = self._audit.digest(one.encode() for one in ask.ids)
        if self._under_way >= MOST_AT_ONCE:
            self._audit.write(who, len(ask.ids), digest, "overloaded")
            raise Problem("overloaded", retry_after_s=1.0)
        deadline_s = min(self._deadline_s, (ask.deadline_ms or math.inf) / 1_000)
        request_id: str = request.scope["request_id"]
        self._under_way += 1
        try:
            answer = await self._guest.answer(ask.ids, deadline_s, request_id)
        except IdRefused as error:
            self._audit.write(who, len(ask.ids), digest, "refused")
            raise Problem("invalid_value", errors=(FieldProblem("ids", f"an id {error}"),)) from error
        finally:
            self._under_way -= 1
        degraded = bool(answer.degraded.any())
        self._audit.write(
            who, len(ask.ids), digest, "degraded" if degraded else "answered", request_id=request_id
        )
        self._count(answer)
        return json_response(
            {
                "request_id": request_id,
                "model": self._model,
                "degraded": degraded,
                "took_ms": round(1_000 * (time.perf_counter() - began_s), 2),
                "hosts": dict(answer.hosts),
                "predictions": _rows(ask.ids, answer),
            }
        )

    def _check(self, ask: Ask) -> None:
        if not ask.ids:
            raise Problem.field("invalid_value", "ids", "must not be empty")
        if len(ask.ids) > self._most_ids:
            raise Problem("body_too_large", f"At most {self._most_ids} ids are taken at once.")
        if ask.deadline_ms is not None and ask.deadline_ms <= 0:
            raise Problem.field("invalid_value", "deadline_ms", "must be above 0")

    def _count(self, answer: Answer) -> None:
        alone, here = int(answer.degraded.sum()), int(answer.found.sum())
        self._metrics.rows.labels("joint").inc(here - alone)
        self._metrics.rows.labels("degraded").inc(alone)
        self._metrics.rows.labels("not_found").inc(len(answer.found) - here)
        for name, outcome in answer.hosts.items():
            self._metrics.hosts.labels(name, outcome).inc()

    async def live(self, request: Request) -> Response:
        """The process is there."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The model is loaded, since it is before anything is listened to; hosts may be late, answers then degrade."""
        return json_response({"status": "ok", "model": self._model})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4")


def _rows(ids: list[str], answer: Answer) -> list[dict[str, Any]]:
    single = answer.scores.ndim == 1
    rows: list[dict[str, Any]] = []
    for place, one in enumerate(ids):
        row: dict[str, Any] = {"id": one, "status": "present" if answer.found[place] else "not_found"}
        if answer.found[place]:
            score = answer.scores[place]
            row |= (
                {"score": float(score)} if single else {"scores": [float(value) for value in np.ravel(score)]}
            )
            row["degraded"] = bool(answer.degraded[place])
        rows.append(row)
    return rows


def _who(request: Request) -> str:
    """The beginning of the key's digest, as the settings have it; the key itself is never written."""
    key = next(presented(request.scope["headers"]), None)
    return OPEN if key is None else f"key {hashlib.sha256(key).hexdigest()[:12]}"


def predictions_app(routes: Predictions, keys: Keys, metrics: Metrics) -> ASGIApp:
    """The whole ASGI application. ``keys``: whoever has one of scope read may ask."""
    app = Starlette(
        routes=[
            Route("/v1/predictions", routes.predict, methods=["POST"]),
            Route("/health/live", routes.live, methods=["GET"]),
            Route("/health/ready", routes.ready, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_problem, Problem: _problem},
    )

    def admit(scope: Scope) -> None:
        if scope["path"].startswith("/v1/"):
            keys.check(scope["headers"], "read")

    known = {"/v1/predictions", "/health/live", "/health/ready", "/metrics"}
    return Gate(app, {}, admit, metrics, lambda scope: scope["path"] if scope["path"] in known else "other")


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response(request.scope["request_id"])


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    if code is None:
        return PlainTextResponse("", error.status_code)
    response = Problem(code).response(request.scope.get("request_id", ""))
    response.headers.update(error.headers or {})
    return response
