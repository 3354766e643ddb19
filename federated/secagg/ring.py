"""Integers modulo 2**bits: where masked values are added, and proof that the sum does not wrap.

Words are kept in uint32 (up to 32 bits) or uint64, and all arithmetic is modulo 2**32 or 2**64: 2**bits divides both,
so reducing once, when packing or reading, gives what reducing at every step would, and a uniform word reduces to a
uniform one. Masks therefore cost the same at 33 bits as at 64, and no step but the last knows the width.

A packed vector is a sequence of planes, one for each power of two in ``bits`` from the largest to the smallest (33
bits: a plane of 32 and a plane of 1), lowest bits first. A plane of 8 bits or more is an array of little-endian
integers. In a narrower one of p bits, byte i holds the values i, i + m, i + 2m ... from its lowest bits on, where m is
the plane's length in bytes. So every step is a pass over contiguous arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BITS = 64

Words = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
"""A vector [L] of ring elements, each known up to multiples of 2**bits."""


class RingRefused(ValueError):
    """A ring that cannot hold the sum, a value that does not fit into the ring, or bytes that are no vector of it."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The integers modulo 2**``bits``, 1 to 64 bits. Raises RingRefused for another width."""

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MOST_BITS:
            raise RingRefused(f"a ring has 1 to {MOST_BITS} bits, not {self.bits}")

    @staticmethod
    def holding(clients: int, weight: int, bound: int) -> Ring:
        """The smallest ring in which the sum of ``clients`` vectors is read back exactly, each of them a whole weight
        up to ``weight`` times integers of magnitude up to ``bound``: 2**bits >= 2 * clients * weight * bound + 1.

        Raises RingRefused when 64 bits do not suffice, or for a number below 1.
        """
        if min(clients, weight, bound) < 1:
            raise RingRefused(f"{clients} clients, weight {weight} and bound {bound}: each is at least 1")
        bits = (2 * clients * weight * bound).bit_length()
        if bits > MOST_BITS:
            raise RingRefused(
                f"{clients} clients of weight up to {weight} and values up to {bound} steps need {bits} bits, "
                f"more than {MOST_BITS}: lower the clip, the weight or the number of clients, or take a coarser step"
            )
        return Ring(bits)

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint32 up to 32 bits, else uint64."""
        return np.dtype(np.uint32 if self.bits <= 32 else np.uint64)

    @property
    def largest(self) -> int:
        """The largest magnitude that ``signed`` gives back whatever the sign: 2**(bits - 1) - 1."""
        return (1 << (self.bits - 1)) - 1

    def zeros(self, length: int) -> Words:
        """The zero vector [L]."""
        zeros: Words = np.zeros(length, self.dtype)
        return zeros

    def of(self, values: npt.NDArray[np.int64]) -> Words:
        """Integers [L] as words [L]. Raises RingRefused for one that ``signed`` would not give back."""
        if len(values) and not -self.largest - 1 <= int(values.min()) <= int(values.max()) <= self.largest:
            raise RingRefused(
                f"values from {values.min()} to {values.max()} do not fit into {self.bits} bits"
            )
        words: Words = values.astype(self.dtype)
        return words

    def signed(self, words: Words) -> npt.NDArray[np.int64]:
        """Words [L] as integers [L] from -2**(bits - 1) to 2**(bits - 1) - 1 (two's complement)."""
        self._check(words)
        spare = words.dtype.itemsize * 8 - self.bits
        signed = (words << words.dtype.type(spare)).view(np.dtype(f"i{words.dtype.itemsize}"))
        values: npt.NDArray[np.int64] = (signed >> signed.dtype.type(spare)).astype(np.int64, copy=False)
        return values

    def add_into(self, total: Words, words: Words) -> None:
        """Add ``words`` [L] to ``total`` [L] in place."""
        self._check(words)
        self._check(total)
        np.add(total, words, out=total)

    def reduced(self, words: Words) -> Words:
        """The same elements, each as the word below 2**bits: two vectors are equal when these are."""
        self._check(words)
        reduced: Words = words & words.dtype.type((1 << self.bits) - 1)
        return reduced

    def packed_bytes(self, length: int) -> int:
        """Bytes of a packed vector [L]: at most 5 more than bits * L / 8."""
        return sum(_plane_bytes(length, width) for _, width in self._planes())

    def pack(self, words: Words) -> bytes:
        """Words [L] in ``packed_bytes(L)`` bytes."""
        self._check(words)
        return b"".join(_packed_plane(words, low, width) for low, width in self._planes())

    def unpack(self, body: bytes | memoryview, length: int) -> Words:
        """The words [L] below 2**bits in ``body``. Raises RingRefused unless ``pack`` could have made it."""
        if length < 0 or len(body) != self.packed_bytes(length):
            raise RingRefused(
                f"{len(body)} bytes where {length} words of {self.bits} bits take {self.packed_bytes(max(length, 0))}"
            )
        words = self.zeros(length)
        at = 0
        for low, width in self._planes():
            size = _plane_bytes(length, width)
            _unpack_plane(words, memoryview(body)[at : at + size], low, width)
            at += size
        return words

    def _planes(self) -> list[tuple[int, int]]:
        """(lowest bit, width) of each plane."""
        planes, low = [], 0
        for width in (64, 32, 16, 8, 4, 2, 1):
            if self.bits & width:
                planes.append((low, width))
                low += width
        return planes

    def _check(self, words: Words) -> None:
        if words.dtype != self.dtype or words.ndim != 1:
            raise TypeError(f"a vector of {self.dtype}, not {words.ndim} dimensions of {words.dtype}")


def _plane_bytes(length: int, width: int) -> int:
    return -(-length * width // 8)


def _packed_plane(words: Words, low: int, width: int) -> bytes:
    shifted = words >> words.dtype.type(low) if low else words
    if width >= 8:
        return shifted.astype(np.dtype(f"<u{width // 8}")).tobytes()
    values = shifted.astype(np.uint8) & np.uint8((1 << width) - 1)
    packed = np.zeros(_plane_bytes(len(words), width), np.uint8)
    for place in range(8 // width):
        part = values[place * len(packed) : (place + 1) * len(packed)]
        packed[: len(part)] |= part << np.uint8(place * width)
    return packed.tobytes()


def _unpack_plane(words: Words, body: memoryview, low: int, width: int) -> None:
    """Set the bits ``low`` to ``low + width`` of words that are zero there."""
    if width >= 8:
        _set_bits(words, np.frombuffer(body, np.dtype(f"<u{width // 8}")), low)
        return
    packed = np.frombuffer(body, np.uint8)
    for place in range(8 // width):
        values = (packed >> np.uint8(place * width)) & np.uint8((1 << width) - 1)
        part = words[place * len(packed) : (place + 1) * len(packed)]
        if values[len(part) :].any():
            raise RingRefused("bits behind the last word are set")
        _set_bits(part, values[: len(part)], low)


def _set_bits(words: Words, values: npt.NDArray[Any], low: int) -> None:
    shifted = values.astype(words.dtype)
    if low:
        np.left_shift(shifted, words.dtype.type(low), out=shifted)
    np.bitwise_or(words, shifted, out=words)
