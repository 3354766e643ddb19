"""Guest and one host without a coordinator: each holds a key of its own.

    guest ◄► host     ``keys``; ``width``
    each batch    host ► guest    ``share``: Enc_H(k * X_h w_h)
                  guest ► host    ``residual``: Enc_H(d + r), Enc_G(-r), r a mask in every slot
                  host            opens d + r, which is noise, and adds it to Enc_G(-r): Enc_G(d)
                  guest ► host    ``masked`` under the host's key, and back ``gradient``
                  host ► guest    ``masked`` under the guest's key, and back ``gradient``
    each epoch    guest ► host    ``loss`` masked under the host's key
                  host ► guest    ``verdict``: the loss, and whether to stop; a checkpoint

What a key holder learns: the host opens the other side's residuals and gradient terms, the guest the host's gradient
terms, all under masks (``Plan.row_distance``, ``slot_distance`` bound what is left of them). The host also learns each
epoch's loss, the guest the same. Neither learns the other's predictor of any row, as the label party would where it
alone holds a key and hosts send predictors in the clear.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from typing import Any

from tenseal import sealapi

from federated.vertical.ckks import FLOOR, Opener, Sealer, read_relinearisation, stored
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
    sealed_share,
    told,
    told_loss,
)
from federated.vertical.linear.sums import Sums, Terms
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
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Bytes, Int, pack, unpack

Exchange = Generator[Effect, Incoming | None, Any]


def host(
    options: LinearOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party with features alone."""
    table = own_table(setup, options, guest=False)
    peer = setup.one("guest")
    plan = Plan.of(options, len(table), setup.seed, 1)
    own = Own.of(table, options, plan.curvature, state, intercept=False)
    plan.check_host(own.width)
    if not own.solver.done:
        opener = Opener(plan.scheme)
        body = keys_of(opener.public(), opener.relinearisation())
        sealer, _, peer_width = yield from _meet(plan, peer, body, own.width)
        check_batches(plan.batches, peer_width)
        mine = Sealer(plan.scheme, opener.public())
        sums = Sums(opener, plan.batches, plan.masks, plan.circuit.term_scale, options.noise, draw)
        terms = Terms(plan.scheme, sealer, plan.batches, own.features, plan.masks, draw)
    while not own.solver.done:
        for batch in range(len(plan.batches.rows)):
            yield Send(peer, "share", sealed_share(plan, own, mine, batch))
            body = yield from receive(peer, "residual")
            residual = _turned(plan, sums, body, peer)
            body = yield from receive(peer, "masked")
            yield Send(peer, "gradient", sums.answer(body, peer, batch, peer_width))
            yield from descend(own, terms, batch, residual, peer)
        body = yield from receive(peer, "loss")
        loss = opened_loss(plan, sums, body, peer) + own.solver.penalty_loss
        stop = ends([*own.solver.losses, loss], options)
        yield Send(peer, "verdict", verdict(told_loss(plan, loss, draw), stop))
        yield Checkpoint(own.solver.epoch + 1, own.solver.end_epoch(loss, stop))
    part = HostModel(own.scaling, own.solver.weights)
    return PartResult(_figures(plan, own), part.dump(), curves=curves(own))


def guest(
    options: LinearOptions, setup: Setup, state: bytes | None, draw: Draw = os.urandom
) -> Role[PartResult]:
    """The party with the labels."""
    table = own_table(setup, options, guest=True)
    assert table.labels is not None
    peer = setup.one("host")
    plan = Plan.of(options, len(table), setup.seed, 1)
    own = Own.of(table, options, plan.curvature, state, intercept=True)
    labels = Labels.of(table.labels, options)
    check_batches(plan.batches, own.width)
    if not own.solver.done:
        opener = Opener(plan.scheme)
        body = keys_of(opener.public(), None)
        sealer, products, peer_width = yield from _meet(plan, peer, body, own.width)
        plan.check_host(peer_width)
        keys = read_relinearisation(plan.scheme, products, peer)
        mine = Sealer(plan.scheme, opener.public())
        sums = Sums(opener, plan.batches, plan.masks, plan.circuit.term_scale, options.noise, draw)
        terms = Terms(plan.scheme, sealer, plan.batches, own.features, plan.masks, draw)
    count = len(plan.batches.rows)
    while not own.solver.done:
        loss: sealapi.Ciphertext | None = None
        for batch in range(count):
            share = yield from receive(peer, "share")
            found = computed(plan, own, labels.scaled, batch, {peer: share}, keys)
            yield Send(peer, "residual", _masked_residual(plan, found.residual, sealer, mine, draw))
            yield from descend(own, terms, batch, found.residual, peer)
            body = yield from receive(peer, "masked")
            yield Send(peer, "gradient", sums.answer(body, peer, batch, peer_width))
            loss = found.loss if loss is None else plan.scheme.add(loss, found.loss)
            done = own.solver.epoch * count + batch + 1
            yield Progress(done, options.epochs * count, f"epoch {own.solver.epoch + 1}")
        assert loss is not None
        yield Send(peer, "loss", hidden_loss(plan, own, sealer, loss, draw))
        yield from close(own, peer)
    alone = fit_alone(own.features, labels.scaled, options)
    part = GuestModel(
        options.family, own.scaling, own.solver.weights, alone, labels.mean, labels.deviation, (peer,)
    )
    return PartResult(_figures(plan, own), part.dump(), curves=curves(own))


def _figures(plan: Plan, own: Own) -> dict[str, float | int | str]:
    return (
        plan.figures(own.width)
        | told(own)
        | {"row_mask_distance_log2": round(math.log2(plan.row_distance()), 1)}
    )


def _meet(
    plan: Plan, peer: str, keys: bytes, width: int
) -> Generator[Effect, Incoming | None, tuple[Sealer, bytes, int]]:
    yield Send(peer, "keys", keys)
    yield Send(peer, "width", pack({"rows": plan.rows, "features": width}))
    body = yield from receive(peer, "keys")
    sealer, products = read_keys(plan.scheme, body, peer)
    body = yield from receive(peer, "width")
    fields = unpack(body, peer, {"rows": Int(), "features": Int(1, MOST_COLUMNS + 1)})
    if fields["rows"] != plan.rows:
        raise PeerFault(peer, "rows", f"{fields['rows']} rows, here are {plan.rows}")
    return sealer, products, fields["features"]


def _masked_residual(
    plan: Plan, residual: sealapi.Ciphertext, theirs: Sealer, mine: Sealer, draw: Draw
) -> bytes:
    whole, part = plan.row_masks.split(plan.row_masks.draw(plan.batches.slots, draw))
    hidden = theirs.hide(residual, (whole, part))
    masks = plan.scheme.plus(mine.seal(-whole, FLOOR, residual.scale), -part)
    return pack({"hidden": stored(hidden), "masks": stored(masks)})


def _turned(plan: Plan, sums: Sums, body: bytes, peer: str) -> sealapi.Ciphertext:
    """Enc_G(d) at the host, from Enc_H(d + r) and Enc_G(-r). Raises PeerFault."""
    most = plan.scheme.parameters.most_bytes(FLOOR)
    fields = unpack(body, peer, {"hidden": Bytes(most), "masks": Bytes(most)})
    scale = plan.circuit.residual_scale
    values = sums.values(fields["hidden"], peer, scale, plan.row_masks)
    masks = plan.scheme.read(fields["masks"], peer, FLOOR, scale)
    return plan.scheme.plus(masks, values)
