"""The same network undivided: all columns in one place, one backward pass, one optimiser, nothing sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from federated.vertical.linear.solver import Scaling
from federated.vertical.split.model import as_input, outputs_of
from federated.vertical.split.network import GuestNet, Tower, batches, initialise, loss_of
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.roles import Labels
from federated.vertical.tables import Table


@dataclass(frozen=True, slots=True)
class Trained:
    """``towers``: the hosts', in their order."""

    guest: GuestNet
    towers: tuple[Tower, ...]
    loss: float


def train_plain(
    guest: Table, hosts: Mapping[str, Table], options: SplitOptions, seed: int, weights: Mapping[str, int]
) -> Trained:
    """What the roles compute without noise, bit for bit. ``weights``: each host's seed of initial weights by name, and
    the guest's as ``guest``."""
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
    whole = nn.ModuleList([net, *towers])
    optimiser = torch.optim.Adam(whole.parameters(), lr=options.rate, foreach=False)
    loss = 0.0
    for epoch in range(options.epochs):
        loss = 0.0
        for rows in batches(len(guest), options, seed, epoch):
            shares = [tower(features[rows]) for tower, features in zip(towers, others, strict=True)]
            mean = loss_of(net, own[rows], shares, labels.targets[rows], options)
            loss += float(mean.detach()) * len(rows) / len(guest)
            optimiser.zero_grad()
            mean.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return Trained(net, tuple(towers), loss)
