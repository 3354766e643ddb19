"""``up --regions`` with all real processes on the embedded backends: two regions, a slow link between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway import gateway

from services.api.behind import LEVEL_S
from services.cli.exits import Exit

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
HOME = ["parameter-server-0", "processor-0", "trainer-0", "api-0"]
EU = ["server-0@eu", "api@eu"]


def eventually(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


class Stack:
    """``headwater`` on one data folder, each command a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self._given = [f"--set=data.dir={self.data}", "--set=api.listen=127.0.0.1:0", "--format=json"]

    def run(self, *arguments: str, code: int = 0, given: list[str] | None = None) -> Any:
        """The JSON that a command prints; it must end with ``code``."""
        options = self._given if given is None else [*given, "--format=json"]
        command = [sys.executable, "-m", "services.cli.app", *options, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    def of(self, region: str, *arguments: str) -> Any:
        """A command with the settings of ``region``."""
        return self.run(*arguments, given=[f"--config={self.regions()[region]['settings']}"])

    def regions(self) -> dict[str, dict[str, str]]:
        """What ``status`` says of each region."""
        return {region["name"]: region for region in self.run("status")["regions"]}

    def children(self) -> Mapping[str, Mapping[str, Any]]:
        return {child["name"]: child for child in self.run("status")["processes"]}

    def ask(self, region: str, method: str, path: str, **options: Any) -> httpx.Response:
        """A request to the API of ``region``."""
        return httpx.request(method, self.regions()[region]["url"] + path, timeout=20, **options)


UP = ["up", "--detach", "--timeout=120", "--regions=2", "--link=eu:delay=5ms,rate=100mbit"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    told = running.run(*UP)
    assert [region["name"] for region in told["regions"]] == ["home", "eu"]
    yield running
    running.run("down")
    running.run("status", code=Exit.NOT_RUNNING)


def test_every_process_of_every_region_is_ready(stack: Stack) -> None:
    children = stack.children()
    assert list(children) == [*HOME, "link@eu", *EU]
    assert {child["state"] for child in children.values()} == {"ready"}
    assert [children[name]["region"] for name in ("api-0", "link@eu", "api@eu")] == ["home", "eu", "eu"]
    for name in ("home", "eu"):
        health = stack.ask(name, "GET", "/health/ready").json()
        assert (health["status"], health["region"]) == ("ready", name)


def test_each_region_has_parameter_servers_of_its_own(stack: Stack) -> None:
    leaders = {
        name: {shard["leader"] for shard in stack.of(name, "model", "shards")["shards"]}
        for name in ("home", "eu")
    }
    assert leaders == {"home": {"parameter-server-0"}, "eu": {"server-0@eu"}}
    models = [stack.of(name, "model", "describe")["models"] for name in ("home", "eu")]
    assert [[model["name"] for model in of] for of in models] == [["main"], ["main"]]


def test_events_of_one_region_are_learned_from_in_all(stack: Stack) -> None:
    like = {"type": "interaction", "user_id": "u", "item_id": "film", "action": "like"}
    accepted = stack.ask("eu", "POST", "/v1/events", json=like)
    assert accepted.status_code == 202
    wish = {"user_id": "u", "min_freshness": accepted.json()["token"], "deadline_ms": 20_000}
    for name in ("home", "eu"):
        reply = stack.ask(name, "POST", "/v1/recommendations", json=wish).json()
        assert (reply["region"], reply["degraded"]) == (name, False)
        assert reply["parameters_as_of_ms"] >= accepted.json()["accepted_at_ms"]


def test_the_region_is_reached_over_its_link(stack: Stack) -> None:
    (link,) = stack.run("link", "show")["links"]
    assert (link["name"], link["target"]) == ("eu", stack.children()["parameter-server-0"]["address"])
    assert link["back"]["bytes_total"] > 0


def test_a_region_without_its_servers_says_so_and_the_other_goes_on(stack: Stack) -> None:
    server = stack.children()["server-0@eu"]["pid"]
    os.kill(server, signal.SIGSTOP)
    try:
        health = stack.ask("eu", "GET", "/health/ready")
        assert (health.status_code, health.headers["Retry-After"]) == (503, "1")
        detail = health.json()["dependencies"]["parameters"]["detail"]
        assert detail == "region eu: no answer from server-0@eu"
        reply = stack.ask("eu", "POST", "/v1/recommendations", json={}).json()
        assert (reply["region"], reply["degraded"]) == ("eu", True)
        assert stack.ask("home", "GET", "/health/ready").status_code == 200
        assert not stack.ask("home", "POST", "/v1/recommendations", json={}).json()["degraded"]
    finally:
        os.kill(server, signal.SIGCONT)
    eventually(lambda: stack.ask("eu", "GET", "/health/ready").status_code == 200)


def test_a_region_that_is_cut_off_says_how_far_behind_it_is(stack: Stack) -> None:
    def behind_s(region: str) -> float | None:
        found: float | None = stack.ask(region, "GET", "/health/ready").json()["behind_s"]
        return found

    eventually(lambda: (behind_s("eu") or 0.0) < LEVEL_S)
    stack.run("link", "partition", "eu")
    try:
        eventually(lambda: (behind_s("eu") or 0.0) > 2 * LEVEL_S)
        health = stack.ask("eu", "GET", "/health/ready")
        assert health.status_code == 200, "no more than sync.max_behind"
        assert health.json()["dependencies"]["parameters"]["detail"].endswith(" s behind")
        assert behind_s("home") is None
    finally:
        stack.run("link", "heal", "eu")
    eventually(lambda: (behind_s("eu") or LEVEL_S) < LEVEL_S)


def test_a_gateway_goes_elsewhere_and_comes_back_without_a_failed_request(
    stack: Stack, tmp_path: Path
) -> None:
    addresses = {name: region["url"].removeprefix("http://") for name, region in stack.regions().items()}
    server = stack.children()["server-0@eu"]["pid"]
    with (
        gateway(addresses["eu"], addresses["home"], tmp_path / "haproxy.log") as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):

        def served_by(region: str) -> bool:
            event = {"type": "interaction", "user_id": "u", "item_id": "film", "action": "click"}
            assert http.post("/v1/events", json=event).status_code == 202
            reply = http.post("/v1/recommendations", json={"user_id": "u"})
            assert reply.status_code == 200, reply.text
            body = reply.json()
            return bool(body["region"] == region and not body["degraded"])

        eventually(lambda: served_by("eu"))
        os.kill(server, signal.SIGSTOP)
        try:
            eventually(lambda: served_by("home"))
        finally:
            os.kill(server, signal.SIGCONT)
        eventually(lambda: served_by("eu"))


def test_killed_ones_come_back_where_others_look_for_them(stack: Stack) -> None:
    before = stack.children()
    killed = ("parameter-server-0", "link@eu", "server-0@eu", "api@eu")
    for name in killed:
        os.kill(before[name]["pid"], signal.SIGKILL)

    def back() -> bool:
        now = stack.children()
        new = all(now[name]["pid"] not in (None, before[name]["pid"]) for name in killed)
        return new and {child["state"] for child in now.values()} == {"ready"}

    eventually(back, 90.0)
    after = stack.children()
    assert {name for name, child in after.items() if child["restarts"]} == set(killed)
    for name in ("parameter-server-0", "api@eu"):
        assert after[name]["address"] == before[name]["address"]


@pytest.mark.slow
def test_regions_that_are_started_again_have_their_places_again(stack: Stack) -> None:
    before = (stack.data / "run" / "regions.json").read_bytes()
    stack.run("down")
    assert stack.run(*UP)["regions"][1]["name"] == "eu"
    assert (stack.data / "run" / "regions.json").read_bytes() == before
