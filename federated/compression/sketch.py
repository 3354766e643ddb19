"""Count sketches (Charikar et al. 2002): linear, so the sketch of a sum is the sum of the sketches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federated.compression.errors import UnsoundScheme
from federated.compression.sections import Section, SectionRule
from federated.compression.sparse import chosen_of, largest, require_share
from federated.compression.step import Dice, Kind
from federated.compression.streams import Floats, Indices, buckets, signs

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class CountSketch:
    """``rows`` hash rows of ``columns`` buckets for vectors of D, all named by ``seed``: each coordinate is added,
    with a random sign, to one bucket of every row."""

    seed: int
    dimension: int
    rows: int
    columns: int

    def sketch(self, values: Floats) -> Floats:
        """``[B, D]`` to ``[B, rows, columns]``."""
        out = np.empty((len(values), self.rows, self.columns), np.float32)
        for row in range(self.rows):
            places, flips = self._hashes(row)
            for table, flipped in zip(out, values * flips, strict=True):
                table[row] = np.bincount(places, flipped, self.columns)
        return out

    def mean_estimate(self, tables: Floats) -> Floats:
        """``[B, rows, columns]`` to ``[B, D]``: the mean of the rows' estimates; right in the mean, and linear."""
        out = np.zeros((len(tables), self.dimension), np.float32)
        for row in range(self.rows):
            places, flips = self._hashes(row)
            out += tables[:, row, places] * flips
        return out / np.float32(self.rows)

    def median_estimate(self, tables: Floats) -> Floats:
        """``[B, rows, columns]`` to ``[B, D]``: the median of the rows' estimates; finds large coordinates surely."""
        estimates = np.empty((self.rows, len(tables), self.dimension), np.float32)
        for row in range(self.rows):
            places, flips = self._hashes(row)
            estimates[row] = tables[:, row, places] * flips
        median: Floats = np.median(estimates, axis=0)
        return median

    def heavy(self, tables: Floats, chosen: int) -> Floats:
        """The ``chosen`` largest coordinates by the median estimate, all else zero, ``[B, D]``. A server that sums
        sketches keeps what this leaves behind, tables − sketch(heavy), for the next round (FetchSGD, Rothchild
        et al. 2020)."""
        estimates = self.median_estimate(tables)
        places = largest(estimates, chosen)
        out = np.zeros_like(estimates)
        np.put_along_axis(out, places, np.take_along_axis(estimates, places, axis=1), axis=1)
        return out

    def _hashes(self, row: int) -> tuple[Indices, Floats]:
        purpose = 16 + 2 * row
        return (
            buckets(self.seed, purpose, self.dimension, self.columns),
            signs(self.seed, purpose + 1, self.dimension),
        )


@dataclass(frozen=True, slots=True)
class Sketch:
    """A count sketch of ``share`` · D numbers in ``rows`` rows, under the round's shared seed; the server's estimate is
    the rows' mean, so that decoding each body and summing gives what summing the sketches and decoding gives."""

    share: float
    rows: int = 1
    name: str = "sketch"
    takes: frozenset[Kind] = frozenset({"dense"})
    gives: Kind = "dense"
    skews: bool = False

    def __post_init__(self) -> None:
        require_share(self.name, self.share)
        if not 1 <= self.rows <= MAX_ROWS:
            raise UnsoundScheme(f"sketch: 1 to {MAX_ROWS} rows, not {self.rows}")

    def grows(self) -> str | None:
        return (
            "a sketch's estimate errs by more than the signal, and its memory belongs to the server "
            "that sums the sketches (FetchSGD)"
        )

    def width(self, count: int) -> int:
        return self.rows * self._columns(count)

    def rules(self, count: int) -> tuple[SectionRule, ...]:
        return ()

    def encode(self, values: Floats, dice: Dice, feedback: bool) -> tuple[Floats, tuple[Section, ...]]:
        return self.of(values.shape[1], dice.shared).sketch(values).reshape(len(values), -1), ()

    def decode(
        self, values: Floats, sections: Sequence[Section], count: int, dice: Dice, feedback: bool
    ) -> Floats:
        return self.of(count, dice.shared).mean_estimate(values.reshape(len(values), self.rows, -1))

    def of(self, dimension: int, shared: int) -> CountSketch:
        """The sketch for vectors of ``dimension`` in the round of the ``shared`` seed."""
        return CountSketch(shared, dimension, self.rows, self._columns(dimension))

    def _columns(self, count: int) -> int:
        return max(1, chosen_of(self.share, count) // self.rows)
