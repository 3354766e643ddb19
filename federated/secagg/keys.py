"""Keys of secure aggregation: agreement (X25519), sealing (AES-256-GCM), signatures (Ed25519) and certificates.

Every agreed key, sealed message and signature is bound to a context that names purpose, job, iteration, sender and
receiver, so that nothing of another round, pair or direction opens or verifies anything.

    KeyRefused              something that a peer sent is not what it has to be
    ├─ SealRefused          a sealed message that this key, or this context, does not open
    ├─ SignatureRefused     a signature that is not of this key over this message
    └─ CertificateRefused   a certificate that the registrar did not sign, or of another job or client

The registrar vouches that a signing key belongs to a client. Whoever holds the registrar's key can enrol as many
clients as they like: a server that is its own registrar can fill a round with clients it plays itself, which is what
an assumed share of colluding clients then has to cover.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
SEAL_BYTES: Final = 28
MOST_CONTEXT_BYTES: Final = 4096

_NONCE_BYTES = 12
_CONTEXT = b"headwater-secagg-1"


class KeyRefused(ValueError):
    """Something that a peer sent is not what it has to be."""


class SealRefused(KeyRefused):
    """A sealed message that this key, or this context, does not open."""


class SignatureRefused(KeyRefused):
    """A signature that is not of this key over this message."""


class CertificateRefused(KeyRefused):
    """A certificate that the registrar did not sign, or of another job or client."""


def context(purpose: str, job: str, iteration: int, sender: str, receiver: str) -> bytes:
    """What a key, sealed message or signature is for; two that differ never give the same bytes.

    Raises ValueError for an iteration that is no 64-bit count, or more than 4096 bytes altogether.
    """
    if not 0 <= iteration < 2**64:
        raise ValueError(f"iteration {iteration}")
    return _encoded(
        [purpose.encode(), job.encode(), iteration.to_bytes(8), sender.encode(), receiver.encode()]
    )


def pair_context(purpose: str, job: str, iteration: int, one: str, other: str) -> bytes:
    """``context`` of what both sides must agree on: the same whichever of the two asks."""
    one, other = sorted((one, other))
    return context(purpose, job, iteration, one, other)


def derive(secret: bytes, salt: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF with SHA-256 (RFC 5869): ``length`` bytes. Raises ValueError for more than 255 hashes."""
    if not 1 <= length <= 255 * 32:
        raise ValueError(f"HKDF gives 1 to {255 * 32} bytes, not {length}")
    extracted = hmac.digest(salt or bytes(32), secret, hashlib.sha256)
    output, block = b"", b""
    for number in range(1, -(-length // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), hashlib.sha256)
        output += block
    return output[:length]


class AgreementKey:
    """An X25519 key made of a seed of 32 bytes, new without one. ``seed`` is what is shared by Shamir, ``public`` its
    public key of 32 bytes. Raises ValueError for a seed of another length."""

    __slots__ = ("_private", "public", "seed")

    def __init__(self, seed: bytes | None = None) -> None:
        self.seed = _seed(seed)
        self._private = X25519PrivateKey.from_private_bytes(self.seed)
        self.public = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"AgreementKey(public={self.public.hex()})"

    def agree(self, peer_public: bytes, context: bytes) -> bytes:
        """The 32 bytes that only the two sides know, for this context and these two public keys.

        Raises KeyRefused for bytes that are no key, and for a point of small order, with which everybody would know
        the result.
        """
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError:  # what `cryptography` raises for a wrong length and for an all-zero result
            raise KeyRefused("the peer's public key is no point of large order") from None
        # Both public keys enter, so that a public key which gives the same secret gives another result.
        return derive(secret, b"".join(sorted((self.public, peer_public))), context)


def seal(key: bytes, plain: bytes, associated: bytes) -> bytes:
    """``plain`` encrypted, and authenticated together with ``associated``: 28 bytes longer.

    The nonce is random: a device that starts again and seals anew under the same key does not repeat one.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plain, associated)


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """The plain text. Raises SealRefused unless ``seal`` made it with this key and this ``associated``."""
    if len(sealed) < SEAL_BYTES:
        raise SealRefused(f"{len(sealed)} bytes are no sealed message")
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], associated)
    except InvalidTag:
        raise SealRefused("a sealed message of another key or context, or a changed one") from None


class SigningKey:
    """An Ed25519 key made of a seed of 32 bytes, new without one; ``public`` is its public key of 32 bytes. Raises
    ValueError for a seed of another length."""

    __slots__ = ("_private", "public", "seed")

    def __init__(self, seed: bytes | None = None) -> None:
        self.seed = _seed(seed)
        self._private = Ed25519PrivateKey.from_private_bytes(self.seed)
        self.public = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()})"

    def sign(self, message: bytes) -> bytes:
        """The signature of 64 bytes. ``message`` begins with its ``context``."""
        return self._private.sign(message)


def verify(public: bytes, message: bytes, signature: bytes) -> None:
    """Raises SignatureRefused unless the owner of ``public`` signed ``message``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):  # ValueError: bytes that are no key
        raise SignatureRefused("not a signature of this key over this message") from None


@dataclass(frozen=True, slots=True)
class Certificate:
    """The registrar's word that ``client`` signs with ``public`` (32 bytes) in ``job``."""

    job: str
    client: str
    public: bytes
    signature: bytes

    def check(self, registrar: bytes, job: str, client: str) -> None:
        """Raises CertificateRefused unless the registrar with this public key signed it for this job and client."""
        if (self.job, self.client) != (job, client):
            raise CertificateRefused(
                f"a certificate of {self.client} in {self.job}, not of {client} in {job}"
            )
        try:
            verify(registrar, _certified(job, client, self.public), self.signature)
        except SignatureRefused:
            raise CertificateRefused(f"the registrar did not sign the certificate of {client}") from None


class Registrar:
    """Who certifies at enrolment; every client knows its public key of 32 bytes beforehand. New without a seed."""

    __slots__ = ("_key", "public")

    def __init__(self, seed: bytes | None = None) -> None:
        self._key = SigningKey(seed)
        self.public = self._key.public

    def __repr__(self) -> str:
        return f"Registrar(public={self.public.hex()})"

    def certify(self, job: str, client: str, public: bytes) -> Certificate:
        """The certificate of a client's signing key. Raises KeyRefused for a key of another length than 32 bytes."""
        if len(public) != KEY_BYTES:
            raise KeyRefused(f"a public key has {KEY_BYTES} bytes, not {len(public)}")
        return Certificate(job, client, public, self._key.sign(_certified(job, client, public)))


def _certified(job: str, client: str, public: bytes) -> bytes:
    return _encoded([b"certificate", job.encode(), client.encode(), public])


def _encoded(fields: list[bytes]) -> bytes:
    """Each field behind its length, so that no two lists give the same bytes."""
    if sum(map(len, fields)) > MOST_CONTEXT_BYTES:
        raise ValueError(f"names of more than {MOST_CONTEXT_BYTES} bytes")
    return _CONTEXT + b"".join(len(field).to_bytes(2) + field for field in fields)


def _seed(seed: bytes | None) -> bytes:
    seed = os.urandom(KEY_BYTES) if seed is None else seed
    if len(seed) != KEY_BYTES:
        raise ValueError(f"a key is made of {KEY_BYTES} bytes, not {len(seed)}")
    return seed
