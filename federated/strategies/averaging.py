"""Weighted means of differences: FedAvg and its nearest relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from federated.device import Instructions
from federated.layout import Layout
from federated.strategies.strategy import ServerState, Strategy, Vector, settle
from federated.sums import Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg(Strategy):
    """w ← w + rate · mean difference (McMahan et al. 2017); with rate 1 the mean of the clients' weights."""

    name: ClassVar[str] = "fedavg"

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        return state.following({"weights": settle(state, self.server_rate * mean, mean, total.most_steps)})


@dataclass(frozen=True, slots=True, kw_only=True)
class FedSGD(FedAvg):
    """One gradient over all of a client's examples per iteration (McMahan et al. 2017): FedAvg's baseline."""

    name: ClassVar[str] = "fedsgd"

    def instructions(self, state: ServerState) -> Instructions:
        """One step on the full batch."""
        return Instructions(full_batch=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose devices are held near the global weights by ½ μ ‖w − w_global‖² (Li et al. 2020)."""

    name: ClassVar[str] = "fedprox"
    proximal: float = 0.01

    def check(self) -> None:
        """μ must not be negative."""
        FedAvg.check(self)
        if not 0.0 <= self.proximal < np.inf:
            raise ValueError("fedprox: proximal must not be negative")

    def instructions(self, state: ServerState) -> Instructions:
        """μ."""
        return Instructions(proximal=self.proximal)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgM(Strategy):
    """Server momentum (Hsu et al. 2019): v ← β v + mean difference, w ← w + rate · v."""

    name: ClassVar[str] = "fedavgm"
    momentum: float = 0.9

    def check(self) -> None:
        """β must lie in [0, 1)."""
        Strategy.check(self)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError("fedavgm: momentum must be at least 0 and below 1")

    def more_vectors(self, layout: Layout) -> dict[str, Vector]:
        """v = 0."""
        return {"momentum": np.zeros(layout.size, np.float64)}

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        velocity = self.momentum * state.vectors["momentum"] + mean
        weights = settle(state, self.server_rate * velocity, mean, total.most_steps)
        return state.following({"weights": weights, "momentum": velocity})
