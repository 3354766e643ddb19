"""The same network undivided: all columns in one place, one backward pass, one optimiser, nothing sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from federated.vertical.linear.solver import Scaling
from federated.vertical.split.exchange import first_share
from federated.vertical.split.layer import Plan
from federated.vertical.split.model import GuestModel, HostModel, as_input, outputs_of
from federated.vertical.split.network import Adam, GuestNet, Integers, Tower, batches, initialise, loss_of
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.ring import PLAIN, centred
from federated.vertical.split.roles import Labels
from federated.vertical.tables import Table

Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Watch = Callable[[int, Integers, list[Singles], list[Singles]], None]
"""Is told of each batch: its epoch, its rows, what the guest sees of each host [B, options.share], and the gradients
that each host gets [B, width]."""


@dataclass(frozen=True, slots=True)
class Trained:
    """``towers``: the hosts', in their order; ``layers``: their encrypted layers' weights [d, k], if any."""

    guest: GuestNet
    towers: tuple[Tower, ...]
    loss: float
    layers: tuple[Floats, ...] = ()


class Layer:
    """The encrypted layer in the clear, without blur. ``rounded``: in the whole numbers that the encrypted one has, so
    that it is equal bit for bit; else in floats, the layer that these stand for."""

    def __init__(self, plan: Plan, host_seed: int, guest_seed: int, place: int, rounded: bool) -> None:
        self._plan, self._rounded = plan, rounded
        halves = first_share(plan, host_seed, 0) + first_share(plan, guest_seed, 1 + place)
        self._whole = centred(halves % PLAIN)
        self._real = np.ldexp(self._whole.astype(np.float64), -plan.weight_bits)

    @property
    def weights(self) -> Floats:
        """[d, k]."""
        if not self._rounded:
            return self._real
        return np.ldexp(self._whole.astype(np.float64), -self._plan.weight_bits)

    def forward(self, activations: Singles) -> Singles:
        """z [B, k] of activations [B, d]."""
        if not self._rounded:
            return (activations @ self._real).astype(np.float32)
        return self._plan.real(self._plan.activations(activations) @ self._whole % PLAIN, "this twin")

    def backward(self, activations: Singles, gradients: Singles) -> Singles:
        """Gradients [B, d] along the activations, from those along z [B, k]; the weights move."""
        plan, rows = self._plan, np.float32(len(activations))
        if not self._rounded:
            along = (gradients @ self._real.T).astype(np.float32)
            self._real = self._real - np.ldexp(rows * (activations.T @ gradients), -plan.shift)
            return along
        steps = plan.gradients(gradients * rows)
        found = plan.real(steps @ self._whole.T % PLAIN, "this twin") / rows
        self._whole = self._whole - plan.activations(activations).T @ steps
        return found


def train_plain(
    guest: Table,
    hosts: Mapping[str, Table],
    options: SplitOptions,
    seed: int,
    weights: Mapping[str, int],
    *,
    rounded: bool = True,
    watch: Watch | None = None,
) -> Trained:
    """What the roles compute without noise and blur, bit for bit. ``weights``: each host's seed of initial weights by
    name, and the guest's as ``guest``. ``rounded``: as ``Layer`` has it."""
    assert guest.labels is not None
    if options.noise:
        raise ValueError("the undivided network has no noise")
    labels = Labels.of(guest.labels, options)
    own, *others = (
        as_input(Scaling.of(table.features, options.clip), table.features)
        for table in (guest, *hosts.values())
    )
    net = GuestNet(own.shape[1], len(hosts), outputs_of(options, labels.values), options)
    towers = [Tower(len(table.names), options) for table in hosts.values()]
    for name, part in zip(("guest", *hosts), (net, *towers), strict=True):
        initialise(part, weights[name])
    layers: list[Layer] = []
    if options.encrypted:
        plan = Plan.of(options, len(guest))
        layers = [
            Layer(plan, weights[name], weights["guest"], place, rounded) for place, name in enumerate(hosts)
        ]
    whole = nn.ModuleList([net, *towers])
    optimiser = Adam(whole, options.rate)
    loss = 0.0
    for epoch in range(options.epochs):
        loss = 0.0
        for rows in batches(len(guest), options, seed, epoch):
            activations = [tower(features[rows]) for tower, features in zip(towers, others, strict=True)]
            shares = _cut_off(activations, layers)
            mean = loss_of(net, own[rows], shares, labels.targets[rows], options)
            loss += float(mean.detach()) * len(rows) / len(guest)
            optimiser.zero_grad()
            torch.autograd.backward(mean)
            gradients = _passed_on(activations, shares, layers)
            if watch is not None:
                watch(epoch, rows, [share.detach().numpy() for share in shares], gradients)
            optimiser.step()
    return Trained(net, tuple(towers), loss, tuple(layer.weights for layer in layers))


def answers(
    trained: Trained,
    guest: Table,
    hosts: Mapping[str, Table],
    options: SplitOptions,
    fitted: Mapping[str, Table],
) -> Floats:
    """Scores of rows of ``guest`` and ``hosts`` by a network that was trained on the tables ``fitted``."""
    labels = fitted["guest"].labels
    assert labels is not None

    def scaling(name: str) -> Scaling:
        return Scaling.of(fitted[name].features, options.clip)

    parts = [
        HostModel(options, scaling(name), tower, trained.layers[place] if trained.layers else None)
        for place, (name, tower) in enumerate(zip(hosts, trained.towers, strict=True))
    ]
    shares = {
        name: part.partial(table.features) for part, (name, table) in zip(parts, hosts.items(), strict=True)
    }
    model = GuestModel(
        options,
        scaling("guest"),
        trained.guest,
        trained.guest,
        Labels.of(labels, options).values,
        tuple(hosts),
    )
    return model.combine(guest.features, shares)


def _cut_off(activations: list[Tensor], layers: list[Layer]) -> list[Tensor]:
    """The hosts' shares: with layers, leaves of the backward pass."""
    for one in activations:
        one.retain_grad()
    if layers:
        return [
            torch.from_numpy(layer.forward(one.detach().numpy())).requires_grad_()
            for one, layer in zip(activations, layers, strict=True)
        ]
    return activations


def _passed_on(activations: list[Tensor], shares: list[Tensor], layers: list[Layer]) -> list[Singles]:
    """The gradients along the activations, which have gone into the towers."""
    for one, share, layer in zip(activations, shares, layers, strict=False):
        assert share.grad is not None
        along = layer.backward(one.detach().numpy(), share.grad.numpy())
        torch.autograd.backward(one, torch.from_numpy(along))
    found = []
    for one in activations:
        assert one.grad is not None
        found.append(one.grad.numpy())
    return found
