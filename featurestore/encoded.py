"""Encoded features: what models see of entities, as columns. NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MISSING: Final = 0
"""The key of a value that is not there. It has no row: models see zeros, and learn nothing from it. (With a row
of its own it would tie all entities that lack the value: what one of them does would move all others.)"""

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.float32]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ragged:
    """N lists of keys in compressed form: list n is ``values[offsets[n]:offsets[n + 1]]``.

    Shapes: values ``[T]`` uint64, offsets ``[N + 1]`` int64, ascending from 0 to T.
    """

    values: Keys
    offsets: Offsets

    def take(self, rows: npt.NDArray[np.integer]) -> Ragged:
        """The lists of ``rows`` ``[M]``, in that order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        within = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[:-1][rows], lengths) + within], offsets)

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        """All lists of ``parts`` one after the other."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(np.concatenate([part.values for part in parts]), offsets)


@dataclass(frozen=True, slots=True)
class Encoded:
    """N entities, encoded in the order of their schema.

    Shapes: categorical ``[N, C]`` uint64 keys, numeric ``[N, D]`` float32 standardised, one Ragged of N
    lists per list feature.
    """

    categorical: Keys
    numeric: Numbers
    lists: tuple[Ragged, ...]

    def __len__(self) -> int:
        return len(self.categorical)

    def take(self, rows: npt.NDArray[np.integer]) -> Encoded:
        """The entities of ``rows`` ``[M]``, in that order."""
        return Encoded(self.categorical[rows], self.numeric[rows], tuple(r.take(rows) for r in self.lists))

    @staticmethod
    def concatenate(parts: Sequence[Encoded]) -> Encoded:
        """All entities of ``parts`` (at least one, all of one schema) one after the other."""
        return Encoded(
            np.concatenate([part.categorical for part in parts]),
            np.concatenate([part.numeric for part in parts]),
            tuple(Ragged.concatenate(lists) for lists in zip(*(part.lists for part in parts), strict=True)),
        )
