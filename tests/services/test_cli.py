"""The ``headwater`` command as people meet it: what it prints where, and with what code it ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest

from services.backends import open_log
from services.cli.app import main
from services.cli.context import hoist
from services.cli.exits import HELP, Exit
from services.cli.failures import code_of
from services.messagelog.contract import Message
from services.settings.keys import hash_key
from services.settings.load import load_settings


class Ran:
    """How a command ended and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command(Protocol):
    """Runs ``headwater`` with the given arguments."""

    def __call__(self, *arguments: str) -> Ran: ...


@pytest.fixture
def headwater(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs the command in this process, in an empty folder, without the tester's own settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADWATER")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, printed.out, printed.err)

    return run


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server = self.server
        assert isinstance(server, FakeApi)
        server.requests.append((self.path, json.loads(body) if body else None, self.headers.get("X-API-Key")))
        status, reply = server.reply
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no access log."""


class FakeApi(ThreadingHTTPServer):
    """Answers everything with ``reply`` and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: tuple[int, object] = (200, {})
        self.requests: list[tuple[str, object, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestShape:
    def test_no_arguments_print_help(self, headwater: Command) -> None:
        ran = headwater()
        assert "Commands:" in ran.out + ran.err

    @pytest.mark.parametrize(
        "command",
        ["up", "down", "status", "demo", "evaluate", "import", "recommend", "openapi", "exits", "events",
         "config", "service", "events send", "config new-key", "service trainer", "service check"],
    )  # fmt: skip
    def test_help_everywhere(self, headwater: Command, command: str) -> None:
        for flag in ("-h", "--help"):
            ran = headwater(*command.split(), flag)
            assert ran.code == 0
            assert ran.out.startswith(f"Usage: headwater {command}")

    def test_help_imports_nothing_heavy(self) -> None:
        """``headwater -h`` answers at once because it loads none of these."""
        program = (
            "import sys; from services.cli.app import main\n"
            "try: main(['-h'])\n"
            "except SystemExit: pass\n"
            "heavy = {'numpy', 'torch', 'pydantic', 'numba', 'pyarrow', 'httpx', 'fastapi', 'rich.table'}\n"
            "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"

    def test_global_options_stand_anywhere(self) -> None:
        expected = ["--format", "json", "--set=a.b=1", "demo", "--keep", "x"]
        assert hoist(["demo", "--format", "json", "--keep", "x", "--set=a.b=1"]) == expected
        assert hoist(["recommend", "--", "--format"]) == ["recommend", "--", "--format"]
        assert hoist(["demo", "--format"]) == ["--format", "demo"]

    def test_every_exit_code_has_its_help(self, headwater: Command) -> None:
        assert set(HELP) == set(Exit)
        shown = headwater("exits", "--format", "json").json
        assert shown == {str(int(e)): {"name": e.name.lower(), "help": HELP[e]} for e in Exit}
        table = headwater("exits").out
        assert all(str(int(code)) in table for code in Exit)

    def test_failures_are_looked_up_by_the_nearest_class(self) -> None:
        from services.datasets.errors import BadRows, DatasetDamaged
        from services.messagelog.contract import LogUnavailable

        assert code_of(BadRows((), 0)) is Exit.BAD_INPUT
        assert code_of(DatasetDamaged("x")) is Exit.DATA_UNAVAILABLE
        assert code_of(LogUnavailable("x")) is Exit.BACKEND_UNAVAILABLE
        assert code_of(KeyboardInterrupt()) is Exit.INTERRUPTED
        assert code_of(OSError(errno.EADDRINUSE, "in use")) is Exit.ADDRESS_IN_USE
        assert code_of(ZeroDivisionError()) is None
        assert code_of(OSError(errno.ENOSPC, "full")) is None

    def test_named_exceptions_exist(self) -> None:
        """The table of failures names classes by text; a renamed class must not fall out of it unseen."""
        from importlib import import_module

        from services.cli import failures

        for name in failures._CODES:
            module, _, cls = name.rpartition(".")
            assert issubclass(getattr(import_module(module), cls), Exception)


class TestConfig:
    def test_show_says_where_each_value_comes_from(
        self, headwater: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "headwater.toml").write_text("[trainer]\ncount = 2\n")
        monkeypatch.setenv("HEADWATER__LOG__PARTITIONS", "8")
        ran = headwater("config", "show", "--set", "api.deadline=1s", "--format", "json")
        shown = {row["name"]: (row["value"], row["origin"]) for row in ran.json}
        assert shown["trainer.count"] == (2, "file headwater.toml, line 2")
        assert shown["log.partitions"] == (8, "environment HEADWATER__LOG__PARTITIONS")
        assert shown["api.deadline"] == (1.0, "flag --set api.deadline")
        assert shown["processor.count"] == (1, "default")
        assert shown["features.url"][0] == "**********"
        assert next(row["text"] for row in ran.json if row["name"] == "api.deadline") == "1s"
        table = headwater("config", "show", "--set", "sync.max_behind=90s", "--set", "rpc.insecure=true").out
        cells = {line.split()[0]: line.split()[1] for line in table.splitlines() if len(line.split()) > 1}
        assert cells["trainer.count"] == "2"
        assert (cells["sync.max_behind"], cells["sync.coalesce"]) == ("90s", "5ms")
        assert cells["rpc.insecure"] == "true"

    def test_wrong_settings_stop_with_name_value_origin_and_suggestion(self, headwater: Command) -> None:
        ran = headwater("up", "--set", "log.partitons=3")
        assert ran.code == Exit.SETTINGS
        assert ran.out == ""
        for part in ("log.partitons", "'3'", "flag --set log.partitons", "did you mean log.partitions?"):
            assert part in ran.err
        assert "Traceback" not in ran.err

    def test_an_open_address_without_a_key_is_refused(self, headwater: Command) -> None:
        ran = headwater("service", "api", "--set", "api.listen=0.0.0.0:8080")
        assert ran.code == Exit.SETTINGS
        assert "config new-key" in ran.err

    def test_servers_on_one_machine_cannot_share_a_port(self, headwater: Command, tmp_path: Path) -> None:
        ran = headwater("up", "--set", "parameters.servers=2", "--set", "parameters.listen=127.0.0.1:7400")
        assert (ran.code, "parameters.listen=127.0.0.1:0" in ran.err) == (Exit.SETTINGS, True)
        assert not (tmp_path / ".headwater").exists()

    def test_new_key(self, headwater: Command) -> None:
        made = headwater("config", "new-key", "admin", "--format", "json").json
        assert made["hashed"] == f"admin:{hash_key(made['key'])}"
        assert headwater("config", "show", "--set", f"api.keys={made['hashed']}").code == 0
        refused = headwater("config", "new-key", "root")
        assert (refused.code, "read, write, admin" in refused.err) == (Exit.USAGE, True)

    def test_init_asks_before_it_overwrites(
        self, headwater: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "headwater.toml"
        assert headwater("config", "init").code == 0
        written = file.read_text()
        assert set(tomllib.loads(written)) >= {"log", "api"}
        file.write_text("[log]\n")
        monkeypatch.setattr("typer.confirm", lambda *_args, **_kwargs: False)
        assert headwater("config", "init").code == Exit.DECLINED
        assert file.read_text() == "[log]\n"
        assert headwater("config", "init", "--yes").code == 0
        assert file.read_text() == written

    def test_a_place_that_cannot_be_written(self, headwater: Command) -> None:
        ran = headwater("config", "init", "no/such/folder.toml")
        assert (ran.code, "cannot be written" in ran.err) == (Exit.BAD_INPUT, True)


class TestNothingRuns:
    @pytest.mark.parametrize("command", ["status", "down", "service check"])
    def test_says_so_and_leaves_no_trace(self, headwater: Command, tmp_path: Path, command: str) -> None:
        ran = headwater(*command.split())
        assert ran.code == Exit.NOT_RUNNING
        assert ran.out == ""
        assert not list(tmp_path.iterdir())

    def test_no_api(self, headwater: Command) -> None:
        ran = headwater("recommend", "1", "--set", "api.listen=127.0.0.1:1")
        assert ran.code == Exit.NOT_RUNNING
        assert "http://127.0.0.1:1 does not answer" in ran.err
        assert headwater("recommend", "1", "--url", "ftp://x").code == Exit.NOT_RUNNING


LISTED = {
    "recommendation_id": "r1",
    "model_version": "main@7",
    "parameters_as_of": "2026-01-01T00:00:00.000Z",
    "took_ms": 3.1,
    "degraded": True,
    "something_new": 1,
    "items": [
        {
            "item_id": "i[b]1",
            "score": 0.5,
            "source": "two_tower",
            "reasons": ["like x"],
            "attributes": {"title": "Toy Story"},
        },
        {"item_id": "i2", "score": None, "source": "popular_fallback", "reasons": []},
    ],
}


class TestRecommend:
    def test_table_with_titles(self, headwater: Command, api: FakeApi) -> None:
        api.reply = (200, LISTED)
        ran = headwater(
            "recommend", "u/1", "-n", "2", "--category", "War", "--url", api.url, "--key", "secret"
        )
        assert ran.code == 0
        assert "Toy Story" in ran.out
        assert "i[b]1" in ran.out
        assert "popular_fallback" in ran.out
        assert "main@7" in ran.err
        assert "degraded" in ran.err
        body = {
            "n": 2,
            "exclude_seen": True,
            "include_attributes": ["title"],
            "user_id": "u/1",
            "categories": ["War"],
        }
        assert api.requests == [("/v1/recommendations", body, "secret")]

    def test_json_is_the_reply_alone(self, headwater: Command, api: FakeApi) -> None:
        api.reply = (200, LISTED)
        assert headwater("recommend", "--url", api.url, "--format", "json").json == LISTED

    def test_a_problem_is_told_with_its_code_and_fields(self, headwater: Command, api: FakeApi) -> None:
        problem = {"code": "invalid_value", "detail": "No.", "request_id": "q7"}
        api.reply = (422, problem | {"errors": [{"path": "n", "message": "too large"}]})
        ran = headwater("recommend", "1", "--url", api.url)
        assert ran.code == Exit.REFUSED
        assert "invalid_value: No." in ran.err
        assert "n: too large" in ran.err
        assert "q7" in ran.err
        api.reply = (401, {"code": "unauthenticated"})
        assert "HEADWATER_API_KEY" in headwater("recommend", "1", "--url", api.url).err
        api.reply = (502, ["not", "a", "problem"])
        assert "HTTP 502" in headwater("recommend", "1", "--url", api.url).err

    def test_a_reply_of_another_form(self, headwater: Command, api: FakeApi) -> None:
        api.reply = (200, {"items": "none"})
        assert headwater("recommend", "1", "--url", api.url).code == Exit.REFUSED


class TestEventsSend:
    def test_one(self, headwater: Command, api: FakeApi) -> None:
        api.reply = (202, {"token": "t"})
        ran = headwater(
            "events", "send", "u", "i", "rating", "--value", "4.5", "--url", api.url, "--format", "json"
        )
        assert ran.json == {"token": "t"}
        event = {"type": "interaction", "user_id": "u", "item_id": "i", "action": "rating", "value": 4.5}
        assert api.requests == [("/v1/events", event, None)]

    def test_a_file_in_batches_with_refusals_by_line(
        self, headwater: Command, api: FakeApi, tmp_path: Path
    ) -> None:
        (tmp_path / "e.jsonl").write_text('{"n": 1}\n\n{"n": 2}\n')
        refused = {"status": "refused", "code": "invalid_value", "errors": [{"path": "n", "message": "no"}]}
        api.reply = (
            202,
            {"accepted": 1, "refused": 1, "token": "t", "results": [{"status": "accepted"}, refused]},
        )
        ran = headwater("events", "send", "--file", "e.jsonl", "--url", api.url)
        assert ran.code == Exit.REFUSED
        assert "e.jsonl:3: invalid_value" in ran.err
        assert api.requests == [("/v1/events:batch", {"events": [{"n": 1}, {"n": 2}]}, None)]

    def test_a_broken_line_is_named(self, headwater: Command, api: FakeApi, tmp_path: Path) -> None:
        (tmp_path / "e.jsonl").write_text('{"n": 1}\n{"n"\n')
        ran = headwater("events", "send", "--file", "e.jsonl", "--url", api.url)
        assert (ran.code, "e.jsonl:2:" in ran.err) == (Exit.BAD_INPUT, True)
        assert headwater("events", "send", "--file", "none", "--url", api.url).code == Exit.BAD_INPUT
        assert headwater("events", "send", "u").code == Exit.USAGE


class TestImport:
    def test_wrong_rows_are_named_and_nothing_is_written(self, headwater: Command, tmp_path: Path) -> None:
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "events.csv").write_text("user_id,item_id,action,timestamp\na,x,like,noon\n")
        ran = headwater("import", "mine")
        assert ran.code == Exit.BAD_INPUT
        assert "events.csv:2: timestamp 'noon'" in ran.err
        assert not (tmp_path / ".headwater").exists()

    def test_into_the_log_and_seen_there(self, headwater: Command, tmp_path: Path) -> None:
        folder = tmp_path / "mine"
        folder.mkdir()
        rows = "".join(f"u{n},i{n % 3},like,{n}\n" for n in range(40))
        (folder / "events.csv").write_text("user_id,item_id,action,timestamp\n" + rows)
        told = headwater("import", "mine", "--until", "0.5", "--shift-to-now", "--format", "json").json
        assert (told["items"], told["users"], told["interactions"], told["events"]) == (3, 40, 20, 63)
        shown = headwater("events", "tail", "-n", "5", "--format", "json").out.splitlines()
        assert len(shown) == 5
        assert all("type" in json.loads(line)["event"] for line in shown)
        everything = headwater("events", "tail", "-n", "1000").out.splitlines()
        assert len(everything) == 63
        now_ms = time.time() * 1e3
        times = [json.loads(line.split(" ", 2)[2])["timestamp_ms"] for line in everything if "like" in line]
        assert now_ms - 60_000 < max(times) <= now_ms
        assert max(times) - min(times) == 19_000
        assert headwater("events", "rejected").err == "there are no rejected events\n"

    def test_waiting_for_a_pipeline_that_does_not_run(self, headwater: Command, tmp_path: Path) -> None:
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "items.csv").write_text("item_id,title\nx,One\n")
        ran = headwater("import", "mine", "--wait", "--stall", "0.1")
        assert ran.code == Exit.NOT_PROCESSED
        assert "0 of 1" in ran.err

    def test_rejected_events_carry_their_reason(self, headwater: Command, tmp_path: Path) -> None:
        settings = load_settings(overrides=[f"data.dir={tmp_path / '.headwater'}"]).settings
        with closing(open_log(settings)) as log, closing(log.producer()) as producer:
            producer.append([Message("rejected", 0, b"k", b'{"code": "unusable", "reason": "no"}', 5)])
        assert '"reason": "no"' in headwater("events", "rejected").out
        (line,) = headwater("events", "rejected", "--format", "json").out.splitlines()
        assert json.loads(line)["rejected"] == {"code": "unusable", "reason": "no"}
        assert json.loads(line)["accepted_at_ms"] == 5

    def test_an_unknown_name(self, headwater: Command) -> None:
        ran = headwater("import", "ml-1m")
        assert ran.code == Exit.DATA_UNAVAILABLE
        assert "ml-100k" in ran.err


@pytest.mark.parametrize("service", ["parameter-server", "processor", "trainer", "api", "link"])
def test_the_entry_points_of_services_exist(service: str) -> None:
    from importlib.util import find_spec

    from services.processes import SERVICES

    assert find_spec(SERVICES[service]) is not None
