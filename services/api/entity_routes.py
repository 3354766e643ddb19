"""What users and items have in common: upsert, patch, delete, bulk, read, list, and their features.

Writes are events: they go through the log, so that they keep their order with everything else that happens
to the entity, and are answered with a token once durable. Reads come from the online store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from featurestore.online import Cell, EntityKey
from services.api.bodies import Body, json_response
from services.api.context import Api
from services.api.documents import Documented, query_parameter
from services.api.entities import Kind, is_gone, path_id
from services.api.events import AcceptedEvent, BatchResults, EventIntake
from services.api.features import FeatureValues, read_features
from services.api.paging import MAX_LIMIT, encode_cursor, page
from services.api.problems import Problem
from services.events import Attributes, Event


class EntityBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entity's attributes, and optionally when they became true and an id against repeats."""

    attributes: Attributes = {}
    timestamp_ms: int | None = None
    event_id: str | None = None


_BODY: Final = Body(Decoder(EntityBody))
Reader = Callable[[bytes, int], Sequence[Event | Problem]]


@dataclass(frozen=True)
class EntityKind:
    """How one kind of entity differs from the other."""

    name: Kind
    plural: str
    event: Callable[..., Event]
    """Makes its event: ``event(id, attributes=..., deleted=..., replace=..., ...)``."""
    read_rows: Reader
    batch: Any
    one: Any
    many: Any
    show: Callable[[str, Mapping[str, Cell], Api], object]
    unknown: str


class EntityRoutes:
    """The routes of one kind of entity."""

    def __init__(self, api: Api, kind: EntityKind) -> None:
        self._api = api
        self._kind = kind
        self._intake = EventIntake(api)
        self._id = f"{kind.name}_id"

    async def put(self, request: Request) -> Response:
        """Create or replace: attributes that are not given are removed."""
        return await self._write(request, replace=True)

    async def patch(self, request: Request) -> Response:
        """Change some attributes; the others stay. An unknown id is created."""
        return await self._write(request, replace=False)

    async def delete(self, request: Request) -> Response:
        """Delete. Deleting what is not there is no error."""
        event = self._kind.event(path_id(request, self._id), deleted=True)
        return await self._accept(event)

    async def post_batch(self, request: Request) -> Response:
        """Create or replace many: one result per row, in order."""
        rows = self._kind.read_rows(await self._api.body(request), self._api.settings.api.max_batch)
        return json_response(await self._intake.take(rows), 202)

    async def get(self, request: Request) -> Response:
        """Read one as it is in the online store now."""
        entity_id = path_id(request, self._id)
        row = await self.row(entity_id)
        return json_response(self._kind.show(entity_id, row, self._api))

    async def get_features(self, request: Request) -> Response:
        """Every declared feature of it: value, status and event time."""
        entity_id = path_id(request, self._id)
        row = await self.row(entity_id)
        return json_response(
            read_features(self._kind.name, entity_id, row, self._api.schema, self._api.clock_ms())
        )

    async def get_list(self, request: Request) -> Response:
        """List by id, a page at a time."""
        after, limit = page(request, self._kind.name)
        ids = await self._api.store.scan(self._kind.name, after, limit + 1)
        more = len(ids) > limit
        ids = ids[:limit]
        rows = await self._api.store.read([EntityKey(self._kind.name, one) for one in ids])
        shown = [
            self._kind.show(one, row, self._api)
            for one, row in zip(ids, rows, strict=True)
            if not is_gone(row)
        ]
        cursor = encode_cursor(self._kind.name, ids[-1]) if more else None
        return json_response({self._kind.plural: shown, "cursor": cursor})

    async def row(self, entity_id: str) -> dict[str, Cell]:
        """The stored cells of an entity. Raises Problem unknown_user or unknown_item."""
        row = (await self._api.store.read([EntityKey(self._kind.name, entity_id)]))[0]
        if is_gone(row):
            raise Problem(self._kind.unknown)
        return row

    async def _write(self, request: Request, *, replace: bool) -> Response:
        entity_id = path_id(request, self._id)
        raw = await self._api.body(request)
        body = _BODY.decode(raw) if raw.strip() else EntityBody()
        return await self._accept(
            self._kind.event(
                entity_id,
                attributes=body.attributes,
                replace=replace,
                event_id=body.event_id,
                timestamp_ms=body.timestamp_ms,
            )
        )

    async def _accept(self, event: Event) -> Response:
        return json_response(await self._intake.take_one(event), 202)

    def router(self, documented: Documented) -> APIRouter:
        """All routes."""
        name, plural = self._kind.name, self._kind.plural
        router = APIRouter(tags=[plural])
        one, many = f"/v1/{plural}/{{{self._id}}}", f"/v1/{plural}"
        write = documented.operation(takes=EntityBody, gives=AcceptedEvent, status=202, path=[self._id])
        erase = documented.operation(gives=AcceptedEvent, status=202, path=[self._id])
        bulk = documented.operation(takes=self._kind.batch, gives=BatchResults, status=202)
        read = documented.operation(gives=self._kind.one, path=[self._id], missing=True)
        features = documented.operation(gives=FeatureValues, path=[self._id], missing=True)
        listing = documented.operation(
            gives=self._kind.many,
            query=[
                query_parameter("cursor", "Where the last page ended", {"type": "string"}),
                query_parameter(
                    "limit", "Entries of a page", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}
                ),
            ],
        )
        add = router.add_api_route
        add(f"{many}:batch", self.post_batch, methods=["POST"], status_code=202,
            operation_id=f"put_{plural}", openapi_extra=bulk)  # fmt: skip
        add(many, self.get_list, methods=["GET"], operation_id=f"list_{plural}", openapi_extra=listing)
        add(one, self.get, methods=["GET"], operation_id=f"get_{name}", openapi_extra=read)
        add(one, self.put, methods=["PUT"], status_code=202, operation_id=f"put_{name}", openapi_extra=write)
        add(one, self.patch, methods=["PATCH"], status_code=202,
            operation_id=f"patch_{name}", openapi_extra=write)  # fmt: skip
        add(one, self.delete, methods=["DELETE"], status_code=202,
            operation_id=f"delete_{name}", openapi_extra=erase)  # fmt: skip
        add(f"{one}/features", self.get_features, methods=["GET"], operation_id=f"get_{name}_features",
            description=f"Every declared feature of the {name}: value, status and event time.",
            openapi_extra=features)  # fmt: skip
        return router
