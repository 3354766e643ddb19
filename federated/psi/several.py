"""The ids that three or more parties have in common, and nothing of what only some of them have.

A star, after Kolesnikov, Matania, Pinkas, Rosulek and Trieu (2017, the augmented semi-honest protocol):

    1. Every two parties share a key. S_i(x) is the exclusive or of a pseudo-random function of x under all keys of
       party i: over all parties the S_i(x) cancel out, while those of only some look random.
    2. Each party i lets the leader (the first one) evaluate a function F_i of its own (``function``) on the leader's
       ids, and sends a key-value store (``keyvalue``) of S_i(y) ⊕ F_i(y) for its ids y.
    3. The leader reads all stores at its ids: everything cancels out exactly where every party has the id.
    4. By setting, the leader tells the others, by hashes of the common ids.

Who learns what: the leader the common ids and the sizes, no pairwise intersection; the others their size beside the
leader's and, by setting, the common ids. Semi-honest, no two parties together: the leader with all but one of the
others can compare its ids with that one's, as it could by letting those others take its own ids as theirs.
A ring in which every set is masked by everybody would show whoever compares all pairwise intersections: not done.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import numpy as np

from federated.psi.function import answer, ask, owned
from federated.psi.group import scalar
from federated.psi.hashing import Rows, Tags, as_rows, system, tags
from federated.psi.keyvalue import VALUE_BYTES, decode, encode, length
from federated.psi.members import Arrange, Members
from federated.psi.terms import (
    Found,
    Session,
    Terms,
    chunks,
    confirm,
    found_ids,
    found_nothing,
    greet,
    numbered,
    receive_numbered,
    rows_of,
    tell_common,
    told_common,
)
from federated.vertical.parties import (
    Alone,
    Draw,
    Effect,
    Incoming,
    PeerFault,
    Role,
    Send,
    Workers,
    receive,
)

MOST_PARTIES: Final = 32
_KEY_BYTES: Final = 32
_PIECE: Final = 2**18  # Rows of a store in a message: 4 MiB.


def several(
    me: str,
    parties: Sequence[str],
    arrange: Arrange,
    terms: Terms,
    *,
    draw: Draw = system,
    workers: Workers | None = None,
) -> Role[Found]:
    """One party of ``parties`` (three or more, the leader first). ``terms.learns``: ``both`` means all, ``first`` the
    leader alone. In the result ``theirs`` is the smallest other set at the leader, the leader's set at the others.

    Raises PeerFault; ValueError for terms that this protocol has not; StoreFull with probability 2**-40.
    """
    if not 3 <= len(parties) <= MOST_PARTIES or len(set(parties)) != len(parties) or me not in parties:
        raise ValueError(
            f"{me} with {len(parties)} parties; 3 to {MOST_PARTIES} of different names are needed"
        )
    if terms.wants != "ids" or terms.learns == "second":
        raise ValueError("several parties: the leader learns the ids, or all do")
    workers = Alone() if workers is None else workers
    keys = yield from _keys(me, parties, draw)
    members = arrange(draw(32))
    ids = [one for part in members.chunks(terms.chunk) for one in part]
    shares = _shares(ids, keys)
    if me == parties[0]:
        return (yield from _lead(parties, members, ids, shares, terms, draw, workers))
    return (yield from _follow(parties, members, ids, shares, terms, draw, workers))


def _keys(
    me: str, parties: Sequence[str], draw: Draw
) -> Generator[Effect, Incoming | None, dict[str, bytes]]:
    """A key with every other party, drawn by the one that the job names before."""
    place = parties.index(me)
    keys = {other: draw(_KEY_BYTES) for other in parties[place + 1 :]}
    for other, key in keys.items():
        yield Send(other, "psi.pair", key)
    for other in parties[:place]:
        key = yield from receive(other, "psi.pair")
        if len(key) != _KEY_BYTES or not any(key):
            raise PeerFault(other, "key", "sent no key of 32 bytes")
        if key in keys.values():
            raise PeerFault(other, "key", "sent a key that another party has")
        keys[other] = key
    return keys


def _shares(ids: Sequence[bytes], keys: dict[str, bytes]) -> Tags:
    """S(x) of each id: [N, 16]."""
    found = np.zeros((len(ids), VALUE_BYTES), np.uint8)
    for key in keys.values():
        found ^= tags("psi-share", key, ids, VALUE_BYTES)
    return found


def _lead(
    parties: Sequence[str],
    members: Members,
    ids: Sequence[bytes],
    shares: Tags,
    terms: Terms,
    draw: Draw,
    workers: Workers,
) -> Generator[Effect, Incoming | None, Found]:
    others = parties[1:]
    sessions: dict[str, Session] = {}
    for other in others:
        sessions[other] = yield from greet(True, other, _named(parties), terms, len(ids), draw)
    total = shares.copy()
    for other in others:
        session = sessions[other]
        values = yield from ask(other, ids, terms.chunk, draw, workers)
        store = yield from _store(other, length(session.theirs))
        total ^= values ^ decode(store, ids, session.key)
    positions: Rows = np.flatnonzero(~total.any(axis=1))
    smallest = min(session.theirs for session in sessions.values())
    whole = Session(sessions[others[0]].key, len(ids), smallest, VALUE_BYTES)
    found = found_ids(members, positions, whole)
    if terms.learns == "both":
        for other in others:
            yield from tell_common(other, sessions[other], found)
        for other in others:
            yield from confirm(other, sessions[other], found)
    return found


def _follow(
    parties: Sequence[str],
    members: Members,
    ids: Sequence[bytes],
    shares: Tags,
    terms: Terms,
    draw: Draw,
    workers: Workers,
) -> Generator[Effect, Incoming | None, Found]:
    leader = parties[0]
    session = yield from greet(False, leader, _named(parties), terms, len(ids), draw)
    key = scalar(draw)
    yield from answer(leader, session.theirs, terms.chunk, key, workers)
    store = encode(ids, shares ^ owned(ids, key, workers), session.key, draw)
    for number in range(chunks(len(store), _PIECE)):
        piece = store[number * _PIECE : (number + 1) * _PIECE]
        yield Send(leader, "psi.store", numbered(number, piece.tobytes()))
    if terms.learns != "both":
        return found_nothing(session)
    found = yield from told_common(leader, session, members, ids)
    yield from confirm(leader, session, found)
    return found


def _store(peer: str, rows: int) -> Generator[Effect, Incoming | None, Tags]:
    parts: list[bytes] = []
    for number in range(chunks(rows, _PIECE)):
        count = rows_of(rows, _PIECE, number)
        parts.append((yield from receive_numbered(peer, "psi.store", number, count, VALUE_BYTES)))
    return as_rows(b"".join(parts), VALUE_BYTES)


def _named(parties: Sequence[str]) -> str:
    return f"several {len(parties)}"
