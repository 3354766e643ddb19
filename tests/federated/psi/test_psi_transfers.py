"""Oblivious transfers: base transfers, tables, the function, and the intersection by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import federated.psi.transfers as module
from federated.psi.cuckoo import TableFull, bins_for, build, places
from federated.psi.hashing import split
from federated.psi.members import Arrange
from federated.psi.oblivious import CODE_BYTES, WIDTH, codes, evaluate, outputs, own
from federated.psi.terms import Learns, Terms
from federated.psi.transfer import choose, offer
from federated.psi.transfers import transfers
from federated.vertical.parties import PeerFault, Role, Twist, run_local
from tests.support.psi import (
    bodies,
    check,
    drawing,
    expected,
    meet,
    members,
    repeating,
    replacing,
    resumed,
    shape,
)

SESSION = bytes(range(32))
ONE, OTHER = [f"u{at}" for at in range(60)], [f"u{at}" for at in range(45, 130)]


def side(terms: Terms) -> Any:
    def made(peer: str, arrange: Arrange, first: bool) -> Role[Any]:
        return transfers(peer, arrange, terms, first=first)

    return made


def base(choices: list[int], twist: Twist | None = None) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    roles = {
        "chooser": choose("other", SESSION, choices, drawing(1)),
        "other": offer("chooser", SESSION, len(choices), drawing(2)),
    }
    results = run_local(roles, twist=twist).results
    return results["chooser"], results["other"]


@given(st.lists(st.integers(0, 1), max_size=8))
@settings(max_examples=10, deadline=None)
def test_base_transfers(choices: list[int]) -> None:
    got, both = base(choices)
    assert got == [pair[choice] for choice, pair in zip(choices, both, strict=True)]
    assert len({key for pair in both for key in pair}) == 2 * len(choices)


@pytest.mark.parametrize(
    ("kind", "peer", "body", "rule"),
    [
        ("psi.ot.choices", "chooser", lambda body: bytes(32) + body[32:], "element"),
        ("psi.ot.choices", "chooser", lambda body: b"\xff" * 32 + body[32:], "element"),
        ("psi.ot.choices", "chooser", lambda body: body[:-32], "count"),
        ("psi.ot.reply", "other", lambda body: bytes(32) + body[32:], "element"),
        ("psi.ot.reply", "other", lambda body: body + bytes(32), "count"),
    ],
)
def test_base_transfers_with_wrong_elements(kind: str, peer: str, body: Any, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        base([0, 1], replacing(kind, body))
    assert (caught.value.peer, caught.value.rule) == (peer, rule)


@pytest.mark.parametrize("count", [0, 1, 100, 5_000])
def test_every_id_has_a_place(count: int) -> None:
    ids = [b"%d" % at for at in range(count)]
    bins = bins_for(count)
    where = places(ids, SESSION, bins)
    table = build(where, bins, np.random.default_rng(1))
    assert (table.holds[table.at] == np.arange(count)).all()
    assert (where[np.arange(count), table.by] == table.at).all()
    assert (table.holds >= 0).sum() == count


def test_a_table_that_is_full_says_so() -> None:
    with pytest.raises(TableFull):
        build(np.zeros((3, 3), np.int64), 2, np.random.default_rng(1))


@pytest.mark.parametrize("bins", [1, 8, 100])
def test_the_function_is_the_same_at_both_where_ids_are(bins: int) -> None:
    ids = [b"id%d" % at for at in range(bins)]
    roles = {
        "asks": evaluate("owns", SESSION, codes(SESSION, ids, 0), drawing(3)),
        "owns": own("asks", SESSION, bins, drawing(4)),
    }
    results = run_local(roles).results
    at = np.arange(bins)
    mine = outputs(SESSION, at, results["asks"], 16)
    owner = results["owns"]
    np.testing.assert_array_equal(owner.values(ids, at, 0, 16), mine)
    for other in (
        owner.values([b"another%d" % number for number in range(bins)], at, 0, 16),
        owner.values(ids, at, 1, 16),
    ):
        assert not (other == mine).all(axis=1).any()
    assert len(results["asks"]) == bins


def test_codes_are_far_apart() -> None:
    made = np.unpackbits(codes(SESSION, [b"%d" % at for at in range(300)], 0), axis=1)
    apart = (made[:, None, :] != made[None, :, :]).sum(axis=2)[~np.eye(300, dtype=bool)]
    assert apart.min() >= 128
    assert made.shape == (300, 8 * CODE_BYTES)


@pytest.mark.parametrize("learns", ["both", "first", "second"])
def test_who_learns_finds_the_intersection(learns: Learns) -> None:
    terms = Terms(learns, chunk=16)
    outcome = meet(ONE, OTHER, side(terms))
    for name, texts in (("a", ONE), ("b", OTHER)):
        if terms.i_learn(name == "a"):
            check(outcome.results[name], texts, expected(ONE, OTHER))
        else:
            assert (outcome.results[name].ids, outcome.results[name].count) == (None, None)


@pytest.mark.parametrize(("one", "other"), [([], OTHER), (ONE, []), (ONE, ONE), (ONE, ["x"])])
def test_edges(one: list[str], other: list[str]) -> None:
    results = meet(one, other, side(Terms())).results
    assert results["a"].ids == results["b"].ids == expected(one, other)


def test_many() -> None:
    one, other = [f"u{at}" for at in range(4_200)], [f"u{at}" for at in range(3_000, 6_500)]
    results = meet(one, other, side(Terms())).results
    check(results["a"], one, expected(one, other))
    check(results["b"], other, expected(one, other))


def test_transcript_depends_on_sizes_alone_but_for_the_result() -> None:
    terms = Terms("first", chunk=16)
    assert shape(meet(ONE, OTHER, side(terms))) == shape(
        meet(ONE, [f"x{at}" for at in range(85)], side(terms))
    )


def test_values_tell_nothing_of_their_ids() -> None:
    outcomes = [meet(ONE, OTHER, side(Terms("first")), bodies=True) for _ in range(2)]
    elements = [
        element
        for kind in ("psi.ot.choices", "psi.ot.reply")
        for outcome in outcomes
        for element in split(outcome.transcript.of(kind=kind)[0].body or b"", 32)
    ]
    assert len(elements) == len(set(elements)) == 2 * 3 * WIDTH  # each transfer has its own exponents
    for number in range(3):
        sets = []
        for outcome in outcomes:
            values = split((outcome.transcript.of(kind=f"psi.values.{number}")[0].body or b"")[4:], 7)
            assert values == sorted(values)
            sets.append(set(values))
        assert not sets[0] & sets[1]
    columns = np.frombuffer((outcomes[0].transcript.of(kind="psi.ot.columns")[0].body or b"")[4:], np.uint8)
    ones = np.unpackbits(columns)
    assert abs(ones.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(ones))


@pytest.mark.parametrize("learns", ["both", "first", "second"])
def test_large_sets_go_on_after_the_transfers(learns: Learns, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Terms(learns, chunk=16)

    def make(name: str, state: bytes | None) -> Role[Any]:
        if name == "a":
            return transfers("b", members(ONE), terms, first=True, state=state)
        return transfers("a", members(OTHER), terms, first=False, state=state)

    assert sorted(resumed(make, "ab")) == [0]  # a run of a second begins anew
    monkeypatch.setattr(module, "LARGE", 85)
    outcomes = resumed(make, "ab")
    assert sorted(outcomes) == [0, 1]
    for name in "ab":
        ids = expected(ONE, OTHER) if terms.i_learn(name == "a") else None
        assert [outcome.results[name].ids for outcome in outcomes.values()] == [ids, ids]
    assert {one.kind for one in outcomes[1].transcript.messages}.isdisjoint(
        {"psi.hello", "psi.ot.choices", "psi.ot.reply", "psi.ot.columns"}
    )
    for number in range(3):
        kind = f"psi.values.{number}"
        assert bodies(outcomes[0], kind) == bodies(outcomes[1], kind)
    monkeypatch.setattr(module, "_MOST_KEPT", 3 * 7 * 85 - 1)
    assert sorted(resumed(make, "ab")) == [0]  # beyond what a message carries


@pytest.mark.parametrize(
    ("twist", "peer", "rule"),
    [
        (replacing("psi.ot.columns", lambda body: body[:-1]), "a", "count"),
        (replacing("psi.values.1", lambda body: body[:4] + body[4:11] * 2 + body[18:]), "b", "repeated"),
        (repeating("psi.values.2", "b"), "b", "order"),
        (replacing("psi.values.0", lambda body: body[:-7]), "b", "count"),
        (replacing("psi.common", lambda body: bytes(16) + body[16:]), "a", "positions"),
        (replacing("psi.common", lambda body: body[:16] + body), "a", "positions"),
        (replacing("psi.common", lambda body: body[:-1]), "a", "count"),
        (replacing("psi.common", lambda body: body[:-16]), "a", "result"),
    ],
)
def test_wrong_messages_are_named(twist: Twist, peer: str, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        meet(ONE, OTHER, side(Terms(chunk=40)), twist=twist)
    assert caught.value.rule == rule
    assert rule == "result" or caught.value.peer == peer  # both notice that results differ
