"""A pseudo-random function whose key one side has and whose input the other: F(x) = h(x, H(x)^k).

Jarecki, Kiayias and Krawczyk (2014), on ristretto255: the asker sends H(x)^r, is answered H(x)^{rk}, takes r away. The
owner of k sees a uniform element. One-more gap Diffie-Hellman, random oracles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import Final

import numpy as np

from federated.psi.filters import HASH_BYTES
from federated.psi.group import (
    ELEMENT_BYTES,
    ElementRefused,
    hash_and_raise,
    inverse,
    raise_all,
    scalar,
)
from federated.psi.hashing import Tags, split
from federated.psi.terms import chunks, numbered, receive_numbered, rows_of
from federated.vertical.parties import Draw, Effect, Incoming, PeerFault, Progress, Send, Workers

_HASH: Final = b"function"


def owned(ids: Sequence[bytes], key: bytes, workers: Workers) -> Tags:
    """F of each of the owner's own ids: [N, 16]."""
    return _values(ids, hash_and_raise(ids, _HASH, key, workers))


def ask(
    peer: str, ids: Sequence[bytes], chunk: int, draw: Draw, workers: Workers
) -> Generator[Effect, Incoming | None, Tags]:
    """F of ``ids`` under the peer's key: [N, 16]. A new blinding for each chunk. Raises PeerFault."""
    found: list[Tags] = [np.empty((0, HASH_BYTES), np.uint8)]
    total = chunks(len(ids), chunk)
    for number in range(total):
        part = ids[number * chunk : (number + 1) * chunk]
        blinding = scalar(draw)
        yield Send(peer, "psi.ask", numbered(number, hash_and_raise(part, _HASH, blinding, workers)))
        got = yield from receive_numbered(peer, "psi.answer", number, len(part), ELEMENT_BYTES)
        try:
            elements = raise_all(got, inverse(blinding), workers)
        except ElementRefused as why:
            raise PeerFault(peer, "element", str(why)) from None
        found.append(_values(part, elements))
        yield Progress(number + 1, total, "chunks asked")
    return np.concatenate(found)


def answer(
    peer: str, count: int, chunk: int, key: bytes, workers: Workers
) -> Generator[Effect, Incoming | None, None]:
    """The owner's side for ``count`` ids of the peer. Raises PeerFault."""
    total = chunks(count, chunk)
    for number in range(total):
        asked = yield from receive_numbered(
            peer, "psi.ask", number, rows_of(count, chunk, number), ELEMENT_BYTES
        )
        try:
            answered = raise_all(asked, key, workers)
        except ElementRefused as why:
            raise PeerFault(peer, "element", str(why)) from None
        yield Send(peer, "psi.answer", numbered(number, answered))
        yield Progress(number + 1, total, "chunks answered")


def _values(ids: Sequence[bytes], elements: bytes) -> Tags:
    found = bytearray()
    for value, element in zip(ids, split(elements, ELEMENT_BYTES), strict=True):
        hashed = hashlib.sha256(b"headwater-psi-function" + len(value).to_bytes(2) + value + element)
        found += hashed.digest()[:HASH_BYTES]
    return np.frombuffer(bytes(found), np.uint8).reshape(-1, HASH_BYTES)
