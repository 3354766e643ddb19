"""What two parties agree on before an intersection, and what each has in the end.

Everything of ``Terms`` and both sizes are known to both parties. A difference is a PeerFault that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from federated.psi.hashing import (
    MOST_IDS,
    Rows,
    Tags,
    as_rows,
    keys_of,
    list_digest,
    matches,
    ordered,
    tag_bytes,
    tags,
)
from federated.psi.ids import IdRule
from federated.psi.limits import Budget
from federated.psi.members import Members
from federated.vertical.parties import Draw, Effect, Incoming, PeerFault, Send, receive
from federated.vertical.wire import Bytes, Int, Text, pack, unpack

NONCE_BYTES: Final = 32
COMMON_BYTES: Final = 16
MOST_CHUNK: Final = 2**20
_VERSION: Final = "psi-2"

Learns = Literal["both", "first", "second"]
Wants = Literal["ids", "count"]
Step = Generator[Effect, Incoming | None, None]


@dataclass(frozen=True, slots=True)
class Terms:
    """``learns``: who learns the result. ``wants``: the ids of the intersection, or their count alone.

    ``first`` and ``second`` are the two parties in the order that the job names them. ``chunk``: ids in a message.
    ``most``: how many ids of the peer are accepted: what a peer may ask is bounded by it. ``budget``: what it may ask
    over all runs; every run in which it learns something takes as many ids of it as its set has.
    """

    learns: Learns = "both"
    wants: Wants = "ids"
    rule: IdRule = field(default_factory=IdRule)
    chunk: int = 8_192
    most: int = MOST_IDS
    budget: Budget | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.learns not in ("both", "first", "second"):
            raise ValueError(f"learns is both, first or second, not {self.learns!r}")
        if self.wants not in ("ids", "count"):
            raise ValueError(f"wants is ids or count, not {self.wants!r}")
        if not 1 <= self.chunk <= MOST_CHUNK:
            raise ValueError(f"a chunk has 1 to {MOST_CHUNK} ids, not {self.chunk}")
        if not 0 <= self.most <= MOST_IDS:
            raise ValueError(f"at most {MOST_IDS} ids of a peer, not {self.most}")

    def i_learn(self, first: bool) -> bool:
        """Whether the party that is (or is not) the first one learns the result."""
        return self.learns == "both" or (self.learns == "first") == first

    def agreed(self, protocol: str) -> str:
        """What must be the same at both, as text."""
        return f"{_VERSION} {protocol} {self.learns} {self.wants} {self.rule.case} chunk={self.chunk}"


@dataclass(frozen=True, slots=True)
class Found:
    """A party's result. ``ids`` and ``rows`` (where they stand in its file): the intersection in the joint order.

    The joint order is that of the ids' bytes. Both are None for a party that learns a count alone (``count``) or
    nothing (``count`` None). ``mine``, ``theirs``: the sizes of the sets.
    """

    count: int | None
    ids: list[bytes] | None
    rows: Rows | None
    mine: int
    theirs: int


@dataclass(frozen=True, slots=True)
class Session:
    """``key``: 32 bytes that only this run has. ``tag``: bytes of a tag in it."""

    key: bytes
    mine: int
    theirs: int
    tag: int


def greet(
    me_first: bool, peer: str, protocol: str, terms: Terms, size: int, draw: Draw
) -> Generator[Effect, Incoming | None, Session]:
    """Exchange terms, sizes and nonces. Raises PeerFault for other terms, and for a set beyond ``terms.most`` or what
    is left of ``terms.budget``: nothing that depends on an id was sent by then."""
    if size > MOST_IDS:
        raise ValueError(f"{size} ids; at most {MOST_IDS}")
    nonce = draw(NONCE_BYTES)
    agreed = terms.agreed(protocol)
    yield Send(peer, "psi.hello", pack({"terms": agreed, "ids": size, "nonce": nonce}))
    body = yield from receive(peer, "psi.hello")
    told = unpack(
        body, peer, {"terms": Text(), "ids": Int(0, MOST_IDS), "nonce": Bytes(NONCE_BYTES, NONCE_BYTES)}
    )
    if told["terms"] != agreed:
        raise PeerFault(peer, "terms", f"wants {told['terms']!r}, this side {agreed!r}")
    if told["ids"] > terms.most:
        raise PeerFault(peer, "size", f"has {told['ids']} ids, this side accepts {terms.most}")
    theirs = bytes(told["nonce"])
    if theirs == nonce:
        raise PeerFault(peer, "nonce", "sent this side's own nonce back")
    if terms.budget is not None and terms.i_learn(not me_first):
        terms.budget.spend(peer, told["ids"])
    both = nonce + theirs if me_first else theirs + nonce
    key = hashlib.sha256(b"headwater-psi-session" + both + agreed.encode()).digest()
    return Session(key, size, told["ids"], tag_bytes(size, told["ids"]))


def numbered(number: int, payload: bytes) -> bytes:
    """``payload`` behind its chunk's number, so that no chunk stands in for another."""
    return number.to_bytes(4, "little") + payload


def receive_numbered(
    peer: str, kind: str, number: int, rows: int, width: int
) -> Generator[Effect, Incoming | None, bytes]:
    """The payload of chunk ``number``: ``rows`` times ``width`` bytes. Raises PeerFault for another."""
    body = yield from receive(peer, kind)
    if len(body) != 4 + rows * width:
        raise PeerFault(peer, "count", f"{kind} has {len(body)} bytes, {4 + rows * width} are expected")
    if (told := int.from_bytes(body[:4], "little")) != number:
        raise PeerFault(peer, "order", f"{kind} is chunk {told}, expected {number}")
    return body[4:]


def chunks(size: int, chunk: int) -> int:
    """How many chunks ``size`` ids take."""
    return -(-size // chunk)


def rows_of(size: int, chunk: int, number: int) -> int:
    """How many ids chunk ``number`` has; 0 beyond the last."""
    return max(0, min(chunk, size - number * chunk))


def found_ids(members: Members, positions: Rows, session: Session) -> Found:
    """The result for the members at rising ``positions``, in the joint order."""
    return found_values(*members.take(positions), session)


def found_values(values: Sequence[bytes], rows: Rows, session: Session) -> Found:
    """The result for ``values``, which stand in ``rows`` of the file, in the joint order."""
    order = ordered(values, np.arange(len(values)))
    return Found(
        len(values), [values[at] for at in order.tolist()], rows[order], session.mine, session.theirs
    )


def found_nothing(session: Session) -> Found:
    """The result of a party that learns nothing."""
    return Found(None, None, None, session.mine, session.theirs)


def tell_common(peer: str, session: Session, found: Found) -> Step:
    """Tell a peer which of its ids are common, by hashes of them under the session's key, in rising order."""
    assert found.ids is not None
    sent = np.sort(keys_of(_common_tags(session, found.ids))).tobytes() if found.ids else b""
    yield Send(peer, "psi.common", sent)


def told_common(
    peer: str, session: Session, members: Members, ids: Sequence[bytes]
) -> Generator[Effect, Incoming | None, Found]:
    """The result that the peer tells; ``ids``: all members in their order. Raises PeerFault for what is not ours."""
    body = yield from receive(peer, "psi.common")
    if len(body) % COMMON_BYTES or len(body) > COMMON_BYTES * min(session.mine, session.theirs):
        raise PeerFault(peer, "count", f"{len(body)} bytes name no common ids")
    told = as_rows(body, COMMON_BYTES)
    positions = matches(_common_tags(session, ids), told)
    if len(positions) != len(told):
        raise PeerFault(peer, "positions", "names ids that are not there, or one more than once")
    return found_ids(members, positions, session)


def _common_tags(session: Session, ids: Sequence[bytes]) -> Tags:
    return tags("psi-common", session.key, ids, COMMON_BYTES)


def members_digest(members: Members, key: bytes, chunk: int) -> bytes:
    """16 bytes that are equal for the same set in the same order: a file that changed must not go on."""
    hashed = hashlib.blake2b(key=key, digest_size=16)
    for part in members.chunks(chunk):
        hashed.update(list_digest(key, part))
    return hashed.digest()
