"""Equal results are seen to be equal; of other results nothing can be found out, by trying lists either."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from federated.psi.agreement import _HASH, _shown, confirm
from federated.psi.group import hashed, raised, scalar
from federated.psi.hashing import list_digest
from federated.psi.terms import Found, Session
from federated.vertical.parties import Incoming, PeerFault, Role, Send, Sent, Twist, run_local
from tests.support.psi import drawing, replacing

SESSION = Session(bytes(range(32)), 9, 9, 8)
CANDIDATES = [b"07%02d" % at for at in range(100)]


def found(values: list[bytes] | None, count: int = 1) -> Found:
    return Found(count, values, np.arange(len(values or [])), 9, 9)


def agree(one: Found, other: Found, twist: Twist | None = None, seed: int = 1) -> Any:
    roles: dict[str, Role[None]] = {
        "a": confirm("b", SESSION, one, first=True, draw=drawing(seed)),
        "b": confirm("a", SESSION, other, first=False, draw=drawing(seed + 1)),
    }
    return run_local(roles, twist=twist, bodies=True)


@pytest.mark.parametrize("result", [found([b"x", b"y"]), found([]), found(None, 7)])
def test_equal_results_agree_and_each_run_sends_other_bytes(result: Found) -> None:
    sent = [one.body for seed in (1, 5) for one in agree(result, result, seed=seed).transcript.messages]
    assert len(sent) == len(set(sent)) == 8
    assert {len(body) for body in sent} == {32}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (found([b"x"]), found([b"y"])),
        (found([b"x", b"y"]), found([b"xy"])),
        (found([b"x"]), found([b"x", b"y"])),
        (found([]), found(None, 0)),
        (found(None, 1), found(None, 2)),
    ],
)
def test_other_results_are_seen(one: Found, other: Found) -> None:
    with pytest.raises(PeerFault, match="another intersection"):
        agree(one, other)


@pytest.mark.parametrize("kind", ["psi.result", "psi.agreed"])
def test_what_one_sent_is_not_taken_back(kind: str) -> None:
    held: list[bytes] = []

    def mirror(sent: Sent) -> list[tuple[str, bytes]]:
        assert sent.body is not None
        if sent.kind != kind:
            return [(sent.kind, sent.body)]
        held.append(sent.body)
        return [(sent.kind, held[0])]

    with pytest.raises(PeerFault) as caught:
        agree(found([b"x"]), found([b"x"]), mirror)
    assert caught.value.rule == "result"
    assert ("own element" in str(caught.value)) == (kind == "psi.result")


@pytest.mark.parametrize("element", [bytes(32), b"\xff" * 32, b"", bytes(31), b"\2" * 33])
def test_what_is_no_element_is_refused(element: bytes) -> None:
    with pytest.raises(PeerFault) as caught:
        agree(found([b"x"]), found([b"x"]), replacing("psi.result", lambda _: element, sender="a"))
    assert (caught.value.peer, caught.value.rule) == ("a", "result")


@pytest.mark.parametrize(("guess", "right"), [(b"0742", True), (b"0741", False)])
def test_a_peer_can_try_one_list_and_no_other(guess: bytes, right: bool) -> None:
    role = confirm("b", SESSION, found([b"0742"]), first=True, draw=drawing(3))
    mine = next(role)
    role.send(None)
    secret = scalar(drawing(9))
    theirs = raised(hashed(_HASH, list_digest(SESSION.key, [guess])), secret)
    shown = role.send(Incoming("b", "psi.result", theirs))
    assert isinstance(mine, Send)
    assert isinstance(shown, Send)
    both = mine.body + theirs
    assert (shown.body == _shown(SESSION, True, both + raised(mine.body, secret))) == right
    # Nothing else that it could make of a list, without an exponent of this side, is what it was sent.
    for other in CANDIDATES:
        digest = list_digest(SESSION.key, [other])
        known = (digest, hashed(_HASH, digest), raised(hashed(_HASH, digest), secret))
        assert not {mine.body, shown.body} & {*known, *(_shown(SESSION, True, both + one) for one in known)}
