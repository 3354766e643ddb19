"""The kind of job ``split``."""

from __future__ import annotations

from typing import Final

from federated.vertical.kinds import Count, GuestPart, HostPart, Kind, Setup
from federated.vertical.parties import Make, PartResult, Role
from federated.vertical.split.options import SplitOptions


def make(options: SplitOptions, setup: Setup) -> Make:
    """This party's role. Raises ValueError."""
    import torch

    from federated.vertical.split import roles

    # Batches are small: threads would wait for each other, and sums would depend on how many there are.
    torch.set_num_threads(1)
    roles.own_table(setup, options)
    role = roles.guest if setup.parties[setup.me] == "guest" else roles.host

    def start(state: bytes | None) -> Role[PartResult]:
        return role(options, setup, state)

    return start


def load(body: bytes) -> HostPart | GuestPart:
    """A party's part of the model."""
    from federated.vertical.split.model import load as read

    return read(body)


KIND: Final = Kind(
    name="split",
    summary="a neural network, or a recommender of two towers, split between the parties",
    roles={"guest": Count(1, 1), "host": Count(1, 8)},
    options=SplitOptions,
    make=make,
    seen={
        "activations": "what a host's tower makes of each row of a batch: without noise much of the row's features; "
        "with noise what the host's epsilon allows",
        "gradients": "the loss's gradient along each of the receiver's activations: without noise practically each "
        "row's label; with noise what the guest's epsilon allows",
    },
    load=load,
)
