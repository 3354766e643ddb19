"""``headwater service check``: the health check of containers, on a registry with members of every sort."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.cli.app import main
from services.cli.exits import Exit
from services.coordination.membership import Member, Registration
from services.coordination.sqlite import SqliteCoordination
from services.processes import announce

PID = 17


class Health(HTTPServer):
    """An API that answers /health/ready with ``reply``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: tuple[int, str] = (200, '{"status": "ready", "dependencies": {}}')

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Health)
        status, body = self.server.reply if self.path == "/health/ready" else (404, "{}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no access log."""


@pytest.fixture
def health() -> Iterator[Health]:
    with Health() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Registry:
    """Registers members in the coordination of a data folder, and runs the check on it."""

    def __init__(self, folder: Path, open_: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._open, self._capsys = open_, capsys
        self._store = open_.enter_context(closing(SqliteCoordination(folder / "coordination.db")))

    def add(self, service: str, name: str, *, ready: bool = True, address: str = "h:1") -> None:
        member = Member(name, service, address, PID, 1, 0, ready)
        self._open.callback(Registration(self._store, member, 60.0).close)

    def check(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of ``headwater service check``."""
        with pytest.raises(SystemExit) as ended:
            main(["service", "check", "--set", f"data.dir={self.folder}", *arguments])
        printed = self._capsys.readouterr()
        code: Any = ended.value.code
        return int(code or 0), printed.out, printed.err


@pytest.fixture
def registry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registry]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as open_:
        yield Registry(tmp_path, open_, capsys)


class TestNamed:
    def test_passes_for_what_is_registered_and_ready(self, registry: Registry) -> None:
        registry.add("trainer", "trainer-0")
        registry.add("processor", "processor-0", ready=False)
        assert registry.check("--name", "trainer-0") == (0, "PASS  trainer-0\n", "")
        assert registry.check("--service", "trainer", "--name", "trainer-0")[0] == 0

    def test_says_what_is_not_ready(self, registry: Registry) -> None:
        registry.add("processor", "processor-0", ready=False)
        code, out, _ = registry.check("--name", "processor-0")
        assert code == Exit.CHECK_FAILED
        assert out == "FAIL  processor-0: registered, but not ready\n"

    def test_what_is_not_registered(self, registry: Registry) -> None:
        registry.add("trainer", "trainer-0")
        code, out, error = registry.check("--service", "processor", "--name", "trainer-0")
        assert (code, out) == (Exit.NOT_RUNNING, "")
        assert "trainer-0 of the processor service is not registered" in error

    def test_a_whole_service(self, registry: Registry) -> None:
        assert "a process of the trainer service" in registry.check("--service", "trainer")[2]
        registry.add("trainer", "trainer-0")
        registry.add("trainer", "trainer-1", ready=False)
        registry.add("processor", "processor-0", ready=False)
        code, out, _ = registry.check("--service", "trainer", "--format", "json")
        assert (code, json.loads(out)) == (Exit.CHECK_FAILED, {"trainer-0": True, "trainer-1": False})

    def test_a_service_that_does_not_exist(self, registry: Registry) -> None:
        code, _, error = registry.check("--service", "trainers")
        assert code == Exit.USAGE
        assert "'trainers' is not a service: parameter-server" in error

    def test_a_registry_that_cannot_be_reached(self, registry: Registry) -> None:
        unreachable = ("--set", "coordination.backend=etcd", "--set", "coordination.url=http://127.0.0.1:1")
        code, out, error = registry.check("--name", "trainer-0", *unreachable)
        assert (code, out) == (Exit.BACKEND_UNAVAILABLE, "")
        assert "etcd" in error


class TestApi:
    def test_passes_when_it_answers(self, registry: Registry, health: Health) -> None:
        registry.add("api", "api-0", address=health.url)
        assert registry.check("--name", "api-0")[0] == 0

    def test_tells_which_dependency_is_not_well(self, registry: Registry, health: Health) -> None:
        registry.add("api", "api-0", address=health.url)
        states = {"log": {"ok": False, "detail": "the event log cannot be reached"}, "items": {"ok": True}}
        health.reply = (503, json.dumps({"status": "not_ready", "dependencies": states}))
        code, out, _ = registry.check("--name", "api-0")
        assert (code, out) == (Exit.CHECK_FAILED, "FAIL  api-0: log: the event log cannot be reached\n")

    @pytest.mark.parametrize("reply", [(503, "busy"), (500, "[]"), (503, "{}")])
    def test_another_answer_fails(self, registry: Registry, health: Health, reply: tuple[int, str]) -> None:
        registry.add("api", "api-0", address=health.url)
        health.reply = reply
        code, out, _ = registry.check("--name", "api-0")
        assert code == Exit.CHECK_FAILED
        assert f"FAIL  api-0: {health.url}/health/ready: " in out

    @pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://[", "nonsense"])
    def test_no_answer_fails(self, registry: Registry, address: str) -> None:
        registry.add("api", "api-0", address=address)
        code, out, _ = registry.check("--name", "api-0")
        assert code == Exit.CHECK_FAILED
        assert out.startswith(f"FAIL  api-0: {address}/health/ready: ")


class TestStartedHere:
    def test_each_must_be_registered_with_its_own_process(self, registry: Registry) -> None:
        registry.add("trainer", "trainer-0")
        announce(registry.folder, "trainer-0", PID)
        assert registry.check() == (0, "PASS  trainer-0\n", "")
        announce(registry.folder, "trainer-0", PID + 1)
        announce(registry.folder, "processor-0", PID)
        code, out, _ = registry.check()
        assert code == Exit.CHECK_FAILED
        assert out == "FAIL  processor-0: not registered\nFAIL  trainer-0: not registered\n"
