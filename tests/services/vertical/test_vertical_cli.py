"""``headwater fl vertical`` as a person types it, and whole trials on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federated.vertical.kinds import Count, Kind
from federated.vertical.parties import PeerFault
from federated.vertical.tables import Table, TableRefused, read_table, write_csv
from services.cli.app import main
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.vertical.config import ConfigRefused, load_party, parse_party
from services.vertical.jobs import JobRefused, find_kind, parse_options
from services.vertical.report import read_reports, tables
from services.vertical.splitting import halves, is_whole, open_whole, split_table
from services.vertical.trial import find_parties, parse_pairs, write_files
from services.vertical.workers import Processes, workers
from tests.support.vertical import ROOT, party_files
from tests.support.vertical_sums import KIND, SumsOptions


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))


def headwater(*arguments: str) -> int:
    """The exit code of a command."""
    try:
        main(["fl", "vertical", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def own_table(folder: Path, rows: int = 60) -> Path:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(rows, 4))
    labels = (features.sum(axis=1) > 0).astype(np.float64)
    path = folder / "own.csv"
    write_csv(Table(tuple(f"u{row}" for row in range(rows)), features, ("a", "b", "c", "d"), labels), path)
    return path


def test_a_table_of_ones_own_is_split_and_run_on_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, parts, out = own_table(tmp_path), tmp_path / "parts", tmp_path / "trial"
    assert (
        headwater("split", str(own), "--out", str(parts), "--label", "y", "--id", "id", "--overlap", "0.8")
        == 0
    )
    capsys.readouterr()
    assert headwater("run", "sums", "--data", str(parts), "--out", str(out), "--format", "json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["parties"].keys() == {"guest", "host"}
    guest = report["parties"]["guest"]
    assert guest["figures"]["test auc"] == 1.0  # labels are the sign of the sum
    assert guest["figures"]["test auc"] > guest["figures"]["fallback auc"]
    assert guest["alone"]["logistic"]["auc"] < report["pooled"]["logistic"]["auc"]
    assert headwater("report", str(out)) == 0
    shown = capsys.readouterr().out
    for text in (
        "all tables pooled, logistic",
        "guest alone, boosting",
        "psi.masked",
        "the sum of all of a host's",
    ):
        assert text in shown
    assert headwater("report", str(out / "host")) == 0
    assert "host" in capsys.readouterr().out
    assert headwater("run", "sums", "--data", str(parts), "--out", str(out)) == Exit.USAGE
    assert f"{out} has a trial already" in capsys.readouterr().err


def test_a_trial_that_fails_names_the_party_whose_fault_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tmp_path / "parts"
    assert (
        headwater("split", str(own_table(tmp_path)), "--out", str(parts), "--label", "y", "--id", "id") == 0
    )
    code = headwater("run", "sums", "--data", str(parts), "--align", "psi", "--option", "fails_at=1")
    assert code == Exit.REFUSED
    told = capsys.readouterr().err
    assert "guest: ValueError: the guest's role fails; the parties' files: /" in told


def test_keys_check_and_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headwater("keys", str(tmp_path / "keys"), "--format", "json") == 0
    public = json.loads(capsys.readouterr().out)["public"]
    assert (tmp_path / "keys" / "party.public").read_text().strip() == public
    assert (tmp_path / "keys" / "party.secret").stat().st_mode & 0o077 == 0
    assert headwater("keys", str(tmp_path / "keys")) == Exit.SETTINGS
    assert "never overwritten" in capsys.readouterr().err
    files = party_files(tmp_path / "job", {"bank": "guest", "shop": "host"}, listening=("bank",), options={})
    assert headwater("check", "--config", str(files["bank"]), "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 12
    assert headwater("kinds", "--format", "json") == 0
    assert {"psi", "linear", "boosting", "sums"} <= {
        one["name"] for one in json.loads(capsys.readouterr().out)
    }


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("party",), Exit.USAGE, "--config FILE names the party's file"),
        (("party", "--config", "none.toml"), Exit.SETTINGS, "cannot be read"),
        (("run", "sum", "--data", "."), Exit.SETTINGS, "did you mean 'sums'"),
        (("run", "sums", "--data", ".", "--option", "turn=3"), Exit.SETTINGS, "did you mean 'turns'"),
        (("run", "sums", "--data", "none/x"), Exit.SETTINGS, "is no folder"),
        (("run", "sums", "--data", "none.csv"), Exit.SETTINGS, "none.csv: there is no such file"),
        (("party",), Exit.USAGE, "`headwater fl vertical example > party.toml`"),
        (("report", "none"), Exit.SETTINGS, "cannot be read as a report"),
        (("split", "none.csv", "--out", "x", "--label", "y"), Exit.BAD_INPUT, "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(
    arguments: tuple[str, ...], code: Exit, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headwater(*arguments) == code
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "step"), [("limit", "psi.most_ids_of_a_peer"), ("job", "Compare the [job]")]
)
def test_a_peers_fault_comes_with_the_step_that_helps(rule: str, step: str) -> None:
    from services.cli.vertical import _refusals

    with pytest.raises(CommandFailed) as told, _refusals():
        raise PeerFault("bank", rule, "asks 569 more; 431 of 1000 are left")
    assert told.value.code == Exit.REFUSED
    assert step in told.value.next_step


CONFIG: dict[str, Any] = {
    "party": {"name": "bank", "role": "guest", "keys": "keys", "listen": "127.0.0.1:0"},
    "peers": {"shop": {"role": "host", "key": "a" * 64}},
    "job": {"what": "sums"},
    "data": {"path": "x.csv", "label": "y"},
}


@pytest.mark.parametrize(
    ("section", "change", "why"),
    [
        ("party", {"liste": "x"}, "party.liste: is unknown; did you mean 'listen'?"),
        ("party", {"name": None}, "party.name: "),
        ("party", {"name": "shop"}, "also the name of a peer"),
        ("party", {"listen": "127.0.0.1:99999"}, "party.listen: 99999 is not a port between 0 and 65535"),
        ("party", {"listen": "7400"}, "party.listen: is not HOST:PORT"),
        ("party", {"listen": None}, "shop without an address"),
        ("party", {"role": "host"}, "label is for the guest alone"),
        ("data", {"columns": []}, "data.columns: is neither a file's name nor a list of columns' names"),
        ("party", {"role": "coordinator"}, "a coordinator has none"),
        ("party", {"dead_after": "soon"}, "not a number and a unit"),
        ("peers", {"shop": {"role": "host", "key": "A" * 64}}, "peers.shop.key: is not 64 hexadecimal"),
        (
            "peers",
            {"shop": {"role": "host", "kye": "a" * 64}},
            "peers.shop.kye: is unknown; did you mean 'key'",
        ),
        (
            "peers",
            {"post": {"role": "host", "key": "b" * 64, "address": "shop:0"}},
            "peers.post.address: 0 is",
        ),
        ("peers", {"post": {"role": "host", "key": "a" * 64}}, "the same key"),
        ("job", {"test": 1.5}, "job.test"),
        ("job", {"options": {"turns": [1, float("nan")]}}, "job.options: turns is not a finite number"),
        ("serve", {"api_keys": ["read:x"]}, "serve.api_keys.0"),
    ],
)
def test_a_wrong_file_of_a_party_is_named(
    section: str, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = {**CONFIG, section: {**CONFIG.get(section, {}), **change}}
    config["party"] = {key: value for key, value in config["party"].items() if value is not None}
    with pytest.raises(ConfigRefused, match=why):
        parse_party(config, tmp_path)


def test_the_example_of_a_partys_file_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headwater("example") == 0
    path = tmp_path / "party.toml"
    path.write_text(capsys.readouterr().out.replace("64 hexadecimal digits", "a" * 64))
    config = load_party(path)
    assert config.roles() == {"bank": "guest", "shop": "host"}
    assert config.party.state == tmp_path / "state"
    assert config.job.options == {"epochs": 20}


def test_options_are_checked_with_names() -> None:
    assert parse_options(KIND, {"turns": 3}) == SumsOptions(turns=3)
    for given, why in (({"turn": 3}, "did you mean 'turns'"), ({"turns": "many"}, "turns: Input")):
        with pytest.raises(JobRefused, match=why):
            parse_options(KIND, given)
    with pytest.raises(JobRefused, match="no kind of job 'nothing'"):
        find_kind("nothing")
    assert parse_pairs(["a=1", "b=x", "c=[1, 2]", "d=true"]) == {"a": 1, "b": "x", "c": [1, 2], "d": True}
    with pytest.raises(ConfigRefused, match="not NAME=VALUE"):
        parse_pairs(["a"])


def test_tables_are_found_by_name_and_a_coordinator_joins_where_needed(tmp_path: Path) -> None:
    for name in ("x_guest.csv", "x_host_a.csv", "x_host_b.parquet", "y_guest.csv", "notes.txt"):
        (tmp_path / name).write_text("id\n")
    with_c = Kind(
        "k", "", {"guest": Count(1, 1), "host": Count(1, 2), "coordinator": Count(0, 1)}, dict, None, {}
    )  # type: ignore[arg-type]
    found = find_parties(tmp_path / "x", with_c, coordinator=True)
    assert [(one.name, one.role) for one in found] == [
        ("guest", "guest"),
        ("host1", "host"),
        ("host2", "host"),
        ("coordinator", "coordinator"),
    ]
    assert len(find_parties(tmp_path / "x", with_c)) == 3
    with pytest.raises(ConfigRefused, match="FOLDER/PREFIX"):
        find_parties(tmp_path, KIND)
    files = write_files(tmp_path / "out", found, {"what": "sums", "options": {"text": 'a"b\\', "on": True}})
    config = load_party(files["host1"])
    assert config.job.options == {"text": 'a"b\\', "on": True}
    assert config.agreed() == load_party(files["coordinator"]).agreed()


def test_one_table_may_be_a_file_or_one_of_scikit_learns(tmp_path: Path) -> None:
    own = own_table(tmp_path)
    assert is_whole(str(own))
    assert not is_whole(str(tmp_path))
    assert open_whole(str(own), id_column="id", label_column="y").ids[:2] == ("u0", "u1")
    bare = tmp_path / "bare.csv"
    bare.write_text('y,x\n1,"2"\n0,3\n')
    assert open_whole(str(bare), id_column=None, label_column="y").ids == ("1", "2")
    pytest.importorskip("sklearn", reason="the extra `datasets` is not installed")
    assert is_whole("sklearn:wine")
    wine = open_whole("sklearn:wine", id_column=None, label_column="y")
    assert wine.features.shape == (178, 13)
    assert wine.names[0] == "alcohol"
    assert wine.labels is not None
    assert set(wine.labels.tolist()) == {0.0, 1.0, 2.0}
    with pytest.raises(TableRefused, match="none of sklearn:breast_cancer"):
        open_whole("sklearn:boston", id_column=None, label_column="y")


def test_splitting_shares_rows_and_parts_columns(tmp_path: Path) -> None:
    table = read_table(own_table(tmp_path, 200), label_column="y")
    parts = split_table(table, {"host": ["b", "d"]}, overlap=0.5)
    assert (parts["guest"].names, parts["host"].names) == (("a", "c"), ("b", "d"))
    assert parts["host"].labels is None
    common = set(parts["guest"].ids) & set(parts["host"].ids)
    assert 100 <= len(common) < 150
    assert halves(["a", "b", "c"], 2) == {"host1": ["b"], "host2": ["c"]}
    for hosts in ({"host": ["z"]}, {"host1": ["a"], "host2": ["a"]}):
        with pytest.raises(TableRefused, match="not there, or given twice"):
            split_table(table, hosts)


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(ConfigRefused, match="no report"):
        read_reports(tmp_path)
    with pytest.raises(ConfigRefused, match=r"no report\.json"):
        read_reports(_empty(tmp_path))
    assert tables({"parties": {}, "pooled": {}})


def _empty(folder: Path) -> Path:
    empty = folder / "empty"
    empty.mkdir()
    return empty


def test_workers_keep_the_order_of_chunks() -> None:
    with workers(2) as several:
        assert isinstance(several, Processes)
        assert list(several.map(abs, range(-9, 0))) == list(range(9, 0, -1))
    with workers(1) as alone:
        assert list(alone.map(abs, [-1])) == [1]


def test_figures_of_any_size_can_be_told_apart() -> None:
    values = {"small": 5.52e-5, "smaller": 5.55e-5, "none": 0.0, "whole": 7, "usual": 0.91, "large": 2.5e80}
    party = {
        "role": "guest",
        "seconds": 1.0,
        "attempts": 1,
        "bytes_sent": 0,
        "bytes_received": 0,
        "received": [],
    }
    shown = tables({"parties": {"guest": party | {"figures": values}}})
    assert {row[1]: row[2] for _, _, rows in shown for row in rows if row[1] in values} == {
        "small": "5.52e-05",
        "smaller": "5.55e-05",
        "none": "0.0000",
        "whole": "7",
        "usual": "0.9100",
        "large": "2.5e+80",
    }


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("batch", 0, "options of linear: batch is 0, not within 2 and 8192"),
        ("rate", "abc", "options of linear: rate: Input should be a valid number"),
    ],
)
def test_an_option_that_cannot_be_is_named_once(name: str, value: object, told: str) -> None:
    with pytest.raises(JobRefused) as caught:
        parse_options(find_kind("linear"), {name: value})
    assert str(caught.value).startswith(told)
