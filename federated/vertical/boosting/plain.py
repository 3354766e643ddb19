"""Histogram boosting of all columns in one place, in the clear: what the joint trees must equal, and one party's own.

Nothing of the joint roles is used here but the arithmetic of gains and leaves, so that each checks the other. Columns
of several parties stand side by side; candidates are tried in the parties' order and in each party's own, and the
first of equal gains wins, which is the joint protocol's rule too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.vertical.boosting.candidates import Candidates, candidates_of
from federated.vertical.boosting.objective import (
    Objective,
    Rule,
    Whole,
    fit_objective,
    gains,
    leaf_value,
    whole,
)
from federated.vertical.boosting.trees import Splits, Tree
from federated.vertical.histograms.bins import Codes, encode, fit_edges
from federated.vertical.histograms.lanes import HALF

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlainModel:
    """Trees whose splits are all of one table; ``splits.feature`` counts through all columns."""

    objective: Objective
    splits: Splits
    trees: tuple[Tree, ...]

    def scores(self, rows: Floats) -> Floats:
        """Raw scores [N, K] of rows [N, F]."""
        found = np.tile(self.objective.base, (len(rows), 1))
        left = self.splits.left(rows)
        for tree in self.trees:
            found += tree.score([left])
        return found

    def answer(self, rows: Floats) -> Floats:
        """Probabilities or numbers: [N] or [N, K]."""
        return self.objective.answer(self.scores(rows))


def boost(
    features: Floats, labels: Floats, *, trees: int, depth: int, bins: int, rule: Rule, loss: str
) -> PlainModel:
    """Train on features [N, F] (NaN: missing), labels [N]. Raises ValueError for labels that do not fit ``loss``."""
    edges = fit_edges(features, bins, rule.least_rows)
    codes = encode(features, edges)
    candidates = candidates_of(codes, edges, rule.least_rows)
    objective, targets = fit_objective(labels, loss)
    scores = np.tile(objective.base, (len(labels), 1))
    splits, grown = Splits(), []
    for _ in range(trees):
        numbers = whole(objective.derivatives(scores, targets), HALF)
        tree, leaf = _grow(codes, edges, candidates, numbers, depth, rule, splits)
        scores = scores + np.array(tree.value)[leaf]
        grown.append(tree)
    return PlainModel(objective, splits, tuple(grown))


def _grow(
    codes: Codes,
    edges: Sequence[Floats],
    candidates: Candidates,
    numbers: Whole,
    depth: int,
    rule: Rule,
    splits: Splits,
) -> tuple[Tree, Ints]:
    """A tree, and the leaf [N] in which each row ends."""
    rows, lanes = numbers.values.shape
    tree, leaf = Tree(lanes // 2), np.zeros(rows, np.int64)
    level = [(tree.add(), np.arange(rows))]
    for _ in range(depth):
        below: list[tuple[int, Ints]] = []
        for node, members in level:
            total = numbers.values[members].sum(axis=0)
            counts = candidates.count_left(codes[members])
            sums = candidates.sum_left(codes[members], numbers.values[members])
            allowed = (counts >= rule.least_rows) & (len(members) - counts >= rule.least_rows)
            gain = np.where(allowed, gains(sums, total, numbers.scale, rule.l2), -np.inf)
            best = int(gain.argmax()) if len(gain) else 0
            if not len(gain) or gain[best] < rule.least_gain:
                continue
            feature, edge = int(candidates.feature[best]), int(candidates.edge[best])
            threshold = -np.inf if edge < 0 else float(edges[feature][edge])
            split = splits.add(feature, threshold, bool(candidates.missing_left[best]))
            goes = candidates.take(np.array([best])).left(codes[members])[0]
            left, right = tree.divide(node, 0, split, float(gain[best]))
            leaf[members[goes]], leaf[members[~goes]] = left, right
            below += [(left, members[goes]), (right, members[~goes])]
        level = below
    for node in range(len(tree)):
        if tree.owner[node] < 0:
            tree.value[node] = leaf_value(numbers.values[leaf == node].sum(axis=0), numbers.scale, rule)
    return tree, leaf
