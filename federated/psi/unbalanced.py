"""A small set against a large one: the large side's work is done once, and its set travels as a compact filter.

    prepare   The owner evaluates a pseudo-random function (``function``) on its ids and builds a filter of the values.
    run       The asker gets the filter unless it has it from before, is answered the function on its own ids, and
              looks them up. Where both learn, it names the values found; the owner says which are of its ids.

A stranger passes the filter with probability 2**-bits (a setting). Where both learn, the owner's answer removes such
matches. What a peer can ask over all runs is limited by a ledger; without an answer the filter tells nothing, since its
values are those of a function that only the owner can evaluate. Semi-honest, as ``function``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from federated.psi.filters import HASH_BYTES, HashFilter, digest, size
from federated.psi.function import answer, ask, owned
from federated.psi.group import SCALAR_BYTES, check_scalar, scalar
from federated.psi.hashing import (
    MOST_IDS,
    Tags,
    as_rows,
    keys_of,
    list_digest,
    matches,
    repeats,
    system,
)
from federated.psi.ids import Ids
from federated.psi.limits import Ledger
from federated.psi.members import Arrange
from federated.psi.signatures import asks
from federated.psi.terms import (
    Found,
    Session,
    Terms,
    chunks,
    confirm,
    found_ids,
    found_nothing,
    found_values,
    greet,
    numbered,
    receive_numbered,
    rows_of,
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
from federated.vertical.wire import Arr, Bytes, Int, pack, unpack

BITS: Final = 30
_PIECE: Final = 4 * 2**20
_PREPARED: Final = b"headwater-psi-prepared"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The owner's side for many runs: ``secret`` key, ``values`` [N, 16] of its ids in their order, ``filter``.

    As secret as the ids: whoever has it can test for any id.
    """

    secret: bytes
    ids: bytes
    values: Tags
    filter: bytes

    def __repr__(self) -> str:
        return f"Prepared({len(self.values)} ids)"

    def fits(self, ids: Ids) -> bool:
        """Whether it was made of these ids, in this order."""
        return list_digest(_PREPARED, ids.values) == self.ids

    def to_bytes(self) -> bytes:
        """To be kept by the owner alone."""
        return pack(
            {"secret": self.secret, "ids": self.ids, "values": self.values.copy(), "filter": self.filter}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Prepared:
        """What ``to_bytes`` wrote. Raises PeerFault (of "the prepared set") for anything else."""
        told = unpack(
            data,
            "the prepared set",
            {
                "secret": Bytes(SCALAR_BYTES, SCALAR_BYTES),
                "ids": Bytes(32, 32),
                "values": Arr("|u1", (None, HASH_BYTES), HASH_BYTES * MOST_IDS),
                "filter": Bytes(2**40),
            },
        )
        return cls(check_scalar(told["secret"]), told["ids"], told["values"], told["filter"])


def prepare(
    ids: Sequence[bytes], bits: int = BITS, *, draw: Draw = system, workers: Workers | None = None
) -> Prepared:
    """Evaluate the function on ``ids`` under a new key and build the filter."""
    secret = scalar(draw)
    values = owned(ids, secret, Alone() if workers is None else workers)
    return Prepared(secret, list_digest(_PREPARED, ids), values, HashFilter.of(values, bits).to_bytes())


def owner(
    peer: str,
    ids: Ids,
    prepared: Prepared,
    terms: Terms,
    *,
    first: bool,
    ledger: Ledger | None = None,
    draw: Draw = system,
    workers: Workers | None = None,
) -> Role[Found]:
    """The large side. ``ids``: those that were prepared, in that order.

    Raises ValueError where they are others; PeerFault beyond the ledger's limit.
    """
    if asks(first, terms):
        raise ValueError("the party that learns the result is the asker")
    if not prepared.fits(ids):
        raise ValueError("the ids are not those that were prepared: prepare anew")
    session = yield from greet(first, peer, "unbalanced", terms, len(ids), draw)
    if ledger is not None:
        ledger.spend(peer, session.theirs)
    named_filter = digest(prepared.filter)
    yield Send(peer, "psi.filter.offer", pack({"digest": named_filter, "bits": prepared.filter[0]}))
    wanted = unpack((yield from receive(peer, "psi.filter.want")), peer, {"want": Int(0, 1)})["want"]
    if wanted:
        for number in range(chunks(len(prepared.filter), _PIECE)):
            piece = prepared.filter[number * _PIECE : (number + 1) * _PIECE]
            yield Send(peer, "psi.filter.piece", numbered(number, piece))
    yield from answer(
        peer, session.theirs, terms.chunk, prepared.secret, Alone() if workers is None else workers
    )
    if terms.learns != "both":
        return found_nothing(session)
    body = yield from receive(peer, "psi.values")
    if len(body) % HASH_BYTES or len(body) > HASH_BYTES * session.theirs:
        raise PeerFault(peer, "count", f"{len(body)} bytes are not values of {HASH_BYTES}")
    named = as_rows(body, HASH_BYTES)
    if repeats(named):
        raise PeerFault(peer, "repeated", "names a value more than once")
    held = np.zeros(len(named), np.uint8)
    held[matches(named, prepared.values)] = 1
    yield Send(peer, "psi.held", held.tobytes())
    places = matches(prepared.values, named)
    found = found_values([ids.values[place] for place in places.tolist()], ids.rows[places], session)
    yield from confirm(peer, session, found)
    return found


def asker(
    peer: str,
    arrange: Arrange,
    terms: Terms,
    *,
    first: bool,
    held: HashFilter | None = None,
    most_filter: int = 2**31,
    least_bits: int = 20,
    draw: Draw = system,
    workers: Workers | None = None,
) -> Role[tuple[Found, HashFilter]]:
    """The small side. ``held``: the filter of an earlier run. Gives the result and the filter for the next one.

    ``most_filter``: bytes of a filter that are taken; ``least_bits``: 2**-bits is the most a false match may be likely.
    """
    if not asks(first, terms):
        raise ValueError("the party that learns nothing is the owner")
    members = arrange(draw(32))
    ids = [one for part in members.chunks(terms.chunk) for one in part]
    session = yield from greet(first, peer, "unbalanced", terms, len(ids), draw)
    offered = unpack(
        (yield from receive(peer, "psi.filter.offer")), peer, {"digest": Bytes(32, 32), "bits": Int(0, 64)}
    )
    known = held is not None and digest(held.to_bytes()) == offered["digest"]
    yield Send(peer, "psi.filter.want", pack({"want": int(not known)}))
    if held is None or not known:
        held = yield from _filter(peer, session, offered["digest"], offered["bits"], most_filter)
    if held.bits < least_bits or len(held.numbers) != session.theirs:
        raise PeerFault(peer, "filter", f"of {len(held.numbers)} ids with {held.bits} bits")
    values = yield from ask(peer, ids, terms.chunk, draw, Alone() if workers is None else workers)
    positions = np.flatnonzero(held.holds(values))
    if terms.learns == "both":
        order = np.argsort(keys_of(values[positions]), kind="stable") if len(positions) else positions
        positions = positions[order]
        yield Send(peer, "psi.values", values[positions].tobytes())
        said = yield from receive(peer, "psi.held")
        if len(said) != len(positions) or any(one > 1 for one in said):
            raise PeerFault(peer, "count", f"answers {len(said)} values, {len(positions)} were named")
        positions = np.sort(positions[np.frombuffer(said, np.uint8) == 1])
    found = found_ids(members, positions, session)
    if terms.learns == "both":
        yield from confirm(peer, session, found)
    return found, held


def _filter(
    peer: str, session: Session, named: bytes, bits: int, most: int
) -> Generator[Effect, Incoming | None, HashFilter]:
    length = size(session.theirs, bits)
    if length > most:
        raise PeerFault(peer, "filter", f"of {length} bytes, at most {most} are taken")
    parts: list[bytes] = []
    for number in range(chunks(length, _PIECE)):
        rows = rows_of(length, _PIECE, number)
        parts.append((yield from receive_numbered(peer, "psi.filter.piece", number, rows, 1)))
    data = b"".join(parts)
    if digest(data) != named:
        raise PeerFault(peer, "filter", "is not the one that was offered")
    try:
        return HashFilter.from_bytes(data)
    except ValueError as why:
        raise PeerFault(peer, "filter", str(why)) from None
