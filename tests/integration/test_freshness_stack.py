"""``headwater freshness`` against real processes: every stage is timed, in each API's region, and nothing is learned.

The second region here is a second API over the same parameter servers: what it shows is measured by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.service_process import ROOT, eventually, service

from featurestore.encoder import Encoder
from featurestore.schema import default_schema
from models.parameters import DENSE, RANKING, RETRIEVAL
from services.backends import open_coordination
from services.catalogue import ITEM_KEYS, key_function
from services.coordination.membership import members
from services.freshness.updates import MODEL, TABLE
from services.parameter_server.client import ParameterClient
from services.settings.model import RegionSettings, Settings
from services.settings.show import to_toml

pytestmark = pytest.mark.timeout(240)


@dataclass
class Stack:
    settings: Settings
    home: httpx.Client
    eu: httpx.Client
    config: Path


def _address(settings: Settings, name: str) -> str:
    with closing(open_coordination(settings)) as coordination:
        found: list[str] = []

        def known() -> bool:
            found[:] = [m.address for m in members(coordination, "api") if m.name == name]
            return bool(found)

        eventually(known)
        return found[0]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("freshness")
    settings = Settings.model_validate(
        {
            "data": {"dir": folder / "data"},
            "log": {"partitions": 2},
            "features": {"offline": False},
            "api": {"listen": "127.0.0.1:0", "deadline": 5.0},
            "trainer": {"commit_interval": 0.1, "nice": 0},
            "parameters": {"servers": 2, "generation_interval": 1.0, "deadline": 5.0},
            "model": {"retrieval_dim": 8, "ranking_dim": 4},
        }
    )
    eu = settings.model_copy(update={"region": RegionSettings(name="eu", number=1)})
    config = folder / "headwater.toml"
    config.write_text(to_toml(settings), encoding="utf-8")
    with ExitStack() as stack:
        for name in ("parameter-server-0", "parameter-server-1", "processor-0", "trainer-0", "api-0"):
            stack.enter_context(service(name, settings))
        stack.enter_context(service("api-1", eu))
        clients = [
            stack.enter_context(httpx.Client(base_url=_address(settings, name), timeout=20))
            for name in ("api-0", "api-1")
        ]
        for http in clients:
            eventually(lambda http=http: http.get("/health/ready").status_code == 200, 90)
        found = Stack(settings, clients[0], clients[1], config)
        _teach(found)
        yield found


def _teach(stack: Stack) -> None:
    """A few items and likes, learned and visible, so that there is something that probes could spoil."""
    items = [{"item_id": f"film-{n}", "attributes": {"categories": ["Drama"]}} for n in range(20)]
    assert stack.home.post("/v1/items:batch", json={"items": items}).is_success
    likes = [
        {"type": "interaction", "user_id": f"u{n % 4}", "item_id": f"film-{n % 7}", "action": "like"}
        for n in range(40)
    ]
    token = stack.home.post("/v1/events:batch", json={"events": likes}).json()["token"]
    for http in (stack.home, stack.eu):
        eventually(
            lambda http=http: http.get(f"/v1/freshness?token={token}&wait_ms=5000").json()["stages"][
                "recommendations"
            ]["reached"]
        )


@contextmanager
def _client(stack: Stack) -> Iterator[ParameterClient]:
    with (
        closing(open_coordination(stack.settings)) as coordination,
        closing(ParameterClient(coordination)) as client,
    ):
        yield client


def _learned(stack: Stack) -> dict[str, Any]:
    """All that a probe must not change: parameters to the bit, rows, users, items and their counters."""
    keys = key_function(Encoder(default_schema()), ITEM_KEYS)([f"film-{n}" for n in range(20)])
    with _client(stack) as client:
        rows = {
            (of.name, table.name): table.rows
            for of in client.describe()
            for table in of.models["main"]
            if table.name != DENSE
        }
        pulled = client.pull("main", {RETRIEVAL: keys, RANKING: keys}).rows
        dense = client.dense("main", published=False).values
    lists = {user: stack.home.get(f"/v1/users/{user}/features").json()["features"] for user in ("u0", "u3")}
    items = [stack.home.get(f"/v1/items/film-{n}").json() for n in range(20)]
    return {
        "rows": rows,
        "bits": {name: values.tobytes() for name, values in {**pulled, DENSE: dense}.items()},
        "users": [user["user_id"] for user in stack.home.get("/v1/users").json()["users"]],
        "items": items,
        "item ids": [item["item_id"] for item in stack.home.get("/v1/items").json()["items"]],
        "features": lists,
    }


def test_every_stage_is_timed_in_each_region_and_nothing_is_learned(live: Stack, tmp_path: Path) -> None:
    before = _learned(live)
    command = [
        sys.executable, "-m", "services.cli.app", "--config", str(live.config), "--format", "json",
        "freshness", "--rate", "50", "--seconds", "2", "--out", str(tmp_path),
        "--url", str(live.home.base_url), "--region", f"eu={live.eu.base_url}",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == []
    assert found["regions"] == ["home", "eu"]
    rows = {(row["kind"], row["region"], row["stage"]): row for row in found["rows"]}
    assert rows.keys() == {
        *(("event", None, stage) for stage in ("accepted", "processed", "trained", "applied")),
        *(("event", region, s) for region in ("home", "eu") for s in ("parameters", "recommendations")),
        ("update", None, "applied"), ("update", "home", "parameters"), ("update", "eu", "parameters"),
    }  # fmt: skip
    assert {(row["sent"], row["missing"]) for row in rows.values()} == {(100, 0)}
    p50 = {key: row["ms"]["p50_ms"] for key, row in rows.items()}
    assert p50["event", None, "processed"] < p50["event", None, "trained"] < p50["event", None, "applied"]
    for region in ("home", "eu"):
        assert p50["event", None, "trained"] < p50["event", region, "parameters"]
        assert p50["event", region, "parameters"] <= p50["event", region, "recommendations"]
    assert (tmp_path / "freshness.png").stat().st_size > 10_000
    assert _learned(live) == before


def test_each_region_sums_up_what_it_saw_itself(live: Stack) -> None:
    sent = live.home.post("/v1/probes", json={"count": 5}).json()
    pushed = live.home.post("/v1/probes", json={"count": 3, "kind": "update"}).json()
    for http, region in ((live.home, "home"), (live.eu, "eu")):
        for token in (sent["token"], pushed["token"]):
            reply = http.get(f"/v1/freshness?token={token}&wait_ms=9000").json()
            assert reply["region"] == region
            assert all(stage["reached"] for stage in reply["stages"].values())

        def known(http: httpx.Client = http) -> bool:
            probe = http.get(f"/v1/probes/{sent['probes'][0]['id']}").json()
            stages = ("processed", "trained", "applied", "parameters", "recommendations")
            return list(probe.get("after_ms", {})) == list(stages)

        eventually(known)
        summary = http.get("/v1/freshness").json()["summary"]
        assert summary["events"]["recommendations"]["n"] >= 5
        assert summary["updates"]["applied"]["n"] >= 3


def test_marked_updates_change_the_rows_that_readers_get(live: Stack) -> None:
    with _client(live) as client:
        keys = np.arange(64, dtype=np.uint64)
        live.home.post("/v1/probes", json={"kind": "update"}).raise_for_status()
        first = client.pull(MODEL, {TABLE: keys}).rows[TABLE]
        reply = live.home.post("/v1/probes", json={"kind": "update"}).json()
        second = client.pull(MODEL, {TABLE: keys})
    assert np.abs(second.rows[TABLE] - first).min() == 1.0
    offsets = {mark.offset for mark in second.watermarks.values()}
    assert int(reply["probes"][0]["id"].rpartition("-")[2]) in offsets
