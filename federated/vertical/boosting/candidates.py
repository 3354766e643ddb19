"""The splits that a party's bins allow.

A *candidate* is a way to send rows left: by ``x <= edge``, and in columns with missing values also with those
(``missing_left``), or those alone (edge -1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.vertical.histograms.bins import MISSING, Codes, Floats

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """M ways to split, in an order that is fixed by column, edge and ``missing_left``.

    ``feature``, ``edge`` (a place in that column's edges, or -1): int64 [M]; ``missing_left``: bool [M].
    """

    feature: Ints
    edge: Ints
    missing_left: Bools

    def __len__(self) -> int:
        return len(self.feature)

    def take(self, order: Ints) -> Candidates:
        """These candidates, in this order."""
        return Candidates(self.feature[order], self.edge[order], self.missing_left[order])

    def left(self, codes: Codes) -> Bools:
        """Which rows each candidate sends left: [M, n] for codes [n, F]."""
        chosen = codes.T[self.feature]
        left: Bools = chosen <= self.edge[:, None]
        missing = chosen == MISSING
        return np.where(missing, self.missing_left[:, None], left)

    def count_left(self, codes: Codes) -> Ints:
        """How many rows each sends left: [M], by a histogram of each column."""
        return self.sum_left(codes, np.ones((len(codes), 1), np.int64))[:, 0]

    def sum_left(self, codes: Codes, values: Ints) -> Ints:
        """The sums [M, L] of values [n, L] that each sends left, exact while they stay below 2^53."""
        sums = np.zeros((len(self), values.shape[1]), np.int64)
        weights = [column.astype(np.float64) for column in values.T]
        for feature in np.unique(self.feature):
            here = self.feature == feature
            # Place 0 is for what is missing, before the bins.
            places = codes[:, feature].astype(np.int64) + 1
            most = int(self.edge[here].max(initial=0)) + 2
            for lane, weight in enumerate(weights):
                upto = np.bincount(places, weight, minlength=most).cumsum().astype(np.int64)
                missing = upto[0]
                kept = upto[self.edge[here] + 1] - missing
                sums[here, lane] = kept + np.where(self.missing_left[here], missing, 0)
        return sums


def candidates_of(codes: Codes, edges: tuple[Floats, ...], least: int = 1) -> Candidates:
    """All candidates of columns with these codes [N, F]; ``missing_left`` ones only where ``least`` values are missing.

    Where fewer are, they go right.
    """
    rows: list[tuple[int, int, bool]] = []
    for feature, own in enumerate(edges):
        count = int((codes[:, feature] == MISSING).sum())
        missing = count >= least
        # What is missing alone is a split only beside values.
        if missing and len(codes) - count >= least:
            rows.append((feature, MISSING, True))
        for edge in range(len(own)):
            rows.append((feature, edge, False))
            if missing:
                rows.append((feature, edge, True))
    feature_of, edge_of, left_of = zip(*rows, strict=True) if rows else ((), (), ())
    return Candidates(
        np.array(feature_of, np.int64), np.array(edge_of, np.int64), np.array(left_of, np.bool_)
    )
