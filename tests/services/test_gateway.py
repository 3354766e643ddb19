"""The gateway's configuration, by a real HAProxy before two stand-ins for the APIs of two regions."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml
from support.gateway import CONFIGURATION, gateway, program

from services.api.problems import KINDS

OVERLAY: Final = CONFIGURATION.parents[1] / "compose.regions.yml"


class Region(ThreadingHTTPServer):
    """An API that says its region. Not ``ready``: /health/ready is 503. ``cut``: it hangs up instead of answering a
    POST. ``empty``: it has nothing to answer one with, and says 503."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.ready = True
        self.cut = False
        self.empty = False
        self.posts: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """HAProxy ends checks by a reset; that is no news."""

    def close(self) -> None:
        """End as a killed process would: connections are refused from now on. May be called twice."""
        if self._thread.is_alive():
            self.shutdown()
            self.server_close()
            self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    # One connection a request: a closed stand-in leaves none of them open.
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        assert isinstance(self.server, Region)
        self._answer(200 if self.path != "/health/ready" or self.server.ready else 503)

    def do_POST(self) -> None:
        assert isinstance(self.server, Region)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.posts.append(self.path)
        if not self.server.cut:
            self._answer(503 if self.server.empty else 200)

    def _answer(self, status: int) -> None:
        assert isinstance(self.server, Region)
        body = json.dumps({"region": self.server.name}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no access log."""


class Site:
    """Two regions and the gateway before them."""

    def __init__(self, stack: ExitStack, log: Path) -> None:
        self.near, self.far = Region("near"), Region("far")
        for region in (self.near, self.far):
            stack.callback(region.close)
        url = stack.enter_context(gateway(self.near.address, self.far.address, log))
        self.http = stack.enter_context(httpx.Client(base_url=url, timeout=20))

    def post(self, path: str = "/v1/recommendations") -> httpx.Response:
        return self.http.post(path, json={})

    def asked(self) -> str:
        """Who answers a list."""
        reply = self.post()
        assert reply.status_code == 200, reply.text
        region: str = reply.json()["region"]
        assert reply.headers["X-Gateway-Server"] == region
        return region

    def backend(self) -> str:
        """What a list comes from: ``regions``, or ``stale``."""
        reply = self.post()
        assert reply.status_code == 200, reply.text
        return reply.headers["X-Gateway-Backend"]

    def until(self, true: Callable[[], bool]) -> None:
        """Ask until ``true()``."""
        deadline = time.monotonic() + 20.0
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, tmp_path / "haproxy.log")


def test_the_configuration_is_valid_as_it_stands() -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    done = subprocess.run(
        [program(), "-c", "-f", str(CONFIGURATION)], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def test_the_near_region_answers_alone(site: Site) -> None:
    assert [site.asked() for _ in range(10)] == ["near"] * 10
    assert site.far.posts == []


def test_a_region_that_is_not_ready_is_left_and_taken_again(site: Site) -> None:
    site.near.ready = False
    site.until(lambda: site.asked() == "far")
    assert site.post("/v1/events").json() == {"region": "far"}
    site.near.ready = True
    site.until(lambda: site.asked() == "near")


def test_a_killed_api_costs_no_request(site: Site) -> None:
    assert site.asked() == "near"
    site.near.close()
    # At once, before any check: what reaches nobody is sent on, events as well.
    assert site.asked() == "far"
    assert site.post("/v1/events").json() == {"region": "far"}


def test_what_is_cut_off_is_repeated_where_that_does_nothing_twice(site: Site) -> None:
    site.near.cut = True
    assert site.asked() == "far"
    before = len(site.near.posts)
    reply = site.post("/v1/events")
    assert (reply.status_code, reply.json()["status"]) == (502, 502)
    assert (reply.headers["Content-Type"], reply.json()["code"]) == (
        "application/problem+json",
        "unavailable",
    )
    assert (site.near.posts[before:], "/v1/events" in site.far.posts) == (["/v1/events"], False)


def test_where_no_region_is_ready_one_that_lives_answers_with_what_it_has(site: Site) -> None:
    site.near.ready = site.far.ready = False
    # In between nobody is turned away.
    site.until(lambda: site.backend() == "stale")
    assert [site.asked() for _ in range(10)] == ["near"] * 10
    assert site.http.get("/gateway/health").status_code == 200
    assert site.post("/v1/events").json() == {"region": "near"}
    # Home is lost altogether.
    site.near.close()
    assert site.asked() == "far"
    assert site.post("/v1/events").json() == {"region": "far"}
    site.far.ready = True
    site.until(lambda: site.backend() == "regions")
    assert site.asked() == "far"


def test_a_living_region_that_has_nothing_to_answer_with_is_passed_over(site: Site) -> None:
    site.near.ready = site.far.ready = False
    site.until(lambda: site.backend() == "stale")
    site.near.empty = True
    assert site.asked() == "far"
    reply = site.post("/v1/events")
    assert (reply.status_code, reply.json()) == (503, {"region": "near"}), (
        "events are their clients' to repeat"
    )


def test_without_any_region_it_says_so_as_an_api_does(site: Site) -> None:
    site.near.close()
    site.far.close()
    site.until(lambda: site.http.get("/gateway/health").status_code == 503)
    reply = site.post()
    assert reply.status_code == 503
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.headers["Retry-After"] == "1"
    problem = reply.json()
    assert (problem["code"], problem["status"]) == ("unavailable", 503)
    assert problem["title"] == KINDS["unavailable"].title


def test_the_health_check_of_its_container_sees_whether_any_region_answers(site: Site) -> None:
    check = yaml.safe_load(OVERLAY.read_text())["services"]["gateway"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "bash", "-c"]
    script = check[3].replace("/8088", f"/{site.http.base_url.port}").replace("$$", "$")

    def well() -> bool:
        return subprocess.run(["bash", "-c", script], timeout=10, check=False).returncode == 0

    site.near.ready = site.far.ready = False
    site.until(lambda: site.backend() == "stale")
    assert well()
    site.near.close()
    site.far.close()
    site.until(lambda: not well())
