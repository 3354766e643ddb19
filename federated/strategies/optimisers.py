"""Adaptive server optimisers (Reddi et al. 2021, "Adaptive Federated Optimization", algorithm 2).

With Δ the mean difference: m ← β₁ m + (1 − β₁) Δ, then v by the optimiser, then w ← w + rate · m / (√v + τ).
As there, without bias correction; v starts at τ².
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from federated.layout import Layout
from federated.strategies.strategy import ServerState, Strategy, Vector, Wide, settle
from federated.sums import Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveOptimiser(Strategy):
    """What the three share. ``beta`` is β₁, ``adaptivity`` is τ."""

    server_rate: float = 0.03
    beta: float = 0.9
    adaptivity: float = 1e-3

    def check(self) -> None:
        """β₁ must lie in [0, 1), τ must be positive."""
        Strategy.check(self)
        if not (0.0 <= self.beta < 1.0 and 0.0 < self.adaptivity < np.inf):
            raise ValueError(f"{self.name}: beta must be at least 0 and below 1, adaptivity positive")

    def more_vectors(self, layout: Layout) -> dict[str, Vector]:
        """m = 0, v = τ²."""
        return {
            "momentum": np.zeros(layout.size, np.float64),
            "second": np.full(layout.size, self.adaptivity**2, np.float64),
        }

    @abstractmethod
    def second(self, before: Wide, squared: Wide) -> Wide:
        """v [D] from the one before and Δ² [D]."""

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        momentum = self.beta * state.vectors["momentum"] + (1.0 - self.beta) * mean
        second = self.second(state.vectors["second"], np.square(mean))
        change = self.server_rate * momentum / (np.sqrt(second) + self.adaptivity)
        weights = settle(state, change, mean, total.most_steps)
        return state.following({"weights": weights, "momentum": momentum, "second": second})


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad(AdaptiveOptimiser):
    """v ← v + Δ²; as there, no momentum unless asked for."""

    name: ClassVar[str] = "fedadagrad"
    beta: float = 0.0

    def second(self, before: Wide, squared: Wide) -> Wide:
        """v."""
        return before + squared


@dataclass(frozen=True, slots=True, kw_only=True)
class _SecondMoment(AdaptiveOptimiser):
    """``second_beta`` is β₂."""

    second_beta: float = 0.99

    def check(self) -> None:
        """β₂ must lie in [0, 1)."""
        AdaptiveOptimiser.check(self)
        if not 0.0 <= self.second_beta < 1.0:
            raise ValueError(f"{self.name}: second_beta must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam(_SecondMoment):
    """v ← β₂ v + (1 − β₂) Δ²."""

    name: ClassVar[str] = "fedadam"

    def second(self, before: Wide, squared: Wide) -> Wide:
        """v."""
        return self.second_beta * before + (1.0 - self.second_beta) * squared


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi(_SecondMoment):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    name: ClassVar[str] = "fedyogi"

    def second(self, before: Wide, squared: Wide) -> Wide:
        """v."""
        return before - (1.0 - self.second_beta) * squared * np.sign(before - squared)
