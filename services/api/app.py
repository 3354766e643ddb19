"""The API put together: routers on a FastAPI app, and the gate around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.assembled import Assembled, problem_app, serving_document
from services.api.auth import Keys
from services.api.context import Api
from services.api.documents import Documented
from services.api.entity_routes import EntityRoutes
from services.api.events import EventRoutes
from services.api.gate import Endpoint, Gate
from services.api.health import Check, HealthRoutes, Lag, level
from services.api.items import ITEMS
from services.api.probes import ProbeRoutes
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
    app = problem_app("Headwater", VERSION, DESCRIPTION)
    events, users, items = EventRoutes(api), EntityRoutes(api, USERS), EntityRoutes(api, ITEMS)
    recommendations, rankings = RecommendationRoutes(api, recommender), RankingRoutes(api, recommender)
    similar = SimilarRoutes(api, recommender)
    health = HealthRoutes(checks, api.metrics, api.settings.region.name, behind_s)
    probing = probing or Probing(api.incarnation, api.settings.log.partitions)
    probes = ProbeRoutes(api, probing)
    for routes in (events, recommendations, rankings, similar, items, users, probes, health):
        app.include_router(routes.router(documented))
    gate = Gate(
        app,
        _hot(events, users, items, recommendations, rankings, probes),
        Keys(key.get_secret_value() for key in api.settings.api.keys).admit,
        api.metrics,
        _route_of,
    )
    return serving_document(app, documented, _encoded_paths(gate))


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
