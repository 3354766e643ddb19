"""A small set against a large one: the large side's work is done once, and its set travels as a compact filter.

    prepare   The owner evaluates a pseudo-random function (``function``) on its ids and builds a filter of the values:
              before the run, or within its first, chunk by chunk with checkpoints.
    run       The asker gets the filter unless it has it from before, is answered the function on its own ids, and
              looks them up. Where both learn, it names the values found; the owner says which are of its ids.

A stranger passes the filter with probability 2**-bits (a setting). Where both learn, the owner's answer removes such
matches. What a peer can ask over all runs is limited by ``Terms.budget``; without an answer the filter tells nothing,
since its values are those of a function that only the owner can evaluate. Semi-honest, as ``function``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from federated.psi.agreement import confirm
from federated.psi.filters import HASH_BYTES, HashFilter, check_fits, digest, size
from federated.psi.function import answer, ask, owned
from federated.psi.group import SCALAR_BYTES, check_scalar, scalar
from federated.psi.hashing import (
    MOST_IDS,
    Rows,
    Tags,
    as_rows,
    keys_of,
    list_digest,
    matches,
    repeats,
    system,
)
from federated.psi.ids import Ids
from federated.psi.members import Arrange, MemoryMembers
from federated.psi.resume import Begun, begin, charge_again, due
from federated.psi.signatures import asks
from federated.psi.terms import (
    Found,
    Session,
    Terms,
    chunks,
    found_ids,
    found_nothing,
    found_values,
    numbered,
    receive_numbered,
    rows_of,
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
    receive,
)
from federated.vertical.wire import Arr, Bytes, Expected, Int, Value, pack, unpack

BITS: Final = 30
_PIECE: Final = 4 * 2**20
_PREPARED: Final = b"headwater-psi-prepared"
_VALUES: Final = Bytes(2**40)
_OWNER: Final[Mapping[str, Expected]] = {
    "secret": Bytes(SCALAR_BYTES, SCALAR_BYTES),
    "parts": Int(),
    "values": _VALUES,
}
_ASKER: Final[Mapping[str, Expected]] = {"parts": Int(), "values": _VALUES, "filter": Bytes(2**40)}


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

    @property
    def bits(self) -> int:
        """Of the filter."""
        return self.filter[0]

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
    return _prepared(secret, ids, owned(ids, secret, Alone() if workers is None else workers), bits)


def owner(
    peer: str,
    ids: Ids,
    prepared: Prepared | None,
    terms: Terms,
    *,
    first: bool,
    bits: int = BITS,
    ready: Callable[[Prepared], None] = lambda made: None,
    draw: Draw = system,
    workers: Workers | None = None,
    state: bytes | None = None,
) -> Role[Found]:
    """The large side. ``prepared``: of these ids in their order; without it they are prepared within the run, with a
    filter of ``bits``, and ``ready`` is told, so that it can be kept for later runs.

    Raises ValueError where it is of other ids, or not what a checkpoint stands on, or where there is no such filter;
    PeerFault.
    """
    if asks(first, terms):
        raise ValueError("the party that learns the result is the asker")
    if prepared is not None and not prepared.fits(ids):
        raise ValueError("the ids are not those that were prepared: prepare anew")
    if prepared is None:
        check_fits(len(ids), bits)  # before the work that it would end
    workers = Alone() if workers is None else workers
    arrange = partial(MemoryMembers, ids)
    begun = yield from begin(first, peer, "unbalanced", terms, arrange, draw, state, _OWNER)
    session = begun.session
    if begun.anew:
        secret = scalar(draw) if prepared is None else prepared.secret
        parts = chunks(len(ids), terms.chunk) if prepared is None else 0
        values = bytearray()
        yield Send(peer, "psi.prepare", pack({"parts": parts}))
    else:
        secret, parts = check_scalar(begun.held["secret"]), begun.held["parts"]
        values = bytearray(begun.held["values"])
        if prepared is not None and prepared.secret != secret:
            raise ValueError("the checkpoint is of another preparation: begin anew")
    steps = _Steps(begun, parts, chunks(session.theirs, terms.chunk))

    def kept() -> dict[str, Value]:
        return {"secret": secret, "parts": parts, "values": bytes(values)}

    for number in steps.preparing():
        if prepared is None:
            part = ids.values[number * terms.chunk : (number + 1) * terms.chunk]
            values += owned(part, secret, workers).tobytes()
        yield from steps.ended(number + 1, "chunks prepared", kept)
    if prepared is None:
        if len(values) != HASH_BYTES * len(ids):
            raise ValueError("the prepared set that the checkpoint stands on is not there: begin anew")
        prepared = _prepared(secret, ids.values, as_rows(bytes(values), HASH_BYTES), bits)
        ready(prepared)
    if steps.filter_left:
        yield from _offer(peer, prepared.filter)
        yield from steps.ended(parts + 1, "the filter", kept)
    if not begun.anew:
        charge_again(first, peer, terms, session.theirs - steps.asking().start * terms.chunk)
    for number in steps.asking():
        yield from answer(peer, number, rows_of(session.theirs, terms.chunk, number), secret, workers)
        yield from steps.ended(parts + 2 + number, "chunks answered", kept)
    if terms.learns != "both":
        return found_nothing(session)
    found = yield from _told(peer, ids, prepared, session)
    yield from confirm(peer, session, found, first=first, draw=draw)
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
    state: bytes | None = None,
) -> Role[tuple[Found, HashFilter]]:
    """The small side. ``held``: the filter of an earlier run. Gives the result and the filter for the next one.

    ``most_filter``: bytes of a filter that are taken; ``least_bits``: 2**-bits is the most a false match may be likely.
    """
    if not asks(first, terms):
        raise ValueError("the party that learns nothing is the owner")
    workers = Alone() if workers is None else workers
    begun = yield from begin(first, peer, "unbalanced", terms, arrange, draw, state, _ASKER)
    members, session = begun.members, begun.session
    if begun.anew:
        parts, values, data = (yield from _parts(peer, session, terms)), bytearray(), b""
    else:
        parts, values = begun.held["parts"], bytearray(begun.held["values"])
        data = begun.held["filter"]
    steps = _Steps(begun, parts, chunks(session.mine, terms.chunk))

    def kept() -> dict[str, Value]:
        return {"parts": parts, "values": bytes(values), "filter": data}

    for number in steps.preparing():
        yield from steps.ended(number + 1, "chunks prepared", kept)
    if steps.filter_left:
        held = yield from _wanted(peer, session, held, most_filter, least_bits)
        data = held.to_bytes()
        yield from steps.ended(parts + 1, "the filter", kept)
    else:
        held = HashFilter.from_bytes(data)
    own = members.chunks(terms.chunk, steps.asking().start)
    for number in steps.asking():
        found = yield from ask((peer,), number, next(own), draw, workers)
        values += found[peer].tobytes()
        yield from steps.ended(parts + 2 + number, "chunks asked", kept)
    hashes = as_rows(bytes(values), HASH_BYTES)
    positions = np.flatnonzero(held.holds(hashes))
    if terms.learns == "both":
        positions = yield from _held(peer, hashes, positions)
    result = found_ids(members, positions, session)
    if terms.learns == "both":
        yield from confirm(peer, session, result, first=first, draw=draw)
    return result, held


class _Steps:
    """The units of a run, the same at both: ``parts`` of preparation, the filter, ``asked`` chunks."""

    def __init__(self, begun: Begun, parts: int, asked: int) -> None:
        self._begun, self._parts, self._asked = begun, parts, asked
        self.total = parts + 1 + asked

    def preparing(self) -> range:
        """The parts that are left."""
        return range(self._begun.done, self._parts)

    @property
    def filter_left(self) -> bool:
        """Whether the filter has yet to be offered."""
        return self._begun.done <= self._parts

    def asking(self) -> range:
        """The chunks that are left to ask."""
        return range(max(0, self._begun.done - self._parts - 1), self._asked)

    def ended(
        self, done: int, what: str, kept: Callable[[], Mapping[str, Value]]
    ) -> Generator[Effect, Incoming | None, None]:
        """``done`` units are done."""
        yield Progress(done, self.total, what)
        if due(done, self.total):
            yield Checkpoint(done, self._begun.state(done, kept()))


def _prepared(secret: bytes, ids: Sequence[bytes], values: Tags, bits: int) -> Prepared:
    return Prepared(secret, list_digest(_PREPARED, ids), values, HashFilter.of(values, bits).to_bytes())


def _parts(peer: str, session: Session, terms: Terms) -> Generator[Effect, Incoming | None, int]:
    """How many units of preparation the owner has: none, or one for each chunk of its ids."""
    told: int = unpack((yield from receive(peer, "psi.prepare")), peer, {"parts": Int()})["parts"]
    if told not in (0, whole := chunks(session.theirs, terms.chunk)):
        raise PeerFault(peer, "count", f"prepares in {told} parts, not in none or {whole}")
    return told


def _offer(peer: str, data: bytes) -> Generator[Effect, Incoming | None, None]:
    yield Send(peer, "psi.filter.offer", pack({"digest": digest(data), "bits": data[0]}))
    wanted = unpack((yield from receive(peer, "psi.filter.want")), peer, {"want": Int(0, 1)})["want"]
    if wanted:
        for number in range(chunks(len(data), _PIECE)):
            piece = data[number * _PIECE : (number + 1) * _PIECE]
            yield Send(peer, "psi.filter.piece", numbered(number, piece))


def _told(
    peer: str, ids: Ids, prepared: Prepared, session: Session
) -> Generator[Effect, Incoming | None, Found]:
    """The owner's result: which of the values that the asker names are of its ids, and the asker is told."""
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
    return found_values([ids.values[place] for place in places.tolist()], ids.rows[places], session)


def _held(peer: str, hashes: Tags, positions: Rows) -> Generator[Effect, Incoming | None, Rows]:
    """Those of ``positions`` whose values the owner holds; they are named in the order of the values."""
    order = np.argsort(keys_of(hashes[positions]), kind="stable") if len(positions) else positions
    positions = positions[order]
    yield Send(peer, "psi.values", hashes[positions].tobytes())
    said = yield from receive(peer, "psi.held")
    if len(said) != len(positions) or any(one > 1 for one in said):
        raise PeerFault(peer, "count", f"answers {len(said)} values, {len(positions)} were named")
    return np.sort(positions[np.frombuffer(said, np.uint8) == 1])


def _wanted(
    peer: str, session: Session, held: HashFilter | None, most: int, least_bits: int
) -> Generator[Effect, Incoming | None, HashFilter]:
    """The filter that the owner offers: the one held, or fetched."""
    offered = unpack(
        (yield from receive(peer, "psi.filter.offer")), peer, {"digest": Bytes(32, 32), "bits": Int(0, 64)}
    )
    known = held is not None and digest(held.to_bytes()) == offered["digest"]
    yield Send(peer, "psi.filter.want", pack({"want": int(not known)}))
    if held is None or not known:
        held = yield from _filter(peer, session, offered["digest"], offered["bits"], most)
    if held.bits < least_bits or len(held.numbers) != session.theirs:
        raise PeerFault(peer, "filter", f"of {len(held.numbers)} ids with {held.bits} bits")
    return held


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
