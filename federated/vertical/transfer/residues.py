"""Masks that are uniform over the whole modulus, and sums of slots that take them off exactly.

CKKS's decoded slots cannot carry a uniform mask, but the ring can. A plaintext is a polynomial modulo q = Π q_i, in
SEAL's NTT form one number modulo each q_i for each of the N odd powers of a root. A mask is N uniform numbers modulo
each q_i: who decrypts ciphertext plus mask holds a uniform polynomial, whatever was encrypted and however large it is.

Sums of slots commute with that. The powers ±3^j of the root belong to slot j, and to its conjugate; the sum of all
powers whose j are alike modulo ``period`` is the trace to a subring, modulo q as exact as the rest: the trace of a
masked polynomial less the trace of its mask is the trace of the polynomial, which decodes to twice the sums of slots.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import FLOOR, Scheme, restored, stored
from federated.vertical.parties import Draw

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.uint64]

# SEAL's header of a stored object: magic, its own length, version, compression, reserved, bytes in all.
_HEADER: Final = struct.Struct("<HBBBBHQ")
_MAGIC: Final = 0xA15E
_PLAIN: Final = 0


class Residues:
    """Of plaintexts at the floor, their slots summed modulo ``period``, a power of two."""

    def __init__(self, scheme: Scheme, period: int) -> None:
        degree = scheme.parameters.degree
        self.scheme, self.period = scheme, period
        self.primes: Numbers = np.array(scheme.primes[:FLOOR], np.uint64)[:, None]
        self._degree = degree
        # SEAL keeps the power 2·reverse(i) + 1 of the root at place i.
        places = np.arange(degree)
        reverse = np.zeros_like(places)
        for bit in range(degree.bit_length() - 1):
            reverse = (reverse << 1) | ((places >> bit) & 1)
        slot = np.empty(2 * degree, np.int64)
        power = 1
        for number in range(degree // 2):
            slot[[power, 2 * degree - power]] = number
            power = 3 * power % (2 * degree)
        self._alike = np.argsort(slot[2 * reverse + 1] % period, kind="stable").reshape(period, -1)
        head = _HEADER.unpack(stored(scheme.encode(0.0, FLOOR, 1.0))[: _HEADER.size])
        self._version = head[2:4]

    def uniform(self, draw: Draw) -> Numbers:
        """A mask [FLOOR, N]."""
        found = np.empty((FLOOR, self._degree), np.uint64)
        for row, prime in zip(found, self.primes[:, 0], strict=True):
            wrong = np.ones(self._degree, np.bool_)
            # What reaches the prime is drawn again: a remainder would not be uniform.
            while count := int(wrong.sum()):
                row[wrong] = np.frombuffer(draw(8 * count), np.uint64) >> np.uint64(
                    64 - int(prime).bit_length()
                )
                wrong = row >= prime
        return found

    def of(self, plain: sealapi.Plaintext) -> Numbers:
        """[FLOOR, N] of a plaintext at the floor."""
        count = FLOOR * self._degree
        if plain.coeff_count() != count:
            raise ValueError(f"a plaintext of {plain.coeff_count()} numbers, expected {count}")
        read = plain.data
        return np.fromiter((read(at) for at in range(count)), np.uint64, count).reshape(FLOOR, -1)

    def plain(self, numbers: Numbers, scale: float) -> sealapi.Plaintext:
        """The plaintext of ``numbers`` [FLOOR, N]."""
        data = struct.pack("<Q", numbers.size) + np.ascontiguousarray(numbers, "<u8").tobytes()
        inside = struct.pack("<4Qqd", *self.scheme.id_of(FLOOR), numbers.size, scale) + self._framed(data)
        body = self._framed(inside)
        return restored(sealapi.Plaintext, self.scheme.context, body, "a mask", len(body))

    def trace(self, numbers: Numbers) -> Numbers:
        """[FLOOR, period] of ``numbers`` [FLOOR, N]."""
        found = numbers[:, self._alike]
        primes = self.primes[:, :, None]
        # Two numbers of 60 bits at a time: more would not fit.
        while found.shape[2] > 1:
            half = found.shape[2] // 2
            found = (found[:, :, :half] + found[:, :, half:]) % primes
        return found[:, :, 0]

    def less(self, trace: Numbers, mask: Numbers) -> Numbers:
        """``trace`` less the trace of a mask, both [FLOOR, period]."""
        return (trace + (self.primes - mask)) % self.primes

    def sums(self, trace: Numbers, scale: float) -> Values:
        """The sums of slots [period] that a trace of plaintexts of this scale stands for."""
        numbers = np.empty((FLOOR, self._degree), np.uint64)
        numbers[:, self._alike] = trace[:, :, None]
        # Conjugates are in the trace, too: twice the sum.
        return self.scheme.decode(self.plain(numbers, 2 * scale))[: self.period]

    def _framed(self, body: bytes) -> bytes:
        size = _HEADER.size
        return _HEADER.pack(_MAGIC, size, *self._version, _PLAIN, 0, size + len(body)) + body
