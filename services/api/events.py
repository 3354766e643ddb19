"""``POST /v1/events`` and ``POST /v1/events:batch``: take events, answer once they are durable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from services.api.bodies import Body, json_response
from services.api.context import Api
from services.api.documents import Documented
from services.api.ingest import Position
from services.api.problems import FieldProblem, Problem
from services.api.rows import RowReader
from services.api.validation import check_event, plainly_good
from services.events import Event
from services.messagelog.contract import Message


class AcceptedEvent(msgspec.Struct, frozen=True, tag_field="status", tag="accepted"):
    """The event is durable. ``token`` asks for lists that know it, as ``min_freshness``."""

    event_id: str
    accepted_at_ms: int
    token: str


class RefusedEvent(msgspec.Struct, frozen=True, tag_field="status", tag="refused"):
    """The row was not taken, and why. The other rows of the batch are unaffected."""

    code: str
    errors: list[FieldProblem]


Result = AcceptedEvent | RefusedEvent


class EventBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several events, of any kinds."""

    events: list[Event]


class BatchResults(msgspec.Struct, frozen=True):
    """One result per row, order kept. ``token`` covers all accepted rows (null if there is none)."""

    accepted: int
    refused: int
    token: str | None
    results: list[Result]


def _rows_of(batch: EventBatch) -> list[Event]:
    return batch.events


def _itself(event: Event) -> Event:
    return event


_ONE: Final[Body[Event]] = Body(Decoder(Event))
_ROWS: Final = RowReader("events", Body(Decoder(EventBatch)), _ONE, _rows_of, _itself)


class EventIntake:
    """Judges events, appends the good ones, and says what became of each."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._counts = {
            outcome: api.metrics.events.labels(outcome)
            for outcome in ("accepted", "invalid_request", "invalid_value", "invalid_json")
        }

    def identified(self, event: Event) -> tuple[Event, str]:
        """The event with its id; one that came without gets one, so that it is counted once too."""
        if event.event_id is not None:
            return event, event.event_id
        made = self._api.event_ids.make()
        return msgspec.structs.replace(event, event_id=made), made

    async def take_one(self, event: Event) -> AcceptedEvent:
        """Append one event. Raises Problem where it cannot be taken."""
        now_ms = self._api.clock_ms()
        if problem := self.judge(event, now_ms):
            self._count(problem.code, 1)
            raise problem
        event, event_id = self.identified(event)
        position = (await self._api.ingest.append([self._api.ingest.message(event, now_ms)]))[0]
        self._count("accepted", 1)
        return AcceptedEvent(event_id, now_ms, self._api.token([position]))

    def judge(self, event: Event, now_ms: int) -> Problem | None:
        """Why ``event`` cannot be taken, None if it can."""
        if plainly_good(event, now_ms + self._api.rules.max_ahead_ms):
            return None
        errors = check_event(event, self._api.rules, now_ms)
        return Problem("invalid_value", errors=errors) if errors else None

    async def take(self, rows: Sequence[Event | Problem]) -> BatchResults:
        """Append the good rows in one go; each row's result, in order. Raises Problem where the log as a
        whole cannot take them."""
        now_ms = self._api.clock_ms()
        message = self._api.ingest.message
        results: list[Result | str] = []  # an accepted row is its event id until its offset is known
        messages: list[Message] = []
        for row in rows:
            problem = row if isinstance(row, Problem) else self.judge(row, now_ms)
            if problem is not None:
                results.append(RefusedEvent(problem.code, problem.below("")))
            elif not isinstance(row, Problem):
                event, event_id = self.identified(row)
                messages.append(message(event, now_ms))
                results.append(event_id)
        positions = await self._api.ingest.append(messages)
        return self._batch(results, positions, now_ms)

    def _batch(self, results: list[Result | str], positions: list[Position], now_ms: int) -> BatchResults:
        token = self._api.token
        place = iter(positions)
        done: list[Result] = [
            AcceptedEvent(result, now_ms, token([next(place)])) if isinstance(result, str) else result
            for result in results
        ]
        for result in results:
            if isinstance(result, RefusedEvent):
                self._count(result.code, 1)
        self._count("accepted", len(positions))
        whole = token(positions) if positions else None
        return BatchResults(len(positions), len(done) - len(positions), whole, done)

    def _count(self, outcome: str, amount: int) -> None:
        if amount:
            self._counts[outcome].inc(amount)


class EventRoutes:
    """The two endpoints, as functions for the router and for the gate."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._intake = EventIntake(api)

    async def post_event(self, request: Request) -> Response:
        """Take one event: durable when answered, visible in recommendations moments later."""
        event = _ONE.decode(await self._api.body(request))
        return json_response(await self._intake.take_one(event), 202)

    async def post_batch(self, request: Request) -> Response:
        """Take many events: one result per row, in order; bad rows do not hold up good ones."""
        rows = _ROWS.read(await self._api.body(request), self._api.settings.api.max_batch)
        return json_response(await self._intake.take(rows), 202)

    def router(self, documented: Documented) -> APIRouter:
        """Both routes."""
        router = APIRouter(tags=["events"])
        router.add_api_route(
            "/v1/events",
            self.post_event,
            methods=["POST"],
            status_code=202,
            operation_id="post_event",
            openapi_extra=documented.operation(takes=Event, gives=AcceptedEvent, status=202),
        )
        router.add_api_route(
            "/v1/events:batch",
            self.post_batch,
            methods=["POST"],
            status_code=202,
            operation_id="post_events",
            openapi_extra=documented.operation(takes=EventBatch, gives=BatchResults, status=202),
        )
        return router
