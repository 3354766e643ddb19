"""The measuring client against regions that are made up: each as late as it is told to be."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from services.cli.app import main
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.freshness import read_regions
from services.freshness.book import HOME
from services.freshness.measure import MeasurementFailed, Plan, measure
from services.freshness.report import report
from services.freshness.updates import LOG as UPDATES
from services.freshness.updates import Update
from services.parameter_server.types import ParameterError
from services.supervisor.folder import ChildState, ProcessId, RunFolder, SupervisorState
from services.tokens import Token, decode_token, encode_token, log_fingerprint

EVENTS = log_fingerprint("events-1")
MARKED = log_fingerprint(UPDATES)


@dataclass
class World:
    """The log that all made-up regions share: when each position was accepted (monotonic seconds)."""

    accepted: dict[tuple[int, int], float] = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    offsets: Iterator[int] = field(default_factory=itertools.count)

    def accept(self, log: int, offset: int) -> None:
        with self.lock:
            self.accepted[log, offset] = time.monotonic()

    def newest(self, log: int, before_s: float) -> int:
        """The last position of ``log`` that was accepted by then, and all before it."""
        with self.lock:
            found = [o for (name, o), at_s in self.accepted.items() if name == log and at_s <= before_s]
        return max(found, default=-1)


class Handler(BaseHTTPRequestHandler):
    """One region's API, as far as the client asks for it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    region: Region

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        with suppress(ConnectionError):  # at the end of a measurement polls are given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        region = self.region
        region.keys.add(self.headers.get("X-API-Key"))
        if region.refusing:
            self._reply(429, {"code": "overloaded"})
            return
        with region.turn:
            time.sleep(region.accept_s)
        offset = next(region.world.offsets)
        region.world.accept(EVENTS, offset)
        now_ms = time.time() * 1e3
        stages = {"processed": 4.0, "trained": 6.0, "applied": 8.0}
        region.world.probes.append({"id": body["event_id"], "accepted_at_ms": now_ms, "after_ms": stages})
        self._reply(202, {"token": encode_token(Token(EVENTS, ((0, offset),)))})

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        region = self.region
        region.asked += 1
        if parts.path == "/v1/probes":
            first = int(query.get("cursor", "0"))
            page = region.world.probes[first : first + 500]
            more = first + 500 < len(region.world.probes)
            self._reply(200, {"probes": page, "cursor": str(first + 500) if more else None})
            return
        if "token" not in query:
            self._reply(200, {"region": region.name, "stages": {}})
            return
        token = decode_token(query["token"])
        ((slot, offset),) = token.positions
        deadline_s = time.monotonic() + int(query["wait_ms"]) / 1e3
        while region.has(token.log, query["stage"]) < offset and time.monotonic() < deadline_s:
            time.sleep(0.001)
        stages = ("parameters", "recommendations") if token.log == EVENTS else ("parameters",)
        standing = {}
        for stage in stages:
            newest = region.has(token.log, stage)
            place = encode_token(Token(token.log, ((slot, newest),))) if newest >= 0 else None
            standing[stage] = {"token": place, "reached": newest >= offset}
        self._reply(200, {"region": region.name, "stages": standing})


@dataclass
class Region:
    """A made-up region, ``late_s`` behind the log with its parameters and 20 ms more with recommendations."""

    name: str
    world: World
    late_s: float
    accept_s: float = 0.0
    refusing: bool = False
    blind: bool = False
    asked: int = 0
    keys: set[str | None] = field(default_factory=set)
    turn: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def has(self, log: int, stage: str) -> int:
        more_s = 0.020 if stage == "recommendations" else 0.0
        return -1 if self.blind else self.world.newest(log, time.monotonic() - self.late_s - more_s)


@contextmanager
def serving(*regions: Region) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            server = ThreadingHTTPServer(
                ("127.0.0.1", 0), type("Bound", (Handler,), {"region": region}), bind_and_activate=True
            )
            server.daemon_threads = True
            stack.callback(server.server_close)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            region.url = f"http://127.0.0.1:{server.server_port}"
        yield


@pytest.fixture
def world() -> World:
    return World()


def pushing(world: World) -> Any:
    numbers = itertools.count(1)

    def push() -> Update:
        number, sent_ms = next(numbers), time.time() * 1e3
        world.accept(MARKED, number)
        return Update(0, number, sent_ms, time.time() * 1e3)

    return push


def test_each_region_is_as_late_as_it_is(world: World) -> None:
    home, eu = Region("home", world, 0.010), Region("eu", world, 0.150)
    with serving(home, eu):
        sent: list[int] = []
        plan = Plan(home.url, {"eu": eu.url}, "secret", rate=40.0, seconds=0.8)
        found = report(measure(plan, [pushing(world)], sent.append))
    assert found.problems == []
    assert sum(sent) == 64
    assert home.keys == {"secret"}
    for kind, region, stage, least_ms in (
        ("event", "home", "parameters", 10),
        ("event", "home", "recommendations", 30),
        ("event", "eu", "parameters", 150),
        ("event", "eu", "recommendations", 170),
        ("update", "home", "parameters", 10),
        ("update", "eu", "parameters", 150),
    ):
        row = found.row(kind, region, stage)
        assert row is not None
        assert row.ms is not None
        assert (row.sent, row.missing) == (32, 0)
        assert least_ms - 1 <= row.curve_ms[0], "never earlier than it can be"
        assert row.ms.p50_ms < least_ms + 400, "nor much later than it was, even on a busy machine"
    processed = found.row("event", None, "processed")
    assert processed is not None
    assert processed.ms is not None
    assert processed.missing == 0
    applied = found.row("event", None, "applied")
    assert applied is not None
    assert applied.ms is not None
    assert applied.ms.p50_ms - processed.ms.p50_ms == pytest.approx(4.0, abs=0.1)
    assert eu.asked < 400, "watermarks cover many probes, so polls are fewer than probes times stages"


def test_a_server_that_stalls_is_not_flattered(world: World) -> None:
    """Ten events are due within 90 ms and taken one by one, 50 ms each: the last waited for all before it."""
    home = Region("home", world, 0.0, accept_s=0.05)
    with serving(home):
        measured = measure(Plan(home.url, rate=100.0, seconds=0.1, kinds=("event",)), (), lambda n: None)
    accepted = measured.book.after_ms("event")[HOME]["accepted"]
    assert len(accepted) == 10
    assert min(accepted) >= 50
    assert max(accepted) >= 10 * 50 - 90


def test_a_region_that_never_shows_anything_is_told_and_holds_nobody_up(world: World) -> None:
    home, eu = Region("home", world, 0.0), Region("eu", world, 0.0, blind=True)
    with serving(home, eu):
        plan = Plan(home.url, {"eu": eu.url}, rate=50.0, seconds=0.2, patience_s=0.3, kinds=("event",))
        found = report(measure(plan, (), lambda n: None))
    eu_row, home_row = found.row("event", "eu", "parameters"), found.row("event", "home", "parameters")
    assert eu_row is not None
    assert home_row is not None
    assert (eu_row.ms, eu_row.missing, home_row.missing) == (None, 10, 0)
    assert any("not visible" in problem for problem in found.problems)


def test_a_region_that_is_away_is_named(world: World) -> None:
    home = Region("home", world, 0.0)
    with serving(home):
        away = "http://127.0.0.1:1"
        plan = Plan(home.url, {"eu": away}, rate=50.0, seconds=0.1, patience_s=0.2, kinds=("event",))
        found = report(measure(plan, (), lambda n: None))
    assert any(away in problem for problem in found.problems)
    assert found.row("event", "home", "recommendations") is not None


def test_without_a_home_there_is_nothing_to_measure(world: World) -> None:
    with pytest.raises(MeasurementFailed, match="does not answer"):
        measure(Plan("http://127.0.0.1:1", kinds=("event",)), (), lambda n: None)
    refusing = Region("home", world, 0.0, refusing=True)
    with serving(refusing), pytest.raises(MeasurementFailed, match="overloaded"):
        measure(Plan(refusing.url, rate=20.0, seconds=0.1, kinds=("event",)), (), lambda n: None)


def test_updates_that_fail_are_counted_and_told(world: World) -> None:
    home = Region("home", world, 0.0)
    good, calls = pushing(world), itertools.count()

    def push() -> Update:
        if next(calls) % 2:
            raise ParameterError("no room")
        update: Update = good()
        return update

    with serving(home):
        plan = Plan(home.url, rate=100.0, seconds=0.1, kinds=("update",))
        found = report(measure(plan, [push], lambda n: None))
    row = found.row("update", "home", "parameters")
    assert row is not None
    assert (row.sent, row.missing, found.failed) == (5, 0, 5)
    assert any("no room" in problem for problem in found.problems)


def test_a_writer_that_waits_holds_up_no_other(world: World) -> None:
    home, good, slow = Region("home", world, 0.0), pushing(world), []

    def waits() -> Update:
        if slow:
            time.sleep(0.2)
        slow.append(1)  # its first does not count, and warms up
        update: Update = good()
        return update

    with serving(home):
        plan = Plan(home.url, rate=100.0, seconds=0.08, kinds=("update",))
        measured = measure(plan, [waits, good], lambda n: None)
    applied = sorted(measured.book.after_ms("update")[HOME]["applied"])
    assert len(applied) == 8
    assert applied[3] < 200 <= applied[4], "every other one"


def test_the_command_prints_json_alone_and_writes_its_folder(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, eu = Region("home", world, 0.0), Region("eu", world, 0.030)
    with serving(home, eu), pytest.raises(SystemExit) as ended:
        main(
            ["freshness", "--rate", "50", "--seconds", "0.2", "--no-updates", "--url", home.url, "--region",
             f"eu={eu.url}", "--out", str(tmp_path / "out"), "--format", "json"]
        )  # fmt: skip
    assert ended.value.code == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["regions"] == ["home", "eu"]
    assert {row["kind"] for row in found["rows"]} == {"event"}
    assert json.loads((tmp_path / "out" / "freshness.json").read_text()) == found
    assert (tmp_path / "out" / "freshness.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in printed.err


@pytest.mark.parametrize("way", ["blind", "away"])
def test_probes_that_are_missing_somewhere_fail_the_check(
    way: str, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.freshness.measure.Plan", partial(Plan, patience_s=0.2))
    home, eu = Region("home", world, 0.0), Region("eu", world, 0.0, blind=True)
    command = ["freshness", "--rate", "50", "--seconds", "0.1", "--no-updates", "--format", "json"]
    with serving(home, eu):
        watched = f"eu={eu.url}" if way == "blind" else "eu=http://127.0.0.1:1"
        with pytest.raises(SystemExit) as ended:
            main([*command, "--url", home.url, "--region", watched])
    assert ended.value.code == Exit.CHECK_FAILED
    printed = capsys.readouterr()
    assert json.loads(printed.out)["regions"] == ["home", "eu"]
    assert "FAIL  eu: 5 of 5 event probes are missing at stage parameters" in printed.err
    assert "FAIL  home" not in printed.err


def test_home_is_watched_where_it_is_said_to_be(world: World) -> None:
    taking, watched = Region("home", world, 5.0), Region("home", world, 0.0)
    with serving(taking, watched):
        plan = Plan(taking.url, {"home": watched.url}, None, 50.0, 0.1, patience_s=2.0, kinds=("event",))
        found = report(measure(plan, [], lambda _: None))
    assert found.regions == ["home"]
    assert all(row.missing == 0 for row in found.rows), "the one that takes them shows them 5 s later"
    assert watched.asked > 2


def test_what_is_said_to_be_home_and_is_not_is_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    home, eu = Region("home", world, 0.0), Region("eu", world, 0.0)
    with serving(home, eu), pytest.raises(SystemExit) as ended:
        main(
            ["freshness", "--no-updates", "--seconds", "0.1", "--url", home.url, "--region", f"home={eu.url}"]
        )
    assert ended.value.code not in (0, Exit.CHECK_FAILED)
    told = capsys.readouterr().err
    assert f"home is the region at {home.url}, which takes the probes" in told
    assert f"{eu.url} is an API of eu" in told
    assert not world.accepted


@pytest.mark.parametrize(
    "text", ["eu", "eu=", "=http://x", "eu=127.0.0.1:80", "eu=ftp://x", "eu=http://", "eu=http://x:y"]
)
def test_a_region_is_a_name_and_an_address(text: str) -> None:
    with pytest.raises(CommandFailed) as failed:
        read_regions([text])
    assert failed.value.code == Exit.USAGE


def test_there_must_be_something_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["freshness", "--no-updates", "--no-events", "--url", "http://127.0.0.1:1"])
    assert ended.value.code == Exit.USAGE


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rate", "inf"], "probes of each kind"),
        (["--rate", "1e9"], "probes of each kind"),
        (["--seconds", "inf"], "probes of each kind"),
        (["--out", "/dev/null/out"], "no folder"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_said_before_anything_is_sent(
    world: World, options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Region("home", world, 0.0)
    with serving(home), pytest.raises(SystemExit) as ended:
        main(["freshness", "--no-updates", "--url", home.url, *options])
    assert ended.value.code == Exit.USAGE
    assert why in capsys.readouterr().err
    assert not world.accepted


def _measured_regions(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["freshness", "--rate", "50", "--seconds", "0.1", "--no-updates", "--format", "json", *options])
    assert ended.value.code == 0
    regions: list[str] = json.loads(capsys.readouterr().out)["regions"]
    return regions


def test_the_regions_of_the_settings_are_watched(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, eu = Region("home", world, 0.0), Region("eu", world, 0.0)
    with serving(home, eu):
        monkeypatch.setenv("HEADWATER_URL", home.url)
        options = ["--set", f"data.dir={tmp_path}", "--set", f"freshness.regions=eu={eu.url}"]
        assert _measured_regions(capsys, *options) == ["home", "eu"]


def test_the_regions_that_run_from_the_data_folder_are_found(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWATER_URL", raising=False)
    home, eu = Region("home", world, 0.0), Region("eu", world, 0.0)
    folder, here = RunFolder(tmp_path), ProcessId.of(os.getpid())
    assert here is not None
    with serving(home, eu), folder.locked():
        children = (
            ChildState("api-0", "api", "ready", 0, address=home.url),
            ChildState("api@eu", "api", "ready", 0, address=eu.url, region="eu"),
        )
        folder.write_state(SupervisorState(here, 0, children))
        assert _measured_regions(capsys, "--set", f"data.dir={tmp_path}") == ["home", "eu"]
