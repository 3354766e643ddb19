"""How a matrix V [h, d] and weights [outputs, h, d] lie in slots, so that one product and a few rotations do much.

Slots are *positions* of ``lanes`` slots each, d of them used. A ciphertext has ``period`` rows, each in ``copies``
positions one after another; more rows go on in further *chunks*. What is wanted is Σ_r V[r, k]·W[f, r, k] for every
output f. In *turn* t the slots are rotated by t rows and multiplied by

    position p:   W[f, row of (p // copies + t) modulo period],   f = p modulo fan,   fan = turns·copies

so that over all turns the positions of f meet every row once; chunks and turns add up in one ciphertext. Its slots that
are alike modulo fan·lanes are summed by the key holder, who can do it after decryption (``residues``). Outputs beyond
``fan`` make further *groups*.

Rotations: turn t = g·babies + j is a rotation of V by j, and one by g·babies of the sum of such products (the diagonal
method of Halevi and Shoup 2014 with baby and giant steps).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

MOST_WEIGHTS: Final = 2**28
"""Numbers that the weights of one step may have; 2 GiB."""


class Layout:
    """For V of ``height`` rows and ``width`` columns, and so many ``outputs``. Raises ValueError for what is too large.

    ``slots``: of a ciphertext, a power of two.
    """

    def __init__(self, height: int, width: int, outputs: int, slots: int) -> None:
        if width > slots:
            raise ValueError(f"{width} columns in {slots} slots")
        if outputs * height * width > MOST_WEIGHTS:
            raise ValueError(
                f"{height} rows with {outputs - 1} features and vectors of {width} are too many for one step"
            )
        self.height, self.width, self.outputs, self.slots = height, width, outputs, slots
        self.lanes = _power(width)
        positions = slots // self.lanes
        self.period = min(_power(height), positions)
        self.copies = positions // self.period
        self.chunks = -(-height // self.period)
        self.turns = min(_power(-(-outputs // self.copies)), self.period)
        self.fan = self.turns * self.copies
        self.groups = -(-outputs // self.fan)
        powers = [2**power for power in range(self.turns.bit_length())]
        self.babies = min(powers, key=lambda b: self.chunks * (b - 1) + self.groups * (self.turns // b - 1))

    @property
    def stride(self) -> int:
        """Slots of a rotation by one row."""
        return self.copies * self.lanes

    @property
    def residues(self) -> int:
        """Slots that are alike modulo this are summed by the key holder."""
        return self.fan * self.lanes

    def steps(self) -> list[int]:
        """Slots of every rotation that is done."""
        rows = [*range(1, self.babies), *range(self.babies, self.turns, self.babies)]
        return [self.stride * row for row in rows]

    def spread(self, matrix: Values) -> list[Values]:
        """V [h, d] as what fills each chunk, [slots]."""
        filled = np.zeros((self.chunks * self.period, self.lanes))
        filled[: self.height, : self.width] = matrix
        parts = filled.reshape(self.chunks, self.period, self.lanes)
        return [np.repeat(part, self.copies, axis=0).reshape(-1) for part in parts]

    def diagonals(self, weights: Values, group: int, giant: int) -> Iterator[tuple[int, int, Values]]:
        """(chunk, baby, what its slots are multiplied by [slots]) for one giant step; those of zeros are left out.

        ``weights``: [outputs, h, d].
        """
        positions = np.arange(self.slots // self.lanes)
        output = group * self.fan + positions % self.fan
        shift = giant * self.babies * self.stride
        for chunk in range(self.chunks):
            for baby in range(self.babies):
                turn = giant * self.babies + baby
                row = chunk * self.period + (positions // self.copies + turn) % self.period
                live = (row < self.height) & (output < self.outputs)
                found = np.zeros((len(positions), self.lanes))
                found[live, : self.width] = weights[output[live], row[live]]
                if found.any():
                    yield chunk, baby, np.roll(found.reshape(-1), shift)

    def gathered(self, sums: Values) -> Values:
        """The outputs [outputs, d] from the sums [groups, residues] of slots that are alike."""
        return sums.reshape(self.groups * self.fan, self.lanes)[: self.outputs, : self.width]


def _power(least: int) -> int:
    """The smallest power of two that is at least so much."""
    return 1 << (least - 1).bit_length()
