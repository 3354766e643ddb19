"""The kind of job ``transfer``."""

from __future__ import annotations

from typing import Final

from federated.vertical.kinds import Count, GuestPart, HostPart, Kind, Setup, by_role
from federated.vertical.parties import Make
from federated.vertical.transfer.options import TransferOptions


def make(options: TransferOptions, setup: Setup) -> Make:
    """This party's role. Raises ValueError."""
    from federated.vertical.transfer import roles

    roles.own_table(setup)
    roles.check_trials(options, setup)
    return by_role(options, setup, {"guest": roles.guest, "host": roles.host})


def load(body: bytes) -> HostPart | GuestPart:
    """A party's part of the model."""
    from federated.vertical.transfer.model import load as read

    return read(body)


KIND: Final = Kind(
    name="transfer",
    summary="few common users: the guest's labels, all of its rows too, for scores of the host's customers",
    roles={"guest": Count(1, 1), "host": Count(1, 1)},
    options=TransferOptions,
    make=make,
    seen={
        "features": "how many features the sender has",
        "keys": "a public key, and keys with which slots under it are rotated",
        "matrix": "nothing: the sender's vectors (and labels) of the common rows, encrypted under its own key",
        "masked": "nothing: the key holder decrypts a polynomial that is uniform over the whole modulus",
        "sums": "the receiver's own gradient over all common rows, with the key holder's noise; over many steps these "
        "are many sums of the same rows. A host that solves them has the label of most common rows where these are "
        "few, and the numbers by which vectors are scored, so that it needs the guest no more; a guest has part of the "
        "vectors. Noise makes that worse, no bound is stated, and each restart repeats sums with noise of their own. "
        "Whoever departs from the protocol gets as many other sums of the peer's vectors instead",
        "vectors": "where there are gammas, for each of them the host's vectors of a quarter of the common rows: as a "
        "joint answer for these rows",
        "gamma": "which of the gammas the guest's labels are for",
    },
    load=load,
)
