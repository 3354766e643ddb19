"""``POST /v1/rankings``: order the given items for a user, a session, or nobody in particular."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from services.api.bodies import Body, json_response
from services.api.context import Api
from services.api.documents import Documented
from services.api.entities import rfc3339
from services.api.problems import FieldProblem, Problem
from services.api.recommendations import (
    MAX_DEADLINE_MS,
    MAX_SESSION,
    RecommendedItem,
    SessionEvent,
    check_count,
    deadline,
    item_reply,
    read_token,
)
from services.api.serving import Query, Recommends
from services.api.validation import check_features, check_text

MAX_ITEMS: Final = 1_000


class RankingWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Items to put in order. Hidden and expired ones are left out; unknown ones come last, unscored."""

    item_ids: list[str]
    user_id: str | None = None
    session_events: list[SessionEvent] = []
    context: dict[str, Any] | None = None
    explain: bool = False
    min_freshness: str | None = None
    deadline_ms: int | None = None


class Ranking(msgspec.Struct, frozen=True):
    """The items in order, best first, and what the order rests on."""

    recommendation_id: str
    region: str
    model_version: str | None
    parameters_as_of: str | None
    parameters_as_of_ms: int | None
    took_ms: float
    degraded: bool
    experiment: str | None
    items: list[RecommendedItem]


_WISH: Final = Body(Decoder(RankingWish))


def check_ranking(wish: RankingWish, api: Api) -> Iterator[FieldProblem]:
    """Everything in ``wish`` that means nothing or is out of range."""
    yield from check_text("user_id", wish.user_id)
    if not 1 <= len(wish.item_ids) <= MAX_ITEMS:
        yield FieldProblem("item_ids", f"must name 1 to {MAX_ITEMS} items")
    for n, item_id in enumerate(wish.item_ids[:MAX_ITEMS]):
        yield from check_text(f"item_ids[{n}]", item_id)
    if len(wish.session_events) > MAX_SESSION:
        yield FieldProblem("session_events", f"has more than {MAX_SESSION} entries")
    for n, event in enumerate(wish.session_events[:MAX_SESSION]):
        yield from check_text(f"session_events[{n}].item_id", event.item_id)
    yield from check_count("deadline_ms", wish.deadline_ms, MAX_DEADLINE_MS)
    yield from check_features("context", "context", wish.context, api.schema)


class RankingRoutes:
    """The endpoint."""

    def __init__(self, api: Api, recommender: Recommends) -> None:
        self._api = api
        self._recommender = recommender

    async def post(self, request: Request) -> Response:
        """Order the given items, each once, best first."""
        started = time.perf_counter()
        wish = _WISH.decode(await self._api.body(request))
        if errors := list(check_ranking(wish, self._api)):
            raise Problem("invalid_value", errors=errors)
        query = Query(
            user_id=wish.user_id,
            deadline_s=deadline(self._api, wish.deadline_ms),
            session=tuple(event.item_id for event in wish.session_events),
            explain=wish.explain,
            min_freshness=read_token(wish.min_freshness, self._api.incarnation),
        )
        picks = await self._recommender.rank(query, tuple(dict.fromkeys(wish.item_ids)))
        as_of_ms = picks.as_of.accepted_at_ms if picks.as_of is not None else None
        return json_response(
            Ranking(
                recommendation_id=self._api.event_ids.make(),
                region=self._api.settings.region.name,
                model_version=picks.model_version,
                parameters_as_of=None if as_of_ms is None else rfc3339(as_of_ms),
                parameters_as_of_ms=as_of_ms,
                took_ms=round((time.perf_counter() - started) * 1e3, 3),
                degraded=picks.degraded,
                experiment=None,
                items=[item_reply(pick, None) for pick in picks.items],
            )
        )

    def router(self, documented: Documented) -> APIRouter:
        """The route."""
        router = APIRouter(tags=["recommendations"])
        router.add_api_route(
            "/v1/rankings",
            self.post,
            methods=["POST"],
            operation_id="rank",
            openapi_extra=documented.operation(takes=RankingWish, gives=Ranking, stale=True),
        )
        return router
