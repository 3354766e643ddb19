"""Which rows form a batch, and how a batch lies in a ciphertext's slots.

All batches have the same *stride*, the size of the largest. A ciphertext holds as many copies of a batch as fit, one
after another; copy j is multiplied by feature j, so one product gives as many features' terms as there are copies::

    slot   0 ........ stride ........ 2*stride ........ slots
           rows * x_0   rows * x_1      rows * x_2 ...   (rest empty)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Slots = TypeVar("Slots", Integers, Values)


@dataclass(frozen=True, slots=True)
class Batches:
    """``rows``: positions of each batch's rows in the joint order."""

    rows: tuple[Integers, ...]
    stride: int
    slots: int

    @classmethod
    def of(cls, count: int, most: int, slots: int, seed: int) -> Batches:
        """``count`` rows in batches of nearly equal size, at most ``most`` and ``slots``: a public partition."""
        if count < 2:
            raise ValueError(f"{count} rows: nothing to learn from")
        size = min(most, slots, count)
        order = np.random.default_rng([seed, count]).permutation(count).astype(np.int64)
        parts = np.array_split(order, -(-count // size))
        return cls(tuple(parts), max(len(part) for part in parts), slots)

    @property
    def least(self) -> int:
        """Rows of the smallest batch."""
        return min(len(part) for part in self.rows)

    @property
    def copies(self) -> int:
        return self.slots // self.stride

    def ciphertexts(self, features: int) -> int:
        """How many hold the terms of so many features for one batch."""
        return -(-features // self.copies)

    def spread(self, values: Values) -> Values:
        """``values`` of a batch's rows in every copy: [slots]."""
        found = np.zeros(self.slots)
        block = found[: self.copies * self.stride].reshape(self.copies, self.stride)
        block[:, : len(values)] = values
        return found

    def columns(self, features: Values) -> list[Values]:
        """``features`` [rows of the batch, F] as what the copies are multiplied by: ``ciphertexts(F)`` of [slots]."""
        rows, count = features.shape
        found = []
        for start in range(0, count, self.copies):
            part = features[:, start : start + self.copies].T
            slots = np.zeros(self.slots)
            slots[: len(part) * self.stride].reshape(len(part), self.stride)[:, :rows] = part
            found.append(slots)
        return found

    def sums(self, terms: Sequence[Slots], features: int) -> Slots:
        """Each feature's sum over the rows [F] from the slots of its ciphertexts; of integers modulo 2^64."""
        used = self.copies * self.stride
        blocks = [part[:used].reshape(self.copies, self.stride) for part in terms]
        found: Slots = np.concatenate(blocks).sum(axis=1)[:features]
        return found


def label_bits(batches: Batches, features: int, noise: float, epochs: int) -> float:
    """What a party's gradients of the smallest batch can tell of its 0/1 labels, at most, in bits.

    ``features`` Gaussian channels of ``epochs`` uses: their signal is the mean of x * y over the batch, of variance 1/4
    over its rows for standardised x, their noise the key holder's, of deviation ``noise``. Labels are taken to be
    independent of each other; they stay the same in all epochs, so noise averages out.
    """
    signal = 0.25 / batches.least
    return features * 0.5 * math.log2(1 + epochs * signal / noise**2)


def check_labels(batches: Batches, features: int, noise: float, epochs: int) -> None:
    """Raise ValueError for batches whose gradients could tell a host with so many features every 0/1 label.

    That they outnumber the features is too little: labels are whole numbers, so a fraction of the equations does
    (linear programming up to 2 rows a feature, integer programming up to 6 of those tried).
    """
    bits = label_bits(batches, features, noise, epochs)
    if bits >= batches.least:
        raise ValueError(
            f"batches of {batches.least} rows, and a host with {features} features: its gradients hold up to "
            f"{bits:.0f} bits, enough to tell all its labels; take larger batches, fewer columns, more noise (now "
            f"{noise}) or fewer epochs"
        )


def check_batches(batches: Batches, features: int) -> None:
    """Raise ValueError for batches from which a party with so many features could solve for every label."""
    if batches.least <= features:
        raise ValueError(
            f"batches of {batches.least} rows with {features} features: a batch's gradient would tell all its labels; "
            f"it must have more than {features} rows"
        )
