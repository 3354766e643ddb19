"""``/v1/items``: upsert, patch, delete, bulk, read, list, and an item's features."""

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
KIND = EntityKind("item", "items", ItemEvent, _ROWS.read, ItemBatch, Item, Items, _show, "unknown_item")


class ItemRoutes(EntityRoutes):
    """The routes of items."""

    def __init__(self, api: Api) -> None:
        super().__init__(api, KIND)

    async def get_features(self, request: Request) -> Response:
        """Every declared feature of the item: value, status and event time."""
        item_id = path_id(request, "item_id")
        row = await self.row(item_id)
        return json_response(read_features("item", item_id, row, self._api.schema, self._api.clock_ms()))

    def router(self, documented: Documented) -> APIRouter:
        """All routes."""
        router = super().router(documented)
        router.add_api_route(
            "/v1/items/{item_id}/features",
            self.get_features,
            methods=["GET"],
            operation_id="get_item_features",
            openapi_extra=documented.operation(gives=FeatureValues, path=["item_id"], missing=True),
        )
        return router
