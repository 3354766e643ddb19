"""Grown trees: who splits at which node, and the tables of splits that stay with their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.wire import Arr, Expected

LEAF: Final = -1
MOST_DEPTH: Final = 8
MOST_TREES: Final = 10_000
MOST_SPLITS: Final = MOST_TREES * 2**MOST_DEPTH

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Splits:
    """One party's splits by id: ``feature`` (a column of its own), ``threshold``, ``missing_left``."""

    feature: list[int] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)
    missing_left: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.feature)

    def add(self, feature: int, threshold: float, missing_left: bool) -> int:
        """A new split's id. They say nothing of the column: they count up."""
        self.feature.append(feature)
        self.threshold.append(threshold)
        self.missing_left.append(missing_left)
        return len(self.feature) - 1

    def left(self, rows: Floats) -> Bools:
        """Whether each split sends each row of ``rows`` [N, F] left: [N, S]. Missing values of columns that had none in
        training go right."""
        chosen = rows[:, np.array(self.feature, np.int64)]
        with np.errstate(invalid="ignore"):
            left: Bools = chosen <= np.array(self.threshold)
        return np.where(np.isnan(chosen), np.array(self.missing_left, np.bool_), left)

    def fields(self) -> dict[str, npt.NDArray[np.generic]]:
        """For ``wire.pack``."""
        return {
            "split feature": np.array(self.feature, np.int64),
            "split threshold": np.array(self.threshold, np.float64),
            "split missing": np.array(self.missing_left, np.bool_),
        }

    @staticmethod
    def read(fields: Mapping[str, npt.NDArray[np.generic]]) -> Splits:
        """From what ``wire.unpack`` gives for ``SPLIT_FIELDS``. Raises ValueError."""
        feature, threshold, missing = (fields[name].tolist() for name in SPLIT_FIELDS)
        if not len(feature) == len(threshold) == len(missing):
            raise ValueError("a table of splits whose columns differ in length")
        return Splits(feature, threshold, missing)


SPLIT_FIELDS: Final[dict[str, Expected]] = {
    "split feature": Arr("<i8", (None,), MOST_SPLITS),
    # An edge of -inf: only what is missing goes left.
    "split threshold": Arr("<f8", (None,), MOST_SPLITS, finite=False),
    "split missing": Arr("|b1", (None,), MOST_SPLITS),
}


@dataclass(slots=True)
class Tree:
    """Nodes by number, 0 the root. ``owner``: the party whose split it is, by place, or LEAF; ``split``: its id there;
    ``left``, ``right``: nodes; ``gain``; ``value``: a leaf's [K] (zeros elsewhere)."""

    outputs: int
    owner: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    value: list[Floats] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.owner)

    def add(self) -> int:
        """A new leaf's number."""
        for column, start in ((self.owner, LEAF), (self.split, 0), (self.left, 0), (self.right, 0)):
            column.append(start)
        self.gain.append(0.0)
        self.value.append(np.zeros(self.outputs))
        return len(self.owner) - 1

    def divide(self, node: int, owner: int, split: int, gain: float) -> tuple[int, int]:
        """Make a leaf a split; the numbers of its children."""
        self.owner[node], self.split[node], self.gain[node] = owner, split, gain
        self.left[node], self.right[node] = self.add(), self.add()
        return self.left[node], self.right[node]

    def score(self, lefts: Sequence[Bools]) -> Floats:
        """[N, K] for each party's answers [N, S] by place."""
        rows = len(lefts[0])
        at = np.zeros(rows, np.int64)
        owner, split = np.array(self.owner), np.array(self.split)
        after = np.array([self.right, self.left])
        for _ in range(MOST_DEPTH + 1):
            moving = np.flatnonzero(owner[at] != LEAF)
            if not len(moving):
                break
            goes = np.zeros(rows, np.int64)
            for place, answers in enumerate(lefts):
                here = moving[owner[at[moving]] == place]
                goes[here] = answers[here, split[at[here]]]
            at[moving] = after[goes[moving], at[moving]]
        return np.array(self.value)[at]
