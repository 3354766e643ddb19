"""What clients and servers of secure aggregation say to each other, as bytes.

    MessageRefused (ValueError)   bytes that are no message of this version, cut short, too long or impossible

Clients are named by their position in the roster, u16, ascending wherever there are several; sets of them travel as
bitmaps, position 0 in the lowest bit. Numbers are little-endian. Byte 0 holds the version (high half) and the kind.
Which job and iteration a message belongs to is said by the request's address, and proved by what is sealed and signed.
The masked vector is no message of these: it is the upload's body.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, TypeVar

import numpy as np

from federated.secagg.shamir import SHARE_BYTES
from federated.secagg.stages import Stage

VERSION: Final = 1
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
DIGEST_BYTES: Final = 32
TAG_BYTES: Final = 16
COMMITMENT_BYTES: Final = 32
SEALED_BYTES: Final = 2 * SHARE_BYTES + 28  # both shares, the nonce and the tag
UNREADABLE: Final = b"\xff" * SHARE_BYTES  # stands for a share that could not be opened; no share is as large
MOST_NAME: Final = 256
MOST_POSITION: Final = 2**16 - 1

_PLAIN, _SIGNED = 2 * KEY_BYTES, 2 * KEY_BYTES + KEY_BYTES + 2 * SIGNATURE_BYTES
_COUNT: Final = struct.Struct("<H")
_ROSTER: Final = struct.Struct("<HHHH")  # clients, own position, listed, entries
_ENTRY: Final = struct.Struct("<HHB")  # position, the name's length, signed


class MessageRefused(ValueError):
    """Bytes that are no message of this version."""


@dataclass(frozen=True, slots=True)
class Advertisement:
    """A client's two public keys: ``sealing`` for its neighbours' shares, ``masking`` for the pairwise masks.

    Against a malicious server ``signing`` is its Ed25519 key, ``certificate`` the registrar's signature over that, and
    ``signature`` the client's over the two keys in this iteration; else they are empty.
    """

    KIND: ClassVar[int] = 1
    sealing: bytes
    masking: bytes
    signing: bytes = b""
    certificate: bytes = b""
    signature: bytes = b""

    def to_bytes(self) -> bytes:
        """65 bytes, or 225 when signed."""
        return _kind(self) + self.sealing + self.masking + self.signing + self.certificate + self.signature

    @staticmethod
    def read(rest: _Reader) -> Advertisement:
        """Raises MessageRefused."""
        sealing, masking = rest.take(KEY_BYTES), rest.take(KEY_BYTES)
        if rest.left == 0:
            return Advertisement(sealing, masking)
        return Advertisement(
            sealing, masking, rest.take(KEY_BYTES), rest.take(SIGNATURE_BYTES), rest.take(SIGNATURE_BYTES)
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The neighbours that a client chose to hold its shares."""

    KIND: ClassVar[int] = 2
    holders: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """3 bytes and 2 a neighbour."""
        return _kind(self) + _positions(self.holders)

    @staticmethod
    def read(rest: _Reader) -> Choice:
        """Raises MessageRefused."""
        return Choice(rest.positions())


@dataclass(frozen=True, slots=True)
class Sharing:
    """A client's shares, sealed for each of its holders in the order of their positions, and ``commitment`` to the seed
    of its own mask, by which a wrong share is found out."""

    KIND: ClassVar[int] = 3
    commitment: bytes
    sealed: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """35 bytes and 94 a holder."""
        return _kind(self) + self.commitment + _COUNT.pack(len(self.sealed)) + b"".join(self.sealed)

    @staticmethod
    def read(rest: _Reader) -> Sharing:
        """Raises MessageRefused."""
        return Sharing(rest.take(COMMITMENT_BYTES), rest.many(SEALED_BYTES))


@dataclass(frozen=True, slots=True)
class Consent:
    """A client's signature over who survived."""

    KIND: ClassVar[int] = 4
    signature: bytes

    def to_bytes(self) -> bytes:
        """65 bytes."""
        return _kind(self) + self.signature

    @staticmethod
    def read(rest: _Reader) -> Consent:
        """Raises MessageRefused."""
        return Consent(rest.take(SIGNATURE_BYTES))


@dataclass(frozen=True, slots=True)
class Unmasking:
    """One share of each client whose shares the sender holds, by position: of a survivor that of its own mask's seed,
    of a dropped one that of its masking key. Which, the set of survivors says, and nothing else. ``UNREADABLE`` stands
    for one that the sender could not open."""

    KIND: ClassVar[int] = 5
    shares: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """3 bytes and 33 a share."""
        return _kind(self) + _COUNT.pack(len(self.shares)) + b"".join(self.shares)

    @staticmethod
    def read(rest: _Reader) -> Unmasking:
        """Raises MessageRefused."""
        return Unmasking(rest.many(SHARE_BYTES))


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A client of the roster."""

    position: int
    name: str
    advertisement: Advertisement

    def to_bytes(self) -> bytes:
        """5 bytes, the name and the advertisement."""
        name = self.name.encode()
        body = self.advertisement.to_bytes()[1:]
        return _ENTRY.pack(self.position, len(name), len(body) == _SIGNED) + name + body

    @staticmethod
    def read(rest: _Reader) -> RosterEntry:
        """Raises MessageRefused."""
        position, letters, signed = _ENTRY.unpack(rest.take(_ENTRY.size))
        if not 1 <= letters <= MOST_NAME or signed > 1:
            raise MessageRefused(f"a name of {letters} bytes")
        try:
            name = rest.take(letters).decode()
        except UnicodeDecodeError:
            raise MessageRefused("a name is not UTF-8") from None
        inner = _Reader(rest.take(_SIGNED if signed else _PLAIN))
        return RosterEntry(position, name, Advertisement.read(inner))


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part: ``clients`` of them, the reader at ``position``.

    ``leaves`` are (tag, leaf) of every client, to which the server is bound before anybody chooses a neighbour (empty
    where ``entries`` lists them all); ``entries`` are those of the reader's neighbours, as far as they are known.
    """

    KIND: ClassVar[int] = 6
    clients: int
    position: int
    leaves: tuple[bytes, ...]
    entries: tuple[RosterEntry, ...]

    def to_bytes(self) -> bytes:
        """9 bytes, 48 a leaf, and the entries."""
        head = _ROSTER.pack(self.clients, self.position, len(self.leaves), len(self.entries))
        return b"".join((_kind(self), head, *self.leaves, *(entry.to_bytes() for entry in self.entries)))

    @staticmethod
    def moved(body: bytes, position: int) -> bytes:
        """The same roster for the reader at ``position``."""
        at = 1 + _COUNT.size
        return body[:at] + _COUNT.pack(position) + body[at + _COUNT.size :]

    @staticmethod
    def read(rest: _Reader) -> Roster:
        """Raises MessageRefused."""
        clients, position, listed, count = _ROSTER.unpack(rest.take(_ROSTER.size))
        if position >= clients or listed not in (0, clients) or count > clients:
            raise MessageRefused(
                f"{listed} leaves, {count} entries and position {position} of {clients} clients"
            )
        leaves = tuple(rest.take(TAG_BYTES + DIGEST_BYTES) for _ in range(listed))
        return Roster(clients, position, leaves, _entries(rest, count, clients))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The entries of those whom a client chose or who chose it; ``choosers`` are the latter."""

    KIND: ClassVar[int] = 7
    clients: int
    choosers: tuple[int, ...]
    entries: tuple[RosterEntry, ...]

    def to_bytes(self) -> bytes:
        """7 bytes, 2 a chooser, and the entries."""
        head = _COUNT.pack(self.clients) + _positions(self.choosers) + _COUNT.pack(len(self.entries))
        return b"".join((_kind(self), head, *(entry.to_bytes() for entry in self.entries)))

    @staticmethod
    def read(rest: _Reader) -> Neighbours:
        """Raises MessageRefused."""
        clients = rest.count()
        choosers = rest.positions()
        count = rest.count()
        if count > clients:
            raise MessageRefused(f"{count} entries of {clients} clients")
        return Neighbours(clients, choosers, _entries(rest, count, clients))


@dataclass(frozen=True, slots=True)
class Delivery:
    """Who shared, and what they sealed for the reader, by position."""

    KIND: ClassVar[int] = 8
    shared: bytes
    sealed: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """5 bytes, the bitmap and 94 a sealed pair of shares."""
        return b"".join((_kind(self), _short(self.shared), _COUNT.pack(len(self.sealed)), *self.sealed))

    @staticmethod
    def read(rest: _Reader) -> Delivery:
        """Raises MessageRefused."""
        return Delivery(rest.short(), rest.many(SEALED_BYTES))


@dataclass(frozen=True, slots=True)
class Survivors:
    """Whose masked vectors are in the sum."""

    KIND: ClassVar[int] = 9
    survivors: bytes

    def to_bytes(self) -> bytes:
        """3 bytes and the bitmap."""
        return _kind(self) + _short(self.survivors)

    @staticmethod
    def read(rest: _Reader) -> Survivors:
        """Raises MessageRefused."""
        return Survivors(rest.short())


@dataclass(frozen=True, slots=True)
class Signatures:
    """The holders' signatures over the survivors: (position, signature)."""

    KIND: ClassVar[int] = 10
    signatures: tuple[tuple[int, bytes], ...]

    def to_bytes(self) -> bytes:
        """3 bytes and 66 a signature."""
        parts = (_COUNT.pack(position) + signature for position, signature in self.signatures)
        return b"".join((_kind(self), _COUNT.pack(len(self.signatures)), *parts))

    @staticmethod
    def read(rest: _Reader) -> Signatures:
        """Raises MessageRefused."""
        parts = rest.many(_COUNT.size + SIGNATURE_BYTES)
        found = tuple((_COUNT.unpack_from(part)[0], part[_COUNT.size :]) for part in parts)
        _ascending([position for position, _ in found])
        return Signatures(found)


Message = (
    Advertisement
    | Choice
    | Sharing
    | Consent
    | Unmasking
    | Roster
    | Neighbours
    | Delivery
    | Survivors
    | Signatures
)
_KINDS: Final = {
    kind.KIND: kind
    for kind in (
        Advertisement, Choice, Sharing, Consent, Unmasking, Roster, Neighbours, Delivery, Survivors, Signatures,
    )
}  # fmt: skip
M = TypeVar("M", bound=Message)


def most_bytes(stage: Stage, clients: int) -> int:
    """The longest message of a client of ``clients`` for a stage."""
    count = 1 + _COUNT.size
    sizes = {
        Stage.ADVERTISE: 1 + _SIGNED,
        Stage.CHOOSE: count + _COUNT.size * clients,
        Stage.SHARE: count + COMMITMENT_BYTES + SEALED_BYTES * clients,
        Stage.CONSISTENT: 1 + SIGNATURE_BYTES,
        Stage.UNMASK: count + SHARE_BYTES * clients,
    }
    return sizes[stage]


def read_message(body: bytes) -> Message:
    """The message in ``body``. Allocates no more than a few times what ``body`` holds. Raises MessageRefused."""
    if not body:
        raise MessageRefused("a message of no bytes")
    if body[0] >> 4 != VERSION:
        raise MessageRefused(f"version {body[0] >> 4}, this side speaks {VERSION}")
    kind = _KINDS.get(body[0] & 15)
    if kind is None:
        raise MessageRefused(f"a message of unknown kind {body[0] & 15}")
    rest = _Reader(body, 1)
    message: Message = kind.read(rest)
    if rest.left:
        raise MessageRefused(f"{rest.left} bytes behind a message of kind {kind.__name__}")
    return message


def read_as(kind: type[M], body: bytes) -> M:
    """The message of this kind in ``body``. Raises MessageRefused."""
    message = read_message(body)
    if not isinstance(message, kind):
        raise MessageRefused(f"{type(message).__name__} where {kind.__name__} is due")
    return message


def bitmap(positions: Iterable[int], clients: int) -> bytes:
    """The set of ``positions`` among ``clients``."""
    bits = bytearray(-(-clients // 8))
    for position in positions:
        bits[position >> 3] |= 1 << (position & 7)
    return bytes(bits)


def everybody(clients: int) -> bytes:
    """The set of all ``clients``."""
    return ((1 << clients) - 1).to_bytes(-(-clients // 8), "little")


@lru_cache(maxsize=64)
def positions_of(bits: bytes, clients: int) -> tuple[int, ...]:
    """The positions in a bitmap, ascending. Raises MessageRefused for a bitmap of another number of clients."""
    if len(bits) != -(-clients // 8) or int.from_bytes(bits, "little") >> clients:
        raise MessageRefused(f"{len(bits)} bytes are no set among {clients} clients")
    places: list[int] = np.flatnonzero(
        np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    ).tolist()
    return tuple(places)


def is_member(bits: bytes, position: int) -> bool:
    """Whether ``position`` is in a bitmap."""
    return bool(bits[position >> 3] >> (position & 7) & 1)


def size_of(bits: bytes) -> int:
    """How many are in a bitmap."""
    return int.from_bytes(bits, "little").bit_count()


class _Reader:
    """Bytes from the front on; what is not there is refused."""

    def __init__(self, body: bytes, at: int = 0) -> None:
        self._body = body
        self._at = at

    @property
    def left(self) -> int:
        """Bytes not taken yet."""
        return len(self._body) - self._at

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        if length > self.left:
            raise MessageRefused(f"{length} bytes are said to follow, {self.left} do")
        self._at += length
        return self._body[self._at - length : self._at]

    def count(self) -> int:
        """A number of 16 bits."""
        value: int = _COUNT.unpack(self.take(_COUNT.size))[0]
        return value

    def many(self, size: int) -> tuple[bytes, ...]:
        """A count and as many parts of ``size`` bytes."""
        count = self.count()
        whole = self.take(count * size)
        return tuple(whole[at : at + size] for at in range(0, len(whole), size))

    def short(self) -> bytes:
        """A length and as many bytes."""
        return self.take(self.count())

    def positions(self) -> tuple[int, ...]:
        """Ascending positions."""
        found = tuple(_COUNT.unpack(part)[0] for part in self.many(_COUNT.size))
        _ascending(found)
        return found


def _kind(message: Message) -> bytes:
    return bytes((VERSION << 4 | message.KIND,))


def _short(body: bytes) -> bytes:
    return _COUNT.pack(len(body)) + body


def _positions(positions: Sequence[int]) -> bytes:
    return _COUNT.pack(len(positions)) + b"".join(_COUNT.pack(position) for position in positions)


def _ascending(positions: Sequence[int]) -> None:
    if any(one >= other for one, other in itertools.pairwise(positions)):
        raise MessageRefused("positions are not ascending")


def _entries(rest: _Reader, count: int, clients: int) -> tuple[RosterEntry, ...]:
    entries = tuple(RosterEntry.read(rest) for _ in range(count))
    _ascending([entry.position for entry in entries])
    if entries and entries[-1].position >= clients:
        raise MessageRefused(f"position {entries[-1].position} of {clients} clients")
    return entries
