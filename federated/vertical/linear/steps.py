"""What a batch and an epoch are made of, with and without a coordinator."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import FLOOR, Scheme, Sealer, stored
from federated.vertical.linear.circuit import Computed
from federated.vertical.linear.plan import Own, Plan
from federated.vertical.linear.solver import read_verdict
from federated.vertical.linear.sums import Sums, Terms, read_sums
from federated.vertical.masks import BITS, gaussian
from federated.vertical.parties import Checkpoint, Draw, Effect, Incoming, Send, receive
from federated.vertical.wire import Bytes, Expected, Float, Int, pack, unpack

Values = npt.NDArray[np.float64]
Exchange = Generator[Effect, Incoming | None, Any]

MOST_KEY: Final = 64 * 2**20
"""Bytes of a key in a message."""


def keys_of(public: sealapi.PublicKey, products: sealapi.RelinKeys | None) -> bytes:
    """The body of ``keys``: what others need to compute under a key."""
    return pack({"public": stored(public), "products": b"" if products is None else stored(products)})


def read_keys(scheme: Scheme, body: bytes, sender: str) -> tuple[Sealer, bytes]:
    """What ``sender`` sent as its keys: encryption, and the keys for products, unread. Raises PeerFault."""
    fields = unpack(body, sender, {"public": Bytes(MOST_KEY), "products": Bytes(MOST_KEY)})
    return Sealer.of(scheme, fields["public"], sender), fields["products"]


def sealed_share(plan: Plan, own: Own, sealer: Sealer, batch: int) -> bytes:
    """A host's predictors of ``batch``, encrypted in every copy."""
    predictor = plan.surrogate.factor * own.predictor(plan.batches.rows[batch])
    parameters = plan.scheme.parameters
    return stored(sealer.seal(plan.batches.spread(predictor), parameters.top, parameters.scale))


def sealed_penalty(plan: Plan, own: Own, sealer: Sealer) -> bytes:
    """A host's L2 term, in the units of the encrypted loss, in the first slot."""
    slots = np.zeros(plan.batches.slots)
    slots[0] = own.solver.penalty_loss * plan.rows / plan.surrogate.loss_factor
    return stored(sealer.seal(slots, FLOOR, plan.circuit.loss_scale))


def computed(
    plan: Plan,
    own: Own,
    labels: Values,
    batch: int,
    shares: Mapping[str, bytes],
    keys: sealapi.RelinKeys,
) -> Computed:
    """The guest's part of a batch: residuals and loss from the hosts' ``shares``. Raises PeerFault."""
    scheme, batches, surrogate = plan.scheme, plan.batches, plan.surrogate
    parameters = scheme.parameters
    read = [scheme.read(body, name, parameters.top, parameters.scale) for name, body in shares.items()]
    rows = batches.rows[batch]
    predictor = plan.circuit.predictor(read, batches.spread(surrogate.factor * own.predictor(rows)))
    return plan.circuit.compute(predictor, batches.spread(surrogate.offset - labels[rows]), keys)


def hidden_loss(plan: Plan, own: Own, sealer: Sealer, loss: sealapi.Ciphertext, draw: Draw) -> bytes:
    """The body of ``loss``: every slot masked, and the sum of the masks of those that count.

    The guest's own L2 term, in whole steps, is taken off the sum of whole masks, which alone hides it: parts of a step
    add up to a few. Raises ValueError where that term has outgrown the masks.
    """
    masks = plan.loss_masks.draw(plan.batches.slots, draw)
    counted = slice(0, plan.batches.stride)
    own_term = own.solver.penalty_loss * plan.rows / plan.surrogate.loss_factor * 2.0**plan.loss_masks.grid
    if not own_term < 2.0**BITS:
        raise ValueError("the weights have outgrown what masks hide: training diverges; take a lower rate")
    own_steps = np.rint(own_term)
    part = float(masks.part[counted].sum()) - float(own_term - own_steps)
    with np.errstate(over="ignore"):
        whole = int(masks.whole[counted].sum() - np.int64(own_steps))
    blob = stored(sealer.hide(loss, plan.loss_masks.split(masks)))
    return pack({"terms": blob, "whole": whole, "part": part})


def opened_loss(plan: Plan, sums: Sums, body: bytes, sender: str) -> float:
    """The mean loss with penalties, for the key holder. Raises PeerFault."""
    most = plan.scheme.parameters.most_bytes(FLOOR)
    expected: dict[str, Expected] = {"terms": Bytes(most), "whole": Int(-(2**63), 2**63 - 1), "part": Float()}
    fields = unpack(body, sender, expected)
    slots = sums.opened(fields["terms"], sender, plan.circuit.loss_scale, plan.loss_masks)
    with np.errstate(over="ignore"):
        steps = (slots[: plan.batches.stride].sum() - np.int64(fields["whole"])) - fields["part"]
    loss = float(steps) * 2.0**-plan.loss_masks.grid * plan.surrogate.loss_factor / plan.rows
    return plan.surrogate.constant + loss


def told_loss(plan: Plan, loss: float, draw: Draw) -> float:
    """``loss`` as others may hear it: a decryption, too, so with the noise that gradients get."""
    fine = 2**40
    return loss + float(gaussian(1, plan.options.noise * fine, draw)[0]) / fine


def descend(own: Own, terms: Terms, batch: int, residual: sealapi.Ciphertext, keeper: str) -> Exchange:
    """One step: masked terms to ``keeper``, the gradient back."""
    body, masks = terms.hidden(batch, residual)
    yield Send(keeper, "masked", body)
    answer = yield from receive(keeper, "gradient")
    own.solver.step(terms.gradient(batch, read_sums(answer, keeper, own.width), masks, keeper))


def close(own: Own, judge: str) -> Exchange:
    """The end of an epoch: the verdict of ``judge``, and a checkpoint."""
    body = yield from receive(judge, "verdict")
    loss, stop = read_verdict(body, judge)
    state = own.solver.end_epoch(loss, stop)
    yield Checkpoint(own.solver.epoch, state)


def told(own: Own) -> dict[str, float | int | str]:
    """How training went."""
    return {"epochs": own.solver.epoch, "loss": own.solver.losses[-1]}


def curves(own: Own) -> dict[str, list[float]]:
    """The same, epoch by epoch."""
    return {"loss": list(own.solver.losses)}
