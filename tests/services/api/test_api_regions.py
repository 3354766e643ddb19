"""The API of a region says which one it is, and whether that region can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.api import Harness, quick_settings, running_api

from services.api.documents import Documented
from services.api.health import CHECK_S, Dependency, HealthRoutes
from services.api.metrics import ApiMetrics
from services.api.reach import ANSWER_S, Reach
from services.parameter_server.types import (
    Keys,
    ModelUnknown,
    ParametersRefused,
    ParametersUnavailable,
    Pulled,
)
from services.settings.model import RegionSettings
from sync.placement import shard_of


@pytest.fixture
def eu(tmp_path: Path) -> Iterator[Harness]:
    region = RegionSettings(name="eu", number=1)
    with running_api(tmp_path, quick_settings().model_copy(update={"region": region})) as harness:
        harness.write_items({"a": {"title": "A"}, "b": {"title": "B"}})
        yield harness


class TestReplies:
    def test_lists_rankings_and_neighbours_name_the_region(self, eu: Harness) -> None:
        assert eu.recommend()["region"] == "eu"
        assert eu.post("/v1/rankings", json={"item_ids": ["a", "b"]}).json()["region"] == "eu"
        assert eu.get("/v1/items/a/similar").json()["region"] == "eu"

    def test_events_are_taken_in_any_region(self, eu: Harness) -> None:
        event = {"type": "interaction", "user_id": "u", "item_id": "a", "action": "like"}
        assert eu.post("/v1/events", json=event).status_code == 202
        assert len(eu.producer.messages) == 1

    def test_a_list_without_the_regions_servers_is_degraded_and_still_its_own(self, eu: Harness) -> None:
        eu.on_loop(lambda: setattr(eu.parameters, "available", False))
        body = eu.recommend(user_id="u")
        assert (body["degraded"], body["region"]) == (True, "eu")


def ready(check: Callable[[], Awaitable[Dependency]]) -> httpx.Response:
    """The reply of ``/health/ready`` in region eu with one dependency."""
    app = FastAPI()
    app.include_router(HealthRoutes({"parameters": check}, ApiMetrics(), "eu").router(Documented()))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/health/ready")

    return asyncio.run(ask())


class Pulls:
    """Parameter servers of which ``failure`` is all there is to see, if there is one."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.keys: Mapping[str, Keys] = {}
        self.deadline_s: float | None = None

    async def pull(self, model: str, keys: Mapping[str, Keys], *, deadline_s: float | None = None) -> Pulled:
        self.keys, self.deadline_s = keys, deadline_s
        if self.failure is not None:
            raise self.failure
        return Pulled({}, {})


class TestReady:
    def test_with_its_servers(self) -> None:
        reply = ready(Reach(Pulls(), "main", "eu").check)
        assert reply.status_code == 200
        assert "Retry-After" not in reply.headers
        assert reply.json() == {
            "status": "ready",
            "region": "eu",
            "dependencies": {"parameters": {"ok": True, "detail": "region eu: all answer"}},
            "behind_s": None,
        }

    @pytest.mark.parametrize(
        ("failure", "detail"),
        [
            (ParametersUnavailable("pull", ("server-0@eu",), 0.7), "region eu: no answer from server-0@eu"),
            (ParametersUnavailable("pull", (), 0.7), "region eu: no answer from any parameter server"),
            (ModelUnknown("secret"), "region eu: no model is declared yet"),
            (ParametersRefused("secret"), "region eu: the parameter servers refuse to answer"),
        ],
    )
    def test_without_them_says_who_and_when_to_come_again(self, failure: Exception, detail: str) -> None:
        reply = ready(Reach(Pulls(failure), "main", "eu").check)
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
        body: dict[str, Any] = reply.json()
        assert (body["status"], body["region"]) == ("not_ready", "eu")
        assert body["dependencies"] == {"parameters": {"ok": False, "detail": detail}}

    def test_asks_every_shard_and_ends_before_the_check_is_given_up(self) -> None:
        pulls = Pulls()
        ready(Reach(pulls, "main", "eu").check)
        (keys,) = pulls.keys.values()
        assert {int(shard) for shard in shard_of(keys, 32)} == set(range(32))
        assert pulls.deadline_s == ANSWER_S < CHECK_S
