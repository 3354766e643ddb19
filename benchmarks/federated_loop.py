"""The plain way to simulate clients: one after the other, a torch module and ``torch.optim.SGD``.

The batches are those of ``federated.device``, so it ends with our weights to float32's rounding (a test holds that).
Flower's clients run this very loop, in an environment of their own: it imports torch, NumPy and the device's part of
``federated``, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from federated.device import LocalTraining, batch_schedule, device_generator

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: the network's widths from the features to the classes, and each client's training."""

    sizes: tuple[int, ...]
    training: LocalTraining
    seed: int = 0


class LoopedClient:
    """A client's training with a module that is made once and loaded with each start."""

    def __init__(self, work: Work) -> None:
        self._work = work
        layers: list[nn.Module] = []
        for rows, columns in zip(work.sizes, work.sizes[1:], strict=False):
            layers += [nn.Linear(rows, columns), nn.ReLU()]
        self._module = nn.Sequential(*layers[:-1])
        self._linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self._loss = nn.CrossEntropyLoss()

    def train(self, start: Floats, inputs: Floats, labels: Labels, client: int, iteration: int) -> Floats:
        """The difference [D] that ``client`` learns from ``start`` [D] on ``inputs`` [N, F] and ``labels`` [N]."""
        self._load(start)
        training = self._work.training
        rows, answers = torch.from_numpy(inputs), torch.from_numpy(labels)
        batches, sizes = batch_schedule(
            device_generator(self._work.seed, client, iteration), len(labels), training
        )
        optimiser = torch.optim.SGD(self._module.parameters(), lr=training.rate)
        for batch, size in zip(torch.from_numpy(batches), sizes.tolist(), strict=True):
            optimiser.zero_grad()
            loss = self._loss(self._module(rows[batch[:size]]), answers[batch[:size]])
            loss.backward()
            optimiser.step()
        return self._weights() - start

    def _load(self, vector: Floats) -> None:
        """Our vectors hold a layer as [inputs, outputs], torch's as [outputs, inputs]."""
        at = 0
        with torch.no_grad():
            for layer in self._linear:
                shape = layer.in_features, layer.out_features
                middle = at + shape[0] * shape[1]
                layer.weight.copy_(torch.from_numpy(vector[at:middle].reshape(shape).T))
                layer.bias.copy_(torch.from_numpy(vector[middle : middle + shape[1]]))
                at = middle + shape[1]

    def _weights(self) -> Floats:
        parts = [
            part.detach().numpy()
            for layer in self._linear
            for part in (layer.weight.T.reshape(-1), layer.bias)
        ]
        vector: Floats = np.concatenate(parts)
        return vector


def loop_round(
    client: LoopedClient,
    weights: Floats,
    data: Sequence[tuple[Floats, Labels]],
    iteration: int,
) -> Floats:
    """FedAvg over all of ``data`` from ``weights`` [D]: the next weights."""
    total = np.zeros(len(weights), np.float64)
    examples = 0
    for number, (inputs, labels) in enumerate(data):
        total += len(labels) * client.train(weights, inputs, labels, number, iteration).astype(np.float64)
        examples += len(labels)
    return (weights + total / examples).astype(np.float32)
