"""The kind of job ``split``."""

from __future__ import annotations

from typing import Final

from federated.vertical.kinds import Count, GuestPart, HostPart, Kind, Setup, by_role
from federated.vertical.parties import Make
from federated.vertical.split.options import SplitOptions


def make(options: SplitOptions, setup: Setup) -> Make:
    """This party's role. Raises ValueError."""
    import torch

    from federated.vertical.split import roles

    # Batches are small: threads would wait for each other, and sums would depend on how many there are.
    torch.set_num_threads(1)
    roles.own_table(setup, options)
    return by_role(options, setup, {"guest": roles.guest, "host": roles.host})


def load(body: bytes) -> HostPart | GuestPart:
    """A party's part of the model."""
    from federated.vertical.split.model import load as read

    return read(body)


KIND: Final = Kind(
    name="split",
    summary="a neural network, or a recommender of two towers, split between the parties; what passes between them in "
    "the clear, under noise, or through an encrypted layer",
    roles={"guest": Count(1, 1), "host": Count(1, 8)},
    options=SplitOptions,
    make=make,
    seen={
        "activations": "what a host's tower makes of each row of a batch: without noise much of the row's features; "
        "with noise what the host's epsilon allows",
        "gradients": "the loss's gradient along each of the receiver's activations: without noise practically each "
        "row's label; with noise what the guest's epsilon allows, and that grows with the epochs",
        "keys": "a public key",
        "sealed": "nothing: activations and a share of the layer's weights, encrypted under the sender's key",
        "masked": "nothing: the key's holder decrypts numbers that are evenly random",
        "products": "what the layer makes of each row, `interactive` numbers in each epoch, with noise of a few "
        "rounding steps: fewer than the activations, but over the epochs much of the row's features for who knows "
        "those of some rows. A receiver that does not follow the protocol can ask for the activations themselves",
        "turned": "the loss's gradient along each of the receiver's activations: without noise practically each row's "
        "label; with noise what the guest's epsilon allows, and that grows with the epochs. As they are made of "
        "`interactive` numbers, those of one batch tell the layer's weights but for a change of these numbers; the "
        "guest does not learn them",
        "weights": "the layer's weights when training is over, with which the receiver answers alone later on; with "
        "them all gradients that it has kept turn into those along what the guest saw",
    },
    load=load,
)
