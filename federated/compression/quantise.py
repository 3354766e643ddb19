"""Values in 8, 4, 2 or 1 bit, with a scale for each chunk of them.

With 8, 4 and 2 bits a value is code · scale / L, where L is 127, 7 or 1 and scale the chunk's largest magnitude.
Rounding is stochastic, so the mean is right (Alistarh et al. 2017; with 2 bits TernGrad, Wen et al. 2017), or to the
nearest. Under error feedback the error must not exceed what went in. Stochastic rounding of n values to steps of
scale / L has, in the worst case (all but one at a quarter of a step), an error of n · scale² / 8L² beyond their own
squares, against the one value's scale²: sound when n < 8L².

One bit comes in three ways:
- ``sign``: sign · mean magnitude, the best that one bit can do, but skewed: with error feedback (Karimireddy 2019);
- ``stochastic``: ±scale, plus with probability (1 + value / scale) / 2: the mean is right, the noise large;
- ``drive``: sign · |y|₂² / |y|₁ after a rotation (Vargaftik et al. 2021): the mean is right over rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from federated.compression.errors import BodyRefused, UnsoundScheme
from federated.compression.packing import Bytes, pack, packed_length, unpack
from federated.compression.sections import Section, SectionRule
from federated.compression.step import Dice, Kind
from federated.compression.streams import Floats

LEVELS = {8: 127, 4: 7, 2: 1, 1: 1}
# Chunks small enough for error feedback with 8 and 4 bits, and for a scale to cost little.
CHUNKS = {8: 1024, 4: 256, 2: 256, 1: 1024}
ROUNDINGS = {8: ("stochastic", "nearest"), 1: ("sign", "stochastic", "drive")}
MAX_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Quantise:
    """``bits`` a value; ``rounding`` as the module says, empty for the first of ROUNDINGS; ``chunk`` values share a
    scale."""

    bits: int
    rounding: str
    chunk: int
    name: str = "quantise"
    # Not in the repr, which is the scheme's mark: a set has another order in another process.
    takes: frozenset[Kind] = field(default=frozenset({"dense", "sparse"}), repr=False)
    gives: Kind = "codes"
    skews: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.bits not in LEVELS:
            raise UnsoundScheme(f"quantise: 8, 4, 2 or 1 bit, not {self.bits}")
        known = ROUNDINGS.get(self.bits, ROUNDINGS[8])
        object.__setattr__(self, "rounding", self.rounding or known[0])
        if self.rounding not in known:
            raise UnsoundScheme(
                f"quantise: {self.bits} bit rounds by one of {', '.join(known)}, not by {self.rounding!r}"
            )
        if not 1 <= self.chunk <= MAX_CHUNK:
            raise UnsoundScheme(f"quantise: a chunk holds 1 to {MAX_CHUNK} values, not {self.chunk}")
        object.__setattr__(self, "skews", self.rounding in ("nearest", "sign"))

    def grows(self) -> str | None:
        limit = 8 * LEVELS[self.bits] ** 2
        if self.rounding == "stochastic" and self.chunk >= limit:
            other = "sign" if self.bits == 1 else "nearest"
            return (
                f"stochastic rounding of chunks of {self.chunk} to {self.bits} bit may add more error than there "
                f"was signal: take quantise:{self.bits}:{other}, or chunks below {limit}"
            )
        if self.rounding == "drive":
            return "one bit by drive has the right mean by itself: take quantise:1:sign"
        return None

    def width(self, count: int) -> int:
        return 0

    def chunks(self, count: int) -> int:
        """Scales for ``count`` values."""
        return -(-count // self.chunk)

    def rules(self, count: int) -> tuple[SectionRule, ...]:
        return (
            SectionRule(4 * self.chunks(count), noise=True),
            SectionRule(packed_length(count, self.bits), noise=self.bits == 1),
        )

    def encode(self, values: Floats, dice: Dice, feedback: bool) -> tuple[Floats, tuple[Section, ...]]:
        rows, count = values.shape
        blocks = self._blocks(values)
        magnitudes = np.abs(blocks)
        if self.rounding in ("sign", "drive"):
            scales = self._sign_scales(magnitudes, count)
            codes = (values >= 0.0).view(np.uint8)
        else:
            scales = magnitudes.max(axis=2)
            codes = self._round(blocks, scales, dice, count)
        sections = (
            Section.of_rows(scales.astype("<f4").view(np.uint8)),
            Section.of_rows(pack(codes, self.bits)),
        )
        return np.empty((rows, 0), np.float32), sections

    def decode(
        self, values: Floats, sections: Sequence[Section], count: int, dice: Dice, feedback: bool
    ) -> Floats:
        scales = np.ascontiguousarray(sections[0].rows()).view("<f4").astype(np.float32, copy=False)
        # The negated test also finds NaN.
        if not ((scales >= 0.0) & (scales < np.inf)).all():
            raise BodyRefused("a scale is negative or not finite")
        codes = unpack(sections[1].rows(), count, self.bits)
        levels = LEVELS[self.bits]
        if self.bits == 1:
            numbers = codes.astype(np.float32) * np.float32(2.0) - np.float32(1.0)
        else:
            if codes.max(initial=0) > 2 * levels:
                raise BodyRefused(f"a code exceeds {2 * levels}")
            numbers = codes.astype(np.float32) - np.float32(levels)
        blocks = self._blocks(numbers) * (scales / np.float32(levels))[:, :, None]
        decoded: Floats = blocks.reshape(len(codes), -1)[:, :count]
        return decoded

    def _blocks(self, values: Floats) -> Floats:
        """``[B, N]`` as ``[B, chunks, chunk]``, the last filled up with zeros; fewer than a chunk as they are."""
        rows, count = values.shape
        if count <= self.chunk:
            return values.reshape(rows, 1, count)
        padded = np.zeros((rows, self.chunks(count) * self.chunk), np.float32)
        padded[:, :count] = values
        return padded.reshape(rows, -1, self.chunk)

    def _sign_scales(self, magnitudes: Floats, count: int) -> Floats:
        sums = magnitudes.sum(axis=2)
        if self.rounding == "drive":
            squares = np.square(magnitudes).sum(axis=2)
            ratios: Floats = np.divide(squares, sums, out=np.zeros_like(sums), where=sums > 0.0)
            return ratios
        sizes = np.full(sums.shape[1], min(self.chunk, count), np.float32)
        sizes[-1] = count - (sums.shape[1] - 1) * self.chunk
        means: Floats = sums / sizes
        return means

    def _round(self, blocks: Floats, scales: Floats, dice: Dice, count: int) -> Bytes:
        rows, levels = len(blocks), LEVELS[self.bits]
        # A scale so small that its inverse would overflow counts as none: what it scales rounds to zero.
        usable = scales >= np.finfo(np.float32).tiny * 256.0
        factors = np.divide(np.float32(levels), scales, out=np.zeros_like(scales), where=usable)
        steps = (blocks * factors[:, :, None]).reshape(rows, -1)[:, :count]
        if self.rounding == "nearest":
            rounded = np.rint(steps)
        elif self.bits == 1:
            return (dice.uniform(count) * np.float32(2.0) - np.float32(1.0) < steps).view(np.uint8)
        else:
            rounded = np.floor(steps + dice.uniform(count))
        np.clip(rounded, -levels, levels, out=rounded)
        return (rounded + np.float32(levels)).astype(np.uint8)
