"""FedNova (Wang et al. 2020): clients that take unequal numbers of steps pull towards the right optimum.

Each difference is divided by a_i, its effective number of steps, and the mean is multiplied by the cohort's mean of
a_i: w ← w + rate · (Σ p_i a_i) · Σ p_i Δ_i / a_i. For τ plain steps a_i = τ; with momentum ρ
a_i = (τ − ρ (1 − ρ^τ) / (1 − ρ)) / (1 − ρ); with a proximal term μ at step size η a_i = (1 − (1 − ημ)^τ) / (ημ).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from federated.device import Update
from federated.layout import Layout
from federated.strategies.strategy import ServerState, Strategy, scaled_weights, settle
from federated.sums import Contribution, Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNova(Strategy):
    """``momentum``, ``proximal`` and ``rate`` are those of the devices' local training (``rate`` matters only with a
    proximal term); ``max_steps`` caps the steps that a client may claim."""

    name: ClassVar[str] = "fednova"
    momentum: float = 0.0
    proximal: float = 0.0
    rate: float = 0.0
    max_steps: int = 10_000

    def check(self) -> None:
        """Momentum and proximal exclude each other: the formula is known for one at a time."""
        Strategy.check(self)
        if not 0.0 <= self.momentum < 1.0 or self.max_steps < 1:
            raise ValueError("fednova: momentum must be at least 0 and below 1, max_steps at least 1")
        if self.proximal and (self.momentum or not 0.0 < self.rate * self.proximal < 1.0):
            raise ValueError(
                "fednova: a proximal term needs the local rate (rate · proximal below 1) and no momentum"
            )

    def effective_steps(self, steps: int) -> float:
        """a_i of a client that took ``steps`` steps."""
        taken = min(steps, self.max_steps)
        if self.momentum:
            kept = self.momentum
            return (taken - kept * (1.0 - kept**taken) / (1.0 - kept)) / (1.0 - kept)
        if self.proximal:
            pulled = self.rate * self.proximal
            return (1.0 - (1.0 - pulled) ** taken) / pulled
        return float(taken)

    def contribution(self, layout: Layout, update: Update) -> Contribution:
        """The difference per effective step, and the effective steps."""
        effective = self.effective_steps(update.steps)
        weight = float(min(update.examples, self.max_examples))
        normalised = scaled_weights(layout, update.vectors["difference"], 1.0 / effective)
        return Contribution(
            {**update.vectors, "difference": normalised},
            weight,
            update.examples,
            update.steps,
            update.loss,
            {"effective_steps": effective},
        )

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        change = self.server_rate * total.mean_scalar("effective_steps") * mean
        return state.following({"weights": settle(state, change, mean, total.most_steps)})
