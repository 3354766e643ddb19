"""FedNova (Wang et al. 2020): clients that take unequal numbers of steps pull towards the right optimum.

Each difference is divided by a_i, its effective number of steps, and the mean is multiplied by the cohort's mean of
a_i: w ← w + rate · (Σ p_i a_i) · Σ p_i Δ_i / a_i. For τ plain steps a_i = τ; with momentum ρ
a_i = (τ − ρ (1 − ρ^τ) / (1 − ρ)) / (1 − ρ); with a proximal term μ at step size η a_i = (1 − (1 − ημ)^τ) / (ημ).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from federated.device import Update
from federated.layout import Layout
from federated.strategies.strategy import ServerState, Strategy, scaled_weights, settle
from federated.sums import Contribution, Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNova(Strategy):
    """``momentum``, ``proximal`` and ``rate`` are those of the devices' local training (``rate`` matters only with a
    proximal term)."""

    name: ClassVar[str] = "fednova"
    momentum: float = 0.0
    proximal: float = 0.0
    rate: float = 0.0

    def check(self) -> None:
        """Momentum and proximal exclude each other: the formula is known for one at a time."""
        Strategy.check(self)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError("fednova: momentum must be at least 0 and below 1")
        if self.proximal and (self.momentum or not 0.0 < self.rate * self.proximal < 1.0):
            raise ValueError(
                "fednova: a proximal term needs the local rate (rate · proximal below 1) and no momentum"
            )

    def effective_steps(self, steps: int) -> float:
        """a_i of a client that took ``steps`` steps."""
        if self.momentum:
            kept = self.momentum
            return (steps - kept * (1.0 - kept**steps) / (1.0 - kept)) / (1.0 - kept)
        if self.proximal:
            pulled = self.rate * self.proximal
            return (1.0 - (1.0 - pulled) ** steps) / pulled
        return float(steps)

    def contribution(self, layout: Layout, update: Update) -> Contribution:
        """The difference per effective step, and the effective steps."""
        plain = Strategy.contribution(self, layout, update)
        effective = self.effective_steps(max(plain.steps, 1))  # the sum refuses fewer
        normalised = scaled_weights(layout, update.vectors["difference"], 1.0 / effective)
        return replace(
            plain,
            vectors={**update.vectors, "difference": normalised},
            scalars={"effective_steps": effective},
        )

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration."""
        mean = total.mean()
        change = self.server_rate * total.mean_scalar("effective_steps") * mean
        return state.following({"weights": settle(state, change, mean, total.most_steps)})
