"""``headwater fl epsilon`` as people meet it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable

import pytest

from federated.job import load_job
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
