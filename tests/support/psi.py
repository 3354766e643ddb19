"""Sets, and whole intersections in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from federated.psi.ids import IdRule, Ids, normalise
from federated.psi.members import Arrange, MemoryMembers
from federated.psi.terms import Found
from federated.vertical.parties import Draw, Outcome, Role, Sent, Twist, run_local

Side = Callable[[str, Arrange, bool], Role[Any]]


def ids(texts: Iterable[str]) -> Ids:
    return normalise(texts, IdRule())


def members(texts: Iterable[str]) -> Arrange:
    return partial(MemoryMembers, ids(texts))


def drawing(seed: int) -> Draw:
    """A repeatable source; real runs draw from the operating system."""
    generator = np.random.default_rng(seed)
    return lambda count: generator.bytes(count)


def meet(
    one: Iterable[str],
    other: Iterable[str],
    side: Side,
    *,
    twist: Twist | None = None,
    bodies: bool = False,
) -> Outcome[Any]:
    """``side(peer, arrange, first)`` makes the role of ``a`` (the first) and of ``b``."""
    roles = {"a": side("b", members(one), True), "b": side("a", members(other), False)}
    return run_local(roles, twist=twist, bodies=bodies)


def expected(one: Sequence[str], other: Sequence[str]) -> list[bytes]:
    return sorted(text.encode() for text in set(one) & set(other))


def check(found: Found, texts: Sequence[str], common: list[bytes]) -> None:
    """``found`` is the intersection, and its rows are those of ``texts``."""
    assert found.ids == common
    assert found.count == len(common)
    assert found.rows is not None
    assert [texts[row].encode() for row in found.rows.tolist()] == common


def replacing(kind: str, body: Callable[[bytes], bytes], nth: int = 0, sender: str | None = None) -> Twist:
    """A twist that changes the ``nth`` message of ``kind``."""
    seen = [0]

    def twist(sent: Sent) -> list[tuple[str, bytes]]:
        assert sent.body is not None
        if sent.kind != kind or sender not in (None, sent.sender):
            return [(sent.kind, sent.body)]
        seen[0] += 1
        return [(sent.kind, body(sent.body) if seen[0] == nth + 1 else sent.body)]

    return twist


def repeating(kind: str, sender: str) -> Twist:
    """A twist that delivers the first message of ``kind`` in the place of the second one."""
    held: list[bytes] = []

    def twist(sent: Sent) -> list[tuple[str, bytes]]:
        assert sent.body is not None
        if sent.kind != kind or sent.sender != sender:
            return [(sent.kind, sent.body)]
        held.append(sent.body)
        return [(sent.kind, held[0])]

    return twist


def shape(outcome: Outcome[Any]) -> list[tuple[str, str, str, int]]:
    """Sender, receiver, kind and size of every message."""
    return [(one.sender, one.receiver, one.kind, one.size) for one in outcome.transcript.messages]


def resumed(make: Callable[[str, bytes | None], Role[Any]], names: Iterable[str]) -> dict[int, Outcome[Any]]:
    """All of ``names`` killed at every checkpoint of a whole run, and gone on from there; 0: the whole run.

    ``make(name, state)`` makes a role. All must have the same labels, in the whole run and in what is left of it.
    """
    names = list(names)
    whole = run_local({name: make(name, None) for name in names}, bodies=True)
    outcomes = {0: whole}
    labels = sorted(whole.checkpoints[names[0]])
    for label in labels:
        roles = {name: make(name, whole.checkpoints[name][label]) for name in names}
        outcomes[label] = run_local(roles, label=label, bodies=True)
    for label, outcome in outcomes.items():
        left = [later for later in labels if later > label]
        assert all(sorted(outcome.checkpoints[name]) == left for name in names)
    return outcomes


def bodies(outcome: Outcome[Any], kind: str, sender: str | None = None) -> list[bytes | None]:
    return [one.body for one in outcome.transcript.of(kind=kind, sender=sender)]
