"""A small set against a large one: filters, their false matches, reuse, and limits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.psi.filters import HASH_BYTES, HashFilter, digest, size
from federated.psi.group import hashed
from federated.psi.hashing import split
from federated.psi.limits import Ledger
from federated.psi.members import MemoryMembers
from federated.psi.terms import Learns, Session, Terms
from federated.psi.unbalanced import Prepared, _wanted, asker, owner, prepare
from federated.vertical.parties import (
    Incoming,
    Outcome,
    PeerFault,
    Progress,
    Receive,
    Role,
    Send,
    Twist,
    run_local,
)
from federated.vertical.wire import pack
from tests.support.psi import bodies, check, expected, ids, repeating, replacing, resumed, shape

LARGE, SMALL = [f"u{at}" for at in range(300)], [f"u{at}" for at in range(290, 310)]


def hashes(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, HASH_BYTES), np.uint8)


@given(st.integers(0, 300), st.integers(10, 48), st.integers(0, 3))
@settings(max_examples=60)
def test_filters_hold_their_members_and_travel(count: int, bits: int, seed: int) -> None:
    members = hashes(count, seed)
    made = HashFilter.of(members, bits)
    data = made.to_bytes()
    assert len(data) == size(count, bits)
    again = HashFilter.from_bytes(data)
    np.testing.assert_array_equal(again.numbers, made.numbers)
    assert again.holds(members).all()


def test_strangers_pass_as_rarely_as_said_and_bits_are_few() -> None:
    count, asked = 3_000, 200_000
    made = HashFilter.of(hashes(count, 1), 10)
    passed = int(made.holds(hashes(asked, 2)).sum())
    # Between 2**-11 and 2**-10, since 2**12 is the next power of two; six deviations of a count.
    most = asked * count / 2**22
    assert abs(passed - most) < 6 * np.sqrt(most)
    assert passed / asked <= 2**-10
    assert 8 * size(count, 10) / count < 13


@pytest.mark.parametrize("change", ["short", "bits", "count", "marks", "long", "order", "beyond"])
def test_filters_that_are_none(change: str) -> None:
    data = bytearray(HashFilter.of(hashes(100, 1), 20).to_bytes())
    if change == "short":
        data = data[:5]
    elif change == "bits":
        data[0] = 60
    elif change == "count":
        data[1] += 1
    elif change == "marks":
        data[9] ^= 0x80
    elif change == "long":
        data += b"x"
    elif change == "beyond":  # a mark in the bits that fill up the last byte
        marks = np.unpackbits(np.frombuffer(data[9:38], np.uint8))
        marks[np.flatnonzero(marks)[-1]], marks[-1] = 0, 1
        data[9:38] = np.packbits(marks).tobytes()
    else:
        made = HashFilter.of(hashes(100, 1), 20)
        numbers = made.numbers.copy()
        high = numbers >> np.uint64(20)
        at = int(np.flatnonzero(high[1:] == high[:-1])[0])
        numbers[[at, at + 1]] = numbers[[at + 1, at]]
        data = bytearray(HashFilter(numbers, 20).to_bytes())
    with pytest.raises(ValueError, match="filter"):
        HashFilter.from_bytes(bytes(data))


@cache
def prepared() -> Prepared:
    return prepare(ids(LARGE).values, 30)


def run(
    terms: Terms,
    *,
    held: HashFilter | None = None,
    ledger: Ledger | None = None,
    kept: Prepared | None = None,
    twist: Twist | None = None,
    small: list[str] = SMALL,
) -> Outcome[Any]:
    roles = {
        "a": asker("b", partial(MemoryMembers, ids(small)), terms, first=True, held=held),
        "b": owner("a", ids(LARGE), kept or prepared(), replace(terms, budget=ledger), first=False),
    }
    return run_local(roles, twist=twist, bodies=True)


@pytest.mark.parametrize("learns", ["both", "first"])
def test_finds_the_intersection(learns: Learns) -> None:
    outcome = run(Terms(learns, chunk=7))
    found, _ = outcome.results["a"]
    check(found, SMALL, expected(SMALL, LARGE))
    if learns == "both":
        check(outcome.results["b"], LARGE, expected(SMALL, LARGE))
    else:
        assert outcome.results["b"].ids is None


def test_filter_and_preparation_are_used_again() -> None:
    first = run(Terms("first"))
    _, held = first.results["a"]
    kept = Prepared.from_bytes(prepared().to_bytes())
    again = run(Terms("first"), held=held, kept=kept, small=["u7", "x"])
    assert not again.transcript.of(kind="psi.filter.piece")
    assert again.results["a"][0].ids == [b"u7"]
    # Another filter than the one held is fetched.
    other = prepare(ids(LARGE).values)
    assert run(Terms("first"), held=held, kept=other).transcript.of(kind="psi.filter.piece")


@pytest.mark.parametrize("given", [False, True])
def test_resumed_at_every_checkpoint(given: bool) -> None:
    terms = Terms(chunk=7)
    large, kept, made = ids(LARGE[-40:]), None, []
    if given:
        kept = prepare(large.values)

    def make(name: str, state: bytes | None) -> Role[Any]:
        if name == "a":
            return asker("b", partial(MemoryMembers, ids(SMALL)), terms, first=True, state=state)
        return owner("a", large, kept, terms, first=False, ready=made.append, state=state)

    outcomes = resumed(make, "ab")
    # 6 chunks that are prepared (none where that was done before), the filter, 3 chunks that are asked.
    assert sorted(outcomes) == list(range(5 if given else 11))
    after_filter = 1 if given else 7
    for label, outcome in outcomes.items():
        assert outcome.results["a"][0].ids == outcome.results["b"].ids == expected(SMALL, LARGE)
        assert bool(bodies(outcome, "psi.filter.piece")) == (label < after_filter)
        assert len(bodies(outcome, "psi.hello")) == (2 if label == 0 else 0)
        # The same function and filter as in the whole run.
        assert outcome.results["a"][1].to_bytes() == outcomes[0].results["a"][1].to_bytes()
    assert len({one.secret for one in made}) == (0 if given else 1)
    last, other = max(outcomes), prepare(large.values)
    with pytest.raises(ValueError, match="another preparation"):
        next(owner("a", large, other, terms, first=False, state=outcomes[0].checkpoints["b"][last]))
    if given:
        with pytest.raises(ValueError, match="is not there"):
            next(owner("a", large, None, terms, first=False, state=outcomes[0].checkpoints["b"][last]))
    else:
        # What was kept when it was ready is gone on with, before the end of the preparation as after.
        for label in (2, last):
            role = owner("a", large, made[0], terms, first=False, state=outcomes[0].checkpoints["b"][label])
            assert isinstance(next(role), Progress | Receive)


def test_what_is_prepared_within_a_run_serves_the_next() -> None:
    made: list[Prepared] = []
    terms = Terms("first", chunk=50)
    for kept in (None, "made"):
        small = partial(MemoryMembers, ids(SMALL))
        roles = {
            "a": asker("b", small, terms, first=True),
            "b": owner("a", ids(LARGE), made[0] if kept else None, terms, first=False, ready=made.append),
        }
        check(run_local(roles).results["a"][0], SMALL, expected(SMALL, LARGE))
    assert len(made) == 1
    assert made[0].fits(ids(LARGE))
    assert made[0].bits == 30


def test_what_is_asked_again_after_a_restart_counts_again() -> None:
    whole = run(Terms(chunk=7))
    ledger = Ledger(100)
    for label in (1, 3):
        state = whole.checkpoints["b"][label]
        role = owner("a", ids(LARGE), prepared(), Terms(chunk=7, budget=ledger), first=False, state=state)
        next(role)
    assert ledger.as_mapping() == {"a": 20 + 6}


def test_what_passes_by_chance_is_taken_out_where_both_learn() -> None:
    few = prepare(ids(LARGE).values, 10)
    many = [f"s{at}" for at in range(1_500)]
    terms = Terms("both", chunk=4_096)
    roles = {
        "a": asker("b", partial(MemoryMembers, ids(many)), terms, first=True, least_bits=10),
        "b": owner("a", ids(LARGE), few, terms, first=False),
    }
    outcome = run_local(roles)
    assert outcome.results["a"][0].ids == outcome.results["b"].ids == []


def test_queries_are_limited_over_runs() -> None:
    ledger = Ledger(30)
    run(Terms("first"), ledger=ledger)
    with pytest.raises(PeerFault) as caught:
        run(Terms("first"), ledger=ledger)
    assert (caught.value.rule, ledger.left("a"), ledger.left("c")) == ("limit", 10, 30)


def test_transcript_depends_on_sizes_alone_but_for_the_result() -> None:
    assert shape(run(Terms("first"))) == shape(run(Terms("first"), small=[f"x{at}" for at in range(20)]))


def test_who_is_asked_sees_other_elements_in_each_run_and_no_hash() -> None:
    outcomes = [run(Terms(chunk=7), kept=prepared()) for _ in range(2)]
    asked = [
        element
        for outcome in outcomes
        for body in bodies(outcome, "psi.ask")
        for element in split((body or b"")[4:], 32)
    ]
    assert len(asked) == len(set(asked)) == 2 * len(SMALL)
    assert not {hashed(b"function", one.encode()) for one in SMALL} & set(asked)
    for outcome in outcomes:
        (named,) = bodies(outcome, "psi.values")
        values = split(named or b"", HASH_BYTES)
        assert len(values) == 10
        assert values == sorted(values)  # nothing is left of the order in which they were asked


def test_a_filter_of_too_many_bytes_is_not_taken() -> None:
    role = _wanted("b", Session(bytes(32), 5, 1_000, 8), None, size(1_000, 20) - 1, 20)
    next(role)
    role.send(Incoming("b", "psi.filter.offer", pack({"digest": bytes(32), "bits": 20})))
    with pytest.raises(PeerFault, match="are taken"):
        role.send(None)


@pytest.mark.parametrize(("bits", "theirs"), [(19, 10), (20, 9), (20, 11)])
def test_a_filter_of_another_set_or_of_few_bits_is_refused(bits: int, theirs: int) -> None:
    held = HashFilter.of(hashes(10, 1), bits)
    role = _wanted("b", Session(bytes(32), 5, theirs, 8), held, 2**20, 20)
    next(role)
    offer = pack({"digest": digest(held.to_bytes()), "bits": bits})
    role.send(Incoming("b", "psi.filter.offer", offer))
    with pytest.raises(PeerFault) as caught:
        role.send(None)
    assert (caught.value.peer, caught.value.rule) == ("b", "filter")


def test_bits_that_are_too_many_for_the_set_are_refused_before_any_work() -> None:
    many = ids(f"u{at}" for at in range(2**14 + 1))
    with pytest.raises(ValueError, match="take fewer bits"):
        next(owner("a", many, None, Terms(), first=False, bits=48))
    assert isinstance(next(owner("a", many, None, Terms(), first=False, bits=47)), Send)


def test_other_ids_than_prepared_are_refused() -> None:
    role = owner("a", ids(LARGE[1:]), prepared(), Terms(), first=False)
    with pytest.raises(ValueError, match="prepare anew"):
        next(role)
    assert prepared().secret.hex() not in repr(prepared())


@pytest.mark.parametrize(
    ("twist", "peer", "rule"),
    [
        (replacing("psi.filter.piece", lambda body: body[:-1] + bytes((body[-1] ^ 1,))), "b", "filter"),
        (replacing("psi.prepare", lambda body: body[:-8] + (3).to_bytes(8, "little")), "b", "count"),
        (replacing("psi.filter.piece", lambda body: body[:-1]), "b", "count"),
        (replacing("psi.filter.offer", lambda body: body[:-8] + (12).to_bytes(8, "little")), "b", "count"),
        (replacing("psi.filter.want", lambda body: body[:-8] + (2).to_bytes(8, "little")), "a", "malformed"),
        (replacing("psi.ask", lambda body: body[:4] + bytes(32) + body[36:]), "a", "element"),
        (replacing("psi.answer", lambda body: body[:4] + b"\xff" * 32 + body[36:]), "b", "element"),
        (repeating("psi.ask", "a"), "a", "order"),
        (repeating("psi.answer", "b"), "b", "order"),
        (replacing("psi.values", lambda body: body[:16] + body), "a", "repeated"),
        (replacing("psi.values", lambda body: body[:-1]), "a", "count"),
        (replacing("psi.values", lambda body: hashes(len(SMALL) + 1, 1).tobytes()), "a", "count"),
        (replacing("psi.held", lambda body: body + b"\0"), "b", "count"),
        (replacing("psi.held", lambda body: b"\0" + body[1:]), "a", "result"),
    ],
)
def test_wrong_messages_are_named(twist: Twist, peer: str, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        run(Terms(chunk=7), twist=twist)
    assert caught.value.rule == rule
    assert rule == "result" or caught.value.peer == peer


def test_filters_have_names() -> None:
    data = HashFilter.of(hashes(10, 1), 20).to_bytes()
    assert digest(data) != digest(data + b"x")
