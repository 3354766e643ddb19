"""Masks that hide what a CKKS key holder decrypts, and come off exactly.

CKKS's masks cannot be uniform over the modulus, since they are encoded as float64. A mask here is a whole number of 52
bits, as wide as float64 carries, on a grid of 2^-g, and a part of one step, encoded on its own: without it what lies
between the grid's points would stand open. g follows from the precision that is asked for and from the room that the
modulus has. A slot's value v is then hidden up to a statistical distance of at most |v| / 2^(52 - g), the distance of
uniform numbers from the same ones shifted by v; distances add over slots and rounds. (That the encoder's own rounding
of a mask leaves it uniform is a heuristic: it depends on all slots' masks and is a quarter of a step.)

The holder returns sums of slots as integers on the same grid, modulo 2^64: sums of masks come off without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.parties import Draw, PeerFault

BITS: Final = 52
"""Of a mask; float64 holds such an integer exactly."""
SLACK: Final = 1 / 64
"""Part of the range by which a masked value may lie outside."""
ROOM_BITS: Final = 6
"""Bits by which the modulus is wider than the masks: what is tampered with decrypts to anything in it."""
ROUNDING: Final = 1.0
"""Standard deviation of a slot's error at full width, in steps of the grid (0.35 of SEAL's transforms in float64, 0.29
of rounding; measured .5)."""

Integers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Masks in steps of the grid: ``whole`` [n], uniform integers of ``BITS`` bits, and ``part`` [n], uniform within
    plus and minus one half. They are added one after the other: their sum does not fit a float64."""

    whole: Integers
    part: Values


@dataclass(frozen=True, slots=True)
class Masks:
    """``grid``: the step is 2^-grid."""

    grid: int

    @classmethod
    def fitting(cls, error: float, modulus_bits: int, scale_bits: int) -> Masks:
        """The widest masks that keep a slot's error (standard deviation) below ``error`` and fit below a modulus.

        Raises ValueError where no mask of at least 2^16 does.
        """
        by_precision = math.ceil(math.log2(ROUNDING / error))
        # A masked value takes scale_bits + BITS - 1 - grid bits, and a sign.
        by_modulus = scale_bits + BITS + ROOM_BITS - modulus_bits
        grid = max(by_precision, by_modulus)
        if BITS - 1 - grid < 16:
            raise ValueError(f"masks of 2^{BITS - 1 - grid} hide nothing: precision {error} is too fine")
        return cls(grid)

    @property
    def reach(self) -> float:
        """Masks lie within plus and minus this."""
        return math.ldexp(1.0, BITS - 1 - self.grid)

    @property
    def error(self) -> float:
        """Standard deviation of what a slot is off by, because it was masked."""
        return ROUNDING * math.ldexp(1.0, -self.grid)

    def distance(self, value: float, slots: float = 1) -> float:
        """Statistical distance that at most is left between what the holder sees of ``slots`` values, each at most
        ``value``, and pure noise."""
        return min(1.0, slots * value / (2 * self.reach))

    def draw(self, count: int, draw: Draw) -> Drawn:
        """``count`` masks from ``draw``."""
        raw = np.frombuffer(draw(16 * count), np.int64)
        part = np.ldexp((raw[count:] >> 11).astype(np.float64), -53)
        return Drawn(raw[:count] >> (64 - BITS), part)

    def values(self, steps: Integers | Values) -> Values:
        """Steps of the grid as the numbers they stand for."""
        return np.ldexp(steps.astype(np.float64), -self.grid)

    def split(self, drawn: Drawn) -> tuple[Values, Values]:
        """Two numbers for each mask, which together are it."""
        return self.values(drawn.whole), self.values(drawn.part)

    def integers(self, values: Values) -> Integers:
        """Numbers as integers on the grid. They must be in range (``check``)."""
        return np.rint(np.ldexp(values, self.grid)).astype(np.int64)

    def check(self, values: Values, sender: str) -> Values:
        """Masked ``values`` if all can be. Raises PeerFault (``range``): somebody changed the ciphertext, or what was
        computed outgrew the modulus."""
        limit = self.reach * (1 + SLACK)
        if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > limit:
            raise PeerFault(
                sender, "range", f"what it sent decrypts to more than any masked value, {limit:.3g}"
            )
        return values


def gaussian(count: int, deviation: float, draw: Draw) -> Integers:
    """``count`` normal numbers rounded to integers, from ``draw`` (Box and Muller on 53 bits)."""
    pairs = (count + 1) // 2
    raw = np.frombuffer(draw(16 * pairs), np.uint64) >> np.uint64(11)
    uniform = (raw.astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2 * np.log(uniform[:pairs]))
    angle = 2 * np.pi * uniform[pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return np.rint(deviation * normal).astype(np.int64)
