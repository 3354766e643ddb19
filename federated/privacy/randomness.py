"""Where noise comes from: the operating system on real parties, a seed in simulations, which are not private."""

from __future__ import annotations

import os
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


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
