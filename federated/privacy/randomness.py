"""Where noise comes from: the operating system on real parties, a seed in simulations, which are not private."""

from __future__ import annotations

import math
import os
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

_CELL: Final = 2.0**-52
_REFINED: Final = np.uint64(2**20)


class Randomness(Protocol):
    """A source of random numbers."""

    def words(self, count: int) -> Words:
        """``count`` uniform numbers of 64 bits."""
        ...


class SystemRandomness:
    """The operating system's generator: what real parties use, always."""

    def words(self, count: int) -> Words:
        """See ``Randomness``."""
        return np.frombuffer(os.urandom(8 * count), np.uint64)


class SeededRandomness:
    """A seeded generator, for simulations: whoever knows the seed can take the noise away. NOT PRIVATE."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def words(self, count: int) -> Words:
        """See ``Randomness``."""
        return self._generator.integers(0, 2**64, count, np.uint64, endpoint=False)


SYSTEM: Final = SystemRandomness()


def uniform(randomness: Randomness, count: int) -> Floats:
    """``count`` numbers evenly from (0, 1).

    52 bits each; the few below 2**-32 get further bits, so that what is made of small numbers, the tails of noise, is
    no coarser than its middle.
    """
    cells = randomness.words(count) >> np.uint64(12)
    low = np.flatnonzero(cells < _REFINED)
    within = np.full(count, 0.5)
    if len(low):
        within[low] = uniform(randomness, len(low))
    return np.asarray((cells + within) * _CELL)


def normal(randomness: Randomness, count: int) -> Floats:
    """``count`` numbers from N(0, 1), by Box and Muller (1958): radius and angle of pairs."""
    pairs = -(-count // 2)
    drawn = uniform(randomness, 2 * pairs)
    radius, angle = np.sqrt(-2.0 * np.log(drawn[:pairs])), (2.0 * math.pi) * drawn[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def laplace(randomness: Randomness, count: int) -> Floats:
    """``count`` numbers from the Laplace distribution of scale 1: exponential sizes with even signs."""
    sizes = -np.log(uniform(randomness, count))
    signs = np.unpackbits(randomness.words(-(-count // 64)).view(np.uint8), count=count)
    return np.where(signs.view(np.bool_), sizes, -sizes)


def below(randomness: Randomness, limits: Words) -> Words:
    """A number evenly from 0 to limit − 1 for each of ``limits`` [N] (1 to 2**63), exactly: draws from the part of the
    64 bits that the limit does not divide are drawn again."""
    drawn = randomness.words(len(limits))
    spare = (np.uint64(2**64 - 1) - limits + np.uint64(1)) % limits  # 2**64 modulo the limit
    again = np.flatnonzero((spare > 0) & (drawn > np.uint64(2**64 - 1) - spare))
    found: Words = drawn % limits
    if len(again):
        found[again] = below(randomness, limits[again])
    return found
