"""Server-side aggregation as ``(init, apply)`` over serialisable state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federated.device import Update
from federated.weights import Array, Weights, add_scaled, require_same_shape


@dataclass(frozen=True, slots=True)
class ServerState:
    """The global weights after ``round`` finished rounds."""

    weights: dict[str, Array]
    round: int


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Federated averaging (McMahan et al. 2017): the mean of the differences, weighted by examples.

    ``server_rate`` 1 is FedAvg itself. The sum runs in float64, so it does not depend on the order of
    arrival beyond the last bit of float32.
    """

    server_rate: float = 1.0

    def init(self, weights: Weights) -> ServerState:
        """The state before the first round."""
        return ServerState(dict(weights), 0)

    def apply(self, state: ServerState, updates: Sequence[Update]) -> ServerState:
        """The state after one round. Raises ValueError without updates, WeightsMismatch on a foreign one."""
        if not updates:
            raise ValueError("a round needs at least one update")
        for update in updates:
            require_same_shape(state.weights, update.difference)
        shares = np.array([update.examples for update in updates], np.float64)
        shares /= shares.sum()
        mean = {
            name: np.tensordot(shares, np.stack([u.difference[name] for u in updates]), 1).astype(np.float32)
            for name in state.weights
        }
        return ServerState(add_scaled(state.weights, mean, self.server_rate), state.round + 1)
