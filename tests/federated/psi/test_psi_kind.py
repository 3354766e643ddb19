"""PSI as a kind of job: options, roles, and what is said of every message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from federated.psi.kind import KIND, SEEN, PsiOptions, make
from federated.psi.power import way
from federated.vertical.kinds import Setup
from federated.vertical.parties import Log, Outcome, run_local
from federated.vertical.tables import Table
from tests.support.psi import resumed

IDS = {
    "g": [f"u{at}" for at in range(30)],
    "h": [f"u{at}" for at in range(20, 60)],
    "k": [f"u{at}" for at in range(25, 27)],
}


def setup(me: str, names: tuple[str, ...], ids: list[str] | None = None) -> Setup:
    ids = IDS[me] if ids is None else ids
    table = Table(tuple(ids), np.zeros((len(ids), 0)), ())
    return Setup(me, {name: "guest" if name == "g" else "host" for name in names}, table, 0)


def run(options: PsiOptions, names: tuple[str, ...] = ("g", "h")) -> Outcome[Any]:
    return run_local({name: make(options, setup(name, names))(None) for name in names})


@pytest.mark.parametrize("protocol", ["auto", "ecdh", "rsa", "ot", "unbalanced"])
@pytest.mark.parametrize("learns", ["both", "guest", "host"])
def test_rows_are_those_of_the_same_ids(protocol: Any, learns: Any) -> None:
    outcome = run(PsiOptions(protocol=protocol, learns=learns, chunk=8))
    assert {sent.kind for sent in outcome.transcript.messages} <= set(SEEN)
    for name, role in (("g", "guest"), ("h", "host")):
        rows = outcome.results[name].rows
        if learns in ("both", role):
            assert [IDS[name][row] for row in rows] == [f"u{at}" for at in range(20, 30)]
        else:
            assert rows is None


@pytest.mark.parametrize("protocol", ["ecdh", "rsa", "unbalanced", "several"])
def test_roles_go_on_from_every_checkpoint(protocol: Any) -> None:
    names = ("g", "h", "k") if protocol == "several" else ("g", "h")
    options = PsiOptions(protocol=protocol, chunk=16)
    makes = {name: make(options, setup(name, names)) for name in names}
    outcomes = resumed(lambda name, state: makes[name](state), names)
    assert len(outcomes) > 3
    for name in names:
        rows = [outcome.results[name].rows.tolist() for outcome in outcomes.values()]
        assert all(one == rows[0] for one in rows)
        assert rows[0]


def test_the_signer_says_how_it_signs() -> None:
    outcome = run(PsiOptions(protocol="rsa", learns="guest", chunk=8))
    assert outcome.results["h"].figures["signed by"] == way()
    assert "signed by" not in outcome.results["g"].figures
    assert outcome.effects["h"].count(Log(f"signatures by {way()}")) == 1


def test_several() -> None:
    outcome = run(PsiOptions(), ("g", "h", "k"))
    assert {sent.kind for sent in outcome.transcript.messages} <= set(SEEN)
    for name in "ghk":
        assert [IDS[name][row] for row in outcome.results[name].rows] == ["u25", "u26"]
        assert outcome.results[name].figures["protocol"] == "several"


def test_several_count_alone() -> None:
    outcome = run(PsiOptions(wants="count"), ("g", "h", "k"))
    assert {sent.kind for sent in outcome.transcript.messages} <= set(SEEN)
    for name in "ghk":
        assert outcome.results[name].figures["common"] == 2
        assert outcome.results[name].rows is None


def test_counts_and_complaints() -> None:
    names = ("g", "h")
    texts = {"g": ["A", "b ", "b"], "h": ["a", "B", "c"]}
    options = PsiOptions(case="fold", wants="count")
    outcome = run_local({name: make(options, setup(name, names, texts[name]))(None) for name in names})
    assert outcome.results["g"].figures["common"] == 2
    assert outcome.results["g"].figures["rows of an id before"] == 1
    assert "row 3 ('b')" in str(outcome.effects["g"][0])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"protocol": "several"}, ("g", "h")),
        ({"protocol": "rsa"}, ("g", "h", "k")),
        ({"protocol": "ot", "wants": "count"}, ("g", "h")),
        ({"learns": "host"}, ("g", "h", "k")),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"parties|count"):
        make(PsiOptions(**options), setup("g", names))


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 1024},
        {"filter_bits": 5},
        {"chunk": 0},
        {"case": "upper"},
        {"protocol": "pigeon"},
        {"learns": "all"},
    ],
)
def test_options_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bits|chunk|case|protocol|learns"):
        PsiOptions(**wrong)


def test_declared_as_a_kind() -> None:
    assert (KIND.name, KIND.aligned, KIND.options) == ("psi", False, PsiOptions)
