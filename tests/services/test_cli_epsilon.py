"""``headwater fl epsilon`` as people meet it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federated.job import FederatedJob, load_job, read_job
from federated.privacy.accounting_statement import statement
from services.cli.app import main
from services.cli.exits import Exit

Run = Callable[..., tuple[int, str, str]]
ROUNDS = {"rounds": {"start_fl_job_threshold": 80, "fl_iteration_num": 20, "update_model_ratio": 0.7}}
DATA = {"data": {"clients": 2000, "features": 64, "classes": 10}}


@pytest.fixture
def epsilon(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process and gives its code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(("fl", "epsilon", *arguments))
        printed = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), printed.out, printed.err

    return run


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--rate", "0.1"),
        ("--mechanism", "local_gaussian"),
        ("--mechanism", "signds"),
        # 56 uploads, less the 8 of 80 who may work with the server.
        ("--mechanism", "distributed_gaussian", "--weights", "4810", "--honest", "48"),
    ],
)
def test_what_is_printed_is_a_job_that_says_the_same(epsilon: Run, flags: tuple[str, ...]) -> None:
    code, out, err = epsilon("--epsilon", "8", "--rounds", "20", *flags)
    assert code == Exit.OK, err
    job = load_job({**ROUNDS, **DATA, **tomllib.loads(out[out.index("[privacy]") :])})
    assert job.make_rounds(job.make_model().layout().trained).most_releases in (0, 20)

    code, out, err = epsilon("--epsilon", "8", "--rounds", "20", *flags, "--format", "json")
    found = json.loads(out)
    noise = found.get("noise", found.get("report_epsilon"))
    assert 7.9 < found["epsilon_at_end"] <= 8.0
    assert noise > 0.0

    back = ("--report-epsilon" if "report_epsilon" in found else "--noise", str(noise), *flags)
    code, out, err = epsilon("--rounds", "20", *back, "--format", "json")
    assert json.loads(out)["epsilon_at_end"] == found["epsilon_at_end"]
    code, out, err = epsilon("--epsilon", "8", *back, "--format", "json")
    assert json.loads(out)["rounds"] == 20


def test_delta_that_exposes_someone_and_epsilon_that_says_nothing_are_warned_of(epsilon: Run) -> None:
    code, _, err = epsilon("--noise", "0.5", "--rounds", "20", "--clients", "200000")
    assert code == Exit.OK
    assert "no meaningful privacy" in err
    assert "not below 1/200000" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give two of"),
        (("--noise", "1", "--rounds", "2", "--epsilon", "3"), "give two of"),
        (("--mechanism", "centralgaussian", "--rounds", "2"), "did you mean 'central_gaussian'?"),
        (("--mechanism", "signds", "--noise", "1", "--rounds", "2"), "takes --report-epsilon, not --noise"),
        (("--report-epsilon", "1", "--rounds", "2"), "takes --noise, not --report-epsilon"),
        (("--noise", "0.1", "--epsilon", "1"), "one iteration costs"),
        (("--noise", "-1", "--rounds", "1"), "must be positive"),
    ],
)
def test_what_is_wrong_is_said(epsilon: Run, flags: tuple[str, ...], message: str) -> None:
    code, _, err = epsilon(*flags)
    assert code == Exit.USAGE
    assert message in err


JOB = """
[job]
name = "planned"

[data]
clients = 2000
features = 64
classes = 10

[rounds]
start_fl_job_threshold = 80
update_model_ratio = 0.7
fl_iteration_num = 20

[privacy]
mechanism = "{mechanism}"
clip = 0.5
budget_delta = 1e-6
noise_multiplier = 3.0
epsilon = 0.5

[selection]
name = "{selection}"

[secure_aggregation]
protocol = "secagg"
step_bits = 18
"""


def planned(folder: Path, mechanism: str, selection: str = "everyone") -> tuple[FederatedJob, str]:
    file = folder / "job.toml"
    file.write_text(JOB.format(mechanism=mechanism, selection=selection))
    return read_job(file), str(file)


@pytest.mark.parametrize(
    ("mechanism", "selection"),
    [
        ("central_gaussian", "everyone"),
        ("central_gaussian", "poisson"),
        ("distributed_gaussian", "everyone"),
        ("distributed_skellam", "everyone"),
        ("local_gaussian", "everyone"),
        ("signds", "everyone"),
    ],
)
def test_a_job_says_what_it_costs_by_its_own_accounting(
    epsilon: Run, tmp_path: Path, mechanism: str, selection: str
) -> None:
    job, file = planned(tmp_path, mechanism, selection)
    code, out, err = epsilon("--job", file, "--format", "json")
    assert code == Exit.OK, err
    found = json.loads(out)
    said = statement(job.exposure(job.make_model().layout().trained), 20)
    assert found["epsilon_at_end"] == said.epsilon_at_end
    assert (found["rounds"], found["delta"], found["mechanism"]) == (20, 1e-6, mechanism)


def test_flags_go_before_what_a_job_says(epsilon: Run, tmp_path: Path) -> None:
    job, file = planned(tmp_path, "distributed_gaussian")
    code, out, err = epsilon("--job", file, "--epsilon", "4")
    assert code == Exit.OK, err
    # Its rounds, and all that its noise depends on: as many honest devices, the clip, the step.
    tables = tomllib.loads(out[out.index("[privacy]") :])
    assert tables["privacy"]["clip"] == 0.5
    assert tables["secure_aggregation"] == {"protocol": "secagg", "step_bits": 18}
    asked = replace(
        job,
        privacy=replace(job.privacy, noise_multiplier=tables["privacy"]["noise_multiplier"]),
    )
    said = statement(asked.exposure(job.make_model().layout().trained), 20)
    assert said.epsilon_at_end is not None
    assert 3.98 < said.epsilon_at_end <= 4.0

    def found(*flags: str) -> dict[str, Any]:
        code, out, err = epsilon("--job", file, *flags, "--format", "json")
        assert code == Exit.OK, err
        read: dict[str, Any] = json.loads(out)
        return read

    usual = found()["epsilon_at_end"]
    assert found("--rounds", "10")["epsilon_at_end"] < usual
    assert found("--noise", "6")["epsilon_at_end"] < usual
    assert "while 24 of the devices" in found("--honest", "24")["adversary"]
    assert found("--mechanism", "local_gaussian")["report_epsilon"] == 0.5


def test_a_job_without_a_mechanism_or_none_at_all_is_refused(epsilon: Run, tmp_path: Path) -> None:
    _, file = planned(tmp_path, "none")
    code, _, err = epsilon("--job", file)
    assert code == Exit.USAGE
    assert "names no mechanism" in err
    code, _, err = epsilon("--job", str(tmp_path / "no.toml"))
    assert code == Exit.BAD_INPUT
    assert "cannot be read" in err
