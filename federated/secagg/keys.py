"""Keys of secure aggregation: agreement (X25519), sealing (AES-256-GCM), signatures (Ed25519) and certificates.

KeyRefused              something that a peer sent is not what it has to be
├─ SealRefused          a sealed message that this key, or this context, does not open
├─ SignatureRefused     a signature that is not of this key over this message
└─ CertificateRefused   a certificate that the registrar did not sign, or of another job
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
SEAL_BYTES: Final = 28


class KeyRefused(ValueError):
    """Something that a peer sent is not what it has to be."""


class SealRefused(KeyRefused):
    """A sealed message that this key, or this context, does not open."""


class SignatureRefused(KeyRefused):
    """A signature that is not of this key over this message."""


class CertificateRefused(KeyRefused):
    """A certificate that the registrar did not sign, or of another job or client."""


def context(purpose: str, job: str, iteration: int, sender: str, receiver: str) -> bytes:
    """What a key or sealed message is for; no two differing ones give the same bytes."""
    raise NotImplementedError


def pair_context(purpose: str, job: str, iteration: int, one: str, other: str) -> bytes:
    """``context`` of what both sides must agree on: the same whichever of the two asks."""
    one, other = sorted((one, other))
    return context(purpose, job, iteration, one, other)


class AgreementKey:
    """An X25519 key made of a seed of 32 bytes (``seed``: what is shared by Shamir), new with ``AgreementKey()``."""

    def __init__(self, seed: bytes | None = None) -> None:
        raise NotImplementedError

    @property
    def public(self) -> bytes:
        """32 bytes."""
        raise NotImplementedError

    def agree(self, peer_public: bytes, context: bytes) -> bytes:
        """The 32 bytes that only the two sides know, for this context and these two keys. Raises KeyRefused for a point
        of small order, with which the result would be known to everybody."""
        raise NotImplementedError


def seal(key: bytes, plain: bytes, associated: bytes) -> bytes:
    """``plain`` encrypted and authenticated together with ``associated``: 28 bytes longer."""
    raise NotImplementedError


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """The plain text. Raises SealRefused unless ``seal`` made it with this key and this ``associated``."""
    raise NotImplementedError


class SigningKey:
    """An Ed25519 key made of a seed of 32 bytes, new with ``SigningKey()``."""

    def __init__(self, seed: bytes | None = None) -> None:
        raise NotImplementedError

    @property
    def public(self) -> bytes:
        """32 bytes."""
        raise NotImplementedError

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        raise NotImplementedError


def verify(public: bytes, message: bytes, signature: bytes) -> None:
    """Raises SignatureRefused unless ``public``'s owner signed ``message``."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Certificate:
    """The registrar's word that ``client`` signs with ``public`` in ``job``."""

    job: str
    client: str
    public: bytes
    signature: bytes

    def check(self, registrar: bytes, job: str, client: str) -> None:
        """Raises CertificateRefused unless the registrar with this public key signed it for this job and client."""
        raise NotImplementedError


class Registrar:
    """Who certifies at enrolment; its public key is known to every client beforehand."""

    def __init__(self, seed: bytes | None = None) -> None:
        raise NotImplementedError

    @property
    def public(self) -> bytes:
        """32 bytes."""
        raise NotImplementedError

    def certify(self, job: str, client: str, public: bytes) -> Certificate:
        """The certificate of a client's signing key."""
        raise NotImplementedError
