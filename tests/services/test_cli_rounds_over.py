"""What ``headwater fl list`` and ``fl log`` say of jobs that are over."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from federated.privacy.accounting_statement import Exposure, statement
from federated.privacy.section import PrivacySection
from services.cli import rounds
from services.cli.app import main

BUDGET = PrivacySection(mechanism="central_gaussian", budget_epsilon=7.0)
CLOSED = {
    "iteration": 1, "valid": True, "why": "full", "starts": 4, "uploads": 4, "closed_at": 2.0, "opened_at": 1.0,
    "epsilon": 4.2,
}  # fmt: skip


def job(name: str, over: str, **more: Any) -> dict[str, Any]:
    """A job's row as servers tell it."""
    return {
        "job": name, "phase": "finished" if over else "start", "over": over, "iteration": 2, "iterations": 20,
        "valid": 2, "invalid": 0, "version": 2, "starts": 0, "starts_needed": 4, "uploads": 0, "uploads_needed": 4,
        "strategy": "fedavg", "parameters": 10, **more,
    }  # fmt: skip


class Served:
    """Servers with three jobs, each with one iteration in its log."""

    def __init__(self) -> None:
        private = statement(Exposure(BUDGET, 20), 2).as_json()
        self.jobs = [
            job("spent", "budget", privacy=private),
            job("done", "last"),
            job("going", "", privacy=private),
        ]

    def get(self, *path: str) -> object:
        if path == ("fl", "servers"):
            return {"servers": []}
        return {"jobs": self.jobs} if path == ("fl", "jobs") else {"rounds": [CLOSED]}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command of ``fl`` against ``Served`` and gives what it prints."""
    monkeypatch.setattr(rounds, "_api", lambda *_: Served())

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(("fl", *arguments))
        assert not ended.value.code
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("spent", "spent: over: another iteration would exceed the privacy budget"),
        ("done", "done: over: iteration 20 was its last"),
    ],
)
def test_the_log_ends_with_why_a_job_is_over_as_the_list_has_it(
    told: Callable[..., str], name: str, last: str
) -> None:
    assert told("log", name).splitlines()[-1] == last
    assert last in told("list").splitlines()


def test_a_job_that_goes_on_is_not_over(told: Callable[..., str]) -> None:
    assert "over" not in told("log", "going")
    assert not [line for line in told("list").splitlines() if line.startswith("going: over")]


def test_json_has_it_too(told: Callable[..., str]) -> None:
    assert json.loads(told("log", "spent", "--format", "json"))["over"] == "budget"
    assert json.loads(told("log", "going", "--format", "json"))["over"] == ""


def test_only_a_job_that_goes_on_has_an_end_to_come(told: Callable[..., str]) -> None:
    lines = [line for line in told("list").splitlines() if ": privacy: " in line]
    assert "epsilon 6.573 of 7 spent, delta" in lines[0]
    assert "epsilon 6.573 of 7, 6.573 at the end, delta" in lines[1]
