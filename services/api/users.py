"""``/v1/users``: upsert, patch, delete, bulk, read, list, and a user's features."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from featurestore.online import Cell
from services.api.bodies import Body, json_response
from services.api.context import Api
from services.api.documents import Documented
from services.api.entities import (
    EntityKind,
    EntityRoutes,
    attributes_of,
    path_id,
    rfc3339,
    updated_at_ms,
)
from services.api.features import FeatureValues, read_features
from services.api.rows import RowReader
from services.events import Attributes, Event, UserEvent


class UserRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user in a batch: created, or replaced as a whole (``deleted``: removed)."""

    user_id: str
    attributes: Attributes = {}
    deleted: bool = False
    timestamp_ms: int | None = None
    event_id: str | None = None


class UserBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several users."""

    users: list[UserRow]


class User(msgspec.Struct, frozen=True):
    """A user as the online store has it."""

    user_id: str
    attributes: Attributes
    updated_at: str


class Users(msgspec.Struct, frozen=True):
    """A page of users; ``cursor`` is null on the last one."""

    users: list[User]
    cursor: str | None


def _rows_of(batch: UserBatch) -> list[UserRow]:
    return batch.users


def _event(row: UserRow) -> Event:
    return UserEvent(row.user_id, row.attributes, row.deleted, True, row.event_id, row.timestamp_ms)


def _show(user_id: str, row: Mapping[str, Cell], api: Api) -> User:
    attributes = attributes_of(row, "user", api.schema, api.clock_ms())
    return User(user_id, attributes, rfc3339(updated_at_ms(row)))


_ROWS = RowReader("users", Body(Decoder(UserBatch)), Body(Decoder(UserRow)), _rows_of, _event)
KIND = EntityKind("user", "users", UserEvent, _ROWS.read, UserBatch, User, Users, _show, "unknown_user")


class UserRoutes(EntityRoutes):
    """The routes of users."""

    def __init__(self, api: Api) -> None:
        super().__init__(api, KIND)

    async def get_features(self, request: Request) -> Response:
        """Every declared feature of the user: value, status and event time."""
        user_id = path_id(request, "user_id")
        row = await self.row(user_id)
        return json_response(read_features("user", user_id, row, self._api.schema, self._api.clock_ms()))

    def router(self, documented: Documented) -> APIRouter:
        """All routes."""
        router = super().router(documented)
        router.add_api_route(
            "/v1/users/{user_id}/features",
            self.get_features,
            methods=["GET"],
            operation_id="get_user_features",
            openapi_extra=documented.operation(gives=FeatureValues, path=["user_id"], missing=True),
        )
        return router
