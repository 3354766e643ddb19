"""The guest's REST: ``POST /v1/predictions`` and health, as conventions for all of Headwater's REST have it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from federated.psi.ids import IdRefused, IdRule
from services.api.assembled import Assembled, problem_app, serving_document
from services.api.bodies import Body, json_response
from services.api.documents import Documented
from services.api.gate import Gate
from services.api.health import RETRY_AFTER_S, Dependency
from services.api.problems import FieldProblem, Problem
from services.federation.requests import read_within
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.audited import answer_audited
from services.vertical.serving.bodies import Live, Prediction, PredictionRequest, Predictions, Ready
from services.vertical.serving.callers import Callers
from services.vertical.serving.guest import NOT_THERE, Answer, ServingGuest, off_loop
from services.vertical.serving.metrics import ServingMetrics
from services.vertical.serving.tokens import value_of

MOST_BODY: Final = 4 * 2**20
BODY_S: Final = 10.0
MOST_AT_ONCE: Final = 64
"""Requests under way, those whose bodies are still arriving among them; more are told to come again."""
VERSION: Final = "1"
DESCRIPTION: Final = (
    "Joint inference: the guest asks every host for its share of each score within a deadline; past it, or for ids that"
    " a host does not know, the guest's part of the model answers alone and says `degraded`. Errors are"
    " application/problem+json with a stable `code`.\n\n"
    "What an answer gives away: `not_found` says that the guest has no such row. `degraded` of a row while all hosts"
    " answered says that a host has no such row: whoever has a key here can ask who is a customer there."
    " Hosts bound rows a minute (`serve.most_rows_a_minute`), may answer for the rows of the training alone"
    ' (`serve.rows = "joint"`), and, like the guest, write down each id that is asked for.'
)
_PATH: Final = "/v1/predictions"


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one endpoint. ``job``: the kind of the model. ``deadline_s``: for hosts, at most."""

    job: str
    rule: IdRule
    deadline_s: float
    most_ids: int


class PredictionRoutes:
    """The routes of one guest."""

    def __init__(
        self, guest: ServingGuest, audit: AuditLog, metrics: ServingMetrics, callers: Callers, terms: Terms
    ) -> None:
        self._guest, self._audit, self._metrics = guest, audit, metrics
        self._callers, self._terms = callers, terms
        self._body: Body[PredictionRequest] = Body(msgspec.json.Decoder(PredictionRequest))
        self._under_way = 0
        metrics.reached(guest.reach, lambda name: float(not guest.reach[name].trouble(guest.loaded.run)))
        metrics.gauge(
            "headwater_vertical_audit_bytes", "Size of the audit log, older lines included.", audit.size
        )
        metrics.gauge(
            "headwater_vertical_under_way", "Requests that are being answered.", lambda: self._under_way
        )

    async def predict(self, request: Request) -> Response:
        """Scores of ids, by all parties or, past the deadline, by the guest's part alone."""
        began_s = time.perf_counter()
        if self._under_way >= MOST_AT_ONCE:
            raise Problem("overloaded", retry_after_s=1.0)
        self._under_way += 1
        try:
            ask = self._body.decode(await read_within(request, MOST_BODY, BODY_S))
            who, request_id = self._callers.name(request.scope["headers"]), request.scope["request_id"]
            answer = await self._answer(ask, who, request_id)
        finally:
            self._under_way -= 1
        return json_response(
            Predictions(
                request_id,
                self._terms.job,
                answer.run,
                bool(answer.degraded.any()),
                round(1_000 * (time.perf_counter() - began_s), 2),
                dict(answer.hosts),  # type: ignore[arg-type]
                _rows(ask.ids, answer),
            )
        )

    async def _answer(self, ask: PredictionRequest, who: str, request_id: str) -> Answer:
        """The answer, once it is written down. Raises Problem."""
        count = len(ask.ids)
        self._check(ask)
        values, problems = await off_loop(count, lambda: _values(ask.ids, self._terms.rule))
        if problems:
            with _written_down():
                self._audit.refuse(who, count, "refused", request_id=request_id)
            raise Problem("invalid_value", errors=problems)
        deadline_s = min(self._terms.deadline_s, (ask.deadline_ms or math.inf) / 1_000)
        with _written_down():
            answer = await answer_audited(self._guest, self._audit, who, values, deadline_s, request_id)
        self._count(answer)
        return answer

    def _check(self, ask: PredictionRequest) -> None:
        if not ask.ids:
            raise Problem.field("invalid_value", "ids", "must not be empty")
        if len(ask.ids) > self._terms.most_ids:
            raise Problem("body_too_large", f"At most {self._terms.most_ids} ids are taken at once.")
        if ask.deadline_ms is not None and ask.deadline_ms <= 0:
            raise Problem.field("invalid_value", "deadline_ms", "must be above 0")

    def _count(self, answer: Answer) -> None:
        alone, here = int(answer.degraded.sum()), int(answer.found.sum())
        reasons = set(answer.hosts.values()) - {"answered", "not-asked"} or {NOT_THERE}
        self._metrics.answered(here - alone, alone, len(answer.found) - here, reasons if alone else ())

    async def live(self, request: Request) -> Response:
        """Whether the process answers at all."""
        return json_response(Live())

    async def ready(self, request: Request) -> Response:
        """Whether hosts are reached and have this model. A host that is not reached makes answers worse, not wrong, so
        it is told with 200: taking this guest out of service would make them worse still."""
        run = self._guest.loaded.run
        troubles = {name: reach.trouble(run) for name, reach in self._guest.reach.items()}
        looked = all(reach.looked for reach in self._guest.reach.values())
        dependencies = {name: Dependency(not trouble, trouble) for name, trouble in troubles.items()}
        if not looked:
            response = json_response(Ready("not_ready", self._terms.job, run, dependencies), 503)
            response.headers["Retry-After"] = RETRY_AFTER_S
            return response
        status = "degraded" if any(troubles.values()) else "ready"
        return json_response(Ready(status, self._terms.job, run, dependencies))  # type: ignore[arg-type]

    async def metrics(self, request: Request) -> Response:
        """All metrics in Prometheus' text format."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def router(self, documented: Documented) -> APIRouter:
        """All routes."""
        router = APIRouter()
        asked = documented.operation(takes=PredictionRequest, gives=Predictions)
        asked["responses"]["408"] = asked["responses"]["413"] | {
            "description": "The body did not arrive in time"
        }
        router.add_api_route(
            _PATH,
            self.predict,
            methods=["POST"],
            operation_id="predict",
            openapi_extra=asked,
            tags=["predictions"],
        )
        for path, endpoint, name, gives, statuses in (
            ("/health/live", self.live, "live", Live, ("200",)),
            ("/health/ready", self.ready, "ready", Ready, ("200", "503")),
        ):
            reply = {"content": {"application/json": {"schema": documented.ref(gives)}}}
            told = {"responses": {status: {"description": gives.__name__, **reply} for status in statuses}}
            router.add_api_route(
                path, endpoint, methods=["GET"], operation_id=name, openapi_extra=told, tags=["operation"]
            )
        router.add_api_route(
            "/metrics", self.metrics, methods=["GET"], operation_id="metrics", tags=["operation"]
        )
        return router


@contextmanager
def _written_down() -> Iterator[None]:
    """What cannot be written down is not answered."""
    try:
        yield
    except OSError as error:
        raise Problem(
            "unavailable", "The audit log cannot be written, so nothing is answered.", retry_after_s=5.0
        ) from error


def _values(ids: Sequence[str], rule: IdRule) -> tuple[list[bytes], list[FieldProblem]]:
    """The normalised forms of ``ids``, and what is wrong with those that have none."""
    values: list[bytes] = []
    problems: list[FieldProblem] = []
    for place, text in enumerate(ids):
        try:
            values.append(value_of(text, rule))
        except IdRefused as error:
            problems.append(FieldProblem(f"ids[{place}]", str(error)))
    return values, problems


def _rows(ids: Sequence[str], answer: Answer) -> list[Prediction]:
    rows: list[Prediction] = []
    single = answer.scores.ndim == 1
    places = zip(ids, answer.found.tolist(), answer.degraded.tolist(), answer.scores, strict=True)
    for one, found, degraded, score in places:
        if not found:
            rows.append(Prediction(one, "not_found"))
        elif single:
            rows.append(Prediction(one, "present", score=float(score), degraded=degraded))
        else:
            rows.append(Prediction(one, "present", scores=np.ravel(score).tolist(), degraded=degraded))
    return rows


def assemble(routes: PredictionRoutes, callers: Callers, metrics: ServingMetrics) -> Assembled:
    """All routes behind the gate: whoever has a key of scope read may ask."""
    documented = Documented()
    app = problem_app("Headwater joint inference", VERSION, DESCRIPTION)
    app.include_router(routes.router(documented))
    known = {_PATH, "/health/live", "/health/ready", "/metrics", "/openapi.json"}

    def admit(scope: Scope) -> None:
        if scope["path"].startswith("/v1/"):
            callers.check(scope["headers"])

    def route_of(scope: Scope) -> str:
        return scope["path"] if scope["path"] in known else "other"

    return serving_document(app, documented, Gate(app, {}, admit, metrics, route_of))
