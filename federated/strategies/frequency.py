"""Adaptive aggregation frequency: how much devices train between two aggregations, by how far they diverge.

With p_i the weights and Δ_i the differences, divergence = 1 − ‖Σ p_i Δ_i‖² / Σ p_i ‖Δ_i‖², which lies in [0, 1]:
0 when all devices agree, 1 when their differences cancel. The ratio is the inverse of gradient diversity (Yin et al.
2018), taken of whole differences. Agreement means that more local work is safe and saves rounds; divergence means that
local steps no longer help, as near the optimum, where local work should shrink (AdaComm, Wang and Joshi 2019). The rule
itself is ours. On a moving average of the divergence: below ``low`` the steps are multiplied by ``growth``, above
``high`` divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from federated.device import Instructions, Update
from federated.layout import Layout
from federated.strategies.averaging import FedAvg
from federated.strategies.strategy import ServerState, settle, squared_norm, trained_only
from federated.sums import Contribution, Sum
from federated.weights import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveFrequency(FedAvg):
    """FedAvg with ``steps`` local steps at first, kept between ``min_steps`` and ``max_steps``. ``memory`` is the share
    of the old divergence in the moving average."""

    name: ClassVar[str] = "adaptive"
    steps: int = 10
    min_steps: int = 1
    max_steps: int = 100  # here also the most that a device is asked for
    low: float = 0.5
    high: float = 0.8
    growth: float = 1.25
    memory: float = 0.5

    def check(self) -> None:
        """Ranges must be in order."""
        FedAvg.check(self)
        if not 1 <= self.min_steps <= self.steps <= self.max_steps:
            raise ValueError("adaptive: 1 <= min_steps <= steps <= max_steps must hold")
        if not (0.0 <= self.low <= self.high <= 1.0 and self.growth > 1.0 and 0.0 <= self.memory < 1.0):
            raise ValueError("adaptive: 0 <= low <= high <= 1, growth > 1 and 0 <= memory < 1 must hold")

    def init(self, layout: Layout, weights: Array) -> ServerState:
        """The state before the first iteration."""
        state = FedAvg.init(self, layout, weights)
        state.scalars["steps"] = float(self.steps)
        return state

    def instructions(self, state: ServerState) -> Instructions:
        """The number of local steps."""
        return Instructions(steps=round(state.scalars["steps"]))

    def contribution(self, layout: Layout, update: Update) -> Contribution:
        """The difference and its squared norm."""
        plain = FedAvg.contribution(self, layout, update)
        norm = squared_norm(trained_only(layout, update.vectors["difference"]))
        return replace(plain, scalars={"squared_norm": norm})

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        apart = total.mean_scalar("squared_norm")
        together = squared_norm(mean if state.layout.only_weights else mean[state.layout.mask("weight")])
        now = max(0.0, 1.0 - together / apart) if apart > 0.0 else 0.0
        divergence = self.memory * state.scalars.get("divergence", now) + (1.0 - self.memory) * now
        weights = settle(state, self.server_rate * mean, mean, total.most_steps)
        scalars = {"steps": self._steps(state.scalars["steps"], divergence), "divergence": divergence}
        return state.following({"weights": weights}, scalars)

    def _steps(self, steps: float, divergence: float) -> float:
        if divergence > self.high:
            steps /= self.growth
        elif divergence < self.low:
            steps *= self.growth
        return min(max(steps, float(self.min_steps)), float(self.max_steps))
