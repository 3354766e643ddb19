"""The kind of job ``linear``."""

from __future__ import annotations

from typing import Final

from federated.vertical.kinds import Count, GuestPart, HostPart, Kind, Setup
from federated.vertical.linear.options import LinearOptions
from federated.vertical.parties import Make, PartResult, Role


def make(options: LinearOptions, setup: Setup) -> Make:
    """This party's role; without a coordinator there must be one host. Raises ValueError."""
    from federated.vertical.linear import coordinated, pair
    from federated.vertical.linear.plan import own_table

    role = setup.parties[setup.me]
    keepers, hosts = setup.named("coordinator"), setup.named("host")
    if not keepers and len(hosts) != 1:
        raise ValueError(f"{len(hosts)} hosts need a coordinator; without one there is a guest and one host")
    if role != "coordinator":
        own_table(setup, options, guest=role == "guest")

    def start(state: bytes | None) -> Role[PartResult]:
        if role == "coordinator":
            return coordinated.coordinator(options, setup, state)
        if role == "guest":
            return (coordinated.guest if keepers else pair.guest)(options, setup, state)
        return (coordinated.host if keepers else pair.host)(options, setup, state)

    return start


def load(body: bytes) -> HostPart | GuestPart:
    """A party's part of the model."""
    from federated.vertical.linear.model import load as read

    return read(body)


KIND: Final = Kind(
    name="linear",
    summary="logistic or linear regression under CKKS, with a coordinator or between two",
    roles={"guest": Count(1, 1), "host": Count(1, 8), "coordinator": Count(0, 1)},
    options=LinearOptions,
    make=make,
    seen={
        "keys": "public keys",
        "width": "how many rows and features the sender has",
        "share": "nothing: the host's predictors of a batch, encrypted under a key that the guest has not",
        "residual": "with a coordinator nothing: encrypted under its key; between two, residuals under masks that are "
        "noise to the host, up to 2^row_mask_distance_log2",
        "masked": "the key holder decrypts noise: every slot has a mask of its own, up to 2^mask_distance_log2; "
        "nobody sees a gradient of another party",
        "gradient": "the receiver's own gradient of a batch, with the key holder's noise: at a host so many linear "
        "equations of the batch's residuals as it has columns, in the first epoch of its labels; batches for which "
        "these could tell every 0/1 label are refused. A restart repeats them with new noise, and who restarts often "
        "averages it",
        "penalty": "nothing: the host's L2 term, encrypted",
        "loss": "the mean loss of the epoch, with the penalties; no row's",
        "verdict": "the mean loss of the epoch, and whether to stop",
    },
    load=load,
)
