"""What a curious party makes of the sums that it is sent: both sides get them, in every step, as their own gradients.

A sum is V [n + d, d] weighted by numbers that the receiver chose (``sides``), with the key holder's noise. V moves
little from step to step, so all steps together are one regression for V. From the guest's V a host has the labels of
the common rows and Φ, which V is made of: it then scores its customers without the guest. From a host's V the guest has
vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.vertical.transfer.sides import GuestSide, HostSide
from federated.vertical.transfer.twin import gradients

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Guessed:
    """``host``: what the host takes for the guest's V of the common rows [n, d]; ``guest``: the other way round."""

    host: Values
    guest: Values

    @property
    def labels(self) -> Values:
        """The host's guess of labels, but for the sign of all: [n]."""
        found: Values = np.linalg.svd(self.host, full_matrices=False)[0][:, 0]
        return found

    @property
    def phi(self) -> Values:
        """The host's guess of Φ, but for length and sign: [d]."""
        found: Values = np.linalg.svd(self.host, full_matrices=False)[2][0]
        return found


def watched(guest: GuestSide, host: HostSide, rng: np.random.Generator, ridge: float = 0.07) -> Guessed:
    """A whole training in the clear (both sides are changed), and what either side makes of its sums; ``rng``: of the
    noise, as the options have it. ``ridge``: noise over the size that V is thought to have."""
    moments = [_Moments(side.common, side.options.hidden) for side in (guest, host)]
    while guest.step < guest.options.steps:
        found = gradients(guest, host)
        needs = guest.needs(), host.needs()
        for side, clean, (weights, near), own in zip((guest, host), found, needs, moments, strict=True):
            gradient = clean + rng.normal(0.0, side.options.noise, clean.shape)
            own.add(weights[:, : side.common] / side.common, gradient - near / side.common)
            side.move(gradient)
    return Guessed(moments[1].solved(ridge), moments[0].solved(ridge))


class _Moments:
    """Of regressions for each column of V [n, d]."""

    def __init__(self, rows: int, width: int) -> None:
        self._squares: Values = np.zeros((width, rows, rows))
        self._products: Values = np.zeros((width, rows))

    def add(self, weights: Values, sums: Values) -> None:
        """``sums`` [f, d] of V weighted by [f, n, d]."""
        by_column = weights.transpose(2, 0, 1)
        self._squares = self._squares + by_column.transpose(0, 2, 1) @ by_column
        self._products = self._products + np.einsum("kfi,fk->ki", by_column, sums)

    def solved(self, ridge: float) -> Values:
        """V [n, d]."""
        eye = ridge**2 * np.eye(self._squares.shape[1])
        return np.asarray(np.linalg.solve(self._squares + eye, self._products[:, :, None])[:, :, 0].T)
