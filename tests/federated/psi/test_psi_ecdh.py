"""Diffie-Hellman: the right sets, nothing else in the transcript, and every wrong message named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.psi.ecdh import ecdh
from federated.psi.hashing import split
from federated.psi.ids import IdRule
from federated.psi.limits import Ledger
from federated.psi.members import Arrange, MemoryFolder, spool
from federated.psi.resume import stretched
from federated.psi.terms import Learns, Terms, Wants, greet
from federated.vertical.parties import PeerFault, Role, Stalled, Twist, run_local
from tests.support.psi import check, drawing, expected, meet, members, repeating, replacing, resumed, shape

SETS = st.lists(st.text("ab1", max_size=4).filter(lambda text: bool(text)), unique=True, max_size=25)
ONE, OTHER = [f"u{at}" for at in range(30)], [f"u{at}" for at in range(20, 45)]
BAD_POINT = bytes.fromhex("26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371")


def sides(terms: Terms, **more: Any) -> Callable[[str, Arrange, bool], Role[Any]]:
    return lambda peer, arrange, first: ecdh(peer, arrange, terms, first=first, **more)


@given(SETS, SETS, st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_both_find_the_same(one: list[str], other: list[str], chunk: int) -> None:
    results = meet(one, other, sides(Terms(chunk=chunk))).results
    check(results["a"], one, expected(one, other))
    check(results["b"], other, expected(one, other))
    assert (results["a"].mine, results["a"].theirs) == (len(one), len(other))


@pytest.mark.parametrize("learns", ["first", "second"])
@pytest.mark.parametrize("wants", ["ids", "count"])
def test_only_one_learns(learns: Learns, wants: Wants) -> None:
    outcome = meet(ONE, OTHER, sides(Terms(learns, wants, chunk=7)))
    who, other = ("a", "b") if learns == "first" else ("b", "a")
    assert outcome.results[who].count == 10
    assert (outcome.results[who].ids is None) == (wants == "count")
    assert (outcome.results[other].count, outcome.results[other].ids) == (None, None)
    # What the other is sent: terms and uniform elements.
    assert {one.kind for one in outcome.transcript.of(receiver=other)} == {"psi.hello", "psi.masked"}


def test_count_is_all_that_both_learn() -> None:
    outcome = meet(ONE, OTHER, sides(Terms(wants="count", chunk=7)), bodies=True)
    assert [outcome.results[name].count for name in "ab"] == [10, 10]
    assert [outcome.results[name].rows for name in "ab"] == [None, None]
    for receiver in "ab":
        sent = outcome.transcript.of(receiver=receiver, kind="psi.sorted")
        values = [value for one in sent for value in split((one.body or b"")[4:], 7)]
        assert values == sorted(values)  # no trace of the order in which the ids were sent


def test_transcript_depends_on_sizes_alone() -> None:
    terms = Terms(chunk=8)
    renamed = [f"other-{at}" for at in range(30)]
    one = meet(ONE, OTHER, sides(terms))
    same = meet(renamed, [*renamed[20:], *(f"w{at}" for at in range(15))], sides(terms))
    disjoint = meet(ONE, [f"x{at}" for at in range(25)], sides(terms))
    assert shape(one) == shape(same) == shape(disjoint)


def test_masked_ids_look_uniform_and_never_the_same() -> None:
    terms = Terms("second", chunk=1_000)
    texts = [f"u{at}" for at in range(1_000)]
    bodies = []
    for _ in range(2):
        outcome = meet(texts, ["u1"], sides(terms), bodies=True)
        bodies.append((outcome.transcript.of(sender="a", kind="psi.masked")[0].body or b"")[4:])
    assert not set(split(bodies[0], 32)) & set(split(bodies[1], 32))
    # 250 of 256 bits are free (elements are non-negative numbers below 2**255 - 19): each is set half of the time.
    bits = np.unpackbits(np.frombuffer(bodies[0], np.uint8).reshape(-1, 32), axis=1, bitorder="little")
    free = bits[:, 1:254].mean(axis=0)
    assert np.abs(free - 0.5).max() < 6 * 0.5 / np.sqrt(1_000)
    assert np.abs(np.corrcoef(bits[:, 1:20].T) - np.eye(19)).max() < 6 / np.sqrt(1_000)


def test_order_of_the_file_does_not_show() -> None:
    # With everything else drawn alike, two orders of the same set give the same messages.
    def bodies(texts: list[str]) -> list[bytes | None]:
        roles = {
            "a": ecdh("b", members(texts), Terms(chunk=7), first=True, draw=drawing(1)),
            "b": ecdh("a", members(OTHER), Terms(chunk=7), first=False, draw=drawing(2)),
        }
        return [one.body for one in run_local(roles, bodies=True).transcript.messages]

    assert bodies(ONE) == bodies(ONE[::-1])


@pytest.mark.parametrize("wants", ["ids", "count"])
def test_resumed_at_every_checkpoint(wants: Wants) -> None:
    terms = Terms(wants=wants, chunk=3)

    def make(name: str, state: bytes | None) -> Role[Any]:
        if name == "a":
            return ecdh("b", members(ONE), terms, first=True, state=state)
        return ecdh("a", members(OTHER), terms, first=False, state=state)

    outcomes = resumed(make, "ab")
    assert sorted(outcomes) == list(range(11))
    for outcome in outcomes.values():
        ids = expected(ONE, OTHER) if wants == "ids" else None
        assert [outcome.results[name].ids for name in "ab"] == [ids, ids]
        assert [outcome.results[name].count for name in "ab"] == [10, 10]


def test_what_is_asked_again_after_a_restart_counts_again() -> None:
    whole = meet(ONE, OTHER, sides(Terms(chunk=3)))
    ledger = Ledger(100)
    terms = Terms(chunk=3, budget=ledger)
    for label in (4, 10):
        next(ecdh("a", members(OTHER), terms, first=False, state=whole.checkpoints["b"][label]))
    assert ledger.as_mapping() == {"a": 30 - 12}
    few = Terms(chunk=3, budget=Ledger(17))
    with pytest.raises(PeerFault) as caught:
        next(ecdh("a", members(OTHER), few, first=False, state=whole.checkpoints["b"][4]))
    assert (caught.value.peer, caught.value.rule) == ("a", "limit")


def test_resuming_with_other_ids_is_refused() -> None:
    state = meet(ONE, OTHER, sides(Terms(chunk=3))).checkpoints["a"][2]
    role = ecdh("b", members([*ONE[1:], "new"]), Terms(chunk=3), first=True, state=state)
    with pytest.raises(ValueError, match="not those of the checkpoint"):
        next(role)


def test_sets_beyond_memory() -> None:
    def arrange(texts: list[str], key: bytes) -> Any:
        return spool(texts, IdRule(), MemoryFolder(), key)

    terms = Terms(chunk=7)
    roles = {
        name: ecdh(peer, partial(arrange, texts), terms, first=first, folder=MemoryFolder())
        for name, peer, texts, first in (("a", "b", ONE, True), ("b", "a", OTHER, False))
    }
    results = run_local(roles).results
    check(results["a"], ONE, expected(ONE, OTHER))
    check(results["b"], OTHER, expected(ONE, OTHER))


def _first_element(element: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body[:4] + element + body[36:]


@pytest.mark.parametrize(
    ("twist", "rule"),
    [
        (replacing("psi.masked", _first_element(bytes(32)), sender="a"), "element"),
        (replacing("psi.masked", _first_element(BAD_POINT), sender="a"), "element"),
        (replacing("psi.masked", lambda body: body[:-32], sender="a"), "count"),
        (replacing("psi.masked", lambda body: body + bytes(32), sender="a"), "count"),
        (replacing("psi.masked", lambda body: b"", sender="a"), "count"),
        (replacing("psi.masked", lambda body: body[:36] + body[4:36] + body[68:], sender="a"), "repeated"),
        (repeating("psi.masked", "a"), "order"),
        (repeating("psi.tags", "a"), "order"),
        (replacing("psi.tags", lambda body: body[:-1], sender="a"), "count"),
        (replacing("psi.tags", lambda body: body[:4] + body[11:18] + body[11:], sender="a"), "repeated"),
        (replacing("psi.hello", lambda body: body[:-1], sender="a"), "malformed"),
        (replacing("psi.hello", lambda body: body.replace(b"psi-2", b"psi-1"), sender="a"), "terms"),
        (replacing("psi.result", lambda body: bytes(32), sender="a"), "result"),
        (replacing("psi.agreed", lambda body: bytes(32), sender="a"), "result"),
    ],
)
def test_wrong_messages_are_named(twist: Twist, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        meet(ONE, OTHER, sides(Terms(chunk=7)), twist=twist)
    assert (caught.value.peer, caught.value.rule) == ("a", rule)


def test_elements_of_another_session_match_nothing() -> None:
    other = meet(ONE, OTHER, sides(Terms(chunk=50)), bodies=True)
    replayed = other.transcript.of(sender="a", kind="psi.masked")[0].body or b""
    twist = replacing("psi.masked", lambda _: replayed, sender="a")
    results = meet(ONE, OTHER, sides(Terms(chunk=50)), twist=twist).results
    assert [results[name].count for name in "ab"] == [0, 0]


def test_own_nonce_is_not_taken_back() -> None:
    terms = Terms()
    held: list[bytes] = []

    def mirror(sent: Any) -> list[tuple[str, bytes]]:
        if sent.kind == "psi.hello":
            held.append(sent.body)
            return [(sent.kind, held[0] if sent.sender == "b" else sent.body)]
        return [(sent.kind, sent.body)]

    with pytest.raises(PeerFault, match=r"own nonce|twice") as caught:
        meet(ONE, ONE, sides(terms), twist=mirror)
    assert caught.value.rule == "nonce"


def test_lost_message_is_waited_for() -> None:
    def lost(sent: Any) -> list[tuple[str, bytes]]:
        return [] if sent.kind == "psi.tags" else [(sent.kind, sent.body)]

    with pytest.raises(Stalled, match=r"psi\.tags"):
        meet(ONE, OTHER, sides(Terms(chunk=50)), twist=lost)


def test_a_session_is_of_both_nonces() -> None:
    keys = []
    for mine, theirs in ((1, 2), (1, 3), (4, 2)):
        roles = {
            "a": greet(True, "b", "ecdh", Terms(), 5, drawing(mine)),
            "b": greet(False, "a", "ecdh", Terms(), 5, drawing(theirs)),
        }
        results = run_local(roles).results
        assert results["a"] == results["b"]
        keys.append(results["a"].key)
    assert len(set(keys)) == 3


def test_who_learns_nothing_takes_nothing_of_its_budget() -> None:
    ledgers = {name: Ledger(1_000) for name in "ab"}

    def side(peer: str, arrange: Arrange, first: bool, state: bytes | None = None) -> Role[Any]:
        terms = Terms("first", chunk=7, budget=ledgers["a" if first else "b"])
        return ecdh(peer, arrange, terms, first=first, state=state)

    kept = meet(ONE, OTHER, side).checkpoints
    roles = {
        "a": side("b", members(ONE), True, kept["a"][2]),
        "b": side("a", members(OTHER), False, kept["b"][2]),
    }
    run_local(roles, label=2)
    assert (ledgers["a"].spent, ledgers["b"].spent) == ({}, {"a": 30 + 30 - 2 * 7})


def test_what_is_drawn_again_after_a_restart() -> None:
    one, again = (stretched(bytes(32), b"x") for _ in range(2))
    parts = [one(40), one(40)]
    assert parts == [again(40), again(40)]
    assert parts[0] != parts[1]
    for other in (stretched(b"\1" * 32, b"x"), stretched(bytes(32), b"y")):
        assert other(40) not in parts


def test_sets_that_no_checkpoint_takes_are_refused_before_anything_leaves() -> None:
    sent: list[str] = []

    def large(message: Any) -> list[tuple[str, bytes]]:
        sent.append(message.kind)
        ids = (len(ONE).to_bytes(8, "little"), (2**27).to_bytes(8, "little"))
        return [(message.kind, message.body.replace(*ids) if message.sender == "a" else message.body)]

    with pytest.raises(ValueError, match="have them on disk"):
        meet(ONE, OTHER, sides(Terms()), twist=large)
    assert set(sent) == {"psi.hello"}


def test_sets_beyond_the_limit_are_refused() -> None:
    with pytest.raises(PeerFault) as caught:
        meet(ONE, OTHER, sides(Terms(most=29)))
    assert caught.value.rule == "size"


def test_other_terms_are_named() -> None:
    roles = {
        "a": ecdh("b", members(ONE), Terms(rule=IdRule("fold")), first=True),
        "b": ecdh("a", members(OTHER), Terms(), first=False),
    }
    with pytest.raises(PeerFault, match="keep") as caught:
        run_local(roles)
    assert caught.value.rule == "terms"


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"learns": "nobody"}, {"wants": "all"}, {"most": -1}])
def test_terms_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"chunk|learns|wants|at most"):
        Terms(**wrong)
