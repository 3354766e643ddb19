"""``GET /v1/items/{item_id}/similar``: items near a given one."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.api.bodies import json_response
from services.api.context import Api
from services.api.documents import Documented, query_parameter
from services.api.entities import path_id
from services.api.paging import query_count
from services.api.problems import Problem
from services.api.recommendations import (
    DEFAULT_N,
    MAX_CATEGORIES,
    RecommendedItem,
    deadline,
    item_reply,
)
from services.api.serving import Query, Recommends
from services.api.validation import check_text


class SimilarItems(msgspec.Struct, frozen=True):
    """Items near ``item_id``, nearest first."""

    item_id: str
    region: str
    model_version: str | None
    took_ms: float
    degraded: bool
    items: list[RecommendedItem]


class SimilarRoutes:
    """The endpoint."""

    def __init__(self, api: Api, recommender: Recommends) -> None:
        self._api = api
        self._recommender = recommender

    async def get(self, request: Request) -> Response:
        """Items that the same people like. Hidden and expired ones are left out."""
        started = time.perf_counter()
        item_id = path_id(request, "item_id")
        most = self._api.settings.api.max_results
        categories = request.query_params.getlist("category")
        errors = [e for n, name in enumerate(categories) for e in check_text(f"category[{n}]", name)]
        if errors or len(categories) > MAX_CATEGORIES:
            raise Problem("invalid_value", f"At most {MAX_CATEGORIES} categories are taken.", errors)
        query = Query(
            user_id=None,
            deadline_s=deadline(self._api, None),
            n=query_count(request, "n", min(DEFAULT_N, most), most),
            categories=tuple(categories),
        )
        picks = await self._recommender.similar(query, item_id)
        took_ms = round((time.perf_counter() - started) * 1e3, 3)
        items = [item_reply(pick, None) for pick in picks.items]
        region = self._api.settings.region.name
        return json_response(
            SimilarItems(item_id, region, picks.model_version, took_ms, picks.degraded, items)
        )

    def router(self, documented: Documented) -> APIRouter:
        """The route."""
        router = APIRouter(tags=["recommendations"])
        query = [
            query_parameter("n", "How many items", {"type": "integer", "minimum": 1, "default": DEFAULT_N}),
            query_parameter(
                "category",
                "Only items of at least one of these categories (may be repeated)",
                {"type": "array", "items": {"type": "string"}},
            ),
        ]
        router.add_api_route(
            "/v1/items/{item_id}/similar",
            self.get,
            methods=["GET"],
            operation_id="similar_items",
            openapi_extra=documented.operation(
                gives=SimilarItems, query=query, path=["item_id"], missing=True
            ),
        )
        return router
