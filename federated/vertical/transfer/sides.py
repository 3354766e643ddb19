"""Each party's own side of the transfer (Liu et al. 2018), without messages or keys.

u = tanh(x W + b) at either party. Φ = mean over all the guest's rows of y·u_A; a host's row has the score φ = Φ·u_B.
Over the n common rows, with ℓ to the second order, log 2 − ½·y·φ + ⅛·φ²::

    loss = 1/n Σ ℓ(y, φ) + γ/n Σ ½ |u_A − u_B|² + l2/2 (|W_A|² + |W_B|²)

What a party's gradient needs from the other is a matrix V [n + d, d], and it needs it only in sums over a column,
weighted by numbers of its own: gradient[f, k] = Σ_r V[r, k]·weights[f, r, k] + own[f, k], times 1/n. So V can travel
encrypted, and one product with a plaintext is all that is computed::

    from the guest:  −½·y_i·Φ − γ·u_A,i  for each row i, and  Φ Φᵀ
    from a host:     u_B,i               for each row i, and  1/n Σ u_B u_Bᵀ
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.transfer.options import MOST_HIDDEN, TransferOptions
from federated.vertical.wire import Arr, Expected, Int, pack, unpack

Values = npt.NDArray[np.float64]

_MATRIX: Final = Arr("<f8", (None, None), (MOST_COLUMNS + 1) * MOST_HIDDEN)
_STATE: Final[dict[str, Expected]] = {"step": Int(0), "weights": _MATRIX, "velocity": _MATRIX}


@dataclass(slots=True)
class Side:
    """``features``: scaled, a constant column last [N, F + 1], the ``common`` rows first, in the joint order.
    ``weights``: [F + 1, d], the constant's last."""

    features: Values
    common: int
    weights: Values
    options: TransferOptions
    velocity: Values = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        self.velocity = np.zeros_like(self.weights)

    def vectors(self) -> Values:
        """u of all rows, [N, d]."""
        return np.asarray(np.tanh(self.features @ self.weights))

    def move(self, gradient: Values) -> None:
        """A step along the ``gradient`` [F + 1, d] of the loss without L2, which is added here."""
        penalty = self.options.l2 * self.weights
        penalty[-1] = 0.0
        rate = self.options.rate / (1 + self.options.gamma)
        self.velocity = self.options.momentum * self.velocity - rate * (gradient + penalty)
        self.weights = self.weights + self.velocity
        self.step += 1

    def state(self) -> bytes:
        """A checkpoint's."""
        return pack({"step": self.step, "weights": self.weights, "velocity": self.velocity})

    def restore(self, state: bytes) -> None:
        """Put ``state`` back. Raises PeerFault (of ``this checkpoint``), ValueError."""
        fields = unpack(state, "this checkpoint", _STATE)
        if fields["weights"].shape != self.weights.shape or fields["velocity"].shape != self.weights.shape:
            raise ValueError(
                f"a checkpoint of weights {fields['weights'].shape}, there are {self.weights.shape}"
            )
        self.step = fields["step"]
        self.weights, self.velocity = fields["weights"].copy(), fields["velocity"].copy()


@dataclass(slots=True)
class GuestSide(Side):
    """``labels``: −1 and 1, [N]."""

    labels: Values = field(kw_only=True)

    def phi(self) -> Values:
        """Φ, [d]."""
        return np.asarray((self.labels[:, None] * self.vectors()).mean(axis=0))

    def message(self) -> Values:
        """V for the host, [n + d, d]."""
        vectors, phi = self.vectors(), self.phi()
        rows = -0.5 * self.labels[: self.common, None] * phi - self.options.gamma * vectors[: self.common]
        return np.vstack([rows, np.outer(phi, phi)])

    def needs(self) -> tuple[Values, Values]:
        """Weights [F + 1, n + d, d] of the host's V, and the part of its own [F + 1, d]; both n times the mean."""
        n, vectors, phi, gamma = self.common, self.vectors(), self.phi(), self.options.gamma
        slopes = 1 - vectors**2
        shares = self.features.T @ (slopes * self.labels[:, None]) / len(self.labels)
        rows = self.features[:n].T[:, :, None] * slopes[:n]
        seen = -0.5 * self.labels[:n, None] * shares[:, None, :] - gamma * rows
        square = n * 0.25 * phi[None, :, None] * shares[:, None, :]
        return np.concatenate([seen, square], axis=1), gamma * (rows * vectors[:n]).sum(axis=1)


@dataclass(slots=True)
class HostSide(Side):
    """A party with features alone."""

    def message(self) -> Values:
        """V for the guest, [n + d, d]."""
        vectors = self.vectors()[: self.common]
        return np.vstack([vectors, vectors.T @ vectors / self.common])

    def needs(self) -> tuple[Values, Values]:
        """As the guest's, for the guest's V."""
        n = self.common
        vectors = self.vectors()[:n]
        rows = self.features[:n].T[:, :, None] * (1 - vectors**2)
        square = 0.25 * np.einsum("fik,il->flk", rows, vectors)
        return np.concatenate([rows, square], axis=1), self.options.gamma * (rows * vectors).sum(axis=1)


def first_weights(columns: int, options: TransferOptions, seed: int) -> Values:
    """[F + 1, d], uniform within 1/√F; the constant's 0."""
    found: Values = np.random.default_rng(seed).uniform(-1, 1, (columns + 1, options.hidden)) / np.sqrt(
        max(columns, 1)
    )
    found[-1] = 0.0
    return found
