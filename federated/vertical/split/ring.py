"""Encrypted whole numbers modulo PLAIN, multiplied by numbers of one's own: BFV over Microsoft SEAL.

All is exact: a slot decrypts to the number modulo PLAIN and to nothing else, a mask drawn evenly from [0, PLAIN) hides
it perfectly, and shares of a number modulo PLAIN are each evenly spread. CKKS has neither, and every decryption it
returns tells of the key (Li and Micciancio 2021).

What goes back to the key's holder (``Hider.hidden``) gets the mask and

- Enc(0) * (r1 + 2^FLOOD * r2): a fresh encryption of zero times two plaintexts drawn evenly. Without it the holder, who
  knows what it sent, divides the second polynomial by its own and reads what it was multiplied by; and the errors that
  decryption rounds away, its own times that polynomial, tell it too. Here the errors of r2's term are about 2^FLOOD
  times as large as those they cover, and r1's fill the gaps between its steps.

Measured by the noise budget: of 118 bits a product leaves 62, and with that term at least LEAST_BUDGET. That the term
covers the errors is a heuristic by sizes of coefficients, no proof, as ``histograms.sealed`` explains for its own; it
holds against a holder who follows the protocol, since the term is made with the holder's public key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical import bfv
from federated.vertical.bfv import ring_of
from federated.vertical.ckks import restored, stored
from federated.vertical.parties import Draw, PeerFault

SLOTS: Final = 8_192
"""The degree of the ring."""
PLAIN: Final = 18_014_398_508_400_641
"""A prime of 54 bits that is 1 modulo 2 * SLOTS, so that there are slots."""
HALF: Final = (PLAIN - 1) // 2
FLOOD: Final = 44
PRIMES: Final = (60, 60, 60, 38)
"""218 bits, which for this degree is 128 bits of security by SEAL's tables. The last is for keys alone."""
MOST_CIPHERTEXT: Final = 2 * 3 * SLOTS * 8 + 4_096
"""Bytes of a fresh ciphertext at most: two polynomials, three primes."""
MOST_KEY: Final = 2 * 4 * SLOTS * 8 + 4_096
LEAST_BUDGET: Final = 8
_LIMB: Final = 18

Ints = npt.NDArray[np.int64]


@lru_cache(maxsize=1)
def context() -> sealapi.SEALContext:
    """The parameters, the same at every party. A peer has no say in them."""
    return ring_of(SLOTS, PLAIN, sealapi.CoeffModulus.Create(SLOTS, list(PRIMES)))


def uniform(draw: Draw, count: int) -> Ints:
    """``count`` numbers, each of [0, PLAIN) equally likely."""
    found = np.empty(0, np.int64)
    while len(found) < count:
        # 54 of 64 bits; one in 2^34 is too large and drawn again.
        drawn = np.frombuffer(draw(8 * count), "<u8") >> np.uint64(10)
        found = np.concatenate([found, drawn[drawn < PLAIN].astype(np.int64)])
    return found[:count]


def centred(numbers: Ints) -> Ints:
    """``numbers`` of [0, PLAIN) as those between -HALF and HALF."""
    found: Ints = np.where(numbers > HALF, numbers - PLAIN, numbers)
    return found


def product(narrow: Ints, wide: Ints) -> Ints:
    """The matrix product [n, p], modulo PLAIN, of ``narrow`` [n, m], within plus and minus 2^20, and ``wide`` [m, p] of
    [0, PLAIN); m at most 2^24."""
    total: npt.NDArray[np.object_] = np.zeros((len(narrow), wide.shape[1]), object)
    # In limbs: 20 + 18 + 24 bits fit an int64.
    for shift in range(0, PLAIN.bit_length(), _LIMB):
        limb = (wide >> shift) & (2**_LIMB - 1)
        total += (narrow @ limb).astype(object) << shift
    return np.asarray(total % PLAIN, np.int64)


def summed(numbers: Ints, axis: int) -> Ints:
    """Sums modulo PLAIN of numbers of [0, PLAIN) along ``axis``, which is not empty."""
    while numbers.shape[axis] > 1:
        # 256 numbers of 54 bits fit an int64.
        starts = np.arange(0, numbers.shape[axis], 256)
        numbers = np.add.reduceat(numbers, starts, axis=axis) % PLAIN
    return numbers.squeeze(axis)


class KeyHolder(bfv.KeyHolder):
    """A fresh key, and what only its holder can do: ``decrypt`` what a ``Hider`` made."""

    def __init__(self) -> None:
        super().__init__(context(), _read_answer)


class Hider:
    """Multiplies what ``holder`` encrypted, for the holder to decrypt. ``key``: its public key. Raises PeerFault."""

    def __init__(self, key: bytes, holder: str, draw: Draw) -> None:
        self._holder, self._draw = holder, draw
        public = restored(sealapi.PublicKey, context(), key, holder, MOST_KEY)
        self._encryptor = sealapi.Encryptor(context(), public)
        self._encoder, self._evaluator = sealapi.BatchEncoder(context()), sealapi.Evaluator(context())
        self._flood = sealapi.Plaintext(f"{2**FLOOD:x}")
        self._evaluator.transform_to_ntt_inplace(self._flood, context().first_parms_id())

    def read(self, blob: bytes) -> sealapi.Ciphertext:
        """What ``KeyHolder.encrypt`` made, ready to be multiplied. Raises PeerFault."""
        found = _read(blob, self._holder, answered=False)
        # Transformed once, a multiplication takes a ninth of its time.
        self._evaluator.transform_to_ntt_inplace(found)
        return found

    def hidden(self, cipher: sealapi.Ciphertext, factors: Ints, masks: Ints) -> bytes:
        """``cipher`` times ``factors`` plus ``masks``, both [SLOTS] of [0, PLAIN), and nothing that tells more."""
        evaluator, total = self._evaluator, self.product(cipher, factors)
        evaluator.transform_from_ntt_inplace(total)
        plain = sealapi.Plaintext()
        self._encoder.encode(masks.tolist(), plain)
        evaluator.add_plain_inplace(total, plain)
        # With one prime fewer it takes two thirds of the bytes, and errors shrink alike.
        evaluator.mod_switch_to_next_inplace(total)
        return stored(total)

    def product(self, cipher: sealapi.Ciphertext, factors: Ints) -> sealapi.Ciphertext:
        """``cipher`` times ``factors`` [SLOTS], covered but not masked; transformed."""
        total = self._cover()
        if factors.any():
            # A product with zero would not be encrypted, and SEAL refuses it; zero is what it would add.
            term = sealapi.Ciphertext()
            self._evaluator.multiply_plain(cipher, self._encoded(factors), term)
            self._evaluator.add_inplace(total, term)
        return total

    def _cover(self) -> sealapi.Ciphertext:
        """Enc(0) * (r1 + 2^FLOOD * r2), transformed."""
        evaluator, fine, coarse = self._evaluator, sealapi.Ciphertext(), sealapi.Ciphertext()
        self._encryptor.encrypt_zero(fine)
        evaluator.transform_to_ntt_inplace(fine)
        evaluator.multiply_plain(fine, self._encoded(uniform(self._draw, SLOTS)), coarse)
        evaluator.multiply_plain_inplace(coarse, self._flood)
        evaluator.multiply_plain_inplace(fine, self._encoded(uniform(self._draw, SLOTS)))
        evaluator.add_inplace(fine, coarse)
        return fine

    def _encoded(self, slots: Ints) -> sealapi.Plaintext:
        found = sealapi.Plaintext()
        self._encoder.encode(slots.tolist(), found)
        self._evaluator.transform_to_ntt_inplace(found, context().first_parms_id())
        return found


def _read_answer(blob: bytes, sender: str) -> sealapi.Ciphertext:
    return _read(blob, sender, answered=True)


def _read(blob: bytes, sender: str, answered: bool) -> sealapi.Ciphertext:
    """A ciphertext of two polynomials at the level of fresh ones, or of answers. Raises PeerFault."""
    found = restored(sealapi.Ciphertext, context(), blob, sender, MOST_CIPHERTEXT)
    level = _level(answered)
    if found.size() != 2 or found.is_ntt_form() or list(found.parms_id()) != level or found.is_transparent():
        raise PeerFault(sender, "ciphertext", "not of the form that it has here")
    return found


@lru_cache(maxsize=2)
def _level(answered: bool) -> list[int]:
    data = context().first_context_data()
    if answered:
        below = data.next_context_data()
        assert below is not None
        data = below
    return list(data.parms_id())
