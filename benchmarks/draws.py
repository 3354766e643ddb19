"""Keys to read and write: which ones a table holds, and fresh draws of them, evenly or by Zipf's law."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.spec import Initialiser, Optimiser, TableSpec

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

SCALE: Final = 0.05
RATE: Final = 0.1
EPSILON: Final = 1e-8
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


def table(name: str, dim: int) -> TableSpec:
    """A table as the measurements use it: row-wise Adagrad, initially uniform."""
    return TableSpec(name, dim, Initialiser.uniform(SCALE), Optimiser("rowwise_adagrad", RATE, EPSILON))


def keys_of(numbers: npt.NDArray[np.integer]) -> Keys:
    """The key of each of ``numbers`` ``[N]``: distinct ones for distinct numbers, spread over all 64 bits."""
    return numbers.astype(np.uint64) * _ODD


def ranges(first: int, last: int, size: int) -> Iterator[Keys]:
    """The keys of the numbers from ``first`` up to ``last``, ``size`` at a time, each once."""
    for at in range(first, last, size):
        yield keys_of(np.arange(at, min(at + size, last)))


def even(generator: np.random.Generator, rows: int, count: int) -> Keys:
    """``count`` keys of the first ``rows``, drawn evenly; some may repeat."""
    return keys_of(generator.integers(0, rows, count))


def distinct(generator: np.random.Generator, rows: int, count: int) -> Keys:
    """``count`` different keys of the first ``rows`` (at least as many), drawn evenly."""
    found = np.zeros(0, np.int64)
    while len(found) < count:
        found = np.unique(np.concatenate([found, generator.integers(0, rows, count)]))
    return keys_of(generator.permutation(found)[:count])


class Zipf:
    """Draws of the first ``rows`` keys: number n with weight (n + 1)^-exponent."""

    def __init__(self, rows: int, exponent: float) -> None:
        weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
        self._up_to = np.cumsum(weights)
        self._up_to /= self._up_to[-1]

    def draw(self, generator: np.random.Generator, count: int) -> Keys:
        """``count`` keys; the hot ones repeat."""
        return keys_of(np.searchsorted(self._up_to, generator.random(count), side="right"))


def gradients(count: int, dim: int) -> Floats:
    """Some gradients ``[count, dim]``, always the same."""
    return np.random.default_rng(9).normal(size=(count, dim)).astype(np.float32)
