"""Guest and hosts of a split network.

    before all   a checkpoint at every party: a restart has the same first weights, and the same noise (``repeated``)
    each batch   a share of each host's activations to the guest, gradients back (``exchange``)
    each epoch   a checkpoint at every party

Initial weights are drawn in secret: who knows a tower's first weights would invert its first activations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from federated.privacy.randomness import Randomness
from federated.vertical.kinds import Setup
from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import (
    Checkpoint,
    Draw,
    PartResult,
    Progress,
    Role,
)
from federated.vertical.split.exchange import (
    ClearGuest,
    ClearHost,
    GuestSide,
    HostSide,
    SealedGuest,
    SealedHost,
    apart,
    joined,
)
from federated.vertical.split.layer import Plan
from federated.vertical.split.model import GuestModel, HostModel, as_input, outputs_of
from federated.vertical.split.network import (
    Adam,
    GuestNet,
    Tower,
    batches,
    initialise,
    loss_of,
    loss_of_logits,
    restore,
    save,
)
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.protection import noised_rows, noised_step, statement
from federated.vertical.split.repeated import KEY_BYTES, RepeatedNoise
from federated.vertical.tables import Table

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

MOST_CLASSES: Final = 1_000


def drawn_seed(draw: Draw) -> int:
    """A seed of initial weights."""
    return int.from_bytes(draw(8), "little") >> 1


@dataclass(frozen=True, slots=True)
class Labels:
    """``targets`` float32 [N]: 0 and 1, classes' places, or standardised numbers; ``values`` as ``GuestModel`` has."""

    targets: Tensor
    values: Floats

    @classmethod
    def of(cls, labels: Floats, options: SplitOptions) -> Labels:
        """Raises ValueError for labels that the loss is not for."""
        values = np.unique(labels)
        if options.loss == "logistic" and len(values) != 2:
            raise ValueError(f"the loss logistic is for two labels, there are {len(values)}")
        if options.loss == "classes" and not 2 <= len(values) <= MOST_CLASSES:
            raise ValueError(f"{len(values)} classes, not within 2 and {MOST_CLASSES}")
        if options.loss == "squared":
            values = np.array([labels.mean(), labels.std()])
            if not values[1] > 0:
                raise ValueError("all labels are the same number")
            found = (labels - values[0]) / values[1]
        elif options.loss == "in_batch":
            found, values = (labels > 0).astype(np.float64), np.array([0.0, 1.0])
            if not found.any():
                raise ValueError("no row's label is above 0: no pair belongs together")
        else:
            found = np.searchsorted(values, labels).astype(np.float64)
        return cls(torch.from_numpy(found.astype(np.float32)), values)


def own_table(setup: Setup, options: SplitOptions) -> Table:
    """The party's table, fit for this job. Raises ValueError."""
    table, guest = setup.table, setup.parties[setup.me] == "guest"
    if table is None or not table.names:
        raise ValueError(f"{setup.me} has no features")
    if not len(table):
        raise ValueError("no rows: nothing to learn from")
    if options.top == "dot" and len(setup.named("host")) != 1:
        raise ValueError("an inner product is between the guest and one host")
    if guest:
        if table.labels is None:
            raise ValueError(f"{setup.me} is the guest and has no labels")
        Labels.of(table.labels, options)
    if options.encrypted:
        Plan.of(options, len(table))
        if not guest and (columns := _independent(table, options)) <= options.interactive:
            raise ValueError(
                f"{setup.me} has {columns} columns that differ, and the guest gets {options.interactive} numbers of "
                "each row: they could hold the columns themselves; interactive must be smaller"
            )
    return table


def _independent(table: Table, options: SplitOptions) -> int:
    """Columns that are not made of each other: constant ones do not count, copies count once."""
    scaled = Scaling.of(table.features, options.clip).apply(table.features)
    return int(np.linalg.matrix_rank(scaled.T @ scaled, hermitian=True))


def host(
    options: SplitOptions,
    setup: Setup,
    state: bytes | None,
    draw: Draw = os.urandom,
) -> Role[PartResult]:
    """A party with features alone."""
    table, guest_name = own_table(setup, options), setup.one("guest")
    scaling, seed = Scaling.of(table.features, options.clip), drawn_seed(draw)
    features, net = as_input(scaling, table.features), Tower(len(table.names), options)
    initialise(net, seed)
    optimiser = Adam(net, options.rate)
    first, kept, noise = _restored(net, optimiser, state, draw)
    side: HostSide = ClearHost(options, guest_name, noise)
    if options.encrypted:
        side = SealedHost(Plan.of(options, len(table)), guest_name, seed, kept, noise)

    def along(weights: dict[str, Tensor], row: Tensor, gradient: Tensor) -> Tensor:
        shown: Tensor = functional_call(net, weights, (row[None],))
        return (shown[0] * gradient).sum()

    if state is None:
        yield Checkpoint(0, _state(net, optimiser, 0, side, noise))
    yield from side.meet()
    for epoch in range(first, options.epochs):
        noise.begin(epoch)
        for rows in batches(len(table), options, setup.seed, epoch):
            batch = features[rows]
            activations = net(batch)
            gradients = torch.from_numpy((yield from side.gradients(finite(activations.detach().numpy()))))
            optimiser.zero_grad()
            if options.host_noise:
                # A mean's gradient is divided by the rows already; each row's own is cut.
                noised_step(net, along, (batch, gradients * len(rows)), options, noise)
            else:
                activations.backward(gradients)
            optimiser.step()
        yield Checkpoint(epoch + 1, _state(net, optimiser, epoch + 1, side, noise))
        yield Progress(epoch + 1, options.epochs, "epochs")
    part = HostModel(options, scaling, net, (yield from side.end()), noise.key)
    figures: dict[str, float | int | str] = {"epochs": options.epochs, "rows": len(table)}
    return PartResult(figures | statement(options, guest=False), part.dump())


def guest(
    options: SplitOptions,
    setup: Setup,
    state: bytes | None,
    draw: Draw = os.urandom,
) -> Role[PartResult]:
    """The party with the labels."""
    table, hosts = own_table(setup, options), setup.named("host")
    assert table.labels is not None
    labels, scaling = Labels.of(table.labels, options), Scaling.of(table.features, options.clip)
    features, seed = as_input(scaling, table.features), drawn_seed(draw)
    net = GuestNet(len(table.names), len(hosts), outputs_of(options, labels.values), options)
    initialise(net, seed)
    optimiser, loss = Adam(net, options.rate), 0.0
    first, kept, noise = _restored(net, optimiser, state, draw)
    side: GuestSide = ClearGuest(options, hosts, noise)
    if options.encrypted:
        side = SealedGuest(Plan.of(options, len(table)), hosts, seed, kept, noise)
    if state is None:
        yield Checkpoint(0, _state(net, optimiser, 0, side, noise))
    yield from side.meet()
    for epoch in range(first, options.epochs):
        noise.begin(epoch)
        loss = 0.0
        for rows in batches(len(table), options, setup.seed, epoch):
            received = yield from side.shares(len(rows))
            shares = [torch.from_numpy(share).requires_grad_() for share in received]
            mean = loss_of(net, features[rows], shares, labels.targets[rows], options)
            loss += float(mean.detach()) * len(rows) / len(table)
            optimiser.zero_grad()
            torch.autograd.backward(mean)
            shown = finite(np.hstack([_gradient(share) for share in shares]))
            if options.noise:
                noise.about("gradients", shown)
                # All hosts' together: also for hosts that work with each other it is one release.
                count = np.float32(len(rows))
                shown = noised_rows(shown * count, options.gradient_clip, options, noise) / count
                _guest_step(net, features[rows], shares, labels.targets[rows], options, noise)
            yield from side.tell(np.split(shown, len(hosts), axis=1))
            optimiser.step()
        yield Checkpoint(epoch + 1, _state(net, optimiser, epoch + 1, side, noise))
        yield Progress(epoch + 1, options.epochs, f"epochs, loss {loss:.4f}")
    yield from side.end()
    alone = train_alone(features, labels, options, setup.seed)
    model = GuestModel(options, scaling, net, alone, labels.values, hosts)
    figures: dict[str, float | int | str] = {
        "epochs": options.epochs,
        "rows": len(table),
        "loss": round(loss, 6),
    }
    return PartResult(figures | statement(options, guest=True), model.dump())


def train_alone(features: Tensor, labels: Labels, options: SplitOptions, seed: int) -> GuestNet:
    """The same network without hosts and without noise: it stays with the guest."""
    net = GuestNet(features.shape[1], 0, outputs_of(options, labels.values), options)
    initialise(net, seed % 2**63)
    optimiser = Adam(net, options.rate)
    for epoch in range(options.epochs):
        for rows in batches(len(features), options, seed, epoch):
            optimiser.zero_grad()
            torch.autograd.backward(loss_of(net, features[rows], [], labels.targets[rows], options))
            optimiser.step()
    return net


def finite(rows: Singles) -> Singles:
    """``rows``, all finite. Raises ValueError."""
    if not np.isfinite(rows).all():
        raise ValueError("training diverged: not finite; a smaller rate may help")
    return rows


def _restored(
    net: nn.Module, optimiser: Adam, state: bytes | None, draw: Draw
) -> tuple[int, bytes | None, RepeatedNoise]:
    """The epoch of ``state``, which is put back; what it has of the encrypted layer; the noise. Raises PeerFault."""
    if state is None:
        return 0, None, RepeatedNoise(draw(KEY_BYTES))
    of_net, of_layer, noise = apart(state)
    return restore(net, optimiser, of_net), of_layer, noise


def _state(
    net: nn.Module, optimiser: Adam, epoch: int, side: HostSide | GuestSide, noise: RepeatedNoise
) -> bytes:
    return joined(save(net, optimiser, epoch), side.state(), noise)


def _gradient(share: Tensor) -> Singles:
    assert share.grad is not None
    found: Singles = share.grad.numpy()
    return found


def _guest_step(
    net: GuestNet,
    features: Tensor,
    shares: list[Tensor],
    targets: Tensor,
    options: SplitOptions,
    randomness: Randomness,
) -> None:
    def of_row(weights: dict[str, Tensor], row: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        logits = functional_call(net, weights, (row[None], [one[None] for one in others]))
        return loss_of_logits(logits, target[None], options)

    inputs = (features, targets, *(share.detach() for share in shares))
    noised_step(net, of_row, inputs, options, randomness)
