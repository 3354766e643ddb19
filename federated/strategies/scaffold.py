"""SCAFFOLD (Karimireddy et al. 2020): control variates take the drift of unequal clients out of their steps.

The server keeps c, each client its c_i (zero before its first time). A client's control is its own memory: it sends
only c_i⁺ − c_i, and adds it to its own once the server has accepted. Then, over the cohort S of a population of N:
w ← w + rate · mean difference, c ← c + |S| / N · mean control change. Both means are unweighted, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from federated.device import Instructions
from federated.layout import Layout
from federated.strategies.strategy import ServerState, Strategy, Vector, settle
from federated.sums import Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold(Strategy):
    """``population`` is N, the number of clients that may ever take part."""

    name: ClassVar[str] = "scaffold"
    summed: ClassVar[tuple[str, ...]] = ("control", "difference")
    population: int

    def check(self) -> None:
        """N must be at least 1."""
        Strategy.check(self)
        if self.population < 1:
            raise ValueError("scaffold: population must be at least 1")

    @property
    def largest_weight(self) -> int:
        """Every client weighs the same."""
        return 1

    def more_vectors(self, layout: Layout) -> dict[str, Vector]:
        """c = 0."""
        return {"control": np.zeros(layout.size, np.float32)}

    def instructions(self, state: ServerState) -> Instructions:
        """c travels with the weights."""
        return Instructions(vectors=("control",))

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        share = min(total.clients / self.population, 1.0)
        control = state.vectors["control"].astype(np.float64) + share * total.mean("control")
        weights = settle(state, self.server_rate * mean, mean, total.most_steps)
        return state.following({"weights": weights, "control": control.astype(np.float32)})
