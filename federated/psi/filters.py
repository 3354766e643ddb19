"""A set of hashes in few bits, to be sent once and asked often.

Each of N hashes is cut to u = bits + ⌈log2 N⌉ bits, so that one that is not in the set is found in it with probability
at most N/2**u ≤ 2**-bits. The sorted numbers are kept as Elias (1974) and Fano (1971) do: the low ``bits`` of each as
they are, the high part as one mark in a row of N + 2**⌈log2 N⌉. That is bits + 2 to 3 bits an id: half a bit to one
and a half more than a Golomb code, a bit less than a cuckoo filter, 1/1.44 of a Bloom filter's; and NumPy builds and
reads it without a loop.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.psi.hashing import MOST_IDS, Tags

LEAST_BITS: Final = 10
MOST_BITS: Final = 48
HASH_BYTES: Final = 16
_HEAD: Final = 9
_MOST_UNIVERSE: Final = 62

Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class HashFilter:
    """N sorted numbers below 2**(bits + high); ``bits`` says how rarely a stranger is taken for a member."""

    numbers: Numbers
    bits: int

    def __post_init__(self) -> None:
        check_fits(len(self.numbers), self.bits)

    @classmethod
    def of(cls, hashes: Tags, bits: int) -> HashFilter:
        """The filter of uniform ``hashes`` [N, 16]."""
        return cls(np.sort(_cut(hashes, bits + _high(len(hashes)))), bits)

    def holds(self, hashes: Tags) -> npt.NDArray[np.bool_]:
        """Which of ``hashes`` [N, 16] are in the set: all members, and a stranger with probability 2**-bits."""
        asked = _cut(hashes, self.bits + _high(len(self.numbers)))
        if not len(self.numbers):
            return np.zeros(len(asked), np.bool_)
        at = np.minimum(np.searchsorted(self.numbers, asked), len(self.numbers) - 1)
        found: npt.NDArray[np.bool_] = self.numbers[at] == asked
        return found

    def to_bytes(self) -> bytes:
        """Bits, count, high parts, low parts."""
        count = len(self.numbers)
        marks = np.zeros(count + (1 << _high(count)), np.uint8)
        marks[(self.numbers >> np.uint64(self.bits)).astype(np.int64) + np.arange(count)] = 1
        low = _pack(self.numbers & np.uint64((1 << self.bits) - 1), self.bits)
        return bytes((self.bits,)) + count.to_bytes(8, "little") + np.packbits(marks).tobytes() + low

    @classmethod
    def from_bytes(cls, data: bytes) -> HashFilter:
        """What ``to_bytes`` made. Raises ValueError for anything else."""
        if len(data) < _HEAD:
            raise ValueError("a filter that is cut short")
        bits, count = data[0], int.from_bytes(data[1:_HEAD], "little")
        if not LEAST_BITS <= bits <= MOST_BITS or count > MOST_IDS:
            raise ValueError(f"a filter of {count} hashes with {bits} bits")
        length = size(count, bits)
        if len(data) != length:
            raise ValueError(f"a filter of {len(data)} bytes, not {length}")
        marked = count + (1 << _high(count))
        split = _HEAD + -(-marked // 8)
        marks = np.flatnonzero(np.unpackbits(np.frombuffer(data[_HEAD:split], np.uint8)))
        if len(marks) != count or (count and marks[-1] >= marked):
            raise ValueError(f"a filter of {count} hashes with {len(marks)} marks")
        high = (marks - np.arange(count)).astype(np.uint64) << np.uint64(bits)
        numbers = high | _unpack(data[split:], count, bits)
        if (numbers[1:] < numbers[:-1]).any():
            raise ValueError("a filter that is not sorted")
        return cls(numbers, bits)


def check_fits(count: int, bits: int) -> None:
    """Raise ValueError where there is no filter of ``count`` hashes with ``bits``."""
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"{LEAST_BITS} to {MOST_BITS} bits, not {bits}")
    if count > MOST_IDS or bits + _high(count) > _MOST_UNIVERSE:
        raise ValueError(f"a filter with {bits} bits is not for {count} hashes: take fewer bits")


def size(count: int, bits: int) -> int:
    """Bytes of a filter."""
    return _HEAD + -(-(count + (1 << _high(count))) // 8) + -(-count * bits // 8)


def digest(data: bytes) -> bytes:
    """32 bytes that name a filter."""
    return hashlib.sha256(b"headwater-psi-filter" + data).digest()


def _high(count: int) -> int:
    return max(0, count - 1).bit_length()


def _cut(hashes: Tags, bits: int) -> Numbers:
    first = np.ascontiguousarray(hashes[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
    return first >> np.uint64(64 - bits)


_SLAB: Final = 1 << 17  # A multiple of 8, so that each slab's bits end with a byte.


def _pack(numbers: Numbers, bits: int) -> bytes:
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    return b"".join(
        np.packbits(((numbers[at : at + _SLAB, None] >> shifts) & np.uint64(1)).astype(np.uint8)).tobytes()
        for at in range(0, len(numbers), _SLAB)
    )


def _unpack(data: bytes, count: int, bits: int) -> Numbers:
    weights = np.uint64(1) << np.arange(bits - 1, -1, -1, dtype=np.uint64)
    found = np.empty(count, np.uint64)
    step = _SLAB * bits // 8
    for at in range(0, count, _SLAB):
        rows = min(_SLAB, count - at)
        part = np.frombuffer(data[at // _SLAB * step :][:step], np.uint8)
        found[at : at + rows] = np.unpackbits(part, count=rows * bits).reshape(rows, bits) @ weights
    return found
