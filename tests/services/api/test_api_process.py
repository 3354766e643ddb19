"""The API as a process of its own, over sockets, with the real processor, trainer and parameter server."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.service_process import Running, eventually, service

from services.api.main import run
from services.backends import open_coordination, open_log
from services.coordination.membership import members
from services.events import decode_event
from services.messagelog.contract import TopicPartition
from services.settings import SettingsError
from services.settings.model import ApiSettings, Settings
from services.topics import EVENTS

pytestmark = pytest.mark.timeout(180)
ITEMS = {f"film-{n}": ["Drama"] if n % 2 else ["Comedy"] for n in range(40)}


def settings_in(folder: Path, **parameters: object) -> Settings:
    return Settings.model_validate(
        {
            "data": {"dir": folder},
            "log": {"partitions": 2},
            "features": {"offline": False},
            "api": {"listen": "127.0.0.1:0", "deadline": 2.0},
            "trainer": {"commit_interval": 0.1, "nice": 0},
            "parameters": {
                "snapshot_interval": 0.3,
                "deadline": 1.0,
                "generation_interval": 1.0,
                **parameters,
            },
            "model": {"retrieval_dim": 8, "ranking_dim": 4},
        }
    )


def address(settings: Settings, not_at: str | None = None) -> str:
    """Where the API says that it listens, once that is another address than ``not_at``."""
    with closing(open_coordination(settings)) as coordination:
        found: list[str] = []

        def known() -> bool:
            found[:] = [m.address for m in members(coordination, "api") if m.address != not_at]
            return bool(found)

        eventually(known)
        return found[0]


@dataclass
class Stack:
    settings: Settings
    http: httpx.Client
    parameter_server: Running

    def post(self, path: str, body: Any) -> dict[str, Any]:
        reply = self.http.post(path, json=body)
        assert reply.is_success, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def recommend(self, **wish: Any) -> dict[str, Any]:
        return self.post("/v1/recommendations", wish)

    def like(self, user: str, item: str) -> dict[str, Any]:
        return self.post(
            "/v1/events", {"type": "interaction", "user_id": user, "item_id": item, "action": "like"}
        )


def ids(body: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in body["items"]]


@contextmanager
def running(folder: Path, **parameters: object) -> Iterator[Stack]:
    settings = settings_in(folder, **parameters)
    with ExitStack() as stack:
        server = stack.enter_context(service("parameter-server-0", settings))
        for name in ("processor-0", "trainer-0", "api-0"):
            stack.enter_context(service(name, settings))
        http = stack.enter_context(httpx.Client(base_url=address(settings), timeout=20))
        eventually(lambda: http.get("/health/ready").status_code == 200, 60)
        yield Stack(settings, http, server)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack")) as stack:
        rows = [{"item_id": i, "attributes": {"title": i, "categories": of}} for i, of in ITEMS.items()]
        token = stack.post("/v1/items:batch", {"items": rows})["token"]
        eventually(lambda: not stack.recommend(min_freshness=token, deadline_ms=5_000)["degraded"])
        eventually(lambda: len(ids(stack.recommend(n=100))) == 40)
        yield stack


def test_an_address_open_to_others_needs_a_key(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    others = settings.model_copy(update={"api": ApiSettings(listen="0.0.0.0:0")})
    with pytest.raises(SettingsError, match=r"api\.listen"):
        run(others, "api-0", threading.Event())


def test_ready_names_every_dependency(live: Stack) -> None:
    health = live.http.get("/health/ready").json()
    names = {"log", "features", "coordination", "parameters", "items", "model", "warm_up"}
    assert {name for name, state in health["dependencies"].items() if state["ok"]} == names
    assert health["region"] == "home"


def test_a_like_is_in_the_next_list_that_asks_for_it(live: Stack) -> None:
    for n in range(10):
        user = f"user-{n % 3}"
        first = ids(live.recommend(user_id=user))[0]
        accepted = live.like(user, first)
        body = live.recommend(user_id=user, min_freshness=accepted["token"], deadline_ms=10_000)
        assert not body["degraded"]
        assert first not in ids(body)
        assert body["parameters_as_of_ms"] >= accepted["accepted_at_ms"]
        assert body["newest_event"]["event_id"] == accepted["event_id"]
        assert body["newest_event"]["token"] == accepted["token"]


def test_kept_rows_are_not_for_those_who_ask_for_fresh_ones(tmp_path: Path) -> None:
    with running(tmp_path, cached_rows=256, cache_age=60.0, reads="any") as stack:
        stack.post("/v1/items:batch", {"items": [{"item_id": i, "attributes": {"title": i}} for i in ITEMS]})
        eventually(lambda: len(ids(stack.recommend(n=100))) == 40)
        for _ in range(4):
            first = ids(stack.recommend(user_id="somebody", n=100))[0]
            accepted = stack.like("somebody", first)
            body = stack.recommend(user_id="somebody", min_freshness=accepted["token"], deadline_ms=10_000)
            assert not body["degraded"]
            assert body["parameters_as_of_ms"] >= accepted["accepted_at_ms"]
        pattern = r'^headwater_api_cached_rows_total\{what="unasked"\} ([0-9.e+]+)$'
        told = re.findall(pattern, stack.http.get("/metrics").text, re.MULTILINE)
        assert float(told[0]) > 0, "others got rows that were kept"


def test_a_new_item_can_be_recommended_after_its_first_like(live: Stack) -> None:
    accepted = live.like("pioneer", "brand-new")
    live.recommend(user_id="pioneer", min_freshness=accepted["token"], deadline_ms=10_000)
    eventually(lambda: "brand-new" in ids(live.recommend(user_id="somebody else", n=100)))


def test_a_hidden_item_leaves_all_lists(live: Stack) -> None:
    live.http.patch("/v1/items/film-7", json={"attributes": {"hidden": True}})
    eventually(lambda: "film-7" not in ids(live.recommend(n=100)))
    assert "film-7" not in ids(live.http.get("/v1/items/film-5/similar?n=100").json())
    live.http.patch("/v1/items/film-7", json={"attributes": {"hidden": False}})
    eventually(lambda: "film-7" in ids(live.recommend(n=100)))


def test_a_user_is_written_read_and_forgotten(live: Stack) -> None:
    live.http.put("/v1/users/reader", json={"attributes": {"age": 30, "gender": "F"}})
    eventually(lambda: live.http.get("/v1/users/reader").status_code == 200)
    assert live.http.get("/v1/users/reader").json()["attributes"] == {"age": 30, "gender": "F"}
    live.http.put("/v1/users/reader", json={"attributes": {"age": 31}})
    eventually(lambda: live.http.get("/v1/users/reader").json()["attributes"] == {"age": 31})
    live.http.delete("/v1/users/reader")
    eventually(lambda: live.http.get("/v1/users/reader").status_code == 404)


def test_a_repeated_event_counts_once(live: Stack) -> None:
    event = {"type": "interaction", "user_id": "twice", "item_id": "film-1", "action": "like"}
    tokens = [live.post("/v1/events", {**event, "event_id": "the-same"})["token"] for _ in range(3)]
    live.recommend(user_id="twice", min_freshness=tokens[-1], deadline_ms=10_000)
    features = live.http.get("/v1/users/twice/features").json()["features"]
    assert {f["name"]: f["value"] for f in features}["likes_total"] == 1


def test_parameter_servers_that_die_degrade_lists_and_come_back(live: Stack) -> None:
    live.parameter_server.kill()
    body = live.recommend(user_id="user-1", deadline_ms=300)
    assert body["degraded"]
    assert {item["source"] for item in body["items"]} == {"popular_fallback"}
    assert len(ids(body)) == 10
    health = live.http.get("/health/ready")
    assert (health.status_code, health.headers["Retry-After"]) == (503, "1")
    lost = {name: of["detail"] for name, of in health.json()["dependencies"].items() if not of["ok"]}
    assert lost == {"parameters": "region home: no answer from parameter-server-0"}
    live.parameter_server.start()
    eventually(lambda: not live.recommend(user_id="user-1")["degraded"], 60)
    eventually(lambda: live.http.get("/health/ready").status_code == 200, 10)
    accepted = live.like("user-1", ids(live.recommend(user_id="user-1"))[0])
    body = live.recommend(user_id="user-1", min_freshness=accepted["token"], deadline_ms=20_000)
    assert not body["degraded"]


def test_garbage_on_the_socket_does_not_stop_the_server(live: Stack) -> None:
    host, port = live.http.base_url.host, live.http.base_url.port
    assert port is not None
    for garbage in (b"\0\0\0", b"GET\r\n\r\n", b"POST /v1/events HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        with socket.create_connection((host, port), timeout=5) as raw:
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4_096):
                pass
    assert live.http.get("/health/live").status_code == 200


def test_what_was_acknowledged_survives_the_killing_of_the_api(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    acknowledged: list[str] = []
    with service("api-0", settings) as api:
        url = address(settings)

        def post() -> None:
            with httpx.Client(base_url=url, timeout=5) as http:
                for n in range(100_000):
                    event = {"type": "interaction", "user_id": f"u{n}", "item_id": "i", "action": "like"}
                    try:
                        reply = http.post("/v1/events", json=event)
                    except httpx.HTTPError:
                        return
                    acknowledged.append(reply.json()["event_id"])

        posting = [threading.Thread(target=post) for _ in range(4)]
        for thread in posting:
            thread.start()
        eventually(lambda: len(acknowledged) > 200)
        api.kill()
        for thread in posting:
            thread.join()
        api.start()
        assert httpx.get(f"{address(settings, not_at=url)}/health/live").status_code == 200
    with closing(open_log(settings)) as log:
        kept = {
            decode_event(record.value).event_id
            for partition in range(2)
            for record in log.read(TopicPartition(EVENTS, partition), 0, 1_000_000)
        }
    assert set(acknowledged) <= kept
