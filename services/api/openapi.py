"""The OpenAPI document of the REST API, as it is kept in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Never

from featurestore.schema import default_schema
from services.api.app import assemble
from services.api.context import Api
from services.api.documents import Json
from services.api.ingest import Ingest
from services.api.metrics import ApiMetrics
from services.api.serving import Picks, Query
from services.api.store import AsyncStore
from services.settings.model import Settings

PATH: Final = Path(__file__).with_name("openapi.json")


def document() -> Json:
    """The document that the code describes now. Needs no backend."""
    settings = Settings()
    api = Api(
        settings,
        default_schema(),
        Ingest(_nothing, settings.log.partitions, settings.api.queue),
        AsyncStore(_nothing),
        ApiMetrics(),
        incarnation="",
    )
    return assemble(api, _Silent(), {}).document()


class _Silent:
    """Stands where the recommender would: the document needs the routes alone."""

    async def recommend(self, query: Query) -> Picks:
        _nothing()

    async def rank(self, query: Query, item_ids: tuple[str, ...]) -> Picks:
        _nothing()

    async def similar(self, query: Query, item_id: str) -> Picks:
        _nothing()


def _nothing() -> Never:
    raise RuntimeError("the document is made without backends")
