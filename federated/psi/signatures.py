"""Intersection by RSA blind signatures (de Cristofaro and Tsudik 2010; exact rules in ``rsa``).

    1. The signer sends its public key and the proof that blinding hides everything; the asker checks both.
    2. Chunk by chunk: the asker sends blinded hashes, the signer signs them; and it sends tags of its own signatures,
       in a secret order. The asker unblinds, and compares tags.
    3. Where the signer learns the result too, the asker names the common tags, which the signer looks up.

The asker is who learns the result (the first party where both do). The signer sees numbers uniform in Z_n*. Its own
signatures can be kept over runs (``cache``): they cost most. Semi-honest, but that a reply is the right signature, and
the key a permutation, is checked.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

import numpy as np

from federated.psi.agreement import confirm
from federated.psi.hashing import Rows, as_rows, system, tags
from federated.psi.members import Arrange, Folder, MemoryFolder
from federated.psi.pool import TagPool, common, expect
from federated.psi.power import way
from federated.psi.resume import FOLDER, Begun, begin, charge_again, due
from federated.psi.rsa import (
    LEAST_BITS,
    MOST_BITS,
    MOST_EXPONENT,
    PrivateKey,
    PublicKey,
    RsaRefused,
    blind,
    check_proof,
    generate,
    private_key,
    proof,
    sign,
    sign_own,
    unblind,
)
from federated.psi.terms import (
    Found,
    Terms,
    chunks,
    found_ids,
    found_nothing,
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
    Log,
    PeerFault,
    Progress,
    Role,
    Send,
    Workers,
    receive,
)
from federated.vertical.wire import Arr, Bytes, Expected, Int, Value, pack, unpack

CACHED_BYTES: Final = 32
_MOST_KEY: Final = MOST_BITS // 8
_STATE: Final[Mapping[str, Expected]] = {
    "n": Bytes(_MOST_KEY),
    "e": Int(),
    "private": Bytes(8 * _MOST_KEY),
    "folder": FOLDER,
}


class SignatureCache(Protocol):
    """Hashes (32 bytes) of the signer's own signatures by a hash of the id (16 bytes), for one key."""

    def get(self, ids: Sequence[bytes]) -> list[bytes | None]:
        """What is known of each."""
        ...

    def put(self, ids: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """Keep them."""
        ...


@dataclass(slots=True)
class MemoryCache:
    """A cache in memory, at most ``most`` signatures: the oldest go first."""

    most: int = 10_000_000
    held: dict[bytes, bytes] = field(default_factory=dict, repr=False)

    def get(self, ids: Sequence[bytes]) -> list[bytes | None]:
        """See ``SignatureCache``."""
        return [self.held.get(one) for one in ids]

    def put(self, ids: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """See ``SignatureCache``."""
        self.held.update(zip(ids, hashes, strict=True))
        # All that goes is looked up at once: each look at the first one passes over all that went before.
        for old in list(islice(self.held, max(0, len(self.held) - self.most))):
            del self.held[old]

    def to_bytes(self) -> bytes:
        """To be kept by the signer alone: whoever has it can test which ids the signer has."""
        return b"".join(key + value for key, value in self.held.items())

    @classmethod
    def from_bytes(cls, data: bytes, most: int = 10_000_000) -> MemoryCache:
        """What ``to_bytes`` wrote. Raises ValueError."""
        rows = as_rows(data, 16 + CACHED_BYTES)
        return cls(most, {row[:16].tobytes(): row[16:].tobytes() for row in rows})


def asks(first: bool, terms: Terms) -> bool:
    """Whether the first (or second) party is the asker. Raises ValueError for a count alone: an asker knows which of
    its ids each answer belongs to."""
    if terms.wants == "count":
        raise ValueError(
            "this protocol gives ids, not a count alone; ecdh does, and several for more parties"
        )
    return first == (terms.learns != "second")


def signer(
    peer: str,
    arrange: Arrange,
    terms: Terms,
    key: PrivateKey | None = None,
    *,
    first: bool,
    bits: int = LEAST_BITS,
    cache: SignatureCache | None = None,
    draw: Draw = system,
    workers: Workers | None = None,
    folder: Folder | None = None,
    state: bytes | None = None,
) -> Role[Found]:
    """The side with the key; without one, it makes one of ``bits`` for this run. See ``ecdh`` for the rest.

    Raises FaultySignature where signing went wrong here, before anything of it leaves; ValueError where the checkpoint
    is of another key.
    """
    if asks(first, terms):
        raise ValueError("the party that learns the result is the asker")
    workers = Alone() if workers is None else workers
    side = yield from _begun(peer, arrange, terms, first, draw, folder, state)
    if key is None:
        key = private_key(side.private) if side.private else generate(bits)
    side.private = key.to_bytes()
    session, width = side.session, key.public.width
    if side.key is None:
        n = int(key.public.n).to_bytes(width)
        yield Send(peer, "psi.key", pack({"n": n, "e": key.public.e, "proof": proof(key)}))
        side.key = key.public
    elif side.key != key.public:
        raise ValueError("the checkpoint is of another key")
    else:
        charge_again(first, peer, terms, session.theirs - side.start * terms.chunk)
    yield Log(f"signatures by {way()}")
    kept = MemoryCache() if cache is None else cache
    own = side.members.chunks(terms.chunk, side.start)
    for number in side.rounds():
        ids = next(own, [])
        rows = rows_of(session.theirs, terms.chunk, number)
        if rows:
            asked = yield from receive_numbered(peer, "psi.blinded", number, rows, width)
            try:
                signed = sign(key, asked, workers)
            except RsaRefused as why:
                raise PeerFault(peer, "number", str(why)) from None
            yield Send(peer, "psi.signed", numbered(number, signed))
        if ids:
            made = tags("psi-rsa", session.key, _own(key, ids, kept, workers), session.tag)
            side.pool.add(made, number * terms.chunk)
            yield Send(peer, "psi.tags", numbered(number, made.tobytes()))
        yield from side.ended(number)
    if terms.learns != "both":
        return found_nothing(session)
    positions = yield from _named(peer, side)
    found = found_ids(side.members, positions, session)
    yield from confirm(peer, session, found, first=first, draw=draw)
    return found


def asker(
    peer: str,
    arrange: Arrange,
    terms: Terms,
    *,
    first: bool,
    least_bits: int = LEAST_BITS,
    draw: Draw = system,
    workers: Workers | None = None,
    folder: Folder | None = None,
    state: bytes | None = None,
) -> Role[Found]:
    """The side that learns the result. ``least_bits`` of the signer's key. See ``ecdh`` for the rest."""
    if not asks(first, terms):
        raise ValueError("the party that learns nothing is the signer")
    workers = Alone() if workers is None else workers
    side = yield from _begun(peer, arrange, terms, first, draw, folder, state)
    session = side.session
    if side.key is None:
        side.key = yield from _key(peer, least_bits)
    key = side.key
    own = side.members.chunks(terms.chunk, side.start)
    theirs = TagPool(side.folder, "theirs", session.tag, max(session.mine, session.theirs))
    for number in side.rounds():
        ids = next(own, [])
        if ids:
            blinded, kept = blind(key, ids, draw, workers)
            yield Send(peer, "psi.blinded", numbered(number, blinded))
            got = yield from receive_numbered(peer, "psi.signed", number, len(ids), key.width)
            try:
                signatures = unblind(key, got, kept, workers)
            except RsaRefused as why:
                raise PeerFault(peer, "signature", str(why)) from None
            hashed = tags("psi-rsa-own", b"", signatures, CACHED_BYTES)
            made = tags("psi-rsa", session.key, [row.tobytes() for row in hashed], session.tag)
            side.pool.add(made, number * terms.chunk)
        if rows := rows_of(session.theirs, terms.chunk, number):
            got = yield from receive_numbered(peer, "psi.tags", number, rows, session.tag)
            theirs.add(as_rows(got, session.tag), number * terms.chunk)
        yield from side.ended(number)
    if theirs.repeats():
        raise PeerFault(peer, "repeated", "sent a tag more than once")
    positions = common(side.pool, theirs)
    found = found_ids(side.members, positions, session)
    if terms.learns == "both":
        named = common(theirs, side.pool)  # positions in the signer's order, which is a secret one
        yield Send(peer, "psi.common", pack({"positions": np.ascontiguousarray(named)}))
        yield from confirm(peer, session, found, first=first, draw=draw)
    return found


class _Side:
    """What both sides keep."""

    def __init__(self, terms: Terms, folder: Folder, begun: Begun) -> None:
        self.terms, self.folder, self.begun = terms, folder, begun
        self.members, self.session, self.start = begun.members, begun.session, begun.done
        self.key: PublicKey | None = None
        self.private = b""
        if not begun.anew:
            self.key = PublicKey(int.from_bytes(begun.held["n"]), begun.held["e"])
            self.private = begun.held["private"]
            folder.back_to(begun.held["folder"])
        session = self.session
        expect(folder, session.tag, session.mine + session.theirs)
        self.pool = TagPool(folder, "mine", session.tag, max(session.mine, session.theirs))
        self.total = max(chunks(session.mine, terms.chunk), chunks(session.theirs, terms.chunk))

    def rounds(self) -> range:
        return range(self.start, self.total)

    def ended(self, number: int) -> Generator[Effect, Incoming | None, None]:
        yield Progress(number + 1, self.total, "chunks of ids")
        if due(number + 1, self.total):
            assert self.key is not None
            own: dict[str, Value] = {
                "n": self.key.n.to_bytes(self.key.width),
                "e": self.key.e,
                "private": self.private,
                "folder": self.folder.mark(),
            }
            yield Checkpoint(number + 1, self.begun.state(number + 1, own))


def _begun(
    peer: str,
    arrange: Arrange,
    terms: Terms,
    first: bool,
    draw: Draw,
    folder: Folder | None,
    state: bytes | None,
) -> Generator[Effect, Incoming | None, _Side]:
    begun = yield from begin(first, peer, "rsa", terms, arrange, draw, state, _STATE)
    return _Side(terms, MemoryFolder() if folder is None else folder, begun)


def _key(peer: str, least_bits: int) -> Generator[Effect, Incoming | None, PublicKey]:
    body = yield from receive(peer, "psi.key")
    expected: dict[str, Expected] = {
        "n": Bytes(_MOST_KEY),
        "e": Int(1, MOST_EXPONENT),
        "proof": Bytes(8 * _MOST_KEY),
    }
    told = unpack(body, peer, expected)
    try:
        key = PublicKey(int.from_bytes(told["n"]), told["e"])
        if key.n.bit_length() < least_bits:
            raise RsaRefused(f"a key of {key.n.bit_length()} bits, at least {least_bits} are wanted")
        check_proof(key, told["proof"])
    except RsaRefused as why:
        raise PeerFault(peer, "key", str(why)) from None
    return key


def _own(key: PrivateKey, ids: Sequence[bytes], cache: SignatureCache, workers: Workers) -> list[bytes]:
    """Hashes of the signatures of the signer's own ids, from the cache where it has them."""
    places = [row.tobytes() for row in tags("psi-rsa-cache", key.public.fingerprint(), ids, 16)]
    known = cache.get(places)
    missing = [at for at, one in enumerate(known) if one is None]
    if missing:
        signatures = sign_own(key, [ids[at] for at in missing], workers)
        made = [row.tobytes() for row in tags("psi-rsa-own", b"", signatures, CACHED_BYTES)]
        cache.put([places[at] for at in missing], made)
        for at, one in zip(missing, made, strict=True):
            known[at] = one
    return [one for one in known if one is not None]


def _named(peer: str, side: _Side) -> Generator[Effect, Incoming | None, Rows]:
    """The positions that the asker names, in the signer's own order: rising, and of as many as can be common."""
    body = yield from receive(peer, "psi.common")
    most = min(side.session.mine, side.session.theirs)
    positions: Rows = unpack(body, peer, {"positions": Arr("<i8", (None,), most)})["positions"]
    if len(positions) and (
        positions[0] < 0 or positions[-1] >= side.session.mine or (np.diff(positions) <= 0).any()
    ):
        raise PeerFault(peer, "positions", "names positions that are not there, or not in order")
    return positions
