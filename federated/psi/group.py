"""The group of the Diffie-Hellman protocols: ristretto255 (RFC 9496), by libsodium.

Why this one: its order is prime, so there are no points of small order and no cofactor to clear (X25519 has both, and
its ladder gives one coordinate of twist points too); every element has exactly one encoding, so that equal elements
are equal bytes; hashing to it is uniform and specified; libsodium's multiplication takes the same time for every
scalar (that of coincurve, secp256k1's, takes it for secret keys only). Assumption: decisional Diffie-Hellman with one
more exponent (one-more gap DH where a peer chooses what is raised), hashes as random oracles.

An element is 32 bytes. Every element of a peer is checked before it is used: libsodium refuses encodings that are not
canonical and the identity, which all elements would be mapped to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import rbcl

from federated.psi.hashing import split
from federated.vertical.parties import Draw, Workers

ELEMENT_BYTES: Final = 32
SCALAR_BYTES: Final = 32
_HASHED: Final = b"headwater-psi-ristretto255-1"
_SHARE: Final = 1_024  # Elements that a worker takes at once: about 50 ms.
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493


class ElementRefused(ValueError):
    """Bytes of a peer that are no element, or the identity."""


def scalar(draw: Draw) -> bytes:
    """A uniform exponent other than 0: 512 random bits modulo the order."""
    while True:
        found: bytes = rbcl.crypto_core_ristretto255_scalar_reduce(draw(64))
        if any(found):
            return found


def check_scalar(secret: bytes) -> bytes:
    """``secret`` if it is a canonical exponent other than 0. Raises ValueError."""
    if len(secret) != SCALAR_BYTES or not 0 < int.from_bytes(secret, "little") < _ORDER:
        raise ValueError("a secret exponent is 32 bytes, below the group's order and not 0")
    return secret


def inverse(secret: bytes) -> bytes:
    """The exponent that undoes ``secret``."""
    found: bytes = rbcl.crypto_core_ristretto255_scalar_invert(secret)
    return found


def hashed(purpose: bytes, value: bytes) -> bytes:
    """A uniform element of which nobody knows the logarithm, by SHA-512 and the map of RFC 9496."""
    digest = hashlib.sha512(_HASHED + len(purpose).to_bytes(1) + purpose + value).digest()
    found: bytes = rbcl.crypto_core_ristretto255_from_hash(digest)
    return found


def raised(element: bytes, secret: bytes) -> bytes:
    """``element`` to the power of ``secret``. Raises ElementRefused."""
    if len(element) != ELEMENT_BYTES:
        raise ElementRefused(f"an element has {ELEMENT_BYTES} bytes, not {len(element)}")
    try:
        found: bytes = rbcl.crypto_scalarmult_ristretto255(secret, element)
    except RuntimeError:  # what rbcl raises for a wrong encoding, and where the result is the identity
        raise ElementRefused("no element of the group, or its identity") from None
    return found


def base_raised(secret: bytes) -> bytes:
    """The generator to the power of ``secret``."""
    found: bytes = rbcl.crypto_scalarmult_ristretto255_base(secret)
    return found


def product(one: bytes, other: bytes) -> bytes:
    """The group's operation. Raises ElementRefused, for the identity too."""
    return _combined(rbcl.crypto_core_ristretto255_add, one, other)


def quotient(one: bytes, other: bytes) -> bytes:
    """``one`` times the inverse of ``other``. Raises ElementRefused."""
    return _combined(rbcl.crypto_core_ristretto255_sub, one, other)


def _combined(operation: Callable[[bytes, bytes], Any], one: bytes, other: bytes) -> bytes:
    # rbcl ignores what libsodium returns here, so that both are checked beforehand; the identity would be valid.
    for element in (one, other):
        if (
            len(element) != ELEMENT_BYTES
            or not any(element)
            or not rbcl.crypto_core_ristretto255_is_valid_point(element)
        ):
            raise ElementRefused("no element of the group, or its identity")
    found: bytes = operation(one, other)
    return found


def hash_and_raise(values: Sequence[bytes], purpose: bytes, secret: bytes, workers: Workers) -> bytes:
    """H(value)^secret of each, as one run of bytes 32·N."""
    shares = [(purpose, secret, list(values[at : at + _SHARE])) for at in range(0, len(values), _SHARE)]
    return b"".join(workers.map(_hash_and_raise, shares))


def raise_all(elements: bytes, secret: bytes, workers: Workers) -> bytes:
    """Each element of 32·N bytes to the power of ``secret``. Raises ElementRefused."""
    if len(elements) % ELEMENT_BYTES:
        raise ElementRefused(f"{len(elements)} bytes are not elements of {ELEMENT_BYTES}")
    size = _SHARE * ELEMENT_BYTES
    shares = [(secret, elements[at : at + size]) for at in range(0, len(elements), size)]
    return b"".join(workers.map(_raise_all, shares))


def _hash_and_raise(share: tuple[bytes, bytes, Iterable[bytes]]) -> bytes:
    purpose, secret, values = share
    return b"".join([raised(hashed(purpose, value), secret) for value in values])


def _raise_all(share: tuple[bytes, bytes]) -> bytes:
    secret, elements = share
    return b"".join([raised(element, secret) for element in split(elements, ELEMENT_BYTES)])
