"""``headwater fl attack`` as people meet it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from support.in_process import Run, command

from federated.attacks import contest
from services.cli.exits import Exit

QUICK = (
    "--candidates", "150", "--trials", "20", "--worlds", "8", "--rounds", "1", "--cohort", "3", "--audited", "400",
    "--hidden", "16", "--seed", "3",
)  # fmt: skip


@pytest.fixture
def attack(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """``fl attack`` in this process."""
    return command(capsys, monkeypatch, tmp_path, "fl", "attack")


def test_a_table_says_who_attacks_what_and_what_it_buys(attack: Run, tmp_path: Path) -> None:
    code, out, err = attack(
        *QUICK, "--mechanism", "secagg", "--mechanism", "central_gaussian", "--out", "out"
    )
    assert code == Exit.OK, err
    assert "A client with 1 record; chance 0.67%" in out
    assert "A client with 8 records, the others are known" in out
    assert "its server sees plain updates" in out
    assert "hides single updates, not their sum" in out
    assert "simulated: noise is seeded here" in out

    found = json.loads((tmp_path / "out/attacks.json").read_text())
    inversions = [row for row in found["rows"] if row["attack"] == "inversion"]
    of_one = {(row["label"], row["adversary"], row["sees"]): row for row in inversions if row["records"] == 1}
    assert of_one["plain", "the server", "each update"]["top_1"]["value"] > 0.9
    assert of_one["plain", "the server", "each update"]["epsilon"] is None
    assert of_one["secagg", "the server", "one masked update"]["top_1"]["value"] < 0.2
    assert of_one["secagg", "the server, knowing all other updates", "the sum of 3"]["top_1"]["value"] > 0.9
    assert of_one["central_gaussian z 1", "the server", "each update (clipped)"]["top_1"]["value"] > 0.9
    reader = of_one["central_gaussian z 1", "who downloads the models", "the noisy sum of 3"]
    assert reader["epsilon"] == pytest.approx(4.377, abs=0.01)
    assert reader["most_top_1"] == pytest.approx(2.718281828**4.377 / 150, rel=0.02)
    assert {row["attack"] for row in found["rows"]} == {"inversion", "membership", "audit"}
    with (tmp_path / "out/attacks.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found["rows"])
    assert float(lines[0]["top_1_low"]) <= float(lines[0]["top_1"]) <= float(lines[0]["top_1_high"])
    assert (tmp_path / "out/attacks.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_alone_and_the_same_for_the_same_seed(attack: Run) -> None:
    flags = (*QUICK, "--mechanism", "signds", "--attack", "inversion", "--records", "1")
    runs = [attack("--format", "json", *flags) for _ in range(2)]
    assert [code for code, _, _ in runs] == [Exit.OK] * 2
    first, second = (json.loads(out) for _, out, _ in runs)
    assert first == second
    labels = [row["label"] for row in first["rows"]]
    assert labels == ["plain", "compression top_k:0.03,quantise:1,deflate", "signds eps 2", "signds eps 101"]
    assert any("signds eps 101: no meaningful privacy" in text for text in first["notes"])


def test_a_job_is_attacked_as_it_is(attack: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        """
        [data]
        name = "digits"
        clients = 20
        [model]
        name = "softmax"
        [training]
        steps = 2
        rate = 0.05
        [rounds]
        start_fl_job_threshold = 5
        [privacy]
        mechanism = "local_gaussian"
        epsilon = 2.0
        clip = 4.0
        protects = "weights"
        """
    )
    code, out, err = attack(*QUICK, "--job", "job.toml", "--attack", "inversion", "--format", "json")
    assert code == Exit.OK, err
    found = json.loads(out)
    assert {row["label"] for row in found["rows"]} == {"plain", "local_gaussian eps 2"}
    assert (found["settings"]["model"], found["settings"]["training"]["steps"]) == ("softmax", 2)


def test_noise_that_is_less_than_claimed_is_a_failed_check(
    attack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "claimed", lambda *arguments: 0.01)
    code, out, err = attack(*QUICK, "--mechanism", "central_gaussian", "--attack", "audit")
    assert code == Exit.CHECK_FAILED
    assert "BROKEN" in out
    assert "more leaks than is claimed: central_gaussian z 1" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mechanism", "magic"), "--mechanism magic is none of"),
        (("--attack", "luck"), "--attack luck is none of inversion, membership, audit"),
        (("--knows", "all"), "--knows is rest or candidates"),
        (("--candidates", "5000"), "are too many"),
        (("--cohort", "150"), "150 clients of 8 records, none of whom share a row, need 1,200"),
        (("--epsilon", "-1"), "epsilon must be positive"),
        (("--compression", "magic"), "no step 'magic'"),
    ],
)
def test_what_cannot_be_played_is_told_in_a_line(attack: Run, flags: tuple[str, ...], said: str) -> None:
    code, _, err = attack(*flags)
    assert code == Exit.USAGE
    assert said in err
    assert "Traceback" not in err


def test_a_job_of_more_clients_than_rows_are_left_for_is_attacked_with_fewer(
    attack: Run, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(
        "[rounds]\nstart_fl_job_threshold = 200\n[data]\nclients = 1000\n[model]\nname = 'softmax'\n"
    )
    code, out, err = attack(
        "--job", "job.toml", "--attack", "membership", "--worlds", "8", "--rounds", "1", "--format", "json"
    )
    assert code == Exit.OK, err
    # 1,797 rows of digits less a thousand candidates are 797: 99 clients of 8.
    assert json.loads(out)["settings"]["cohort"] == 99


@pytest.mark.slow
def test_the_default_shows_what_each_mechanism_is_worth(attack: Run) -> None:
    code, out, err = attack("--format", "json")
    assert code == Exit.OK, err
    rows = json.loads(out)["rows"]
    for row in rows:
        if row["attack"] != "inversion":
            continue
        open_to_all = row["label"] == "plain" or "clipped" in row["sees"]
        if open_to_all:
            assert row["top_1"]["value"] > 0.9, row
        if row["epsilon"] is not None:
            assert row["top_1"]["low"] <= row["most_top_1"], row
            if row["epsilon"] <= 1.01:
                assert row["top_1"]["low"] <= 0.001, row
    assert all(row["passed"] for row in rows if row["attack"] == "audit")
