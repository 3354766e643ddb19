"""``up``, ``status``, ``import``, ``recommend``, ``down`` with all real processes on the embedded backends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.exits import Exit

ROOT = Path(__file__).parents[2]


class Stack:
    """``headwater`` on one data folder, each command a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._given = [f"--set=data.dir={folder / 'data'}", "--set=api.listen=127.0.0.1:0", "--format=json"]

    def run(self, *arguments: str, code: int = 0) -> Any:
        """The JSON that a command prints; it must end with ``code``."""
        command = [sys.executable, "-m", "services.cli.app", *self._given, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if done.stdout else None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    running.run("up", "--detach")
    yield running
    running.run("down")
    running.run("status", code=Exit.NOT_RUNNING)


def test_every_process_is_ready(stack: Stack) -> None:
    status = stack.run("status")
    assert {child["name"]: child["state"] for child in status["processes"]} == dict.fromkeys(
        ["parameter-server-0", "processor-0", "trainer-0", "api-0"], "ready"
    )
    assert {(lag["group"], lag["topic"]) for lag in status["lag"]} == {
        ("processor", "events"),
        ("trainer", "samples"),
    }
    assert set(stack.run("service", "check").values()) == {True}


def test_a_second_up_on_the_folder_is_refused(stack: Stack) -> None:
    stack.run("up", code=Exit.ALREADY_RUNNING)
    stack.run("up", "--detach", code=Exit.ALREADY_RUNNING)


def test_what_is_imported_is_recommended_also_after_kills(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(
        "item_id,title,categories\n" + "".join(f"i{n},Film {n},War\n" for n in range(9))
    )
    likes = "".join(f"u{n},i{n % 5},like,{1_700_000_000 + n}\n" for n in range(60))
    (tmp_path / "events.csv").write_text("user_id,item_id,action,timestamp\n" + likes)
    assert stack.run("import", str(tmp_path), "--shift-to-now", "--wait")["events"] == 9 + 60 + 60
    before = {child["name"]: child["pid"] for child in stack.run("status")["processes"]}
    for name in ("processor-0", "api-0"):
        os.kill(before[name], signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while True:
        children = {child["name"]: child for child in stack.run("status")["processes"]}
        back = all(children[name]["pid"] not in (None, before[name]) for name in ("processor-0", "api-0"))
        if back and all(child["state"] == "ready" for child in children.values()):
            break
        assert time.monotonic() < deadline, children
        time.sleep(0.2)
    assert [children[name]["restarts"] for name in ("processor-0", "trainer-0", "api-0")] == [1, 0, 1]
    reply = stack.run("recommend", "u0", "-n", "3")
    listed = {item["item_id"] for item in reply["items"]}
    assert len(listed) == 3
    assert "i0" not in listed  # it is known to the user
    assert all(item["attributes"]["title"].startswith("Film") for item in reply["items"])
