"""How rows' whole numbers lie in the slots of ciphertexts, so that one answer carries several sums.

A ciphertext has SLOTS slots, which are added and multiplied slot by slot modulo PLAIN. They are cut into
``copies * count`` stretches of ``width`` slots: stretch (c, l) holds lane l of ``width`` rows, the same for each copy
c. The host multiplies each copy by another candidate's 0/1 row, and adds up over the ciphertexts: stretch (c, l) then
*sums* to lane l of what candidate c sends left. More copies cost more ciphertexts there and save them on the way back.

Why the sums are exact: all arithmetic is modulo PLAIN, and whoever encrypts keeps every subset's true sum within HALF
(boosting by the scale of its whole numbers; counts of rows are far below).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

SLOTS: Final = 8_192
"""The degree of the ring; this, with SEAL's default primes of it (218 bits), has 128 bits of security."""
PLAIN: Final = 1_099_511_480_321
"""A prime of 40 bits that is 1 modulo 2 * SLOTS, so that there are slots."""
HALF: Final = (PLAIN - 1) // 2
ENCRYPTION: Final = f"BFV, ring of degree {SLOTS}, modulus of 218 bits: 128 bits of security"
MOST_LANES: Final = 64
MOST_CIPHERTEXT: Final = 2 * 4 * SLOTS * 8 + 4_096
"""Bytes of a fresh ciphertext at most: two polynomials, four primes."""
MOST_KEY: Final = 2 * 5 * SLOTS * 8 + 4_096
"""Bytes of a public key at most: five primes."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lanes:
    """``count`` numbers a row, ``copies`` of each. Raises ValueError where that leaves no slot a row."""

    count: int
    copies: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.copies < 1 or self.count * self.copies > SLOTS:
            raise ValueError(f"{self.copies} copies of {self.count} lanes in {SLOTS} slots")

    @property
    def width(self) -> int:
        """Rows in a ciphertext."""
        return SLOTS // (self.count * self.copies)

    @property
    def used(self) -> int:
        """Slots that hold anything."""
        return self.width * self.count * self.copies

    def inputs(self, rows: int) -> int:
        """Ciphertexts that hold ``rows`` rows."""
        return -(-rows // self.width)

    def outputs(self, candidates: int) -> int:
        """Ciphertexts that hold the sums of so many candidates."""
        return -(-candidates // self.copies)

    def spread(self, values: Ints) -> Ints:
        """The slots [inputs, SLOTS], modulo PLAIN, of values [n, count]."""
        inputs = self.inputs(len(values))
        padded = np.zeros((inputs * self.width, self.count), np.int64)
        padded[: len(values)] = values % PLAIN
        once = padded.reshape(inputs, self.width, self.count).transpose(0, 2, 1).reshape(inputs, -1)
        slots = np.zeros((inputs, SLOTS), np.int64)
        slots[:, : self.used] = np.tile(once, (1, self.copies))
        return slots

    def select(self, left: Bools, chunk: int) -> Ints:
        """The 0/1 slots [SLOTS] for ciphertext number ``chunk``; left [at most copies, n] is one candidate a copy."""
        piece = left[:, chunk * self.width : (chunk + 1) * self.width]
        stretches = np.zeros((self.copies, self.count, self.width), np.int64)
        stretches[: len(piece), :, : piece.shape[1]] = piece[:, None, :]
        slots = np.zeros(SLOTS, np.int64)
        slots[: self.used] = stretches.reshape(-1)
        return slots

    def zero_sum(self, uniform: Ints) -> Ints:
        """Slots that look uniform and add up to 0 modulo PLAIN in each stretch; ``uniform`` [SLOTS] in [0, PLAIN)."""
        masked = uniform.copy()
        stretches = masked[: self.used].reshape(-1, self.width)
        # At most 4,096 numbers of 40 bits: within int64.
        stretches[:, -1] = -stretches[:, :-1].sum(axis=1) % PLAIN
        return masked

    def collect(self, slots: Ints) -> Ints:
        """The sums [copies * m, count], between -HALF and HALF, of slots [m, SLOTS]."""
        stretches = slots[:, : self.used].reshape(len(slots) * self.copies, self.count, self.width)
        total = stretches.sum(axis=2) % PLAIN
        sums: Ints = np.where(total > HALF, total - PLAIN, total)
        return sums


def choose_lanes(count: int, rows: int, candidates: tuple[int, ...]) -> Lanes:
    """The number of copies that costs least for so many candidates at each host; lanes as ``whole`` gives them.

    In ms on one core, as measured: a ciphertext there 3, one back 12, a multiplication .85; and 10 for the 432 kB of
    each on a line of 350 Mbit/s.
    """
    best, least = Lanes(count, 1), math.inf
    copies = 1
    while copies * count <= SLOTS:
        lanes = Lanes(count, copies)
        there, back = lanes.inputs(rows), [lanes.outputs(one) for one in candidates]
        cost = sum(13 * there + 22 * one + 0.85 * there * one for one in back)
        if cost < least:
            best, least = lanes, cost
        copies *= 2
    return best
