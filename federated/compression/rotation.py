"""A random rotation before quantisation: it spreads a few large coordinates over all, so that one scale fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federated.compression.sections import Section, SectionRule
from federated.compression.step import Dice, Kind
from federated.compression.streams import Floats, signs

BLOCK = 1 << 16


def hadamard(values: Floats) -> Floats:
    """The orthonormal Walsh–Hadamard transform of each row of ``[B, P]``, P a power of two; its own inverse.

    H of P = A · C is H of A by H of C, so both are done along the slow axis, where runs are long. Additions only, in an
    order that does not depend on B: a row has the same bits alone and in a batch."""
    rows, size = values.shape
    columns = 1 << (size.bit_length() - 1) // 2
    out = np.empty((rows, size), np.float32)
    # A few rows at a time stay in the processor's cache.
    for start in range(0, rows, block := max(1, BLOCK // size)):
        part = values[start : start + block].reshape(-1, size // columns, columns)
        part = _butterflies(np.ascontiguousarray(part)).swapaxes(1, 2)
        part = _butterflies(np.ascontiguousarray(part)).swapaxes(1, 2)
        np.multiply(part, 1.0 / np.sqrt(np.float32(size)), out=out[start : start + block].reshape(part.shape))
    return out


def _butterflies(values: Floats) -> Floats:
    """The transform, not normalised, along the middle axis of ``[B, A, C]``."""
    rows, size, columns = values.shape
    half = 1
    while half < size:
        pairs = values.reshape(rows, -1, 2, half, columns)
        out = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=out[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=out[:, :, 1])
        values = out
        half *= 2
    return values.reshape(rows, size, columns)


@dataclass(frozen=True, slots=True)
class Rotate:
    """Random signs, then Hadamard (Suresh et al. 2017), on the first P coordinates and then on the last P, where P is
    the largest power of two within the vector: orthogonal, and without padding. Each body carries its own seed, so
    that the clients' errors are independent."""

    name: str = "rotate"
    takes: frozenset[Kind] = frozenset({"dense"})
    gives: Kind = "dense"
    skews: bool = False

    def grows(self) -> str | None:
        return None

    def width(self, count: int) -> int:
        return count

    def rules(self, count: int) -> tuple[SectionRule, ...]:
        return (SectionRule(4, noise=True),)

    def encode(self, values: Floats, dice: Dice, feedback: bool) -> tuple[Floats, tuple[Section, ...]]:
        section = Section.of_rows(dice.seeds())
        first, last = self._signs(section, values.shape[1], dice)
        size = first.shape[1]
        out = values.copy()
        out[:, :size] = hadamard(out[:, :size] * first)
        if size < values.shape[1]:
            out[:, -size:] = hadamard(out[:, -size:] * last)
        return out, (section,)

    def decode(
        self, values: Floats, sections: Sequence[Section], count: int, dice: Dice, feedback: bool
    ) -> Floats:
        first, last = self._signs(sections[0], count, dice)
        size = first.shape[1]
        out = values.copy()
        if size < count:
            out[:, -size:] = hadamard(out[:, -size:]) * last
        out[:, :size] = hadamard(out[:, :size]) * first
        return out

    def _signs(self, section: Section, count: int, dice: Dice) -> tuple[Floats, Floats]:
        size = 1 << (count.bit_length() - 1)

        def derive(seeds: list[int]) -> tuple[Floats, Floats]:
            first = np.stack([signs(seed, 2, size) for seed in seeds])
            return first, np.stack([signs(seed, 3, size) for seed in seeds]) if size < count else first

        return dice.once(self.name, section, count, derive)
