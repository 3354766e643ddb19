"""``headwater sync status`` of real servers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.parameters import SPECS
from support.service_process import eventually
from support.sync_regions import Region, gradients, running, same
from support.wan import free_port

from services.cli.app import main
from services.cli.exits import Exit
from services.parameter_server import ModelUnknown, ParameterClient
from services.parameter_server.client.syncs import RegionSync
from services.parameter_server.syncing.status import StatusReply
from services.settings.model import SyncSettings
from services.supervisor.folder import ChildState, ProcessId, RunFolder, SupervisorState
from services.supervisor.regions import folder_of
from sync.pushes import Source


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of ``headwater sync status``."""
    with pytest.raises(SystemExit) as ended:
        main(["sync", "status", *arguments])
    output = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), output.out, output.err


def served(client: ParameterClient) -> bool:
    try:
        client.pull("main", {})
    except ModelUnknown:
        return False
    return True


def test_each_upstream_is_shown_with_how_far_behind_it_leaves_the_region(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Region(tmp_path, "home", 0)
    gone = f"127.0.0.1:{free_port()}"
    region = Region(tmp_path, "eu", 1, SyncSettings(upstreams=(*home.addresses.values(), gone)))
    with running(home, region), home.client() as at_home, region.client() as reader:
        at_home.declare("main", SPECS, "fp-1")
        at_home.push("main", Source("log", 0), 0, {0: -1, 1: -1}, 0, None, gradients(0))
        eventually(lambda: served(reader))
        same(at_home, reader)
        faults = re.escape(f'headwater_sync_upstream_faults_total{{upstream="{gone}"}}') + r" (\S+)"
        eventually(lambda: re.findall(faults, next(iter(reader.metrics().values()))) > ["0.0"])
        code, output, _ = told(capsys, "--format", "json", "--set", f"data.dir={region.folder}")
        assert code == Exit.OK
        (shown,) = json.loads(output)["regions"]
        (server,) = shown["servers"]
        assert server["region"] == "eu"
        assert server["written"] == []
        first, second = server["upstreams"]
        assert (first["region"], first["wanted"], first["served"], first["unlike"]) == ("home", 2, 2, [])
        assert 0.0 <= first["behind_s"] < 5.0
        assert first["rows_total"] >= 30
        assert first["bytes_total"] > 1_000
        assert abs(first["clock_ahead_s"]) < 1.0
        assert (second["address"], second["served"], second["behind_s"]) == (gone, 0, None)
        assert second["last_fault"]
        assert {shard["upstream"] for shard in server["followed"]} == {first["address"]}
        code, output, _ = told(capsys, "--format", "json", "--set", f"data.dir={home.folder}")
        (server,) = json.loads(output)["regions"][0]["servers"]
        assert server["written"] == [0, 1]
        assert [one["region"] for one in server["pullers"]] == ["eu"]
        assert server["found"]["cache"] + server["found"]["token"] >= 1

        def complete() -> bool:
            # A leader that was just elected again has not asked everybody yet.
            code, output, errors = told(capsys, "--set", f"data.dir={region.folder}")
            return code == Exit.OK and "2 of 2" in output and f"nothing comes from {gone}" in errors

        eventually(complete)


def test_a_region_without_servers_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = StatusReply("home", "server-0", [0, 1], [], [], [], {}, 0, 0, 0, None, "")
    regions = {"home": RegionSync({"server-0": there}, ()), "eu": RegionSync({}, ())}
    monkeypatch.setattr("services.cli.sync._ask", lambda settings: iter(regions.items()))
    code, output, errors = told(capsys)
    assert code == Exit.OK
    assert "server-0" in output
    assert re.search(r"eu +none +no answer", output)
    assert "eu: no parameter server runs" in errors
    assert "home: no parameter server runs" not in errors


def test_regions_that_write_the_same_shards_are_told_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Region(tmp_path, "one", 1, SyncSettings(writes="all"))
    other = Region(tmp_path, "two", 2, SyncSettings(writes="all", upstreams=tuple(one.addresses.values())))
    one.configure(SyncSettings(writes="all", upstreams=tuple(other.addresses.values())))
    with running(one, other):

        def told_so(region: Region, theirs: str) -> bool:
            code, _, errors = told(capsys, "--set", f"data.dir={region.folder}")
            asked = f"shards 0-1 are written in region {region.name} and in region {theirs} alike"
            return code == Exit.OK and asked in errors and "set sync.writes" in errors

        eventually(lambda: told_so(one, "two"))
        eventually(lambda: told_so(other, "one"))
        # The settings alone are questioned at the start, before anybody was asked.
        assert "so nothing comes from sync.upstreams" in one.output()
        assert one.output().count("are written in region one and in region two alike") == 1


def test_regions_that_should_run_and_do_not_answer_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "home"
    home, here = Region(tmp_path, "home", 0), ProcessId.of(os.getpid())
    assert here is not None
    (eu := folder_of(data, "eu")).mkdir(parents=True)
    file = RunFolder(eu).settings_file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'data.dir = "{eu}"\nregion = {{name = "eu", number = 1}}\n')
    children = (
        ChildState("parameter-server-0", "parameter-server", "ready", 0),
        ChildState("server-0@eu", "parameter-server", "waiting", 0, region="eu"),
        # Its settings were never written, or are lost.
        ChildState("server-0@asia", "parameter-server", "starting", 0, region="asia"),
    )
    folder = RunFolder(data)
    with running(home), folder.locked():
        folder.write_state(SupervisorState(here, 0, children))
        code, output, errors = told(capsys, "--set", f"data.dir={data}")
        assert code == Exit.OK, errors
        for name in ("eu", "asia"):
            assert re.search(rf"{name} +server-0@{name} +no answer", output)
            assert f"{name}: no answer from server-0@{name}" in errors
        assert "home: no answer" not in errors
        _, output, _ = told(capsys, "--format", "json", "--set", f"data.dir={data}")
        silent = {region["name"]: region["silent"] for region in json.loads(output)["regions"]}
        assert silent == {"home": [], "eu": ["server-0@eu"], "asia": ["server-0@asia"]}
        # One whose store cannot be read holds nobody else up.
        (eu / "coordination.db").write_bytes(b"this is no database" * 100)
        code, output, errors = told(capsys, "--set", f"data.dir={data}")
        assert code == Exit.OK
        assert re.search(r"eu +server-0@eu +no answer", output)
        assert "eu: its coordination store cannot be read" in errors


def test_where_nothing_runs_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = told(capsys, "--set", f"data.dir={tmp_path / 'none'}")
    assert code == Exit.NOT_RUNNING
    assert output == ""
    assert "nothing runs" in errors
