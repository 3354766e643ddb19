"""SignDS at the server (Jiang, Zhou and Grossklags 2022): votes on coordinates become a step, whose size bits tell.

Devices vote ±1 on h coordinates each; w ← w + rate · 2 r_est · N · mean vote, over N devices. r_est follows the mean r
of the devices' largest coordinates by bits that went through randomised response. N_C ones are N_T = (N_C − N + N P) /
(2P − 1) true ones, P = e^ε / (1 + e^ε), within [0, N]; B = [N_T > N / 2]. First r_est grows: a device's bit is
[r < 2 r_est], and B = 0 doubles r_est. B = 1 ends that for good. From then on the bit is [r < r_est], and B = 1 halves
r_est. The step is taken with the new r_est.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from federated.device import Instructions
from federated.layout import Layout
from federated.strategies.strategy import ServerState, StateRefused, Strategy, settle
from federated.sums import SCALE_BITS, Sum
from federated.weights import Array

SMALLEST: Final = 2.0**-60
LARGEST: Final = 2.0**20
"""Where r_est stays, whatever devices say."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """r_est, ``estimate``, and whether it has stopped growing."""

    estimate: float
    contracting: bool = False

    @property
    def threshold(self) -> float:
        """What devices compare r with: they say 1 where it is below."""
        return self.estimate if self.contracting else 2.0 * self.estimate

    def following(self, ones: int, devices: int, epsilon: float) -> Magnitude:
        """After ``ones`` of ``devices`` noisy bits."""
        below = true_ones(ones, devices, epsilon) > devices / 2.0
        if self.contracting:
            return replace(self, estimate=max(self.estimate / 2.0, SMALLEST)) if below else self
        if below:
            return replace(self, contracting=True)
        return replace(self, estimate=min(2.0 * self.estimate, LARGEST))


def true_ones(ones: int, devices: int, epsilon: float) -> float:
    """N_T, the unbiased estimate of how many of ``devices`` bits were 1 before randomised response, in [0, N]: written
    as N / 2 + (N_C − N / 2) / (2P − 1), which is exactly half for half."""
    half = devices / 2.0
    return min(max(half + (ones - half) / math.tanh(epsilon / 2.0), 0.0), float(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignVotes(Strategy):
    """``server_rate`` is sign_global_lr; ``magnitude`` is r_est at first, small, since it can only grow quickly at the
    start; ``magnitude_epsilon`` is that of the bits."""

    name: ClassVar[str] = "signds"
    server_rate: float = 0.1
    magnitude: float = math.exp(-5.0)
    magnitude_epsilon: float = 1.0

    def check(self) -> None:
        """r_est must be in its range, ε positive."""
        Strategy.check(self)
        if not SMALLEST <= self.magnitude <= LARGEST or not 0.0 < self.magnitude_epsilon < math.inf:
            raise ValueError(
                f"signds: magnitude must be {SMALLEST:g} to {LARGEST:g}, magnitude_epsilon positive"
            )

    @property
    def largest_weight(self) -> int:
        """Every device has one vote a coordinate, whatever it claims."""
        return 1

    def init(self, layout: Layout, weights: Array) -> ServerState:
        """The state before the first iteration."""
        state = Strategy.init(self, layout, weights)
        state.scalars.update(magnitude=self.magnitude, contracting=0.0)
        return state

    def instructions(self, state: ServerState) -> Instructions:
        """The threshold that bits answer."""
        return Instructions(threshold=_magnitude(state).threshold)

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """One iteration. Statistics and counters stay the server's."""
        mean = total.mean()
        if "bit" not in total.scalars:
            raise StateRefused("the sum has no bits: it is not of SignDS reports")
        ones = total.scalars["bit"] >> SCALE_BITS
        now = _magnitude(state).following(ones, total.clients, self.magnitude_epsilon)
        rate = self.server_rate * 2.0 * now.estimate * total.clients
        weights = settle(state, rate * mean, 0.0 * mean, 0)
        return state.following(
            {"weights": weights}, {"magnitude": now.estimate, "contracting": float(now.contracting)}
        )


def _magnitude(state: ServerState) -> Magnitude:
    return Magnitude(state.scalars["magnitude"], state.scalars["contracting"] > 0.0)
