"""``/v1/freshness`` and ``/v1/probes``: how fresh this region is, and marked events and updates to measure it by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from fastapi import APIRouter
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from services.api.bodies import Body, json_response
from services.api.context import Api
from services.api.documents import Documented, query_parameter
from services.api.entities import path_id, rfc3339
from services.api.events import EventIntake, RefusedEvent
from services.api.paging import encode_cursor, page, query_count
from services.api.problems import Problem
from services.api.serving.freshness import Freshness
from services.api.serving.probing import Probing
from services.events import Probe as ProbeEvent
from services.freshness.stages import REGIONAL, Kind, Stage
from services.freshness.statistics import Quantiles
from services.freshness.tracker import Probe
from services.tokens import Token, TokenError, decode_token, encode_token

ENTITY: Final = "probe"
WINDOW_S: Final = 300
MAX_WAIT_MS: Final = 10_000
MAX_UPDATES: Final = 100
"""In one order: each is pushed after the one before, and from a following region each crosses the wide area."""


class ProbeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many probes to send now: marked ``event``s through the log, or ``update``s of parameters (at most 100)."""

    count: int = 1
    kind: Kind = "event"


class ProbeReply(msgspec.Struct, frozen=True):
    """A probe. ``after_ms``: by stage that has it, how long after its acceptance; processed, trained and applied
    are timed by the process that did it, parameters and recommendations by this API."""

    id: str
    kind: Kind
    token: str
    accepted_at: str
    accepted_at_ms: float
    after_ms: dict[Stage, float]


class SentProbes(msgspec.Struct, frozen=True):
    """The probes that were sent; ``token`` covers all of them."""

    probes: list[ProbeReply]
    token: str


class ProbePage(msgspec.Struct, frozen=True):
    """Probes in the order in which this region heard of them; ``cursor`` is null on the last page."""

    probes: list[ProbeReply]
    cursor: str | None


class Standing(msgspec.Struct, frozen=True):
    """How far one stage is: ``token`` names the positions, ``as_of`` is the acceptance of the newest event that
    it contains. ``reached``: whether that covers the token asked about (null: there was none)."""

    reached: bool | None
    token: str | None
    as_of: str | None
    as_of_ms: int | None


class ProbeSummary(msgspec.Struct, frozen=True):
    """The newest probes accepted within ``window_s``: by stage, how long after acceptance they were there."""

    window_s: int
    events: dict[Stage, Quantiles]
    updates: dict[Stage, Quantiles]


class RegionFreshness(msgspec.Struct, frozen=True):
    """How far this region is, and (where no token was asked about) what its recent probes took."""

    region: str
    as_of: str
    as_of_ms: int
    stages: dict[Stage, Standing]
    summary: ProbeSummary | None


_ORDER: Final = Body(Decoder(ProbeOrder))


class ProbeRoutes:
    """The endpoints."""

    def __init__(self, api: Api, probing: Probing) -> None:
        self._api, self._probing = api, probing
        self._intake = EventIntake(api)

    async def get_freshness(self, request: Request) -> Response:
        """How far this region is; with a token, wait for it (a long poll)."""
        text = request.query_params.get("token")
        if text is None:
            await self._probing.refresh()
            return self._standing(None, True)
        token = _read_token(text)
        stages = self._probing.of(token)
        if stages is None:
            raise Problem.field("stale_token", "token", "speaks of an event log that is gone")
        wait_ms = _wait_ms(request)
        stage = _stage(request, stages)
        if wait_ms:
            await stages[stage].reached(token, wait_ms / 1e3)
        return self._standing(token, False)

    def _standing(self, token: Token | None, summarised: bool) -> Response:
        now_ms = self._api.clock_ms()
        probing = self._probing
        stages: Mapping[Stage, Freshness] | None = None if token is None else probing.of(token)
        if stages is None:
            stages = {"parameters": probing.parameters, "recommendations": probing.recommendations}
        summary = None
        if summarised:
            found = probing.tracker.summary(now_ms - WINDOW_S * 1e3)
            summary = ProbeSummary(WINDOW_S, found["event"], found["update"])
        shown = {stage: _of(freshness, token) for stage, freshness in stages.items()}
        return json_response(RegionFreshness(probing.region, rfc3339(now_ms), now_ms, shown, summary))

    async def post_probes(self, request: Request) -> Response:
        """Send probes now; their way can be followed by ``/v1/probes/{id}``, or by their tokens."""
        order = _ORDER.decode(await self._api.body(request))
        most = self._api.settings.api.max_batch
        if order.kind == "update":
            most = min(most, MAX_UPDATES)
        if not 1 <= order.count <= most:
            raise Problem.field("invalid_value", "count", f"must be from 1 to {most}")
        if order.kind == "event":
            probes = await self._events(order.count)
        else:
            probes = await self._probing.push(order.count)
        last: dict[int, int] = {}
        for probe in probes:
            last[probe.partition] = max(probe.offset, last.get(probe.partition, 0))
        token = encode_token(Token(probes[0].log, tuple(sorted(last.items()))))
        return json_response(SentProbes([_shown(probe) for probe in probes], token), 202)

    async def _events(self, count: int) -> list[Probe]:
        taken = await self._intake.take([ProbeEvent() for _ in range(count)])
        probes = []
        for result in taken.results:
            assert not isinstance(result, RefusedEvent), "a probe has nothing that could be refused"
            token = decode_token(result.token)
            ((partition, offset),) = token.positions
            probe = Probe(result.event_id, "event", token.log, partition, offset, result.accepted_at_ms)
            self._probing.tracker.add(probe)
            probes.append(probe)
        return probes

    async def get_probe(self, request: Request) -> Response:
        """One probe, with the stages that have it by now."""
        probe_id = path_id(request, "probe_id")
        await self._probing.refresh()
        probe = self._probing.tracker.find(probe_id)
        if probe is None:
            raise Problem("unknown_probe")
        return json_response(_shown(probe))

    async def list_probes(self, request: Request) -> Response:
        """The probes that this region knows of, the oldest first."""
        after, limit = page(request, ENTITY)
        await self._probing.refresh()
        probes = self._probing.tracker.listed(after, limit + 1)
        if probes is None:
            raise Problem("expired_cursor")
        cursor = encode_cursor(ENTITY, probes[limit - 1].id) if len(probes) > limit else None
        return json_response(ProbePage([_shown(probe) for probe in probes[:limit]], cursor))

    def router(self, documented: Documented) -> APIRouter:
        """All routes."""
        router = APIRouter(tags=["freshness"])
        asked = [
            query_parameter(
                "token", "Positions to ask about, as an accepted event or probe gave them", _TEXT
            ),
            query_parameter(
                "wait_ms",
                "How long to wait until they are reached",
                {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS, "default": 0},
            ),
            query_parameter(
                "stage",
                "What has to reach them for the wait to end (the last stage, if absent)",
                {"type": "string", "enum": sorted(REGIONAL)},
            ),
        ]
        paging = [
            query_parameter("cursor", "Where the page before ended", _TEXT),
            query_parameter("limit", "How many probes", {"type": "integer", "minimum": 1, "default": 50}),
        ]
        for path, endpoint, method, name, operation in (
            (
                "/v1/freshness", self.get_freshness, "GET", "get_freshness",
                documented.operation(gives=RegionFreshness, query=asked, stale=True),
            ),
            (
                "/v1/probes", self.post_probes, "POST", "send_probes",
                documented.operation(takes=ProbeOrder, gives=SentProbes, status=202),
            ),
            (
                "/v1/probes", self.list_probes, "GET", "list_probes",
                documented.operation(gives=ProbePage, query=paging),
            ),
            (
                "/v1/probes/{probe_id}", self.get_probe, "GET", "get_probe",
                documented.operation(gives=ProbeReply, path=["probe_id"], missing=True),
            ),
        ):  # fmt: skip
            router.add_api_route(
                path,
                endpoint,
                methods=[method],
                status_code=202 if method == "POST" else 200,
                operation_id=name,
                openapi_extra=operation,
            )
        return router


_TEXT: Final = {"type": "string"}


def _read_token(text: str) -> Token:
    try:
        return decode_token(text)
    except TokenError as error:
        raise Problem.field("invalid_token", "token", "is not a token of this server") from error


def _wait_ms(request: Request) -> int:
    return query_count(request, "wait_ms", 0, MAX_WAIT_MS, least=0)


def _stage(request: Request, stages: Mapping[Stage, Freshness]) -> Stage:
    """The stage to wait for: as asked, else the last that the token's log passes."""
    asked = request.query_params.get("stage")
    last: Stage = list(stages)[-1]
    found: Stage | None = last if asked is None else next((s for s in stages if s == asked), None)
    if found is None:
        raise Problem.field("invalid_value", "stage", f"must be one of {', '.join(stages)} for this token")
    return found


def _of(freshness: Freshness, token: Token | None) -> Standing:
    marks = {partition: mark for partition, mark in freshness.marks.items() if mark.offset >= 0}
    reached = None if token is None else freshness.covers(token)
    if not marks:
        return Standing(reached, None, None, None)
    positions = tuple(sorted((partition, mark.offset) for partition, mark in marks.items()))
    as_of_ms = max(mark.accepted_at_ms for mark in marks.values())
    return Standing(reached, encode_token(Token(freshness.log, positions)), rfc3339(as_of_ms), as_of_ms)


def _shown(probe: Probe) -> ProbeReply:
    token = encode_token(Token(probe.log, ((probe.partition, probe.offset),)))
    return ProbeReply(
        probe.id,
        probe.kind,
        token,
        rfc3339(int(probe.accepted_at_ms)),
        probe.accepted_at_ms,
        probe.after_ms(),
    )
