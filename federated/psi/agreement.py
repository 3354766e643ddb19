"""Both have a result: is it the same? Nobody finds out anything of a result that is not its own.

Who has the list of ids has an element P = H(list); both agree on a key from it by Diffie and Hellman (Jablon 1996,
SPEKE), and each shows that it has the key:

    1. I send P^a, the peer P^b, each with a new exponent.
    2. Both have K = P^(ab) where the lists are equal. Each sends a hash of its side, both elements and K.

A digest instead would tell a dishonest peer which ids the result has: it can make a result of one id (by tags that it
repeats, or a position that it names without knowing the id), and try all telephone numbers on the digest. Here it can
try one list a run, and a wrong one ends the run. Each side shows another hash, so that none can be given back.

Computational Diffie-Hellman on ristretto255, random oracles.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from federated.psi.group import ElementRefused, hashed, raised, scalar
from federated.psi.hashing import list_digest
from federated.psi.terms import Found, Session, Step
from federated.vertical.parties import Draw, PeerFault, Send, receive

_HASH: Final = b"result"
_SHOWN: Final = b"headwater-psi-agreed"


def confirm(peer: str, session: Session, found: Found, *, first: bool, draw: Draw) -> Step:
    """Whether the peer's result is ``found`` too; ``first``: whether this is the first of the two. Raises PeerFault."""
    digest = list_digest(session.key, [str(found.count).encode()] if found.ids is None else found.ids)
    secret = scalar(draw)
    mine = raised(hashed(_HASH, digest), secret)
    yield Send(peer, "psi.result", mine)
    theirs = yield from receive(peer, "psi.result")
    if theirs == mine:
        raise PeerFault(peer, "result", "sent this side's own element back")
    try:
        key = raised(theirs, secret)
    except ElementRefused as why:
        raise PeerFault(peer, "result", str(why)) from None
    both = (mine + theirs if first else theirs + mine) + key
    yield Send(peer, "psi.agreed", _shown(session, first, both))
    shown = yield from receive(peer, "psi.agreed")
    if not hmac.compare_digest(shown, _shown(session, not first, both)):
        raise PeerFault(peer, "result", "found another intersection")


def _shown(session: Session, first: bool, both: bytes) -> bytes:
    return hashlib.sha256(_SHOWN + session.key + bytes((first,)) + both).digest()
