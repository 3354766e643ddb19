"""Guest and host of a transfer. Both do the same, each under its own key and the other's (``sealed``).

    first        both ways   ``features``: how many the sender has; then ``keys``: a public key, and keys of rotations
    each step    both ways   ``matrix``, then ``masked``, then ``sums``
    each ``every`` steps     a checkpoint at both

A restart draws new keys; none is ever written down.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import numpy as np
import numpy.typing as npt

from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import (
    Checkpoint,
    Draw,
    Effect,
    Incoming,
    PartResult,
    PeerFault,
    Progress,
    Role,
    Send,
    receive,
)
from federated.vertical.tables import MOST_COLUMNS, Table
from federated.vertical.transfer.model import GuestModel, HostModel, inputs_of
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.sealed import Owner, Plan, Weigher
from federated.vertical.transfer.sides import GuestSide, HostSide, first_weights
from federated.vertical.wire import Int, pack, unpack

Values = npt.NDArray[np.float64]


def drawn_seed(draw: Draw) -> int:
    """A seed of initial weights."""
    return int.from_bytes(draw(8), "little")


def own_table(setup: Setup) -> Table:
    """The party's common rows, fit for this job. Raises ValueError."""
    table = setup.table
    if table is None or not table.names:
        raise ValueError(f"{setup.me} has no features")
    check_rows(len(table), len(table.names))
    if setup.parties[setup.me] == "guest":
        if table.labels is None:
            raise ValueError(f"{setup.me} is the guest and has no labels")
        if len(np.unique(all_labels(setup))) != 2:
            raise ValueError("labels of a transfer are of two values")
    return table


def check_rows(rows: int, features: int) -> None:
    """Raise ValueError for so few common rows that a gradient's sums would tell of each."""
    if rows <= features + 1:
        raise ValueError(
            f"{rows} common rows with {features} features: a gradient would tell all labels; it takes more than "
            f"{features + 1} rows"
        )


def all_labels(setup: Setup) -> Values:
    """Labels of the common rows, then of the guest's others, [N]."""
    parts = [one.labels for one in (setup.table, setup.rest) if one is not None and one.labels is not None]
    return np.concatenate(parts)


def guest_side(options: TransferOptions, setup: Setup, seed: int) -> tuple[Scaling, GuestSide]:
    """From all of the guest's rows, the common ones first."""
    scaling, features = _features(options, setup, rest=True)
    labels = all_labels(setup)
    signs = np.where(labels == labels.max(), 1.0, -1.0)
    table = own_table(setup)
    weights = first_weights(len(table.names), options, seed)
    return scaling, GuestSide(features, len(table), weights, options, labels=signs)


def host_side(options: TransferOptions, setup: Setup, seed: int) -> tuple[Scaling, HostSide]:
    """From the common rows; the others are good for scaling."""
    scaling, features = _features(options, setup, rest=False)
    weights = first_weights(len(own_table(setup).names), options, seed)
    return scaling, HostSide(features, len(features), weights, options)


def guest(
    options: TransferOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party with the labels."""
    scaling, side = guest_side(options, setup, drawn_seed(draw))
    peer = setup.one("host")
    figures = yield from _train(side, peer, state, draw)
    model = GuestModel(scaling, side.weights, side.phi(), peer)
    return PartResult(figures, model.dump())


def host(
    options: TransferOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party whose customers are to be scored."""
    scaling, side = host_side(options, setup, drawn_seed(draw))
    figures = yield from _train(side, setup.one("guest"), state, draw)
    return PartResult(figures, HostModel(scaling, side.weights).dump())


def _train(
    side: GuestSide | HostSide, peer: str, state: bytes | None, draw: Draw
) -> Generator[Effect, Incoming | None, dict[str, float | int | str]]:
    """All steps that are left; figures to show."""
    if state is not None:
        side.restore(state)
    options, features = side.options, len(side.weights) - 1
    own = Plan(options, side.common, features)
    if side.step < options.steps:
        yield Send(peer, "features", pack({"features": features}))
        body = yield from receive(peer, "features")
        count: int = unpack(body, peer, {"features": Int(1, MOST_COLUMNS)})["features"]
        try:
            check_rows(side.common, count)
            owner = Owner(Plan(options, side.common, count), peer, draw)
        except ValueError as error:
            raise PeerFault(peer, "features", str(error)) from None
        yield Send(peer, "keys", owner.keys())
        weigher = Weigher(own, (yield from receive(peer, "keys")), peer, draw)
    while side.step < options.steps:
        yield Send(peer, "matrix", owner.sealed(side.message()))
        weights, near = side.needs()
        masked, mask = weigher.hidden((yield from receive(peer, "matrix")), weights)
        yield Send(peer, "masked", masked)
        yield Send(peer, "sums", owner.answer((yield from receive(peer, "masked"))))
        sums = weigher.sums((yield from receive(peer, "sums")), mask)
        side.move((sums + near) / side.common)
        yield Progress(side.step, options.steps, "steps")
        if side.step % options.every == 0 or side.step == options.steps:
            yield Checkpoint(side.step, side.state())
    return _figures(side, own)


def _features(options: TransferOptions, setup: Setup, rest: bool) -> tuple[Scaling, Values]:
    table = own_table(setup)
    parts = [table.features] + ([] if setup.rest is None else [setup.rest.features])
    scaling = Scaling.of(np.vstack(parts), options.clip)
    return scaling, inputs_of(scaling, np.vstack(parts) if rest else table.features)


def _figures(side: GuestSide | HostSide, plan: Plan) -> dict[str, float | int | str]:
    found: dict[str, float | int | str] = {
        "steps": side.step,
        "common rows": side.common,
        "rows learned from": len(side.features),
    }
    return found | {
        "protection": "CKKS, each party's own key; masks uniform over the modulus",
        "noise_over_error": round(plan.flooding, 1),
    }
