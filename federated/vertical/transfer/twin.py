"""The same transfer in the clear, its gradients by the chain rule over both parties' rows in one place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federated.vertical.transfer.sides import GuestSide, HostSide

Values = npt.NDArray[np.float64]


def loss_of(guest: GuestSide, host: HostSide) -> float:
    """The loss, L2 left out."""
    n, options = guest.common, guest.options
    own, other = guest.vectors()[:n], host.vectors()[:n]
    scores, labels = other @ guest.phi(), guest.labels[:n]
    losses = np.log(2) - 0.5 * labels * scores + scores**2 / 8
    return float(losses.mean() + options.gamma * 0.5 * ((own - other) ** 2).sum() / n)


def gradients(guest: GuestSide, host: HostSide) -> tuple[Values, Values]:
    """Along the guest's and the host's weights, [F + 1, d] each, L2 left out."""
    n, gamma = guest.common, guest.options.gamma
    own, other, phi = guest.vectors(), host.vectors()[:n], guest.phi()
    slope = (-0.5 * guest.labels[:n] + 0.25 * (other @ phi)) / n
    near = gamma / n * (other - own[:n])
    along_other = np.outer(slope, phi) + near
    along_own = np.outer(guest.labels, slope @ other) / len(guest.labels)
    along_own[:n] -= near
    return (
        guest.features.T @ (along_own * (1 - own**2)),
        host.features[:n].T @ (along_other * (1 - other**2)),
    )


def train_plain(guest: GuestSide, host: HostSide) -> None:
    """All of ``steps``; both sides are changed."""
    while guest.step < guest.options.steps:
        for side, gradient in zip((guest, host), gradients(guest, host), strict=True):
            side.move(gradient)
