"""Local training on a device, with whatever library; here with NumPy."""

from __future__ import annotations

import hashlib
from typing import Protocol

from federated.device import (
    ControlVariates,
    Instructions,
    LocalTraining,
    Update,
    device_generator,
    local_update,
)
from federated.layout import Layout
from federated.models import Inputs, Labels, Model
from federated.weights import Array


class Trainer(Protocol):
    """Local training, with whatever library."""

    layout: Layout

    def train(
        self, start: Array, instructions: Instructions, iteration: int, control: ControlVariates | None
    ) -> Update:
        """What is learned from ``start`` [D] on this device's data."""
        ...


class NumpyTrainer:
    """Trains one of our models on ``inputs`` [N, ...] and ``labels`` [N], as every engine would: bit for bit."""

    def __init__(
        self, model: Model, inputs: Inputs, labels: Labels, training: LocalTraining, seed: int, number: int
    ) -> None:
        self.layout = model.layout()
        self._model = model
        self._inputs, self._labels = inputs, labels
        self._training = training
        self._seed, self._number = seed, number

    def train(
        self, start: Array, instructions: Instructions, iteration: int, control: ControlVariates | None
    ) -> Update:
        """See ``Trainer``."""
        generator = device_generator(self._seed, self._number, iteration)
        training = instructions.adapt(self._training)
        return local_update(
            self._model, self.layout, start, self._inputs, self._labels, training, generator, control
        )


def client_number(client: str) -> int:
    """The number that draws a client's batches: its id where that is one, else 8 bytes of its hash."""
    if client.isascii() and client.isdecimal() and len(client) < 19:
        return int(client)
    return int.from_bytes(hashlib.sha256(client.encode()).digest()[:8], "little")
