"""How a run of two parties begins, anew or from a checkpoint, and after which units of its work checkpoints follow.

A checkpoint holds the run's secrets: keep it as safe as the ids. What is drawn again after a restart must tell nothing
that one run does not. Blinding may be new; whatever else was sent before is made again from what the checkpoint holds,
bit by bit: the difference of two stores, or of two lists of masked columns, would tell which ids are in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from federated.psi.members import Arrange, Members
from federated.psi.terms import Session, Terms, greet, members_digest
from federated.vertical.parties import Draw, Effect, Incoming
from federated.vertical.wire import Bytes, Expected, Int, Value, pack, unpack

CHECKPOINTS: Final = 16
"""About so many in a run."""
FOLDER: Final = Bytes(2**40)
"""A folder's mark, as a field of a checkpoint."""
OWN_STATE: Final = "this side's checkpoint"
_COMMON: Final[Mapping[str, Expected]] = {
    "order": Bytes(32, 32),
    "members": Bytes(16, 16),
    "session": Bytes(32, 32),
    "mine": Int(),
    "theirs": Int(),
    "tag": Int(1, 32),
    "done": Int(),
}


def due(done: int, total: int, most: int = CHECKPOINTS) -> bool:
    """Whether a checkpoint follows when ``done`` of ``total`` units are done: about ``most`` times in all."""
    return done % -(-total // most) == 0


@dataclass(frozen=True, slots=True)
class Begun:
    """``members`` in a secret order, what was agreed on, how many units are ``done``; ``held``: the protocol's own
    fields of the checkpoint, empty in a new run."""

    members: Members
    session: Session
    done: int
    order: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    held: Mapping[str, Any] = field(repr=False)

    @property
    def anew(self) -> bool:
        """Whether nothing was done before."""
        return not self.held

    def state(self, done: int, own: Mapping[str, Value]) -> bytes:
        """A checkpoint after ``done`` units, with the protocol's ``own`` fields."""
        session = self.session
        common: dict[str, Value] = {
            "order": self.order,
            "members": self.digest,
            "session": session.key,
            "mine": session.mine,
            "theirs": session.theirs,
            "tag": session.tag,
            "done": done,
        }
        return pack({**common, **own})


def begin(
    first: bool,
    peer: str,
    protocol: str,
    terms: Terms,
    arrange: Arrange,
    draw: Draw,
    state: bytes | None,
    own: Mapping[str, Expected],
) -> Generator[Effect, Incoming | None, Begun]:
    """Exchange hellos, or go on from ``state``, which has the fields ``own`` beside the common ones (at least one).

    Raises PeerFault as ``greet``; ValueError for other ids than those of the checkpoint.
    """
    if state is None:
        order = draw(32)
        members = arrange(order)
        session = yield from greet(first, peer, protocol, terms, len(members), draw)
        return Begun(members, session, 0, order, members_digest(members, session.key, terms.chunk), {})
    held = unpack(state, OWN_STATE, {**_COMMON, **own})
    members = arrange(held["order"])
    session = Session(held["session"], held["mine"], held["theirs"], held["tag"])
    if held["members"] != members_digest(members, session.key, terms.chunk):
        raise ValueError("the ids are not those of the checkpoint: begin anew")
    return Begun(
        members,
        session,
        held["done"],
        held["order"],
        held["members"],
        {name: held[name] for name in own},
    )


def charge_again(first: bool, peer: str, terms: Terms, left: int) -> None:
    """What the peer may ask once more after a restart counts once more: nobody sees that it is the same.

    ``left``: how many of its ids it has yet to ask. Raises PeerFault beyond ``terms.budget``.
    """
    if terms.budget is not None and terms.i_learn(not first) and left > 0:
        terms.budget.spend(peer, left)


def stretched(seed: bytes, purpose: bytes) -> Draw:
    """Bytes that look random to who has not ``seed`` (32 bytes), the same again after a restart."""
    calls = count()

    def draw(length: int) -> bytes:
        return hashlib.shake_256(purpose + next(calls).to_bytes(8) + seed).digest(length)

    return draw
