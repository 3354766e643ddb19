"""``/v1/users``: how users differ from items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.json import Decoder

from featurestore.online import Cell
from services.api.bodies import Body
from services.api.context import Api
from services.api.entities import attributes_of, rfc3339, updated_at_ms
from services.api.entity_routes import EntityKind
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
USERS: Final = EntityKind(
    "user", "users", UserEvent, _ROWS.read, UserBatch, User, Users, _show, "unknown_user"
)
