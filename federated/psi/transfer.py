"""Base oblivious transfers on ristretto255: the chooser gets one of two random keys, the other side knows both.

Masny and Rindal, "Endemic Oblivious Transfer" (CCS 2019), from Diffie-Hellman: one message each way, secure against
malicious parties in the random oracle model. For choice c the chooser sends (r_0, r_1) with r_{1−c} a random element
and r_c = g^a / H_c(r_{1−c}); the other side answers g^b, a fresh b for each transfer; the keys are
H((r_i · H_i(r_{1−i}))^b), of which the chooser knows H((g^b)^a).
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import Final

from federated.psi.group import (
    ELEMENT_BYTES,
    ElementRefused,
    base_raised,
    hashed,
    product,
    quotient,
    raised,
    scalar,
)
from federated.psi.hashing import split
from federated.vertical.parties import Draw, Effect, Incoming, PeerFault, Send, receive

KEY_BYTES: Final = 32


def choose(
    peer: str, session: bytes, choices: list[int], draw: Draw
) -> Generator[Effect, Incoming | None, list[bytes]]:
    """The key of each choice (0 or 1). Raises PeerFault."""
    exponents: list[bytes] = []
    asked: list[bytes] = []
    for at, choice in enumerate(choices):
        other = hashed(b"ot-random", draw(64))
        exponent = scalar(draw)
        chosen = quotient(base_raised(exponent), _mask(session, at, choice, other))
        asked += [other, chosen] if choice else [chosen, other]
        exponents.append(exponent)
    yield Send(peer, "psi.ot.choices", b"".join(asked))
    replies = _elements(peer, (yield from receive(peer, "psi.ot.reply")), len(choices))
    try:
        return [
            _key(session, at, choice, raised(reply, exponent))
            for at, (choice, reply, exponent) in enumerate(zip(choices, replies, exponents, strict=True))
        ]
    except ElementRefused as why:
        raise PeerFault(peer, "element", str(why)) from None


def offer(
    peer: str, session: bytes, count: int, draw: Draw
) -> Generator[Effect, Incoming | None, list[tuple[bytes, bytes]]]:
    """Both keys of each of ``count`` transfers. Raises PeerFault."""
    asked = _elements(peer, (yield from receive(peer, "psi.ot.choices")), 2 * count)
    keys: list[tuple[bytes, bytes]] = []
    replies: list[bytes] = []
    for at in range(count):
        pair = asked[2 * at : 2 * at + 2]
        exponent = scalar(draw)
        try:
            zero, one = (
                _key(
                    session,
                    at,
                    side,
                    raised(product(pair[side], _mask(session, at, side, pair[1 - side])), exponent),
                )
                for side in (0, 1)
            )
        except ElementRefused as why:
            raise PeerFault(peer, "element", str(why)) from None
        keys.append((zero, one))
        replies.append(base_raised(exponent))
    yield Send(peer, "psi.ot.reply", b"".join(replies))
    return keys


def _elements(peer: str, body: bytes, count: int) -> list[bytes]:
    if len(body) != count * ELEMENT_BYTES:
        raise PeerFault(peer, "count", f"{len(body)} bytes are not {count} elements")
    return split(body, ELEMENT_BYTES)


def _mask(session: bytes, at: int, side: int, element: bytes) -> bytes:
    return hashed(b"ot-mask", session + at.to_bytes(2) + bytes((side,)) + element)


def _key(session: bytes, at: int, side: int, shared: bytes) -> bytes:
    return hashlib.sha256(b"headwater-psi-ot" + session + at.to_bytes(2) + bytes((side,)) + shared).digest()
