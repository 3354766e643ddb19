"""A whole joint job in one process: the alignment's checkpoints, with a coordinator who takes no part in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from federated.psi.kind import KIND as PSI
from federated.psi.kind import PsiOptions
from federated.vertical.kinds import Count, Kind, Setup
from federated.vertical.parties import (
    Checkpoint,
    Incoming,
    Make,
    Outcome,
    PartResult,
    PeerFault,
    Receive,
    Role,
    run_local,
)
from federated.vertical.pipeline import ALIGNED, Alignment, joint
from federated.vertical.tables import Table
from federated.vertical.wire import pack

ROLES = {"bank": "guest", "shop": "host", "judge": "coordinator"}
IDS = {"bank": [str(one) for one in range(60)], "shop": [str(one) for one in range(90, 15, -1)]}
COMMON = sorted(str(one) for one in range(16, 60))


@dataclass(frozen=True, slots=True)
class _Options:
    labels: int = 3


def _make(options: _Options, setup: Setup) -> Make:
    def role(state: bytes | None) -> Role[PartResult]:
        for label in range(0 if state is None else state[0] + 1, options.labels):
            yield Checkpoint(label, bytes([label]))
        return PartResult({"rows": setup.rows, "from": -1 if state is None else state[0]})

    return role


STEPS = Kind(
    "steps",
    "checkpoints, and nothing else",
    {"guest": Count(1, 1), "host": Count(1, 1), "coordinator": Count(0, 1)},
    _Options,
    _make,
    {},
)


def table(name: str) -> Table | None:
    if name not in IDS:
        return None
    ids = tuple(IDS[name])
    labels = np.arange(float(len(ids))) % 2 if ROLES[name] == "guest" else None
    return Table(ids, np.zeros((len(ids), 1)), ("x",), labels)


def makes(
    kind: Kind[Any] = PSI, options: Any = None, names: tuple[str, ...] = tuple(ROLES)
) -> dict[str, Make]:
    alignment = Alignment(kind, PsiOptions(chunk=7) if options is None else options)
    roles = {name: ROLES[name] for name in names}
    return {
        name: joint(STEPS, _Options(), Setup(name, roles, table(name), 0), alignment, 0.0) for name in roles
    }


def run(label: int = -1, states: dict[str, bytes] | None = None) -> Outcome[PartResult]:
    roles = {name: make(None if states is None else states[name]) for name, make in makes().items()}
    return run_local(roles, label=label)


def ids_of(name: str, result: PartResult) -> list[str]:
    assert result.rows is not None
    return [IDS[name][row] for row in result.rows.tolist()]


def test_all_have_the_same_labels_and_go_on_from_each_of_them() -> None:
    whole = run()
    labels = {name: list(kept) for name, kept in whole.checkpoints.items()}
    steps = labels["judge"].index(ALIGNED)
    assert steps > 5
    assert labels["bank"] == labels["shop"] == labels["judge"]
    assert labels["judge"] == [*range(steps), ALIGNED, *(ALIGNED + 1 + own for own in range(3))]
    for label in labels["bank"]:
        again = run(label, {name: kept[label] for name, kept in whole.checkpoints.items()})
        for name in IDS:
            assert ids_of(name, again.results[name]) == COMMON
        assert again.results["judge"].rows is None
        assert {result.figures["rows"] for result in again.results.values()} == {len(COMMON)}
        assert {result.figures["from"] for result in again.results.values()} == {max(-1, label - ALIGNED - 1)}
        # Nothing is done twice: what was aligned before the label is not sent again.
        assert list(again.checkpoints["judge"]) == [one for one in labels["judge"] if one > label]
        sent = len(again.transcript.of(sender="bank", receiver="shop", kind="psi.masked"))
        assert sent == max(0, len(range(0, 60, 7)) - label - 1)


def test_a_coordinator_learns_of_the_alignment_that_it_goes_on_and_ends() -> None:
    transcript = run().transcript
    told = transcript.of(receiver="judge")
    assert {(one.sender, one.kind) for one in told} == {("bank", "align"), ("bank", "rows")}
    assert {one.size for one in told if one.kind == "align"} == {len(pack({"more": 1}))}


def test_without_a_coordinator_nobody_is_told() -> None:
    roles = {name: make(None) for name, make in makes(names=("bank", "shop")).items()}
    outcome = run_local(roles)
    assert outcome.transcript.of(kind="align") == []
    assert list(outcome.checkpoints["bank"]) == list(outcome.checkpoints["shop"])


def test_a_guest_that_never_ends_the_alignment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("federated.vertical.pipeline.ALIGNED", 4)
    judge = makes()["judge"](None)
    more = Incoming("bank", "align", pack({"more": 1}))
    assert isinstance(next(judge), Receive)
    for label in range(4):
        assert judge.send(more) == Checkpoint(label, ANY)
        assert isinstance(judge.send(None), Receive)
    with pytest.raises(PeerFault, match="more than 4 checkpoints"):
        judge.send(more)


def test_an_alignment_whose_labels_do_not_rise_is_refused() -> None:
    def make(options: Any, setup: Setup) -> Make:
        def role(state: bytes | None) -> Role[PartResult]:
            yield Checkpoint(5, b"")
            yield Checkpoint(5, b"")
            return PartResult()

        return role

    twice = Kind("twice", "", {"guest": Count(1, 1), "host": Count(1, 1)}, _Options, make, {}, aligned=False)
    with pytest.raises(ValueError, match="checkpoint 5 after 5"):
        run_local({name: one(None) for name, one in makes(twice, _Options()).items()})
