"""Reports of joint jobs: as tables, as files to hand on, side by side, and counted over restarts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from services.cli.app import main
from services.cli.exits import Exit
from services.vertical.comparison import compare
from services.vertical.config import ConfigRefused, load_party
from services.vertical.jobs import settings_of
from services.vertical.party import prepare, run_party
from services.vertical.remarks import remarks
from services.vertical.report import FORMAT, read_reports, tables
from services.vertical.report_file import rendered
from services.vertical.store import StateFolder
from services.vertical.traffic import Traffic, read_traffic
from tests.support.vertical import party_files


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


def party(role: str, **more: Any) -> dict[str, Any]:
    received = [{"from": "shop", "kind": "sum", "messages": 5, "bytes": 2_500, "learns": "the sum"}]
    return {
        "format": FORMAT,
        "at": "2026-01-01T00:00:00+00:00",
        "role": role,
        "seconds": 1.5,
        "attempts": 2,
        "bytes_sent": 1_000,
        "bytes_received": 2_500,
        "figures": {"run": "r1"},
        "received": received,
    } | more


def report(**guest: Any) -> dict[str, Any]:
    figures = {
        "test auc": 0.8,
        "epsilon": 2.5,
        "delta": 1e-5,
        "encryption": "CKKS",
        "own rows": 100,
        "joint rows": 80,
        "alignment: ids of the other": 90,
        "epochs": 3,
        "run": "r1",
    }
    own = {
        "figures": figures,
        "curves": {"loss": [0.7, 0.6, 0.5]},
        "alone": {"logistic": {"auc": 0.7}},
    } | guest
    parties = {
        "bank": party("guest", **own),
        "shop": party("host"),
        "keeper": party("coordinator", received=[]),
    }
    return {
        "job": {"what": "sums", "options": {"turns": 5}},
        "parties": parties,
        "pooled": {"logistic": {"auc": 0.9}},
    }


def test_every_figure_stands_in_one_table() -> None:
    found = {title: rows for title, _, rows in tables(report())}
    assert found["Held-out rows"] == [
        ("joint", "0.8000"),
        ("bank alone, logistic", "0.7000"),
        ("all tables pooled, logistic", "0.9000"),
    ]
    assert found["Rows"] == [
        ("bank", "own rows", "100"),
        ("bank", "joint rows", "80"),
        ("bank", "ids of the other", "90"),
    ]
    assert [row[:3] for row in found["Protections"]] == [
        ("bank", "epsilon", "2.5000"),
        ("bank", "delta", "1e-05"),
        ("bank", "encryption", "CKKS"),
        ("shop", "protection", ""),
        ("keeper", "protection", ""),
    ]
    assert "none named" in found["Protections"][3][3]
    assert "no rows" in found["Protections"][4][3]
    assert found["Figures"] == [("bank", "epochs", "3")]
    assert found["What each party saw"][0] == ("bank", "shop", "sum", "5", "2.5 kB", "the sum")


class Page(HTMLParser):
    """Checks that elements close, and keeps text and names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in ("meta", "path", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_to_hand_on_takes_no_text_for_markup() -> None:
    evil = '<script>alert("x")</script>|\n# forged'
    seen = [{"from": "shop", "kind": evil, "messages": 1, "bytes": 1, "learns": evil}]
    page = Page(rendered({"one": report(received=seen), evil: report()}, ".html"))
    assert not page.open
    assert "script" not in page.names
    assert {"svg", "polyline", "table"} <= page.names
    assert evil in page.texts
    text = rendered({"one": report(received=seen)}, ".md")
    line = next(line for line in text.splitlines() if "alert" in line)
    assert line.startswith("| bank | shop | \\<script\\>")
    assert "\\| \\# forged" in line
    assert not any(line.startswith("# forged") for line in text.splitlines())
    assert "## loss by epoch, at bank" in text
    assert "| 3 | 0.5000 |" in text
    cells = [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(cells) <= {3, 4, 5, 7}  # the columns of the tables, and no more


def test_runs_stand_side_by_side() -> None:
    other = report(figures={"test auc": 0.75, "run": "r2"})
    other["job"] = {"what": "sums", "options": {"turns": 6}}
    other["parties"]["shop"]["received"][0]["messages"] = 6
    found = {title: rows for title, _, rows in compare({"a": report(), "b": other})}
    assert ("joint: auc", "0.8000", "0.7500") in found["Quality on held-out rows"]
    assert found["Settings"] == [("options.turns", "5", "6")]
    assert ("bytes between parties", "3.0 kB", "3.0 kB") in found["Cost"]
    assert ("bank: epsilon", "2.5000", "–") in found["Protections"]
    assert found["What parties saw in one run and not, or not as much of, in another"] == [
        ("shop from shop: sum", "5, 2.5 kB", "6, 2.5 kB")
    ]


def headwater(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["fl", "vertical", "report", *arguments])
    return int(ended.value.code or 0)


def test_the_command_writes_files_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report()))
        paths.append(str(tmp_path / name))
    assert headwater(paths[0], "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == report()
    assert headwater(*paths, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"format", "runs", "comparison"}
    assert list(found["runs"]) == paths
    assert headwater(*paths) == 0
    assert "Quality on held-out rows" in capsys.readouterr().out
    for suffix, begin in ((".md", "# Joint jobs side by side"), (".html", "<!doctype html>")):
        file = tmp_path / f"report{suffix}"
        assert headwater(*paths, "--output", str(file)) == 0
        assert file.read_text().startswith(begin)
    assert headwater(paths[0], "--output", str(tmp_path / "report.pdf")) == Exit.USAGE
    assert headwater(paths[0], "--output", str(tmp_path / "none" / "report.md")) == Exit.BAD_INPUT


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "is no report"),
        ("{", "cannot be read"),
        ('{"parties": {}}', "is no report of a joint job: Object missing required field `job`"),
        ('{"job": {}, "parties": []}', "Expected `object`, got `array`"),
        (json.dumps(report() | {"parties": {"bank": {"role": "guest"}}}), "missing required field `seconds`"),
        (json.dumps(report(figures=[])), "Expected `object`"),
        (json.dumps(report(format=FORMAT + 1)), "this version reads 1"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigRefused, match=why):
        read_reports(tmp_path)


def test_a_partys_own_report_has_defaults_rows_and_what_it_saw_over_restarts(tmp_path: Path) -> None:
    roles = {"bank": "guest", "shop": "host"}
    files = party_files(tmp_path, roles, listening=("bank", "shop"), options={"turns": 3})

    def run(name: str) -> dict[str, Any]:
        return run_party(prepare(load_party(files[name])))

    def seconds_kept(name: str) -> float:
        folder = prepare(load_party(files[name])).folder
        with closing(StateFolder(folder, f"{folder.name}/{name}")) as store:
            return store.traffic().seconds

    with ThreadPoolExecutor(2) as pool:
        first = dict(zip(roles, pool.map(run, roles), strict=True))
        kept = {name: seconds_kept(name) for name in roles}
        again = dict(zip(roles, pool.map(run, roles), strict=True))
    bank = first["bank"]
    assert bank["format"] == FORMAT
    assert bank["settings"]["options"] == {"turns": 3, "pause_s": 0.0, "fails_at": -1}
    assert (bank["figures"]["own rows"], bank["figures"]["joint rows"]) == (12, 12)
    assert [(row["kind"], row["messages"]) for row in bank["received"]] == [("sum", 3)]
    # A party that is started again when all is done reports what it saw then, not nothing.
    for name, one in again.items():
        assert one["received"] == first[name]["received"]
        assert one["sent"] == first[name]["sent"]
        assert one["attempts"] == 1
        # Told to the millisecond.
        assert one["seconds"] >= kept[name] - 0.001 > 0
    assert tables(read_reports(files["bank"].parent))


def test_traffic_is_read_as_it_was_written() -> None:
    traffic = Traffic(attempts=2, seconds=1.5)
    traffic.sent["shop", "sum"] += 3
    traffic.received_bytes["shop", "a kind: with / signs"] += 10
    found = read_traffic(traffic.dump(2.0))
    assert (found.sent, found.received_bytes) == (traffic.sent, traffic.received_bytes)
    assert (found.attempts, found.seconds) == (2, 3.5)
    with pytest.raises(KeyError):
        read_traffic(b"{}")


def test_settings_are_told_with_their_defaults() -> None:
    job = {"what": "sums", "align": "psi", "options": {}, "psi": {"case": "fold"}, "seed": 1}
    found = settings_of(job)
    assert (found["psi"]["case"], found["psi"]["protocol"], found["options"]["turns"]) == ("fold", "auto", 5)
    assert "psi" not in settings_of(job | {"align": "none"})


class TestRemarks:
    def said(self, figures: dict[str, Any], alone: dict[str, dict[str, float]]) -> list[str]:
        return list(remarks({"bank": {"figures": figures, "alone": alone}}))

    @pytest.mark.parametrize(
        ("measure", "joint", "alone", "worse"),
        [
            ("auc", 0.61, 0.98, True),
            ("auc", 0.975, 0.98, False),
            ("auc", 0.99, 0.98, False),
            ("accuracy", 0.7, 0.8, True),
            ("rmse", 60.0, 50.0, True),
            ("rmse", 50.2, 50.0, False),
            ("rmse", 40.0, 50.0, False),
        ],
    )
    def test_a_joint_model_that_does_not_pay_is_named_with_what_is_better(
        self, measure: str, joint: float, alone: float, worse: bool
    ) -> None:
        weak = alone * (2.0 if measure == "rmse" else 0.5)
        said = self.said({f"test {measure}": joint}, {"weak": {measure: weak}, "own": {measure: alone}})
        assert bool(said) == worse
        assert all(f"bank alone, own ({measure} " in one for one in said)

    @pytest.mark.parametrize(("rows", "few"), [(0, False), (12, True), (99, True), (100, False)])
    def test_measures_on_few_rows_are_doubted(self, rows: int, few: bool) -> None:
        assert bool(self.said({"test auc": 1.0, "held-out rows": rows}, {})) == few

    def test_what_was_not_measured_is_not_spoken_of(self) -> None:
        assert self.said({"held-out rows": 12}, {"own": {"auc": 0.9}}) == []
        assert self.said({"test auc": 0.5}, {"own": {"rmse": 1.0}}) == []

    def test_they_stand_beside_the_measures(self) -> None:
        shown = report()
        shown["parties"]["bank"]["alone"] = {"logistic": {"auc": 0.95}}
        titles = [title for title, _, _ in tables(shown)]
        assert titles[:2] == ["Held-out rows", "Remarks"]
        assert [title for title, _, _ in tables(report())].count("Remarks") == 0
