"""The ids that three or more parties have in common, and nothing of what only some of them have.

A star, after Kolesnikov, Matania, Pinkas, Rosulek and Trieu (2017, the augmented semi-honest protocol):

    1. Every two parties share a key. S_i(x) is the exclusive or of a pseudo-random function of x under all keys of
       party i: over all parties the S_i(x) cancel out, while those of only some look random.
    2. Each party i lets the leader (the first one) evaluate a function F_i of its own (``function``) on the leader's
       ids, and sends a key-value store (``keyvalue``) of S_i(y) ⊕ F_i(y) for its ids y.
    3. The leader reads all stores at its ids: everything cancels out exactly where every party has the id.
    4. By setting, the leader tells the others, by hashes of the common ids.

The count alone (``wants="count"``): the second party neither answers nor sends a store. The leader's sum then is what
the second party's S(x) is, where all the others have x, and random elsewhere; nobody can tell the two apart without the
keys of the second party. Leader and second party count in how many (x, sum) they agree by Diffie-Hellman
(``cardinality``), which shows neither of them which those are.

A checkpoint follows some of the chunks that the leader asks, and each part of what the others evaluate on their ids.

Who learns what: the leader the common ids and the sizes, no pairwise intersection; the others their size beside the
leader's and, by setting, the common ids. Semi-honest, no two parties together: the leader with all but one of the
others can compare its ids with that one's, as it could by letting those others take its own ids as theirs.
A ring in which every set is masked by everybody would show whoever compares all pairwise intersections: not done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final

import numpy as np

from federated.psi.agreement import confirm
from federated.psi.cardinality import count_common
from federated.psi.function import answer, ask, owned
from federated.psi.group import SCALAR_BYTES, check_scalar, scalar
from federated.psi.hashing import LONGEST_TAG, Rows, Tags, as_rows, system, tag_bytes, tags
from federated.psi.keyvalue import VALUE_BYTES, decode, encode, length
from federated.psi.members import Arrange
from federated.psi.resume import CHECKPOINTS, Begun, begin, charge_again, due, stretched
from federated.psi.terms import (
    Found,
    Session,
    Terms,
    chunks,
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
    Checkpoint,
    Draw,
    Effect,
    Incoming,
    PeerFault,
    Progress,
    Role,
    Send,
    Workers,
    broadcast,
    receive,
)
from federated.vertical.wire import Arr, Blobs, Bytes, Expected, Int, Value, pack, unpack

MOST_PARTIES: Final = 32
_KEY_BYTES: Final = 32
_PIECE: Final = 2**18  # Rows of a store in a message: 4 MiB.
PARTS: Final = 4
"""In so many parts, with a checkpoint after each, the others evaluate their functions on their own ids. None knows how
many ids another has, so that the number of parts is the same for all sets."""
_LEADER: Final[Mapping[str, Expected]] = {
    "sessions": Blobs(MOST_PARTIES, 32, least_each=32),
    "sizes": Arr("<i8", (None,), MOST_PARTIES),
    "sums": Bytes(2**40),
}
_FOLLOWER: Final[Mapping[str, Expected]] = {
    "key": Bytes(SCALAR_BYTES, SCALAR_BYTES),
    "fill": Bytes(32, 32),
    "pairs": Blobs(MOST_PARTIES, _KEY_BYTES, least_each=_KEY_BYTES),
    "values": Bytes(2**40),
}


def several(
    me: str,
    parties: Sequence[str],
    arrange: Arrange,
    terms: Terms,
    *,
    draw: Draw = system,
    workers: Workers | None = None,
    state: bytes | None = None,
) -> Role[Found]:
    """One party of ``parties`` (three or more, the leader first). ``terms.learns``: ``both`` means all, ``first`` the
    leader alone. In the result ``theirs`` is the smallest other set at the leader, the leader's set at the others.

    Raises PeerFault; ValueError for terms that this protocol has not; StoreFull with probability 2**-40.
    """
    if not 3 <= len(parties) <= MOST_PARTIES or len(set(parties)) != len(parties) or me not in parties:
        raise ValueError(
            f"{me} with {len(parties)} parties; 3 to {MOST_PARTIES} of different names are needed"
        )
    if terms.learns == "second":
        raise ValueError("several parties: the leader learns the result, or all do")
    workers = Alone() if workers is None else workers
    first = me == parties[0]
    peer, fields, role = (parties[1], _LEADER, _lead) if first else (parties[0], _FOLLOWER, _follow)
    keys = (yield from _keys(me, parties, draw)) if state is None else {}
    begun = yield from begin(first, peer, _named(parties), terms, arrange, draw, state, fields)
    ids = [one for part in begun.members.chunks(terms.chunk) for one in part]
    return (yield from role(me, parties, begun, ids, list(keys.values()), terms, draw, workers))


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


def _shares(ids: Sequence[bytes], keys: Sequence[bytes]) -> Tags:
    """S(x) of each id: [N, 16]."""
    found = np.zeros((len(ids), VALUE_BYTES), np.uint8)
    for key in keys:
        found ^= tags("psi-share", key, ids, VALUE_BYTES)
    return found


def _lead(
    me: str,
    parties: Sequence[str],
    begun: Begun,
    ids: Sequence[bytes],
    pairs: list[bytes],
    terms: Terms,
    draw: Draw,
    workers: Workers,
) -> Generator[Effect, Incoming | None, Found]:
    others = [other for other in parties if other != me]
    sessions = {others[0]: begun.session}
    if begun.anew:
        for other in others[1:]:
            sessions[other] = yield from greet(True, other, _named(parties), terms, len(ids), draw)
        sums = _shares(ids, pairs)
    else:
        rest = zip(others[1:], begun.held["sessions"], begun.held["sizes"].tolist(), strict=True)
        for other, key, size in rest:
            sessions[other] = Session(key, len(ids), size, tag_bytes(len(ids), size))
        sums = as_rows(begun.held["sums"], VALUE_BYTES).copy()

    def kept() -> bytes:
        own: dict[str, Value] = {
            "sessions": [sessions[other].key for other in others[1:]],
            "sizes": np.array([sessions[other].theirs for other in others[1:]], np.int64),
            "sums": sums.tobytes(),
        }
        return begun.state(label, own)

    asked = others if terms.wants == "ids" else others[1:]
    total = chunks(len(ids), terms.chunk)
    for label in range(begun.done + 1, total + PARTS + 1):
        if label <= total:
            at = slice((label - 1) * terms.chunk, label * terms.chunk)
            for values in (yield from ask(asked, label - 1, ids[at], draw, workers)).values():
                sums[at] ^= values
        yield from _ended(label, total, "chunks asked", kept)
    for other in asked:
        store = yield from _store(other, length(sessions[other].theirs))
        sums ^= decode(store, ids, sessions[other].key)
    smallest = min(session.theirs for session in sessions.values())
    whole = Session(begun.session.key, len(ids), smallest, VALUE_BYTES)
    if terms.wants == "count":
        count = yield from _counted(others[0], begun.session, ids, sums, terms, True, draw, workers)
        if terms.learns == "both":
            assert count is not None
            yield from broadcast(others[1:], "psi.count", pack({"count": count}))
        return Found(count, None, None, whole.mine, whole.theirs)
    positions: Rows = np.flatnonzero(~sums.any(axis=1))
    found = found_ids(begun.members, positions, whole)
    if terms.learns == "both":
        for other in others:
            yield from tell_common(other, sessions[other], found)
        for other in others:
            yield from confirm(other, sessions[other], found, first=True, draw=draw)
    return found


def _follow(
    me: str,
    parties: Sequence[str],
    begun: Begun,
    ids: Sequence[bytes],
    pairs: list[bytes],
    terms: Terms,
    draw: Draw,
    workers: Workers,
) -> Generator[Effect, Incoming | None, Found]:
    leader, session = parties[0], begun.session
    matcher = terms.wants == "count" and me == parties[1]
    if begun.anew:
        key, fill, values = scalar(draw), draw(32), bytearray()
    else:
        key, fill = check_scalar(begun.held["key"]), begun.held["fill"]
        pairs, values = begun.held["pairs"], bytearray(begun.held["values"])
        answered = 0 if matcher else begun.done * terms.chunk
        charge_again(False, leader, terms, session.theirs - answered)

    def kept() -> bytes:
        return begun.state(label, {"key": key, "fill": fill, "pairs": pairs, "values": bytes(values)})

    total = chunks(session.theirs, terms.chunk)
    for label in range(begun.done + 1, total + PARTS + 1):
        if matcher:
            pass  # Its turn comes after all the others'.
        elif label <= total:
            rows = rows_of(session.theirs, terms.chunk, label - 1)
            yield from answer(leader, label - 1, rows, key, workers)
        else:
            first, last = ((label - total + step) * len(ids) // PARTS for step in (-1, 0))
            values += owned(ids[first:last], key, workers).tobytes()
        yield from _ended(label, total, "chunks answered", kept)
    if matcher:
        mine = _shares(ids, pairs)
        count = yield from _counted(leader, session, ids, mine, terms, False, draw, workers)
        return Found(count, None, None, session.mine, session.theirs)
    # After a restart the same store again: two of them would differ by one that is zero at this party's ids alone.
    mine = _shares(ids, pairs) ^ as_rows(bytes(values), VALUE_BYTES)
    store = encode(ids, mine, session.key, stretched(fill, b"headwater-psi-store"))
    for number in range(chunks(len(store), _PIECE)):
        piece = store[number * _PIECE : (number + 1) * _PIECE]
        yield Send(leader, "psi.store", numbered(number, piece.tobytes()))
    if terms.learns != "both":
        return found_nothing(session)
    if terms.wants == "count":
        most = min(session.mine, session.theirs)
        told = unpack((yield from receive(leader, "psi.count")), leader, {"count": Int(0, most)})
        return Found(told["count"], None, None, session.mine, session.theirs)
    found = yield from told_common(leader, session, begun.members, ids)
    yield from confirm(leader, session, found, first=False, draw=draw)
    return found


def _counted(
    peer: str,
    session: Session,
    ids: Sequence[bytes],
    sums: Tags,
    terms: Terms,
    first: bool,
    draw: Draw,
    workers: Workers,
) -> Generator[Effect, Incoming | None, int | None]:
    """In how many ids, each together with its sum, the leader and the second party agree."""
    joined = (one + row.tobytes() for one, row in zip(ids, sums, strict=True))
    hashed = [row.tobytes() for row in tags("psi-count", session.key, joined, LONGEST_TAG)]
    return (yield from count_common(peer, hashed, terms, first=first, draw=draw, workers=workers))


def _ended(
    label: int, total: int, what: str, kept: Callable[[], bytes]
) -> Generator[Effect, Incoming | None, None]:
    """A unit is done: a chunk of the leader's, or a part of what the others evaluate on their own ids."""
    yield Progress(label, total + PARTS, what if label <= total else "parts of the own sets")
    if label > total or due(label, total, CHECKPOINTS - PARTS):
        yield Checkpoint(label, kept())


def _store(peer: str, rows: int) -> Generator[Effect, Incoming | None, Tags]:
    parts: list[bytes] = []
    for number in range(chunks(rows, _PIECE)):
        count = rows_of(rows, _PIECE, number)
        parts.append((yield from receive_numbered(peer, "psi.store", number, count, VALUE_BYTES)))
    return as_rows(b"".join(parts), VALUE_BYTES)


def _named(parties: Sequence[str]) -> str:
    return f"several {len(parties)}"
