"""Guest, hosts and a coordinator who holds the key (Hardy et al. 2017).

    coordinator ► all     ``keys``
    all ► coordinator     ``width``: rows and features
    each batch    hosts ► guest         ``share``: Enc(k * X_h w_h)
                  guest ► hosts         ``residual``: Enc(d)
                  party ► coordinator   ``masked``, and back ``gradient`` (``sums``)
    each epoch    hosts ► guest         ``penalty``: Enc(its L2 term)
                  guest ► coordinator   ``loss``: Enc(loss), every slot masked, and the masks' sum
                  coordinator ► all     ``verdict``: the loss, and whether to stop; a checkpoint

Nobody may work with the coordinator: together with it a host could open residuals, the guest a host's share.
A restart draws new keys; none is ever written down.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Final

import numpy as np
from tenseal import sealapi

from federated.vertical.ckks import FLOOR, Opener, Scheme, Sealer, read_relinearisation, stored
from federated.vertical.kinds import Setup
from federated.vertical.linear.batches import check_batches
from federated.vertical.linear.model import GuestModel, HostModel, fit_alone
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.plan import Labels, Own, Plan, own_table
from federated.vertical.linear.solver import ends, verdict
from federated.vertical.linear.steps import (
    close,
    computed,
    curves,
    descend,
    hidden_loss,
    keys_of,
    opened_loss,
    read_keys,
    sealed_penalty,
    sealed_share,
    told,
    told_loss,
)
from federated.vertical.linear.sums import Sums, Terms
from federated.vertical.linear.surrogate import surrogate_of
from federated.vertical.parties import (
    Checkpoint,
    Draw,
    Effect,
    Incoming,
    PartResult,
    PeerFault,
    Progress,
    ReceiveAny,
    Role,
    Send,
    broadcast,
    gather,
    receive,
)
from federated.vertical.tables import MOST_COLUMNS, MOST_ROWS
from federated.vertical.wire import Arr, Expected, Int, pack, unpack

_STATE: Final[dict[str, Expected]] = {"losses": Arr("<f8", (None,), 10_000), "stopped": Int(0, 1)}


def host(
    options: LinearOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """A party with features alone."""
    table = own_table(setup, options, guest=False)
    guest_name, keeper = setup.one("guest"), setup.one("coordinator")
    plan = Plan.of(options, len(table), setup.seed, len(setup.named("host")))
    own = Own.of(table, options, plan.curvature, state, intercept=False)
    plan.check_host(own.width)
    if not own.solver.done:
        sealer, _ = yield from _meet(plan, keeper, own.width)
        terms = Terms(plan.scheme, sealer, plan.batches, own.features, plan.masks, draw)
    while not own.solver.done:
        for batch in range(len(plan.batches.rows)):
            yield Send(guest_name, "share", sealed_share(plan, own, sealer, batch))
            body = yield from receive(guest_name, "residual")
            residual = plan.scheme.read(body, guest_name, FLOOR, plan.circuit.residual_scale)
            yield from descend(own, terms, batch, residual, keeper)
        yield Send(guest_name, "penalty", sealed_penalty(plan, own, sealer))
        yield from close(own, keeper)
    part = HostModel(own.scaling, own.solver.weights)
    return PartResult(plan.figures(own.width) | told(own), part.dump(), curves=curves(own))


def guest(
    options: LinearOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party with the labels."""
    table = own_table(setup, options, guest=True)
    assert table.labels is not None
    hosts, keeper = setup.named("host"), setup.one("coordinator")
    plan = Plan.of(options, len(table), setup.seed, len(hosts))
    own = Own.of(table, options, plan.curvature, state, intercept=True)
    labels = Labels.of(table.labels, options)
    check_batches(plan.batches, own.width)
    if not own.solver.done:
        sealer, products = yield from _meet(plan, keeper, own.width)
        keys = read_relinearisation(plan.scheme, products, keeper)
        terms = Terms(plan.scheme, sealer, plan.batches, own.features, plan.masks, draw)
    while not own.solver.done:
        loss: sealapi.Ciphertext | None = None
        for batch in range(len(plan.batches.rows)):
            shares = yield from gather(hosts, "share")
            found = computed(plan, own, labels.scaled, batch, shares, keys)
            yield from broadcast(hosts, "residual", stored(found.residual))
            yield from descend(own, terms, batch, found.residual, keeper)
            loss = found.loss if loss is None else plan.scheme.add(loss, found.loss)
        assert loss is not None
        penalties = yield from gather(hosts, "penalty")
        for name, body in penalties.items():
            loss = plan.scheme.add(loss, plan.scheme.read(body, name, FLOOR, plan.circuit.loss_scale))
        yield Send(keeper, "loss", hidden_loss(plan, own, sealer, loss, draw))
        yield from close(own, keeper)
    weights = own.solver.weights
    alone = fit_alone(own.features, labels.scaled, options)
    part = GuestModel(options.family, own.scaling, weights, alone, labels.mean, labels.deviation, hosts)
    return PartResult(plan.figures(own.width) | told(own), part.dump(), curves=curves(own))


def coordinator(
    options: LinearOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The key holder: it sees noise, each epoch's loss, and how many rows and features there are."""
    guest_name, hosts = setup.one("guest"), setup.named("host")
    parties = (guest_name, *hosts)
    losses: list[float] = []
    stopped = False
    if state is not None:
        fields = unpack(state, "this checkpoint", _STATE)
        losses, stopped = fields["losses"].tolist(), bool(fields["stopped"])
    if stopped:
        return PartResult({"epochs": len(losses), "loss": losses[-1]}, curves={"loss": losses})
    opener = Opener(Scheme(surrogate_of(options).parameters))
    body = keys_of(opener.public(), opener.relinearisation())
    yield from broadcast(parties, "keys", body)
    widths, rows = yield from _widths(parties)
    plan = Plan.of(options, rows, setup.seed, len(hosts))
    check_batches(plan.batches, widths[guest_name])
    for name in hosts:
        plan.check_host(widths[name])
    sums = Sums(opener, plan.batches, plan.masks, plan.circuit.term_scale, options.noise, draw)
    while not stopped:
        for batch in range(len(plan.batches.rows)):
            waiting = parties
            while waiting:
                got = yield ReceiveAny(waiting, "masked")
                assert got is not None
                waiting = tuple(name for name in waiting if name != got.sender)
                answer = sums.answer(got.body, got.sender, batch, widths[got.sender])
                yield Send(got.sender, "gradient", answer)
            yield Progress(
                len(losses) * len(plan.batches.rows) + batch + 1,
                options.epochs * len(plan.batches.rows),
                f"epoch {len(losses) + 1}",
            )
        body = yield from receive(guest_name, "loss")
        losses.append(opened_loss(plan, sums, body, guest_name))
        stopped = ends(losses, options)
        yield from broadcast(parties, "verdict", verdict(told_loss(plan, losses[-1], draw), stopped))
        yield Checkpoint(len(losses), pack({"losses": np.array(losses), "stopped": int(stopped)}))
    return PartResult({"rows": rows, "epochs": len(losses), "loss": losses[-1]}, curves={"loss": losses})


def _meet(plan: Plan, keeper: str, width: int) -> Generator[Effect, Incoming | None, tuple[Sealer, bytes]]:
    body = yield from receive(keeper, "keys")
    found = read_keys(plan.scheme, body, keeper)
    yield Send(keeper, "width", pack({"rows": plan.rows, "features": width}))
    return found


def _widths(parties: tuple[str, ...]) -> Generator[Effect, Incoming | None, tuple[dict[str, int], int]]:
    """Each party's number of features, and the number of rows, which must be the same at all."""
    widths: dict[str, int] = {}
    rows: dict[str, int] = {}
    for name, body in (yield from gather(parties, "width")).items():
        fields = unpack(body, name, {"rows": Int(2, MOST_ROWS), "features": Int(1, MOST_COLUMNS + 1)})
        widths[name], rows[name] = fields["features"], fields["rows"]
    first = rows[parties[0]]
    for name, count in rows.items():
        if count != first:
            raise PeerFault(name, "rows", f"{count} rows, {parties[0]} has {first}")
    return widths, first
