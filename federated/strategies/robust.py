"""Aggregation that a minority of bad clients cannot steer.

``NormBound`` works on sums: each difference is scaled to a largest norm before it is added. The others need every
single update, so they exclude sharded sums and secure aggregation; they are unweighted, since a claimed number of
examples would be a lever. Counters follow the median client's steps, statistics the same rule as weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from federated.device import Update
from federated.layout import Layout
from federated.strategies.averaging import FedAvg
from federated.strategies.strategy import (
    ServerState,
    StateRefused,
    Strategy,
    Wide,
    scaled_weights,
    settle,
    squared_norm,
    trained_only,
)
from federated.sums import Contribution

_CHUNK = 65_536  # coordinates worked on at once


@dataclass(frozen=True, slots=True, kw_only=True)
class NormBound(FedAvg):
    """FedAvg over differences of an L2 norm of at most ``bound`` (Sun et al. 2019)."""

    name: ClassVar[str] = "norm_bound"
    bound: float

    def check(self) -> None:
        """The bound must be positive."""
        FedAvg.check(self)
        if not 0.0 < self.bound < np.inf:
            raise ValueError("norm_bound: bound must be positive")

    def contribution(self, layout: Layout, update: Update) -> Contribution:
        """The difference, scaled down where it is too long."""
        plain = FedAvg.contribution(self, layout, update)
        norm = sqrt(squared_norm(trained_only(layout, update.vectors["difference"])))
        if norm <= self.bound or not norm < np.inf:
            return plain  # what is not finite cannot be shortened: the sum refuses it
        shorter = scaled_weights(layout, update.vectors["difference"], self.bound / norm)
        return replace(plain, vectors={"difference": shorter})


@dataclass(frozen=True, slots=True, kw_only=True)
class _FromUpdates(Strategy):
    """w ← w + rate · centre of the differences."""

    needs: ClassVar[Literal["sum", "updates"]] = "updates"

    @abstractmethod
    def fewest(self) -> int:
        """How many updates an iteration needs."""

    @abstractmethod
    def centre(self, differences: Sequence[npt.NDArray[np.float32]]) -> Wide:
        """One vector [D] for all."""

    def apply_updates(self, state: ServerState, contributions: Sequence[Contribution]) -> ServerState:
        """One iteration."""
        if len(contributions) < self.fewest():
            raise StateRefused(
                f"{self.name} needs {self.fewest()} updates at least, not {len(contributions)}"
            )
        centre = self.centre([contribution.vectors["difference"] for contribution in contributions])
        steps = int(np.median([contribution.steps for contribution in contributions]))
        return state.following({"weights": settle(state, self.server_rate * centre, centre, steps)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(_FromUpdates):
    """Per coordinate, the mean without the ``trim`` share at either end (Yin et al. 2018, "Byzantine-robust")."""

    name: ClassVar[str] = "trimmed_mean"
    trim: float = 0.1

    def check(self) -> None:
        """The share must lie in [0, ½)."""
        Strategy.check(self)
        if not 0.0 <= self.trim < 0.5:
            raise ValueError("trimmed_mean: trim must be at least 0 and below one half")

    def fewest(self) -> int:
        """At least one is left."""
        return 1

    def centre(self, differences: Sequence[npt.NDArray[np.float32]]) -> Wide:
        """The trimmed mean [D]; the number cut at either end is rounded up."""
        count = len(differences)
        cut = min(int(np.ceil(self.trim * count)), (count - 1) // 2)
        found = np.empty(len(differences[0]), np.float64)
        for start in range(0, len(found), _CHUNK):
            part = np.stack([vector[start : start + _CHUNK] for vector in differences])
            part.sort(axis=0)
            found[start : start + _CHUNK] = part[cut : count - cut].mean(axis=0, dtype=np.float64)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Median(_FromUpdates):
    """The median of each coordinate (Yin et al. 2018, "Byzantine-robust")."""

    name: ClassVar[str] = "median"

    def fewest(self) -> int:
        """One is its own median."""
        return 1

    def centre(self, differences: Sequence[npt.NDArray[np.float32]]) -> Wide:
        """The median [D]; of an even number the mean of the middle two."""
        found = np.empty(len(differences[0]), np.float64)
        for start in range(0, len(found), _CHUNK):
            part = np.stack([vector[start : start + _CHUNK] for vector in differences])
            found[start : start + _CHUNK] = np.median(part.astype(np.float64), axis=0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum(_FromUpdates):
    """The mean of the ``keep`` updates nearest to their neighbours, against ``bad`` attackers (Blanchard et al. 2017).

    An update's score is the sum of squared distances to its n − bad − 2 nearest others; the lowest are kept, the
    first client among equals. ``keep`` 0 keeps n − bad; 1 is Krum. Needs n ≥ 2 · bad + 3.
    """

    name: ClassVar[str] = "krum"
    bad: int = 1
    keep: int = 0

    def check(self) -> None:
        """Neither may be negative."""
        Strategy.check(self)
        if self.bad < 0 or self.keep < 0:
            raise ValueError("krum: bad and keep must not be negative")

    def fewest(self) -> int:
        """2 · bad + 3, and as many as are kept."""
        return max(2 * self.bad + 3, self.keep)

    def chosen(self, differences: Sequence[npt.NDArray[np.float32]]) -> list[int]:
        """The places of the updates that are kept, ascending."""
        count = len(differences)
        gram = np.zeros((count, count))
        for start in range(0, len(differences[0]), _CHUNK):
            part = np.stack([vector[start : start + _CHUNK] for vector in differences]).astype(np.float64)
            gram += part @ part.T
        squares = np.diag(gram)
        distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
        np.fill_diagonal(distances, np.inf)
        distances.sort(axis=1)
        scores = distances[:, : count - self.bad - 2].sum(axis=1)
        kept = self.keep or count - self.bad
        return sorted(np.argsort(scores, kind="stable")[:kept].tolist())

    def centre(self, differences: Sequence[npt.NDArray[np.float32]]) -> Wide:
        """The mean [D] of those kept."""
        found = np.zeros(len(differences[0]), np.float64)
        kept = self.chosen(differences)
        for place in kept:
            found += differences[place]
        return found / len(kept)
