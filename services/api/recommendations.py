"""``POST /v1/recommendations``: a list for a known user, a session, or nobody in particular."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from featurestore.online import EntityKey
from services.api.bodies import Body, json_response
from services.api.context import Api
from services.api.cursors import Cursors, Shown
from services.api.documents import Documented
from services.api.entities import PRIVATE, rfc3339
from services.api.ingest import Position
from services.api.problems import FieldProblem, Problem
from services.api.serving import Pick, Picks, Query, Recommends
from services.api.validation import MAX_ACTION_BYTES, check_features, check_text, check_time
from services.tokens import Token, TokenError, decode_token, log_fingerprint

DEFAULT_N: Final = 10
MAX_DEADLINE_MS: Final = 30_000
MAX_EXCLUDED: Final = 1_000
MAX_SESSION: Final = 200
MAX_CATEGORIES: Final = 50
MAX_SHOWN_ATTRIBUTES: Final = 20


class SessionEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that happened in the session, oldest first."""

    item_id: str
    action: str = "view"
    timestamp_ms: int | None = None


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a list. Without ``user_id`` and ``session_events`` it is for nobody in particular.

    ``deadline_ms``: past it, the reply is what is ready by then, ``degraded``. ``min_freshness``: the token
    of accepted events that the list must know of, waited for until the deadline.
    """

    user_id: str | None = None
    session_events: list[SessionEvent] = []
    n: int | None = None
    exclude_item_ids: list[str] = []
    exclude_seen: bool = True
    categories: list[str] = []
    diversity: float = 0.0
    min_score: float | None = None
    context: dict[str, Any] | None = None
    include_attributes: list[str] = []
    explain: bool = False
    cursor: str | None = None
    min_freshness: str | None = None
    deadline_ms: int | None = None


PER_PAGE: Final = frozenset({"n", "cursor", "min_freshness", "deadline_ms", "explain", "include_attributes"})
"""What may differ from page to page of one list."""


class RecommendedItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One place of a list. ``score`` is comparable within the list; ``source`` names the recall channel."""

    item_id: str
    score: float | None
    source: str
    reasons: list[str]
    attributes: dict[str, Any] | None = None
    stages: dict[str, float] | None = None


class NewestEventReply(msgspec.Struct, frozen=True):
    """The newest event of the user that the list knows of; ``token`` asks for nothing older."""

    event_id: str | None
    accepted_at_ms: int
    token: str


class Recommendations(msgspec.Struct, frozen=True):
    """A list and what it rests on. ``region``: whose parameters it was made with. ``parameters_as_of``: acceptance
    time of the newest event of the user's partition that is in all parameters used. ``cursor`` goes on without
    repeats; null at the end."""

    recommendation_id: str
    region: str
    model_version: str | None
    parameters_as_of: str | None
    parameters_as_of_ms: int | None
    newest_event: NewestEventReply | None
    took_ms: float
    degraded: bool
    experiment: str | None
    items: list[RecommendedItem]
    cursor: str | None
    explanation: dict[str, Any] | None = None


_WISH: Final = Body(Decoder(Wish))


def check_wish(wish: Wish, api: Api) -> Iterator[FieldProblem]:
    """Everything in ``wish`` that means nothing or is out of range."""
    settings = api.settings.api
    yield from check_text("user_id", wish.user_id)
    latest_ms = api.clock_ms() + api.rules.max_ahead_ms
    for n, event in enumerate(wish.session_events[:MAX_SESSION]):
        yield from check_text(f"session_events[{n}].item_id", event.item_id)
        yield from check_text(f"session_events[{n}].action", event.action, MAX_ACTION_BYTES)
        yield from check_time(f"session_events[{n}].timestamp_ms", event.timestamp_ms, latest_ms)
    for n, item_id in enumerate(wish.exclude_item_ids[:MAX_EXCLUDED]):
        yield from check_text(f"exclude_item_ids[{n}]", item_id)
    for n, category in enumerate(wish.categories[:MAX_CATEGORIES]):
        yield from check_text(f"categories[{n}]", category)
    for n, name in enumerate(wish.include_attributes[:MAX_SHOWN_ATTRIBUTES]):
        yield from check_text(f"include_attributes[{n}]", name)
    yield from _check_lengths(wish)
    yield from check_count("n", wish.n, settings.max_results)
    yield from check_count("deadline_ms", wish.deadline_ms, MAX_DEADLINE_MS)
    if not 0 <= wish.diversity <= 1:
        yield FieldProblem("diversity", "must lie within 0 and 1")
    yield from check_features("context", "context", wish.context, api.schema)


def _check_lengths(wish: Wish) -> Iterator[FieldProblem]:
    lists: Mapping[str, tuple[Sequence[object], int]] = {
        "session_events": (wish.session_events, MAX_SESSION),
        "exclude_item_ids": (wish.exclude_item_ids, MAX_EXCLUDED),
        "categories": (wish.categories, MAX_CATEGORIES),
        "include_attributes": (wish.include_attributes, MAX_SHOWN_ATTRIBUTES),
    }
    for name, (values, most) in lists.items():
        if len(values) > most:
            yield FieldProblem(name, f"has {len(values)} entries, more than {most}")


def check_count(path: str, value: int | None, most: int) -> Iterator[FieldProblem]:
    """The problem of a count that must lie within 1 and ``most``."""
    if value is not None and not 1 <= value <= most:
        yield FieldProblem(path, f"must be from 1 to {most}")


def _ids_in(wish: Wish) -> int:
    return len(wish.session_events) + len(wish.exclude_item_ids) + len(wish.categories)


def read_token(text: str | None, incarnation: str) -> Token | None:
    """The token of ``min_freshness``. Raises Problem invalid_token or stale_token."""
    if text is None:
        return None
    try:
        token = decode_token(text)
    except TokenError as error:
        raise Problem.field("invalid_token", "min_freshness", "is not a token of this server") from error
    if token.log != log_fingerprint(incarnation):
        raise Problem.field("stale_token", "min_freshness", "speaks of an event log that is gone")
    return token


def deadline(api: Api, deadline_ms: int | None) -> float:
    """When (on the event loop's clock) a request must be answered."""
    seconds = api.settings.api.deadline if deadline_ms is None else deadline_ms / 1_000
    return asyncio.get_running_loop().time() + seconds


class RecommendationRoutes:
    """The endpoint and its cursors."""

    def __init__(self, api: Api, recommender: Recommends) -> None:
        self._api = api
        self._recommender = recommender
        settings = api.settings.api
        self._cursors: Cursors[Wish] = Cursors(
            settings.cursor_ttl, settings.max_cursors, time.monotonic, _ids_in
        )
        api.metrics.gauge(
            "headwater_api_cursors", "Recommendation cursors kept.", lambda: float(len(self._cursors))
        )

    async def post(self, request: Request) -> Response:
        """Recommend items. Fewer than ``n`` are legal; padding says ``popular_fallback``."""
        started = time.perf_counter()
        wish = _WISH.decode(await self._api.body(request))
        if errors := list(check_wish(wish, self._api)):
            raise Problem("invalid_value", errors=errors)
        before: Shown[Wish] | None = None
        if wish.cursor is not None:
            before = self._cursors.find(wish.cursor)
            wish = continued(wish, before.request)
        picks = await self._recommender.recommend(self._query(wish, before))
        shown = await self._attributes(wish, picks)
        page = [pick.item_id for pick in picks.items]
        cursor = self._cursors.open(wish, page, before) if picks.more else None
        self._count(picks)
        return json_response(self._reply(wish, picks, shown, cursor, started))

    def _query(self, wish: Wish, before: Shown[Wish] | None) -> Query:
        shown = frozenset(before.items()) if before else frozenset()
        return Query(
            user_id=wish.user_id,
            deadline_s=deadline(self._api, wish.deadline_ms),
            session=tuple(event.item_id for event in wish.session_events),
            n=wish.n if wish.n is not None else min(DEFAULT_N, self._api.settings.api.max_results),
            excluded=shown.union(wish.exclude_item_ids),
            exclude_seen=wish.exclude_seen,
            categories=tuple(wish.categories),
            diversity=wish.diversity,
            min_score=wish.min_score,
            explain=wish.explain,
            min_freshness=read_token(wish.min_freshness, self._api.incarnation),
        )

    async def _attributes(self, wish: Wish, picks: Picks) -> Mapping[str, dict[str, Any]] | None:
        """The attributes asked for, by item; None where the store cannot be reached."""
        names = [name for name in wish.include_attributes if name not in PRIVATE and "@" not in name]
        if not names or not picks.items:
            return {}
        keys = [EntityKey("item", pick.item_id) for pick in picks.items]
        try:
            rows = await self._api.store.read(keys, names)
        except Problem:
            return None
        return {
            key.id: {
                name: cell.value
                for name, cell in row.items()
                if cell.value is not None and not isinstance(cell.value, bytes)
            }
            for key, row in zip(keys, rows, strict=True)
        }

    def _count(self, picks: Picks) -> None:
        metrics = self._api.metrics
        metrics.recommendations.labels(picks.audience, str(picks.degraded).lower()).inc()
        if picks.as_of is not None:
            age_ms = self._api.clock_ms() - picks.as_of.accepted_at_ms
            metrics.parameters_age.observe(max(age_ms, 0) / 1_000)

    def _reply(
        self,
        wish: Wish,
        picks: Picks,
        shown: Mapping[str, dict[str, Any]] | None,
        cursor: str | None,
        started: float,
    ) -> Recommendations:
        newest = picks.newest
        as_of_ms = picks.as_of.accepted_at_ms if picks.as_of is not None else None
        return Recommendations(
            recommendation_id=self._api.event_ids.make(),
            region=self._api.settings.region.name,
            model_version=picks.model_version,
            parameters_as_of=None if as_of_ms is None else rfc3339(as_of_ms),
            parameters_as_of_ms=as_of_ms,
            newest_event=None
            if newest is None
            else NewestEventReply(
                newest.event_id,
                newest.accepted_at_ms,
                self._api.token([Position(newest.partition, newest.offset)]),
            ),
            took_ms=round((time.perf_counter() - started) * 1e3, 3),
            degraded=picks.degraded or shown is None,
            experiment=None,
            items=[item_reply(pick, (shown or {}).get(pick.item_id)) for pick in picks.items],
            cursor=cursor,
            explanation=dict(picks.explanation) if wish.explain else None,
        )

    def router(self, documented: Documented) -> APIRouter:
        """The route."""
        router = APIRouter(tags=["recommendations"])
        router.add_api_route(
            "/v1/recommendations",
            self.post,
            methods=["POST"],
            operation_id="recommend",
            openapi_extra=documented.operation(takes=Wish, gives=Recommendations, stale=True),
        )
        return router


def item_reply(pick: Pick, attributes: dict[str, Any] | None) -> RecommendedItem:
    """One place of a list, as a client reads it."""
    return RecommendedItem(
        pick.item_id,
        pick.score,
        pick.source,
        list(pick.reasons),
        attributes,
        None if pick.stages is None else dict(pick.stages),
    )


def continued(wish: Wish, first: Wish) -> Wish:
    """``wish`` as a further page of the list that ``first`` began. Raises Problem invalid_value where it asks
    for another list."""
    changes: dict[str, Any] = {}
    errors = []
    for field in msgspec.structs.fields(Wish):
        value, begun = getattr(wish, field.name), getattr(first, field.name)
        unset = value == (field.default_factory() if field.default is msgspec.NODEFAULT else field.default)
        if unset and field.name not in ("cursor", "explain"):
            changes[field.name] = begun
        elif field.name not in PER_PAGE and value != begun:
            errors.append(FieldProblem(field.name, "must be as when the list began, or absent"))
    if errors:
        raise Problem("invalid_value", errors=errors)
    return msgspec.structs.replace(wish, **{**changes, "min_freshness": wish.min_freshness})
