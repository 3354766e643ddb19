"""``headwater fl recommend`` on a stack of two regions: what simulated devices teach is served in both."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import free_ports, ready
from support.service_process import ROOT

from services.backends import open_coordination
from services.cli.client import Api
from services.cli.exits import Exit
from services.cli.running import regions_of
from services.cli.teach import _similar
from services.federation.arrival import Watched, await_arrival, differs, reached_by
from services.parameter_server.client import ParameterClient
from services.settings.load import load_settings
from services.settings.model import Settings
from services.supervisor.folder import RunFolder
from sync.pushes import Source

pytestmark = pytest.mark.timeout(240)
ITEMS, USERS = 130, 30


class Stack:
    """``headwater`` on one data folder, each command a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.given = [f"--set=data.dir={folder / 'data'}", "--set=api.listen=127.0.0.1:0", "--format=json"]

    def run(self, *arguments: str, code: int = 0) -> Any:
        """The JSON that a command prints; it must end with ``code``."""
        command = [sys.executable, "-m", "services.cli.app", *self.given, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if done.stdout else done.stderr

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on."""
        command = [sys.executable, "-m", "services.cli.app", *self.given, *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def settings(self, region: str) -> Settings:
        """Of a region that runs."""
        place = self.data if region == "home" else self.data / "regions" / region
        return load_settings(place / "run" / "settings.toml").settings

    def apis(self) -> dict[str, str]:
        """The regions' addresses."""
        state = RunFolder(self.data).state()
        assert state is not None
        return {
            shown.name: shown.url for shown in regions_of(self.settings("home"), state.children) if shown.url
        }


def write_films(folder: Path) -> Path:
    """A folder of films and people, each of whom likes every fifth film from one on."""
    folder.mkdir()
    films = "".join(f"film-{n},Genre {n % 5}\n" for n in range(ITEMS))
    (folder / "items.csv").write_text("item_id,categories\n" + films)
    likes = [(user, item) for user in range(USERS) for item in range(user % 5, ITEMS, 5) if (user + item) % 3]
    # In no order: were the last films everybody's last, all of them would be held back and nobody could learn them.
    random.Random(0).shuffle(likes)
    rows = "".join(
        f"u{user},film-{item},like,{1_700_000_000_000 + n * 1000}\n" for n, (user, item) in enumerate(likes)
    )
    (folder / "events.csv").write_text("user_id,item_id,action,timestamp_ms\n" + rows)
    return folder


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_films(tmp_path_factory.mktemp("films") / "films")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, films: Path) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    running.run("up", "--detach", "--timeout=120", "--regions=2", "--link=eu:delay=10ms")
    # A tenth of the likes: the films are known, and there is something left to teach.
    running.run("import", str(films), "--until=0.1", "--wait")
    yield running
    running.run("down")


def test_what_devices_teach_is_served_in_every_region(stack: Stack, films: Path) -> None:
    told = stack.run("fl", "recommend", "--dataset", str(films), "--rounds=4", "--cohort=20")
    assert told["simulated"]
    assert [row["number"] for row in told["rounds"]] == [1, 2, 3, 4]
    for row in told["rounds"]:
        assert row["devices"] == 20
        assert list(row["after_ms"]) == ["home", "eu"]
        for stages in row["after_ms"].values():
            assert 0 < stages["parameters"] < stages["list"]
        # The other region hears of it from this one.
        assert row["after_ms"]["eu"]["parameters"] > row["applied_ms"]
    assert told["rounds"][-1]["alone"], "by now the trainer has learned what was imported"
    assert told["rounds"][-1]["loss"] < told["rounds"][0]["loss"]
    lists = {one["region"]: one for one in told["lists"]}
    assert lists.keys() == {"home", "eu"}
    assert lists["home"]["before"] != lists["home"]["after"]
    served = [[item for item, _ in lists[region]["after"]] for region in ("home", "eu")]
    assert served[0] == served[1], "both regions serve the same"
    before, after = told["held_out"]
    assert after["ndcg"] >= before["ndcg"]
    assert after["devices"] == USERS


JOB = """
[job]
name = "films"
[model]
name = "items"
[training]
steps = 1
rate = 0.5
[rounds]
start_fl_job_threshold = 5
update_model_ratio = 1
fl_iteration_num = 2
come_back_min_s = 0.05
come_back_max_s = 0.2
[into]
model = "main"
weight = 500
"""


def test_what_real_devices_learn_in_rounds_is_served_in_every_region(
    stack: Stack, films: Path, tmp_path: Path
) -> None:
    """A federation server on the running stack, five devices as processes, nothing else."""
    (tmp_path / "job.toml").write_text(JOB)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    regions = {name: Api(url, None) for name, url in stack.apis().items()}
    before = {name: _similar(api, "film-1") for name, api in regions.items()}
    serve = stack.start(
        f"--set=federation.listen=127.0.0.1:{port}", "fl", "serve", "--job", str(tmp_path / "job.toml")
    )
    try:
        ready(url, 60.0)
        devices = [stack.start("fl", "join", url, "--client", str(n), "--data", str(films)) for n in range(5)]
        for device in devices:
            output, errors = device.communicate(timeout=90)
            assert device.returncode == 0, errors
            assert json.loads(output)["ended"] == "finished"
        for _ in range(300):
            rows = stack.run("fl", "log", "films", "--url", url)["rounds"]
            if all("pushed" in row for row in rows):
                break
            time.sleep(0.1)
        assert [row["valid"] for row in rows] == [True, True]
        numbers = [row["pushed"]["number"] for row in rows]
        assert numbers == sorted(numbers)
        assert not any(row["pushed"]["refused"] for row in rows)
    finally:
        serve.terminate()
        serve.communicate(timeout=30)
    source, item = Source("federated-job/films", 0), np.zeros(1, np.uint64)
    with ExitStack() as opened:
        watched = []
        for name, api in regions.items():
            coordination = opened.enter_context(closing(open_coordination(stack.settings(name))))
            client = opened.enter_context(closing(ParameterClient(coordination)))
            watched.append(Watched(name, reached_by(client, "main", source, item), partial(_similar, api)))
        arrived = await_arrival(
            watched, numbers[-1], rows[-1]["pushed"]["sent_at_ms"], "film-1", before, 30.0
        )
    for name, arrival in arrived.items():
        assert None not in arrival.after_ms.values(), (name, arrival)
    shown = [arrival.shown for arrival in arrived.values()]
    assert not differs(*shown), "both regions serve the same"


def test_a_stack_that_does_not_run_and_a_data_set_of_other_items_are_told(
    stack: Stack, films: Path, tmp_path: Path
) -> None:
    nowhere = Stack(tmp_path / "nowhere")
    nowhere.run("fl", "recommend", "--dataset", str(films), code=Exit.NOT_RUNNING)
    other = tmp_path / "other"
    other.mkdir()
    (other / "events.csv").write_text("user_id,item_id,action,timestamp_ms\na,song,like,1700000000000\n")
    text = stack.run("fl", "recommend", "--dataset", str(other), code=Exit.BAD_INPUT)
    assert "among the stack's 130" in text
