"""Ids as a guest and one host name them to each other: a keyed hash that nobody else can make.

The key comes from the two parties' own keys (X25519, as CURVE uses them; HKDF), so nothing has to be agreed on. A host
finds its own rows by their tokens, and so learns which of *its* people are asked for; of others it sees a hash. It has
the key, too: a host could test guesses. Ids in the clear would tell it without a guess.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federated.psi.ids import IdRefused, IdRule
from services.rpc.security import KeyPair

TOKEN_BYTES: Final = 16
_INFO: Final = b"headwater vertical: names of ids between two parties, 1"


class Naming:
    """Names of ids between the party with ``keys`` and the one with the public key ``peer`` [32 bytes]."""

    def __init__(self, keys: KeyPair, peer: bytes, rule: IdRule) -> None:
        shared = X25519PrivateKey.from_private_bytes(keys.secret).exchange(
            X25519PublicKey.from_public_bytes(peer)
        )
        self._key = HKDF(SHA256(), 32, None, _INFO).derive(shared)
        self._rule = rule

    def of(self, text: str) -> bytes:
        """The name of an id [16 bytes]: of its normalised form. Raises IdRefused for a text that is no id."""
        return self.token(value_of(text, self._rule))

    def token(self, value: bytes) -> bytes:
        """The name of an id in its normalised form [16 bytes]."""
        return hmac.digest(self._key, value, hashlib.sha256)[:TOKEN_BYTES]

    def array(self, values: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """Names [N, 16] of ids in their normalised form."""
        joined = b"".join(map(self.token, values))
        return np.frombuffer(joined, np.uint8).reshape(len(values), TOKEN_BYTES)


def value_of(text: str, rule: IdRule) -> bytes:
    """The normalised form of an id. Raises IdRefused for a text that is none."""
    value = rule.apply(text)
    if not value:
        raise IdRefused("is empty")
    return value


def names_in(array: npt.NDArray[Any]) -> list[bytes]:
    """The rows of an array [N, 16] as bytes."""
    body = array.tobytes()
    return [body[at : at + TOKEN_BYTES] for at in range(0, len(body), TOKEN_BYTES)]
