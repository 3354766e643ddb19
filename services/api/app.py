"""The API put together: routers on a FastAPI app, and the gate around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.auth import Keys
from services.api.bodies import json_response
from services.api.context import Api
from services.api.documents import Documented, Json
from services.api.entity_routes import EntityRoutes
from services.api.events import EventRoutes
from services.api.gate import Endpoint, Gate
from services.api.health import Check, HealthRoutes, Lag, level
from services.api.items import ITEMS
from services.api.probes import ProbeRoutes
from services.api.problems import Problem
from services.api.rankings import RankingRoutes
from services.api.recommendations import RecommendationRoutes
from services.api.serving import Recommends
from services.api.serving.probing import Probing
from services.api.similar import SimilarRoutes
from services.api.users import USERS

VERSION: Final = "1"
DESCRIPTION: Final = (
    "Recommendations that learn from events within seconds. Errors are application/problem+json with a"
    " stable `code`. Writes are answered once durable, with a token; `min_freshness` takes it."
)
UNMATCHED: Final = "unmatched"


@dataclass(frozen=True)
class Assembled:
    """The ASGI app to serve, and the FastAPI app inside it with its documented types."""

    asgi: ASGIApp
    fastapi: FastAPI
    documented: Documented

    def document(self) -> Json:
        """The OpenAPI document."""
        return self.documented.document(self.fastapi)


def assemble(
    api: Api,
    recommender: Recommends,
    checks: Mapping[str, Check],
    probing: Probing | None = None,
    behind_s: Lag = level,
) -> Assembled:
    """All routes over ``api`` and ``recommender``, behind the gate. ``probing``: this region's freshness; ``behind_s``:
    how far it is behind those that it follows."""
    documented = Documented()
    app = FastAPI(
        title="Headwater",
        version=VERSION,
        description=DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    events, users, items = EventRoutes(api), EntityRoutes(api, USERS), EntityRoutes(api, ITEMS)
    recommendations, rankings = RecommendationRoutes(api, recommender), RankingRoutes(api, recommender)
    similar = SimilarRoutes(api, recommender)
    health = HealthRoutes(checks, api.metrics, api.settings.region.name, behind_s)
    probing = probing or Probing(api.incarnation, api.settings.log.partitions)
    probes = ProbeRoutes(api, probing)
    for routes in (events, recommendations, rankings, similar, items, users, probes, health):
        app.include_router(routes.router(documented))
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(HTTPException, _answer_http)
    assembled = Assembled(
        _encoded_paths(
            Gate(
                app,
                _hot(events, users, items, recommendations, rankings, probes),
                Keys(key.get_secret_value() for key in api.settings.api.keys).admit,
                api.metrics,
                _route_of,
            )
        ),
        app,
        documented,
    )
    _serve_document(app, assembled)
    return assembled


def _hot(
    events: EventRoutes,
    users: EntityRoutes,
    items: EntityRoutes,
    recommendations: RecommendationRoutes,
    rankings: RankingRoutes,
    probes: ProbeRoutes,
) -> Mapping[tuple[str, str], Endpoint]:
    return {
        ("POST", "/v1/events"): events.post_event,
        ("POST", "/v1/events:batch"): events.post_batch,
        ("POST", "/v1/users:batch"): users.post_batch,
        ("POST", "/v1/items:batch"): items.post_batch,
        ("POST", "/v1/recommendations"): recommendations.post,
        ("POST", "/v1/rankings"): rankings.post,
        ("GET", "/v1/freshness"): probes.get_freshness,
    }


def _serve_document(app: FastAPI, assembled: Assembled) -> None:
    async def openapi(request: Request) -> Response:
        return json_response(assembled.document())

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)


def _encoded_paths(app: ASGIApp) -> ASGIApp:
    """Route on the path as it was sent: a slash inside an id (``%2F``) must not look like one between parts.
    Endpoints decode their ids themselves."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path")
        if raw is not None:
            path = raw.partition(b"?")[0].decode("latin-1")
            scope["path"] = path.replace("%3A", ":").replace("%3a", ":") if "%3" in path else path
        await app(scope, receive, send)

    return asgi


def _route_of(scope: Scope) -> str:
    route = scope.get("route")
    path = getattr(route, "path", None)
    return path if isinstance(path, str) else UNMATCHED


async def _answer_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return problem.response(request.scope["request_id"])


async def _answer_http(request: Request, error: Exception) -> Response:
    """The router's own refusals."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    response = Problem(code).response(request.scope["request_id"])
    if error.headers and "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
