"""The compose files for real: devices teach the stack while a server dies, and two companies train together.

Needs a Docker engine with compose, and the image ``headwater:dev`` of this tree (``docker build -t headwater:dev -f
deploy/Dockerfile .``); everything runs under project names of its own and is removed in the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from support.federation import free_ports
from support.service_process import ROOT, eventually

from services.cli.client import Api
from services.cli.teach import _similar
from services.federation.arrival import Watched, await_arrival, differs, lists_before
from services.settings.keys import new_key
from tests.integration.test_federated_teaching import JOB, write_films

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_500)]

FILES: Final = ("docker-compose.yml", "deploy/compose.regions.yml")
# The gateway is not needed here, and has a test of its own.
STACK: Final = (
    "api", "processor", "trainer", "parameter-server-0", "parameter-server-1", "api-eu", "parameter-server-eu-0",
    "federation-scheduler", "federation-0", "federation-1",
)  # fmt: skip


def compose_command() -> list[str]:
    """``docker compose``, or ``docker-compose``; skips the test where there is no engine or image to run."""
    if shutil.which("docker") is None:
        pytest.skip("no docker: install a Docker engine with compose")
    if _fails("docker", "image", "inspect", "headwater:dev"):
        pytest.skip("no image: docker build -t headwater:dev -f deploy/Dockerfile .")
    for command in (["docker", "compose"], ["docker-compose"]):
        if not _fails(*command, "version"):
            return command
    pytest.skip("no docker compose")


def _fails(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    except FileNotFoundError:
        return True


class Project:
    """Compose files under a project's name, with variables for them."""

    def __init__(self, name: str, files: tuple[str, ...], variables: Mapping[str, str]) -> None:
        named = [word for file in files for word in ("-f", file)]
        self._command = [*compose_command(), "-p", name, *named]
        self.variables = dict(variables)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A command that goes on."""
        return subprocess.Popen(
            [*self._command, *words], cwd=ROOT, env={**os.environ, **self.variables}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        """What a command prints; it must end with 0."""
        running = self.start(*words)
        output, errors = running.communicate(timeout=900)
        assert running.returncode == 0, f"{' '.join(words)}\n{output[-3_000:]}\n{errors[-3_000:]}"
        return output

    def once(self, *words: str) -> str:
        """``run --rm`` without a terminal."""
        return self.run("run", "--rm", "-T", *words)

    def healthy(self, *services: str) -> bool:
        """Whether the checks of all ``services`` pass."""
        found = self.run("ps", "-q", *services).split()
        told = subprocess.run(
            ["docker", "inspect", "--format", "{{.State.Health.Status}}", *found],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return len(found) == len(services) and set(told.stdout.split()) == {"healthy"}


@pytest.fixture
def stack() -> Iterator[Project]:
    key, hashed = new_key("admin")
    names = (
        "HEADWATER_PORT",
        "HEADWATER_EU_PORT",
        "HEADWATER_FEDERATION_PORT",
        "HEADWATER_FEDERATION_PORT_1",
    )
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    keys = {"HEADWATER_API_KEY": key, "HEADWATER_API_KEYS": hashed}
    project = Project("headwater-test-stack", FILES, {**ports, **keys})
    try:
        project.run("up", "-d", *STACK)
        eventually(lambda: project.healthy(*STACK), 400.0)
        yield project
    finally:
        project.run("down", "-v", "--remove-orphans")


def test_what_devices_teach_is_served_in_every_region_though_a_server_dies(
    stack: Project, tmp_path: Path
) -> None:
    films = write_films(tmp_path / "films")
    (tmp_path / "job.toml").write_text(JOB.replace("fl_iteration_num = 2", "fl_iteration_num = 4"))
    folder, file = f"{films}:/films:ro", f"{tmp_path / 'job.toml'}:/job.toml:ro"
    stack.once("-v", folder, "tools", "import", "/films", "--shift-to-now", "--wait")
    key = stack.variables["HEADWATER_API_KEY"]
    apis = {
        name: Api(f"http://127.0.0.1:{stack.variables[port]}", key)
        for name, port in (("home", "HEADWATER_PORT"), ("eu", "HEADWATER_EU_PORT"))
    }
    regions = [Watched(name, None, partial(_similar, api)) for name, api in apis.items()]

    def still() -> bool:
        before = lists_before(regions, "film-1")
        time.sleep(3.0)
        after = lists_before(regions, "film-1")
        return all(shown and not differs(shown, after[name]) for name, shown in before.items())

    eventually(still, 120.0)  # the trainer is done with the import
    before = lists_before(regions, "film-1")
    stack.once("-v", file, "tools", "fl", "begin", "/job.toml")
    devices = stack.start(
        "run", "--rm", "-T", "-v", folder, "devices",
        "--job", "films", "--clients", "5", "--data", "/films", "--format", "json",
    )  # fmt: skip

    def rounds() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            stack.once("tools", "fl", "log", "films", "--format", "json")
        )["rounds"]
        return found

    eventually(lambda: bool(rounds()), 120.0)
    stack.run("kill", "-s", "KILL", "federation-0")
    output, errors = devices.communicate(timeout=300)
    assert devices.returncode == 0, errors
    came = json.loads(output)["devices"]
    assert {one["ended"] for one in came.values()} == {"finished"}
    eventually(lambda: all("pushed" in row for row in rounds()), 60.0)
    ended = rounds()
    assert [row["valid"] for row in ended] == [True] * 4
    assert not any(row["pushed"]["refused"] for row in ended)
    pushed = ended[-1]["pushed"]
    arrived = await_arrival(regions, pushed["number"], pushed["sent_at_ms"], "film-1", before, 30.0)
    assert all(arrival.after_ms["list"] is not None for arrival in arrived.values()), arrived
    eventually(lambda: not differs(*lists_before(regions, "film-1").values()), 30.0)


def test_two_companies_train_together() -> None:
    project = Project("headwater-test-companies", ("deploy/compose.companies.yml",), {})
    try:
        for name in ("bank", "shop"):
            told = project.once(name, "fl", "vertical", "keys", "/party/keys", "--format", "json")
            project.variables[f"{name.upper()}_KEY"] = json.loads(told)["public"]
        project.once("tables")
        for name in ("bank", "shop"):
            project.once(name, "fl", "vertical", "check")
        project.run("up", "bank", "shop")
        report = json.loads(
            project.once("bank", "fl", "vertical", "report", "/party/state", "--format", "json")
        )
        auc = report["parties"]["bank"]["figures"]["test auc"]
        assert auc > 0.95, report
    finally:
        project.run("down", "-v", "--remove-orphans")
