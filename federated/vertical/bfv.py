"""BFV over Microsoft SEAL: a ring's parameters, and what only the holder of a key can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import stored
from federated.vertical.parties import PeerFault

Ints = npt.NDArray[np.int64]
Read = Callable[[bytes, str], sealapi.Ciphertext]
"""Reads what a sender (named) sent. Raises PeerFault."""


def ring_of(slots: int, plain: int, primes: Sequence[sealapi.Modulus]) -> sealapi.SEALContext:
    """Parameters of 128 bits of security by SEAL's tables: numbers modulo ``plain`` in so many ``slots``. Raises
    ValueError for parameters of less."""
    chosen = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.BFV)
    chosen.set_poly_modulus_degree(slots)
    chosen.set_coeff_modulus(list(primes))
    chosen.set_plain_modulus(sealapi.Modulus(plain))
    made = sealapi.SEALContext(chosen, True, sealapi.SEC_LEVEL_TYPE.TC128)
    if not made.parameters_set():
        raise ValueError(made.parameters_error_message())
    return made


class KeyHolder:
    """A fresh key of ``context``. ``read``: of answers."""

    def __init__(self, context: sealapi.SEALContext, read: Read) -> None:
        generator = sealapi.KeyGenerator(context)
        secret, public = generator.secret_key(), sealapi.PublicKey()
        generator.create_public_key(public)
        self.public = stored(public)
        self._read = read
        self._encryptor = sealapi.Encryptor(context, secret)
        self._decryptor = sealapi.Decryptor(context, secret)
        self._encoder = sealapi.BatchEncoder(context)

    def encrypt(self, slots: Ints) -> list[bytes]:
        """A ciphertext for each row of ``slots`` [m, SLOTS], whole numbers of the ring."""
        plain, cipher = sealapi.Plaintext(), sealapi.Ciphertext()
        found: list[bytes] = []
        for row in slots:
            self._encoder.encode(row.tolist(), plain)
            self._encryptor.encrypt_symmetric(plain, cipher)
            found.append(stored(cipher))
        return found

    def decrypt(self, blobs: Sequence[bytes], sender: str) -> Ints:
        """The slots [m, SLOTS] of ``sender``'s answers. Raises PeerFault for anything else, or too noisy ones."""
        plain = sealapi.Plaintext()
        found = np.empty((len(blobs), self._encoder.slot_count()), np.int64)
        for place, blob in enumerate(blobs):
            cipher = self._read(blob, sender)
            if self._decryptor.invariant_noise_budget(cipher) <= 0:
                raise PeerFault(sender, "ciphertext", "it cannot be decrypted under this key")
            self._decryptor.decrypt(cipher, plain)
            found[place] = self._encoder.decode_uint64(plain)
        return found

    def budget(self, answer: bytes) -> int:
        """Bits of noise that ``answer`` could still take."""
        return self._decryptor.invariant_noise_budget(self._read(answer, "this party"))
