"""``headwater fl simulate`` as people meet it."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_process import Run, command

from federated.job import load_job
from services.cli.exits import Exit
from services.simulation.settings import read_assignments


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """``fl simulate`` in this process."""
    return command(capsys, monkeypatch, tmp_path, "fl", "simulate")


QUICK = ("--dataset", "digits", "--clients", "20", "--cohort", "5", "--steps", "3", "--seed", "3")


def test_a_run_prints_lines_and_writes_all_that_it_says(simulate: Run, tmp_path: Path) -> None:
    code, out, err = simulate(
        *QUICK, "--rounds", "4", "--out", "out", "--alpha", "0.5", "--strategy", "scaffold"
    )
    assert code == Exit.OK, err
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [f"iteration {number}" for number in range(1, 5)]
    assert "simulated, not private" in out
    assert "against a model trained alone" in out

    found = json.loads((tmp_path / "out/simulation.json").read_text())
    assert (found["simulated"], found["private"]) == (True, False)
    assert len(found["rows"]) == found["totals"]["iterations"] == 4
    assert found["final"]["distribution"]["clients"] == 20
    assert found["data"]["clients"] == 20
    assert (tmp_path / "out/simulation.png").read_bytes().startswith(b"\x89PNG")
    with np.load(tmp_path / "out/model.npz") as model:
        assert model["output.weight"].shape == (64, 10)

    job = load_job(tmp_path / "out/job.toml")
    assert (job.data.name, job.data.clients, job.data.partition) == ("digits", 20, "dirichlet:0.5")
    assert (job.data.features, job.data.classes) == (64, 10)  # what servers need to know
    assert (job.strategy.name, job.training.steps, job.training.epochs) == ("scaffold", 3, None)
    assert (job.rounds.fl_iteration_num, job.rounds.start_fl_job_threshold, job.job.seed) == (4, 5, 3)


def test_the_file_that_was_written_gives_the_same_run(simulate: Run, tmp_path: Path) -> None:
    flags = ("--rounds", "3", "--compression", "top_k:0.1,quantise:1,deflate", "--download-bits", "8")
    assert simulate(*QUICK, *flags, "--dropout", "0.1", "--out", "one")[0] == Exit.OK
    code, out, err = simulate("--job", "one/job.toml", "--format", "json", "--out", "two")
    assert code == Exit.OK, err
    printed = json.loads(out)
    one = json.loads((tmp_path / "one/simulation.json").read_text())
    assert _without_clock(printed) == _without_clock(one)
    assert (tmp_path / "one/job.toml").read_text() == (tmp_path / "two/job.toml").read_text()
    with np.load(tmp_path / "one/model.npz") as first, np.load(tmp_path / "two/model.npz") as second:
        for name in first.files:
            np.testing.assert_array_equal(first[name], second[name])


def _without_clock(found: dict[str, Any]) -> dict[str, Any]:
    del found["totals"]["wall_s"]
    for row in found["rows"]:
        del row["wall_s"]
    return found


def test_resuming_a_finished_run_reports_it_again_and_other_settings_are_refused(simulate: Run) -> None:
    assert simulate(*QUICK, "--rounds", "3", "--out", "out")[0] == Exit.OK
    code, out, _ = simulate("--resume", "--out", "out")
    assert code == Exit.OK
    assert "3 of 3 iterations were valid" in out
    code, _, err = simulate("--resume", "--out", "out", "--rate", "0.3")
    assert code == Exit.BAD_INPUT
    assert "other settings" in err
    code, _, err = simulate("--resume")
    assert code == Exit.USAGE
    code, _, err = simulate(*QUICK, "--rounds", "3", "--resume", "--out", "new")
    assert code == Exit.OK
    assert "no checkpoint" in err


def test_where_training_diverges_the_run_ends_and_says_what_to_lower(simulate: Run) -> None:
    code, out, _ = simulate(*QUICK, "--rounds", "2", "--rate", "1e30", "--compression", "quantise:8")
    assert code == Exit.OK
    assert "0 of 2 iterations were valid" in out
    assert "by rule not_finite" in out
    assert "lower training.rate" in out


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--strategy", "fedavgg"), Exit.SETTINGS, "did you mean 'fedavg'"),
        (("--compression", "quantise:1,top_k:0.1"), Exit.SETTINGS, "compression.upload"),
        (("--engine", "jax"), Exit.SETTINGS, "engine"),
        (("--cohort", "21"), Exit.SETTINGS, "there are 20 clients"),
        (("--partition", ":"), Exit.SETTINGS, "is no partition"),
        (("--with", "model.hidden=true"), Exit.SETTINGS, "hidden must be a whole number, not True"),
        (("--with", "simulation.habits.uplink=1e-300"), Exit.SETTINGS, "uplink must be in"),
        (("--with", "simulation.patience_s=nan"), Exit.SETTINGS, "patience_s must be a positive"),
        (("--strategy", "norm_bound"), Exit.SETTINGS, "norm_bound needs its option bound"),
        (("--with", "strategy.server_rate=true"), Exit.SETTINGS, "server_rate must be a number, not True"),
        (("--strategy", "scaffold", "--with", "strategy.population=1"), Exit.SETTINGS, "a population of 1"),
        (("--model", "text"), Exit.SETTINGS, "model text takes characters"),
        (("--partition", "user"), Exit.SETTINGS, "nobody owns the rows"),
        (("--alpha", "nan"), Exit.SETTINGS, "alpha must be positive"),
        (("--with", "job.seed=abc"), Exit.SETTINGS, "job.seed must be a whole number"),
        (("--with", "training.speed=1"), Exit.SETTINGS, "training"),
        (("--with", "rate=1"), Exit.SETTINGS, "not SECTION.KEY=VALUE"),
        (("--with", "simulation.habits.speed=1"), Exit.SETTINGS, "habits: the key 'speed' is unknown"),
        (("--partition", "iid", "--alpha", "0.1"), Exit.USAGE, "--alpha"),
        (("--job", "missing.toml"), Exit.SETTINGS, "missing.toml"),
        (("--dataset", "nothing-there"), Exit.DATA_UNAVAILABLE, "nothing-there"),
        (
            ("--with", "simulation.availability=trace", "--with", "simulation.trace=none.csv"),
            Exit.BAD_INPUT,
            "none.csv",
        ),
    ],
)
def test_what_cannot_be_run_says_why(simulate: Run, flags: tuple[str, ...], code: Exit, says: str) -> None:
    ended, _, err = simulate(*QUICK, "--rounds", "1", *flags)
    assert ended == code
    assert says in err


def test_a_trace_decides_who_can_be_reached(simulate: Run, tmp_path: Path) -> None:
    rows = "".join(f"{client},0,1000000\n" for client in range(5))
    (tmp_path / "trace.csv").write_text("client,from_s,until_s\n" + rows + "19,0,0.001\n")
    code, out, err = simulate(
        *QUICK, "--rounds", "2", "--with", "simulation.availability=trace",
        "--with", "simulation.trace=trace.csv", "--format", "json",
    )  # fmt: skip
    assert code == Exit.OK, err
    assert all(row["starts"] == 5 for row in json.loads(out)["rows"])


def test_assignments_are_read_as_toml_or_bare() -> None:
    assert read_assignments(["a.b=1", "a.c=.5", 'a.d="x"', "a.e=true", "a.f=30s", "a.g=[1, 2]", "a.h="]) == {
        "a.b": 1, "a.c": 0.5, "a.d": "x", "a.e": True, "a.f": "30s", "a.g": [1, 2], "a.h": "",
    }  # fmt: skip


def test_flags_go_before_the_file(simulate: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[rounds]\nstart_fl_job_threshold = 5\nfl_iteration_num = 9\n[data]\nclients = 20\n'
        '[strategy]\nname = "fedprox"\nmu = 0.5\n'
    )  # fmt: skip
    code, _, err = simulate("--job", "job.toml", "--rounds", "2", "--strategy", "fedavg", "--out", "out")
    assert code == Exit.OK, err
    written = tomllib.loads((tmp_path / "out/job.toml").read_text())
    assert written["rounds"]["fl_iteration_num"] == 2
    assert written["strategy"] == {"name": "fedavg"}


def test_a_run_that_its_budget_ends_says_so(simulate: Run) -> None:
    budget = ("--with", "privacy.mechanism=central_gaussian", "--with", "privacy.budget_epsilon=7")
    code, out, err = simulate(*QUICK, "--rounds", "30", *budget)
    assert code == Exit.OK, err
    # sigma = 1 at delta 1e-5: two releases cost 6.57, three more than 7.
    assert "2 of 2 iterations were valid" in out
    assert "it ended early: after 2 releases another would exceed privacy.budget_epsilon" in out
    spent = next(line for line in out.splitlines() if line.startswith("privacy: central_gaussian"))
    assert "epsilon 6.573 of 7 spent, delta 1e-05" in spent
    assert "at the end" not in spent
    code, out, _ = simulate(*QUICK, "--rounds", "2", *budget)
    assert "ended early" not in out


def test_a_private_run_says_what_privacy_cost_and_that_a_simulation_has_none(
    simulate: Run, tmp_path: Path
) -> None:
    private = ("--with", "privacy.mechanism=local_gaussian", "--with", "privacy.epsilon=4")
    code, out, err = simulate(
        *QUICK, "--rounds", "30", "--out", "out", *private, "--with", "privacy.budget_epsilon=7"
    )
    assert code == Exit.OK, err
    assert err.count("not private: a simulation's randomness is seeded") == 1
    assert "privacy: local_gaussian against everybody, the servers included" in err
    assert "it ended early: too few clients have privacy budget left" in out
    found = json.loads((tmp_path / "out/simulation.json").read_text())
    assert len(found["rows"]) < 30
    spent = [row["epsilon"] for row in found["rows"]]
    assert spent == sorted(spent)
    assert found["privacy"]["epsilon_now"] == pytest.approx(spent[-1])
    assert spent[-1] <= 7.0
    with (tmp_path / "out/simulation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epsilon"]) for row in rows] == spent
    assert {row["loss"] for row in rows} == {""}
    assert all(float(row["metrics.accuracy"]) >= 0.0 for row in rows)
    assert (tmp_path / "out/simulation.png").stat().st_size > 10_000


def test_a_run_of_signs_warns_of_steps_that_diverge_and_has_no_clip(simulate: Run) -> None:
    signs = ("--strategy", "signds", "--with", "privacy.mechanism=signds")
    code, out, err = simulate(*QUICK, *signs, "--with", "privacy.sign_global_lr=20")
    assert code == Exit.OK, err
    assert "warning: SignDS steps are up to" in err
    better = err.partition("sign_global_lr ")[2].split()[0]
    assert "clipped" not in out
    assert "eps" in out
    code, _, err = simulate(*QUICK, *signs, "--with", f"privacy.sign_global_lr={better}")
    assert code == Exit.OK, err
    assert "SignDS steps" not in err
