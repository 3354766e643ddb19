"""``headwater model`` against real parameter servers: what it tells, and moves while trainers push."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parameters import (
    CHUNK,
    CHUNKS,
    DIM,
    EVERYTHING,
    SOURCE,
    SPECS,
    Processes,
    client_of,
    make_settings,
    recorded,
    threads,
    undisturbed,
    wait_ready,
)
from support.service_process import eventually

from services.cli.app import main
from services.cli.exits import Exit
from services.coordination.membership import Member, Registration
from services.coordination.shardmap import ShardMap, read_shard_map, settle_shard_map
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server import ParameterClient
from services.parameter_server.client.directory import SERVICE
from services.parameter_server.types import IncarnationChanged
from services.rpc.server import RpcServer
from sync.spec import Initialiser, TableSpec

SHARDS = 4
PUSHES = 6
ZERO, ONE = "parameter-server-0", "parameter-server-1"
RARE = TableSpec("rare", 2, Initialiser.uniform(0.1), admission=3, expiry_s=3_600)
ROOT = Path(__file__).parents[2]


class Headwater:
    """Runs the command on ``folder`` in this process, and keeps what it printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str, code: int = Exit.OK) -> str:
        with pytest.raises(SystemExit) as ended:
            main([f"--set=data.dir={self._folder}", "model", *arguments])
        self.out, self.err = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, self.err
        return self.out + self.err

    def json(self, *arguments: str) -> Any:
        self("--format=json", *arguments)
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def no_settings_of_the_tester(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADWATER")]:
        monkeypatch.delenv(name)


def rare_part(offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Key 1 in every push, and a key that never comes again."""
    return np.array([1, 1_000 + offset], np.uint64), np.ones((2, 2), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two servers that both hold all shards, with a model that was pushed to."""
    found = tmp_path_factory.mktemp("parameters")
    with threads(make_settings(found, 2, SHARDS, replicas=2)), client_of(found) as client:
        client.declare("main", (*SPECS, RARE), "fp-1")
        for offset in range(PUSHES):
            parts = recorded(offset) | {"rare": rare_part(offset)}
            previous = dict.fromkeys(range(SHARDS), offset - 1)
            client.push("main", SOURCE, offset, previous, 0, None, parts)
        eventually(lambda: all(server.shards for server in client.describe()))
        yield found


@pytest.fixture
def headwater(folder: Path, capsys: pytest.CaptureFixture[str]) -> Headwater:
    return Headwater(folder, capsys)


class TestNothingRuns:
    @pytest.mark.parametrize("command", ["describe", "shards", "shards move 0 --to x", "shards rebalance"])
    def test_says_so_and_leaves_no_trace(
        self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ran = Headwater(tmp_path / "none", capsys)
        assert "headwater up" in ran(*command.split(), code=Exit.NOT_RUNNING)
        assert not list(tmp_path.iterdir())

    def test_servers_that_are_all_gone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with threads(make_settings(tmp_path, 1, 1)):
            pass
        ran = Headwater(tmp_path, capsys)
        assert f"no parameter server answers ({ZERO})" in ran("shards", code=Exit.NOT_RUNNING)

    def test_no_model_yet(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with threads(make_settings(tmp_path, 1, 1)):
            assert "no model is declared" in Headwater(tmp_path, capsys)("describe", code=Exit.NOT_READY)


class TestDescribe:
    def test_figures_are_those_of_the_leaders_alone(self, headwater: Headwater) -> None:
        [model] = headwater.json("describe", "main")["models"]
        tables = {table["name"]: table for table in model["tables"]}
        keys = [np.unique(recorded(offset)["items"][0]) for offset in range(PUSHES)]
        items, dense, rare = tables["items"], tables["dense"], tables["rare"]
        stored = len(np.unique(np.concatenate(keys)))
        assert (items["rows"], dense["rows"], rare["rows"]) == (stored, CHUNKS, 1)
        # Row-wise Adagrad keeps one number beside a row, Adagrad as many as the row has.
        assert items["row_bytes"] == stored * 4 * (DIM + 1)
        assert dense["row_bytes"] == CHUNKS * 4 * 2 * CHUNK
        assert model["embedding_bytes"] == items["row_bytes"] + rare["row_bytes"]
        assert model["dense_bytes"] == dense["row_bytes"]
        assert model["allocated_bytes"] > model["embedding_bytes"] + model["dense_bytes"]
        assert model["rows"] == stored + CHUNKS + 1
        assert items["pushed_rows_total"] == sum(map(len, keys))
        assert items["touched_share"] == pytest.approx(sum(map(len, keys)) / PUSHES / stored)
        assert dense["touched_share"] == 1.0
        assert model["pushes"]["applied_total"] == PUSHES
        assert model["fingerprint"] == "fp-1"
        assert model["servers"] == {ZERO: [0, 2], ONE: [1, 3]}
        assert model["missing"] == []

    def test_admission_expiry_and_guard(self, headwater: Headwater) -> None:
        [model] = headwater.json("describe")["models"]
        rare = next(table for table in model["tables"] if table["name"] == "rare")
        # Key 1 was admitted by its third push; the others came once each.
        assert rare["unadmitted_rows_total"] == PUSHES + 2
        assert rare["waiting"] == pytest.approx(PUSHES, abs=2 * SHARDS + PUSHES)
        assert (rare["admission"], rare["expiry_s"], rare["graves"]) == (3, 3_600, 0)
        assert rare["norm"] == pytest.approx(np.sqrt(2))
        assert rare["guard"] == 1_000.0

    def test_for_people(self, headwater: Headwater) -> None:
        told = headwater("describe")
        for part in (
            "main",
            "fp-1",
            f"{ZERO} (2), {ONE} (2)",
            "rowwise_adagrad",
            "100 %",
            "3,600 s",
            "about",
        ):
            assert part in told

    def test_an_unknown_model(self, headwater: Headwater) -> None:
        told = headwater("describe", "nobody", code=Exit.USAGE)
        assert "no model nobody is declared" in told
        assert "Declared are: main." in told
        assert headwater.out == ""


class TestShards:
    def test_each_with_its_servers(self, headwater: Headwater) -> None:
        found = headwater.json("shards")
        assert [shard["leader"] for shard in found["shards"]] == [ZERO, ONE, ZERO, ONE]
        assert all(shard["leads"] and shard["moving_to"] is None for shard in found["shards"])
        eventually(
            lambda: all(set(shard["behind"].values()) == {0} for shard in headwater.json("shards")["shards"])
        )
        assert found["epoch"] >= max(shard["fence"] for shard in found["shards"]) > 0
        assert all(shard["steps"] >= PUSHES for shard in found["shards"])
        told = headwater("shards")
        assert f"{ONE} (0)" in told
        assert str(found["epoch"]) in told

    @pytest.mark.parametrize(
        ("order", "cause", "step"),
        [
            (("7", "--to", ONE), "there is no shard 7: they are 0 to 3", "headwater model shards"),
            (("0", "--to", "nobody"), "no parameter server nobody", f"Registered are: {ZERO}, {ONE}"),
        ],
    )
    @pytest.mark.parametrize("wait", ["--wait", "--no-wait"])
    def test_what_does_not_exist_is_refused(
        self, headwater: Headwater, order: tuple[str, ...], cause: str, step: str, wait: str
    ) -> None:
        told = headwater("shards", "move", *order, wait, code=Exit.USAGE)
        assert cause in told
        assert step in told

    def test_a_shard_moves_and_comes_back(self, headwater: Headwater) -> None:
        assert "leads it instead of" in headwater("shards", "move", "0", "--to", ONE)
        assert headwater.json("shards")["shards"][0]["leader"] == ONE
        # Nobody has pushed to it since: counters begin anew, rows are as they were.
        [model] = headwater.json("describe")["models"]
        assert model["servers"] == {ZERO: [2], ONE: [0, 1, 3]}
        assert f"is led by {ONE} already" in headwater("shards", "move", "0", "--to", ONE)
        moved = headwater.json("shards", "rebalance", "--yes")["moved"]
        assert [(one["source"], one["to"]) for one in moved] == [(ONE, ZERO)]
        assert 0.0 < moved[0]["took_s"] < 30.0
        assert "fair share already" in headwater("shards", "rebalance")
        eventually(lambda: all(shard["leads"] for shard in headwater.json("shards")["shards"]))

    def test_rebalance_shows_its_plan_and_asks(
        self, headwater: Headwater, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        headwater("shards", "move", "2", "--to", ONE)
        monkeypatch.setattr("typer.confirm", lambda *_args, **_kwargs: False)
        told = headwater("shards", "rebalance", code=Exit.DECLINED)
        assert "holds it already" in told
        assert [shard["leader"] for shard in headwater.json("shards")["shards"]].count(ONE) == 3
        headwater("shards", "rebalance", "--yes")
        assert [shard["leader"] for shard in headwater.json("shards")["shards"]].count(ONE) == 2


class Pusher(threading.Thread):
    """Pushes the recorded micro-batches one after another until told to stop, as a trainer would."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.stop = threading.Event()
        self.pushed = 0
        self.longest_s = 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with client_of(self._folder) as client:
                while not self.stop.is_set():
                    started = time.monotonic()
                    self._push(client)
                    self.longest_s = max(self.longest_s, time.monotonic() - started)
        except Exception as error:
            self.error = error

    def _push(self, client: ParameterClient) -> None:
        found = client.applied("main", SOURCE)
        offset = min(one.applied for one in found.values()) + 1
        previous = {shard: min(one.applied, offset - 1) for shard, one in found.items()}
        known = {shard: one.incarnation for shard, one in found.items()}
        try:
            replies = client.push(
                "main", SOURCE, offset, previous, 0, None, recorded(offset), incarnations=known
            )
        except IncarnationChanged:
            return
        if all(reply.applied >= offset for reply in replies.values()):
            self.pushed = offset + 1


def read_map(folder: Path) -> ShardMap:
    with closing(SqliteCoordination(folder / "coordination.db")) as store:
        found = read_shard_map(store)
    assert found is not None
    return found


def command(folder: Path, *arguments: str) -> Any:
    """The JSON that ``headwater model`` prints as a process of its own."""
    line = [sys.executable, "-m", "services.cli.app", f"--set=data.dir={folder}", "--format=json", "model"]
    done = subprocess.run(
        [*line, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_move_by_the_command_loses_no_push(tmp_path: Path) -> None:
    """Real processes: each shard on one server, the one that it moves to holds nothing of it."""
    running = Processes(tmp_path, 2, 2, 60.0)
    try:
        wait_ready(tmp_path, 2)
        with client_of(tmp_path) as client:
            client.declare("main", SPECS, "fp-1")
        pusher = Pusher(tmp_path)
        pusher.start()
        try:
            eventually(lambda: pusher.pushed >= 5)
            moved = command(tmp_path, "shards", "move", "1", "--to", ZERO)
            before = pusher.pushed
            eventually(lambda: pusher.pushed >= before + 5)
            assert command(tmp_path, "describe")["models"][0]["servers"] == {ZERO: [0, 1]}
            back = command(tmp_path, "shards", "rebalance", "--yes")["moved"]
        finally:
            pusher.stop.set()
            pusher.join()
        assert pusher.error is None
        assert (moved["shard"], moved["source"], moved["to"]) == (1, ONE, ZERO)
        assert [(one["source"], one["to"]) for one in back] == [(ZERO, ONE)]
        assert pusher.longest_s < 5.0
        assert not read_map(tmp_path).moves
        expected = undisturbed(pusher.pushed)
        with client_of(tmp_path) as client:
            assert min(one.applied for one in client.applied("main", SOURCE).values()) == pusher.pushed - 1
            found = client.pull("main", EVERYTHING).rows
        assert all(found[table].tobytes() == rows.tobytes() for table, rows in expected.items())
    finally:
        running.close()


class TestToAServerThatHangs:
    """It is registered and does nothing: the shard's leader waits for it, and goes on leading."""

    @pytest.fixture
    def hung(self, tmp_path: Path) -> Iterator[Registration]:
        silent = RpcServer("127.0.0.1:0")
        with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
            settle_shard_map(store, [ZERO], 2)
            with threads(make_settings(tmp_path, 1, 2)):
                address = f"127.0.0.1:{silent.port}"
                with Registration(store, Member("hung", SERVICE, address, 1, 99, 0, True), 5.0) as found:
                    yield found
        silent.close()

    def test_the_move_ends_at_its_deadline_and_can_be_taken_back(
        self, hung: Registration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        headwater = Headwater(tmp_path, capsys)
        assert "1 moves to hung" in headwater("shards", "move", "1", "--to", "hung", "--no-wait")
        told = headwater("shards", "move", "1", "--to", "hung", "--timeout", "0", code=Exit.NOT_PROCESSED)
        assert "shard 1 is not led by hung after 0 s" in told
        assert f"headwater model shards move 1 --to {ZERO}" in told
        told = headwater("shards")
        assert "no answer from hung" in told
        assert headwater.json("shards")["shards"][1]["moving_to"] == "hung"
        assert f"shard 1 is led by {ZERO} already" in headwater("shards", "move", "1", "--to", ZERO)
        assert read_map(tmp_path).moves == {}
        assert [shard["leads"] for shard in headwater.json("shards")["shards"]] == [True, True]

    def test_a_move_to_a_server_that_dies_is_taken_back(
        self, hung: Registration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        headwater = Headwater(tmp_path, capsys)
        dies = threading.Timer(0.5, hung.close)
        dies.start()
        told = headwater("shards", "move", "1", "--to", "hung", code=Exit.NOT_PROCESSED)
        dies.join()
        assert "hung is gone; shard 1 stays where it is" in told
        assert read_map(tmp_path).moves == {}
