"""``/health/live``, ``/health/ready`` and ``/metrics``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.api.bodies import json_response
from services.api.documents import Documented
from services.api.metrics import ApiMetrics
from services.api.problems import Problem

CHECK_S: Final = 1.0
"""A dependency that does not answer a check within this time counts as not reached."""
RETRY_AFTER_S: Final = "1"
"""Gateways that honour it look again soon: servers that fail over are back within two seconds."""


class Dependency(msgspec.Struct, frozen=True):
    """Whether one dependency is well, and what it says about itself."""

    ok: bool
    detail: str


class Health(msgspec.Struct, frozen=True):
    """The state of this process, and the region that it serves. ``behind_s``: seconds since that was level with the
    regions that it follows; null where it writes all parameters itself, and before anything is known."""

    status: str
    region: str
    dependencies: dict[str, Dependency]
    behind_s: float | None


Check = Callable[[], Awaitable[Dependency]]
Lag = Callable[[], float | None]


def level() -> None:
    """The lag of a region that follows none."""


class HealthRoutes:
    """Health of an API of ``region`` by named ``checks``; a check may raise Problem, which counts as not well.
    ``behind_s``: how far the region is behind, where it follows others."""

    def __init__(
        self, checks: Mapping[str, Check], metrics: ApiMetrics, region: str, behind_s: Lag = level
    ) -> None:
        self._checks = checks
        self._metrics = metrics
        self._region = region
        self._behind_s = behind_s

    async def live(self, request: Request) -> Response:
        """Whether the process answers at all."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Whether every dependency is reached, the model loaded and warmed up (503 if not)."""
        health = await self.state()
        if health.status == "ready":
            return json_response(health)
        response = json_response(health, 503)
        response.headers["Retry-After"] = RETRY_AFTER_S
        return response

    async def state(self) -> Health:
        """All checks, run side by side."""
        found = await asyncio.gather(*(self._run(check) for check in self._checks.values()))
        dependencies = dict(zip(self._checks, found, strict=True))
        ready = all(dependency.ok for dependency in found)
        behind_s = self._behind_s()
        shown_s = None if behind_s is None else round(behind_s, 3)
        return Health("ready" if ready else "not_ready", self._region, dependencies, shown_s)

    async def _run(self, check: Check) -> Dependency:
        try:
            async with asyncio.timeout(CHECK_S):
                return await check()
        except TimeoutError:
            return Dependency(False, f"no answer within {CHECK_S:g} s")
        except Problem as problem:
            return Dependency(False, problem.detail or problem.kind.title)

    async def metrics(self, request: Request) -> Response:
        """All metrics in Prometheus' text format."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def router(self, documented: Documented) -> APIRouter:
        """All routes."""
        router = APIRouter(tags=["operation"])
        reply = {"content": {"application/json": {"schema": documented.ref(Health)}}}
        ready = {
            "responses": {
                "200": {"description": "Ready", **reply},
                "503": {"description": "Not ready", **reply},
            }
        }
        router.add_api_route("/health/live", self.live, methods=["GET"], operation_id="live")
        router.add_api_route(
            "/health/ready", self.ready, methods=["GET"], operation_id="ready", openapi_extra=ready
        )
        router.add_api_route("/metrics", self.metrics, methods=["GET"], operation_id="metrics")
        return router
