"""``/v1/items``: how items differ from users."""

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
from services.events import Attributes, Event, ItemEvent


class ItemRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item in a batch: created, or replaced as a whole (``deleted``: removed)."""

    item_id: str
    attributes: Attributes = {}
    deleted: bool = False
    timestamp_ms: int | None = None
    event_id: str | None = None


class ItemBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several items."""

    items: list[ItemRow]


class Item(msgspec.Struct, frozen=True):
    """An item as the online store has it."""

    item_id: str
    attributes: Attributes
    updated_at: str


class Items(msgspec.Struct, frozen=True):
    """A page of items; ``cursor`` is null on the last one."""

    items: list[Item]
    cursor: str | None


def _rows_of(batch: ItemBatch) -> list[ItemRow]:
    return batch.items


def _event(row: ItemRow) -> Event:
    return ItemEvent(row.item_id, row.attributes, row.deleted, True, row.event_id, row.timestamp_ms)


def _show(item_id: str, row: Mapping[str, Cell], api: Api) -> Item:
    attributes = attributes_of(row, "item", api.schema, api.clock_ms())
    return Item(item_id, attributes, rfc3339(updated_at_ms(row)))


_ROWS = RowReader("items", Body(Decoder(ItemBatch)), Body(Decoder(ItemRow)), _rows_of, _event)
ITEMS: Final = EntityKind(
    "item", "items", ItemEvent, _ROWS.read, ItemBatch, Item, Items, _show, "unknown_item"
)
