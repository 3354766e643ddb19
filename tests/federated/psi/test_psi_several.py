"""Three and more: the common ids, nothing pairwise; the key-value store that carries it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import federated.psi.several as module
from federated.psi.hashing import split
from federated.psi.keyvalue import StoreFull, decode, encode, length
from federated.psi.limits import Ledger
from federated.psi.resume import stretched
from federated.psi.several import PARTS, several
from federated.psi.terms import Learns, Terms
from federated.vertical.parties import Outcome, PeerFault, Role, Twist, run_local
from tests.support.psi import bodies, check, drawing, members, replacing, resumed, shape

SESSION = bytes(32)
SETS = st.lists(st.lists(st.integers(0, 12).map(str), unique=True, max_size=10), min_size=3, max_size=4)


def run(
    sets: list[list[str]], terms: Terms, twist: Twist | None = None, bodies: bool = False
) -> Outcome[Any]:
    names = [f"p{at}" for at in range(len(sets))]
    roles = {
        name: several(name, names, members(texts), terms) for name, texts in zip(names, sets, strict=True)
    }
    return run_local(roles, twist=twist, bodies=bodies)


def values(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


@pytest.mark.parametrize("count", [0, 1, 2, 10, 100, 1_000, 20_000])
def test_stores_give_back_what_was_put_in(count: int) -> None:
    keys = [b"key%d" % at for at in range(count)]
    put = values(count, 1)
    store = encode(keys, put, SESSION, drawing(2))
    assert store.shape == (length(count), 16)
    np.testing.assert_array_equal(decode(store, keys, SESSION), put)
    strangers = decode(store, [b"other%d" % at for at in range(100)], SESSION)
    assert len({row.tobytes() for row in strangers}) == 100


def test_keys_fit_for_many_sessions() -> None:
    for count in (3, 30, 300, 2_000):
        keys = [b"key%d" % at for at in range(count)]
        put = values(count, 1)
        for number in range(6):
            session = number.to_bytes(32)
            store = encode(keys, put, session, drawing(number))
            np.testing.assert_array_equal(decode(store, keys, session), put)


def test_what_peeling_leaves_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    import federated.psi.keyvalue as module

    keys = [b"key%d" % at for at in range(20)]
    put = values(20, 1)
    real = module._hashed

    def crowded(keys: Any, session: bytes, sparse: int) -> Any:
        _, dense = real(keys, session, sparse)
        return np.tile([0, 100, 180], (len(keys), 1)), dense  # all in the same three places: none peels

    monkeypatch.setattr(module, "_hashed", crowded)
    np.testing.assert_array_equal(decode(encode(keys, put, SESSION, drawing(1)), keys, SESSION), put)
    with pytest.raises(StoreFull, match="30 of 30"):
        encode([b"%d" % at for at in range(30)], values(30, 1), SESSION, drawing(1))


def test_a_store_is_uniform() -> None:
    keys = [b"key%d" % at for at in range(3_000)]
    ones = np.unpackbits(encode(keys, values(3_000, 1), SESSION, drawing(2)))
    assert abs(ones.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(ones))


@given(SETS)
@settings(max_examples=15, deadline=None)
def test_all_find_what_all_have(sets: list[list[str]]) -> None:
    common = sorted(text.encode() for text in set.intersection(*map(set, sets)))
    results = run(sets, Terms(chunk=4)).results
    for at, texts in enumerate(sets):
        check(results[f"p{at}"], texts, common)


@pytest.mark.parametrize("learns", ["both", "first"])
def test_resumed_at_every_checkpoint(learns: Learns) -> None:
    names, terms = ["p0", "p1", "p2"], Terms(learns, chunk=3)
    sets = {
        "p0": [f"u{at}" for at in range(14)],
        "p1": [f"u{at}" for at in range(4, 30)],
        "p2": ["u7", "u2", "u9", "x"],
    }

    def make(name: str, state: bytes | None) -> Role[Any]:
        return several(name, names, members(sets[name]), terms, state=state)

    outcomes = resumed(make, names)
    assert sorted(outcomes) == list(range(5 + PARTS + 1))  # the leader's chunks, and parts of the others
    for label, outcome in outcomes.items():
        for name in names:
            ids = [b"u7", b"u9"] if learns == "both" or name == "p0" else None
            assert outcome.results[name].ids == ids
        assert outcome.results["p0"].theirs == 4
        assert len(bodies(outcome, "psi.pair")) == (3 if label == 0 else 0)
        # A second store of the same ids with other filling would tell the leader which ids they are: see below.
        for name in ("p1", "p2"):
            assert bodies(outcome, "psi.store", name) == bodies(outcomes[0], "psi.store", name)
    with pytest.raises(ValueError, match="not those of the checkpoint"):
        next(several("p1", names, members(["y"]), terms, state=outcomes[0].checkpoints["p1"][2]))
    ledger = Ledger(100)
    budgeted = Terms(learns, chunk=3, budget=ledger)
    next(several("p1", names, members(sets["p1"]), budgeted, state=outcomes[0].checkpoints["p1"][2]))
    assert ledger.as_mapping() == {"p0": 14 - 6}


@pytest.mark.parametrize("learns", ["both", "first"])
def test_count_alone(learns: Learns) -> None:
    names, terms = ["p0", "p1", "p2", "p3"], Terms(learns, "count", chunk=5)
    sets = {
        "p0": [f"u{at}" for at in range(14)],
        "p1": [f"u{at}" for at in range(4, 30)],
        "p2": ["u7", "u2", "u9", "u13", "x"],
        "p3": ["u7", "u9", "u2", "u1", "x"],  # u2 is in all but p1, u13 in all but p3
    }

    def make(name: str, state: bytes | None) -> Role[Any]:
        return several(name, names, members(sets[name]), terms, state=state)

    outcomes = resumed(make, names)
    assert sorted(outcomes) == list(range(3 + PARTS + 1))
    for outcome in outcomes.values():
        results = outcome.results
        assert results["p0"].count == 2
        told = 2 if learns == "both" else None
        assert [results[name].count for name in names[1:]] == [told] * 3
        assert [(results[name].ids, results[name].rows) for name in names] == [(None, None)] * 4
    seen = {one.kind for one in outcomes[0].transcript.of(receiver="p1")}
    assert seen <= {"psi.pair", "psi.hello", "psi.masked", "psi.sorted", "psi.result", "psi.agreed"}
    sent = outcomes[0].transcript.of(receiver="p0", kind="psi.sorted")
    values = [value for one in sent for value in split((one.body or b"")[4:], 7)]
    assert len(values) == 14
    assert values == sorted(values)  # no trace of which of the leader's ids they belong to


@given(SETS)
@settings(max_examples=10, deadline=None)
def test_counts_are_those_of_what_all_have(sets: list[list[str]]) -> None:
    results = run(sets, Terms(wants="count", chunk=4)).results
    common = len(set.intersection(*map(set, sets)))
    assert [result.count for result in results.values()] == [common] * len(sets)


def test_sums_do_not_show_whom_the_second_party_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the leader has before the count: nothing tells what all but the second party have from what none has."""
    held: list[tuple[list[bytes], Any]] = []
    real = module._counted

    def watched(peer: str, session: Any, keys: Any, sums: Any, *more: Any) -> Any:
        held.append((list(keys), sums.copy()))
        return real(peer, session, keys, sums, *more)

    monkeypatch.setattr(module, "_counted", watched)
    pair, alone = [f"p{at}" for at in range(400)], [f"a{at}" for at in range(400)]
    run([pair + alone, ["x"], pair], Terms("first", "count"))
    keys, sums = next(one for one in held if len(one[0]) == 800)
    for group in (b"p", b"a"):
        ones = np.unpackbits(sums[[key.startswith(group) for key in keys]])
        assert abs(ones.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(ones))


def test_two_stores_of_the_same_would_tell_their_keys() -> None:
    keys, others = [b"key%d" % at for at in range(300)], [b"other%d" % at for at in range(300)]
    put = values(300, 1)
    one, other = (encode(keys, put, SESSION, drawing(seed)) for seed in (1, 2))
    assert not decode(one ^ other, keys, SESSION).any()
    assert decode(one ^ other, others, SESSION).any(axis=1).all()
    again = [encode(keys, put, SESSION, stretched(bytes(32), b"store")) for _ in range(2)]
    assert (again[0] == again[1]).all()


def test_leader_alone() -> None:
    sets = [["a", "b", "c"], ["b", "c", "d"], ["c", "d", "e"]]
    outcome = run(sets, Terms("first"))
    assert outcome.results["p0"].ids == [b"c"]
    assert [outcome.results[name].ids for name in ("p1", "p2")] == [None, None]
    for name in ("p1", "p2"):
        assert {one.kind for one in outcome.transcript.of(receiver=name)} == {
            "psi.pair",
            "psi.hello",
            "psi.ask",
        }


def test_pairwise_intersections_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's sums: zero where all have the id, and nothing to tell apart an id that one other has from one that
    none has."""
    read: list[Any] = []
    real = module.decode

    def watched(store: Any, keys: Any, session: bytes) -> Any:
        read.append((list(keys), real(store, keys, session)))
        return read[-1][1]

    monkeypatch.setattr(module, "decode", watched)
    common, pair, alone = (
        [f"c{at}" for at in range(50)],
        [f"p{at}" for at in range(400)],
        [f"a{at}" for at in range(400)],
    )
    run([common + pair + alone, common + pair, [*common, "x"]], Terms("first"))
    (keys, first), (_, second) = read
    for group in (b"p", b"a"):
        chosen = np.array([key.startswith(group) for key in keys])
        for part in (first, second):
            ones = np.unpackbits(part[chosen])
            assert abs(ones.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(ones))
        together = np.unpackbits(first[chosen] ^ second[chosen])
        assert abs(together.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(together))
    shapes = [
        shape(run([["a", "b"], other, ["x", "y"]], Terms("first"))) for other in (["a", "b"], ["v", "w"])
    ]
    assert all(one == other for one, other in pairwise(shapes))


@pytest.mark.parametrize(
    ("twist", "peer", "rule"),
    [
        (replacing("psi.pair", lambda body: body[:-1], sender="p0"), "p0", "key"),
        (replacing("psi.pair", lambda body: bytes(32), sender="p0"), "p0", "key"),
        (replacing("psi.store", lambda body: body[:-16], sender="p2"), "p2", "count"),
        (replacing("psi.ask", lambda body: body[:4] + bytes(32) + body[36:]), "p0", "element"),
        (replacing("psi.common", lambda body: bytes(16)), "p0", "positions"),
        (replacing("psi.common", lambda body: bytes(16 * 3)), "p0", "count"),
        (replacing("psi.result", lambda body: bytes(32), sender="p1"), "p1", "result"),
    ],
)
def test_wrong_messages_are_named(twist: Twist, peer: str, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        run([["a", "b"], ["a", "c"], ["a", "d"]], Terms(), twist)
    assert (caught.value.peer, caught.value.rule) == (peer, rule)


def test_a_key_that_two_pairs_share_is_refused() -> None:
    held: list[bytes] = []

    def same(sent: Any) -> list[tuple[str, bytes]]:
        if sent.kind != "psi.pair" or sent.receiver != "p2":
            return [(sent.kind, sent.body)]
        held.append(sent.body)
        return [(sent.kind, held[0])]

    with pytest.raises(PeerFault, match="another party has"):
        run([["a"], ["a"], ["a"]], Terms(), same)


@pytest.mark.parametrize("names", [["p0", "p1"], ["p0", "p1", "p1"], ["x", "y", "z"]])
def test_parties_that_are_none(names: list[str]) -> None:
    with pytest.raises(ValueError, match="are needed"):
        next(several("p0", names, members(["a"]), Terms()))


def test_terms_that_it_has_not() -> None:
    with pytest.raises(ValueError, match="several parties"):
        next(several("p0", ["p0", "p1", "p2"], members(["a"]), Terms("second")))


@pytest.mark.parametrize(
    ("twist", "peer", "rule"),
    [
        (replacing("psi.count", lambda body: body[:-8] + (3).to_bytes(8, "little")), "p0", "malformed"),
        (replacing("psi.result", lambda body: bytes(32), sender="p0"), "p0", "result"),
        (
            replacing("psi.masked", lambda body: body[:4] + bytes(32) + body[36:], sender="p1"),
            "p1",
            "element",
        ),
    ],
)
def test_wrong_messages_of_a_count_are_named(twist: Twist, peer: str, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        run([["a", "b"], ["a", "c"], ["a", "d"]], Terms(wants="count"), twist)
    assert (caught.value.peer, caught.value.rule) == (peer, rule)
