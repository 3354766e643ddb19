"""A pseudo-random function whose key one side has and whose input the other: F(x) = h(x, H(x)^k).

Jarecki, Kiayias and Krawczyk (2014), on ristretto255: the asker sends H(x)^r, is answered H(x)^{rk}, takes r away. The
owner of k sees elements that look uniform. Decisional Diffie-Hellman (r is that of a whole chunk) and, against the
asker, one-more gap Diffie-Hellman; random oracles.
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
from federated.psi.terms import numbered, receive_numbered
from federated.vertical.parties import Draw, Effect, Incoming, PeerFault, Send, Workers, broadcast

_HASH: Final = b"function"


def owned(ids: Sequence[bytes], key: bytes, workers: Workers) -> Tags:
    """F of each of the owner's own ids: [N, 16]."""
    return _values(ids, hash_and_raise(ids, _HASH, key, workers))


def ask(
    peers: Sequence[str], number: int, ids: Sequence[bytes], draw: Draw, workers: Workers
) -> Generator[Effect, Incoming | None, dict[str, Tags]]:
    """F of ``ids``, chunk ``number`` of the asker's, under the key of each of ``peers``: [N, 16] by peer.

    All are asked at once and with one blinding, a new one for each chunk (Jarecki, Kiayias, Krawczyk and Xu 2017): what
    they see together still looks uniform. Raises PeerFault.
    """
    blinding = scalar(draw)
    asked = numbered(number, hash_and_raise(ids, _HASH, blinding, workers))
    yield from broadcast(peers, "psi.ask", asked)
    undo = inverse(blinding)
    found: dict[str, Tags] = {}
    for peer in peers:
        got = yield from receive_numbered(peer, "psi.answer", number, len(ids), ELEMENT_BYTES)
        try:
            elements = raise_all(got, undo, workers)
        except ElementRefused as why:
            raise PeerFault(peer, "element", str(why)) from None
        found[peer] = _values(ids, elements)
    return found


def answer(
    peer: str, number: int, rows: int, key: bytes, workers: Workers
) -> Generator[Effect, Incoming | None, None]:
    """The owner's side for the ``rows`` ids of the peer's chunk ``number``. Raises PeerFault."""
    asked = yield from receive_numbered(peer, "psi.ask", number, rows, ELEMENT_BYTES)
    try:
        answered = raise_all(asked, key, workers)
    except ElementRefused as why:
        raise PeerFault(peer, "element", str(why)) from None
    yield Send(peer, "psi.answer", numbered(number, answered))


def _values(ids: Sequence[bytes], elements: bytes) -> Tags:
    found = bytearray()
    for value, element in zip(ids, split(elements, ELEMENT_BYTES), strict=True):
        hashed = hashlib.sha256(b"headwater-psi-function" + len(value).to_bytes(2) + value + element)
        found += hashed.digest()[:HASH_BYTES]
    return np.frombuffer(bytes(found), np.uint8).reshape(-1, HASH_BYTES)
