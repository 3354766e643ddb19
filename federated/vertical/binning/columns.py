"""One party's columns cut into bins of enough rows, missing values in one of their own where they are enough."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from federated.vertical.binning.options import BinningOptions
from federated.vertical.histograms.bins import MISSING, encode, fit_edges

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one bin of a column lies: ``after < x <= upto`` (None: without end), or what is ``missing``.

    ``joined``: also the missing values, which are too few for a bin of their own.
    """

    after: float | None
    upto: float | None
    missing: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """F columns of N rows. ``codes``: int16 [N, F], each value's bin, 0 up to ``bins`` [F]. ``cuts``: each bin's."""

    codes: npt.NDArray[np.int16]
    bins: Ints
    cuts: tuple[tuple[Cut, ...], ...]

    def places(self) -> tuple[Ints, Ints]:
        """Column and bin of all M bins, column by column: int64 [M] each."""
        column = np.repeat(np.arange(len(self.bins)), self.bins)
        first = np.repeat(np.cumsum(self.bins) - self.bins, self.bins)
        return column, np.arange(len(column)) - first

    def rows(self) -> Ints:
        """How many rows each of all bins has: int64 [M]."""
        counts = [
            np.bincount(codes, minlength=count) for codes, count in zip(self.codes.T, self.bins, strict=True)
        ]
        return np.concatenate([*counts, np.empty(0, np.int64)]).astype(np.int64)


def cut_columns(features: Floats, options: BinningOptions) -> Columns:
    """Bins of features [N, F] (NaN: missing)."""
    edges = fit_edges(features, options.bins, options.least_rows)
    codes = encode(features, edges)
    cuts: list[tuple[Cut, ...]] = []
    for place, own in enumerate(edges):
        missing = codes[:, place] == MISSING
        count = int(missing.sum())
        apart = count >= options.least_rows and len(codes) - count >= options.least_rows
        # Where few are missing they stand with the largest values; where few are there, all stand in one bin.
        codes[missing, place] = len(own) + apart
        ends = [None, *own.tolist(), None]
        found = [Cut(after, upto) for after, upto in pairwise(ends)]
        if apart:
            found.append(Cut(None, None, missing=True))
        elif count:
            found[-1] = Cut(found[-1].after, None, joined=True)
        cuts.append(tuple(found))
    return Columns(codes, np.array([len(one) for one in cuts], np.int64), tuple(cuts))
