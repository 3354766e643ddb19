"""Quantile bins of one party's columns. Their edges are made where the columns are and stay there."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

MISSING: Final = -1
"""The code of a missing value."""
MOST_BINS: Final = 1_024

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int16]


def fit_edges(features: Floats, bins: int, least: int = 1) -> tuple[Floats, ...]:
    """For each column of features [N, F] (NaN: missing) up to ``bins - 1`` rising edges, rows on both sides of each.

    Few different values: midpoints between them; else quantiles. Then bins of fewer than ``least`` rows are joined with
    their neighbours: sums of two candidates differ by a bin, and a bin of one row would tell which row it is.
    """
    return tuple(_edges_of(column[~np.isnan(column)], bins, least) for column in features.T)


def _edges_of(values: Floats, bins: int, least: int) -> Floats:
    different = np.unique(values)
    if not len(different):
        return different
    if len(different) <= bins:
        # Half of each: the sum of two large values may be infinite.
        middle = different[:-1] / 2 + different[1:] / 2
        edges: Floats = np.unique(middle[middle < different[1:]])
    else:
        edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1], method="lower"))
    edges = edges[edges < different[-1]]
    below = np.searchsorted(np.sort(values), edges, side="right")
    kept: list[int] = []
    for place, count in enumerate(below.tolist()):
        before = int(below[kept[-1]]) if kept else 0
        if count - before >= least and len(values) - count >= least:
            kept.append(place)
    return edges[kept]


def encode(features: Floats, edges: tuple[Floats, ...]) -> Codes:
    """Bins' numbers [N, F]: ``code <= j`` exactly where ``x <= edges[j]``; MISSING for NaN."""
    codes = np.empty(features.shape, np.int16)
    for place, own in enumerate(edges):
        column = features[:, place]
        codes[:, place] = np.searchsorted(own, column, side="left")
        codes[np.isnan(column), place] = MISSING
    return codes
