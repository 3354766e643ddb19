"""Blind signatures as a protocol: the right sets, resumed, cached, limited, and wrong messages named."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import pytest

from federated.psi.hashing import list_digest
from federated.psi.limits import Ledger
from federated.psi.members import Arrange
from federated.psi.rsa import PrivateKey, generate
from federated.psi.signatures import MemoryCache, asker, asks, signer
from federated.psi.terms import Learns, Terms
from federated.vertical.parties import PeerFault, Role, Sent, Twist, run_local
from federated.vertical.wire import pack
from tests.support.psi import bodies, check, expected, meet, members, repeating, replacing, resumed, shape

ONE, OTHER = [f"u{at}" for at in range(14)], [f"u{at}" for at in range(9, 20)]


@cache
def key() -> PrivateKey:
    return generate()


def side(terms: Terms, **more: Any) -> Any:
    def made(peer: str, arrange: Arrange, first: bool) -> Role[Any]:
        if asks(first, terms):
            return asker(peer, arrange, terms, first=first)
        return signer(peer, arrange, terms, key(), first=first, **more)

    return made


@pytest.mark.parametrize("learns", ["both", "first", "second"])
def test_who_learns_finds_the_intersection(learns: Learns) -> None:
    terms = Terms(learns, chunk=5)
    outcome = meet(ONE, OTHER, side(terms))
    for name, texts in (("a", ONE), ("b", OTHER)):
        if terms.i_learn(name == "a"):
            check(outcome.results[name], texts, expected(ONE, OTHER))
        else:
            assert (outcome.results[name].ids, outcome.results[name].count) == (None, None)


@pytest.mark.parametrize(("one", "other"), [([], OTHER), (ONE, []), ([], []), (ONE, ONE), (ONE, ["x"])])
def test_edges(one: list[str], other: list[str]) -> None:
    results = meet(one, other, side(Terms())).results
    assert results["a"].ids == results["b"].ids == expected(one, other)


def test_transcript_depends_on_sizes_alone_but_for_the_result() -> None:
    terms = Terms("first", chunk=5)
    assert shape(meet(ONE, OTHER, side(terms))) == shape(
        meet(ONE, [f"x{at}" for at in range(11)], side(terms))
    )


def test_signer_sees_nothing_but_numbers() -> None:
    outcome = meet(ONE, OTHER, side(Terms("first", chunk=5)), bodies=True)
    assert {one.kind for one in outcome.transcript.of(receiver="b")} == {"psi.hello", "psi.blinded"}
    again = meet(ONE, OTHER, side(Terms("first", chunk=5)), bodies=True)
    one, other = (
        {sent.body[4:260] for sent in run.transcript.of(kind="psi.blinded") if sent.body}
        for run in (outcome, again)
    )
    assert not one & other


@pytest.mark.parametrize("own_key", [False, True])
def test_resumed_at_every_checkpoint(own_key: bool) -> None:
    terms = Terms(chunk=4)
    given = None if own_key else key()

    def make(name: str, state: bytes | None) -> Role[Any]:
        if name == "a":
            return asker("b", members(ONE), terms, first=True, state=state)
        return signer("a", members(OTHER), terms, given, first=False, state=state)

    outcomes = resumed(make, "ab")
    assert sorted(outcomes) == [0, 1, 2, 3, 4]
    for label, outcome in outcomes.items():
        assert [outcome.results[name].ids for name in "ab"] == [expected(ONE, OTHER)] * 2
        assert len(bodies(outcome, "psi.key")) == (label == 0)  # the same key goes on
    state = outcomes[0].checkpoints["b"][1]
    with pytest.raises(ValueError, match="another key"):
        next(signer("a", members(OTHER), terms, generate(), first=False, state=state))
    ledger = Ledger(100)
    budgeted = Terms(chunk=4, budget=ledger)
    next(signer("a", members(OTHER), budgeted, given, first=False, state=state))
    assert ledger.as_mapping() == {"a": 10}  # what is yet to be asked counts once more


def test_own_signatures_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = MemoryCache()
    meet(ONE, OTHER, side(Terms(), cache=cached))
    assert len(cached.held) == len(OTHER)
    kept = MemoryCache.from_bytes(cached.to_bytes())

    import federated.psi.signatures as module

    asked: list[int] = []
    real = module.sign_own
    monkeypatch.setattr(
        module,
        "sign_own",
        lambda key, values, workers: asked.append(len(values)) or real(key, values, workers),
    )
    results = meet(ONE, [*OTHER, "u1"], side(Terms(), cache=kept)).results
    assert asked == [1]
    check(results["a"], ONE, expected(ONE, [*OTHER, "u1"]))


def test_cache_is_bounded() -> None:
    cached = MemoryCache(most=3)
    cached.put([bytes((at,)) * 16 for at in range(5)], [bytes(32)] * 5)
    assert list(cached.held) == [bytes((at,)) * 16 for at in (2, 3, 4)]
    with pytest.raises(ValueError, match="not rows"):
        MemoryCache.from_bytes(b"x")
    assert "\\x" not in repr(cached)


def test_queries_are_limited_over_runs() -> None:
    ledger = Ledger(20)

    def limited(peer: str, arrange: Arrange, first: bool) -> Role[Any]:
        return side(Terms() if first else Terms(budget=ledger))(peer, arrange, first)

    meet(ONE, OTHER, limited)
    assert ledger.left("a") == 6
    with pytest.raises(PeerFault) as caught:
        meet(ONE, OTHER, limited)
    assert (caught.value.peer, caught.value.rule) == ("a", "limit")
    assert ledger.as_mapping() == {"a": 14}


def _weak_key(body: bytes) -> bytes:
    n = key().public.n - 1
    return pack({"n": n.to_bytes(256), "e": 65_537, "proof": bytes(8 * 256)})


def _unproved(body: bytes) -> bytes:
    return body[:-256] + bytes(256)


@pytest.mark.parametrize(
    ("twist", "peer", "rule"),
    [
        (replacing("psi.key", _weak_key), "b", "key"),
        (replacing("psi.key", _unproved), "b", "key"),
        (replacing("psi.key", lambda body: body[:-1]), "b", "malformed"),
        (replacing("psi.blinded", lambda body: body[:4] + bytes(256) + body[260:]), "a", "number"),
        (replacing("psi.blinded", lambda body: body[:4] + b"\xff" * 256 + body[260:]), "a", "number"),
        (replacing("psi.blinded", lambda body: body[:-256]), "a", "count"),
        (
            replacing("psi.signed", lambda body: body[:4] + body[260:516] + body[4:260] + body[516:]),
            "b",
            "signature",
        ),
        (replacing("psi.signed", lambda body: body + bytes(256)), "b", "count"),
        (replacing("psi.tags", lambda body: body[:4] + body[10:16] + body[10:]), "b", "repeated"),
        (repeating("psi.blinded", "a"), "a", "order"),
        (repeating("psi.signed", "b"), "b", "order"),
        (repeating("psi.tags", "b"), "b", "order"),
        (replacing("psi.common", lambda body: body[:-8] + (99).to_bytes(8, "little")), "a", "positions"),
        (replacing("psi.common", lambda body: body[:-16] + body[-8:] * 2), "a", "positions"),
        (replacing("psi.common", lambda body: pack({"positions": np.array([-1, 3])})), "a", "positions"),
        (replacing("psi.result", lambda body: bytes(32), sender="a"), "a", "result"),
    ],
)
def test_wrong_messages_are_named(twist: Twist, peer: str, rule: str) -> None:
    with pytest.raises(PeerFault) as caught:
        meet(ONE, OTHER, side(Terms(chunk=5)), twist=twist)
    assert (caught.value.peer, caught.value.rule) == (peer, rule)


def test_who_names_an_id_that_it_has_not_cannot_find_it_out() -> None:
    """The signer then has a result of one id: no hash of it alone may leave."""
    hellos: dict[str, bytes] = {}
    others = [f"07{at:02d}" for at in range(11)]

    def twist(sent: Sent) -> list[tuple[str, bytes]]:
        assert sent.body is not None
        if sent.kind == "psi.hello":
            hellos[sent.sender] = sent.body[-32:]
        elif sent.sender == "b" and sent.kind not in ("psi.key", "psi.signed", "psi.tags"):
            told.append(sent.body)
        named = pack({"positions": np.array([3], np.int64)})
        return [(sent.kind, named if sent.kind == "psi.common" else sent.body)]

    told: list[bytes] = []
    terms = Terms()
    with pytest.raises(PeerFault) as caught:
        meet(ONE, others, side(terms), twist=twist)
    assert caught.value.rule == "result"
    assert told
    key = hashlib.sha256(
        b"headwater-psi-session" + hellos["a"] + hellos["b"] + terms.agreed("rsa").encode()
    ).digest()
    assert not {list_digest(key, [one.encode()]) for one in others} & set(told)


def test_keys_smaller_than_wanted_are_refused() -> None:
    roles = {
        "a": asker("b", members(ONE), Terms(), first=True, least_bits=3072),
        "b": signer("a", members(OTHER), Terms(), key(), first=False),
    }
    with pytest.raises(PeerFault, match="2048 bits") as caught:
        run_local(roles)
    assert caught.value.rule == "key"


def test_what_it_does_not_give() -> None:
    with pytest.raises(ValueError, match="count alone"):
        asks(True, Terms(wants="count"))
    with pytest.raises(ValueError, match="is the asker"):
        next(signer("b", members(ONE), Terms(), key(), first=True))
    with pytest.raises(ValueError, match="is the signer"):
        next(asker("a", members(ONE), Terms(), first=False))
