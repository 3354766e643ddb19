"""What an adversary of a federated job knows: the model, the weights at the start, how devices train, and rows that
could be somebody's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.device import LocalTraining, device_generator, local_update
from federated.models import Inputs, Labels, Model
from federated.weights import Array

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """A job at the start of an iteration: devices train ``model`` from ``start`` [D] by ``training``, their batches are
    drawn by the job's ``seed``. ``inputs`` [N, F] with ``labels`` [N] are the candidates, of which the attacked client
    has some; ``more_inputs`` [Q, F] with ``more_labels`` [Q] are like them and nobody's: from these the adversary
    learns what updates look like, and the other clients are made of them."""

    model: Model
    start: Array
    training: LocalTraining
    seed: int
    inputs: Inputs
    labels: Labels
    more_inputs: Inputs
    more_labels: Labels

    @property
    def candidates(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def others(self) -> int:
        """Q."""
        return len(self.more_labels)

    def updates(self, rows: Places, companions: Places | None = None) -> Array:
        """What clients learn who each have one of the candidates ``rows`` [B] and the further rows ``companions``
        [B, M − 1], or [M − 1] the same for all: differences [B, D]."""
        beside = np.zeros(0, np.int64) if companions is None else companions
        beside = np.broadcast_to(beside, (len(rows), beside.shape[-1]))
        inputs = np.concatenate([self.inputs[rows][:, None], self.more_inputs[beside]], axis=1)
        return self._train(
            inputs, np.concatenate([self.labels[rows][:, None], self.more_labels[beside]], axis=1)
        )

    def strangers(self, rows: Places) -> Array:
        """What clients learn who have the further rows ``rows`` [B, M]: differences [B, D]."""
        return self._train(self.more_inputs[rows], self.more_labels[rows])

    def draw(self, generator: np.random.Generator, *shape: int) -> Places:
        """Numbers of further rows, no row twice along the last axis."""
        wanted, count = shape[-1], int(np.prod(shape[:-1], dtype=np.int64))
        drawn = [generator.choice(len(self.more_labels), wanted, replace=False) for _ in range(count)]
        return np.array(drawn, np.int64).reshape(shape)

    def _train(self, inputs: Inputs, labels: Labels) -> Array:
        layout = self.model.layout()
        learned = np.empty((len(inputs), layout.size), np.float32)
        for place, (own, answers) in enumerate(zip(inputs, labels, strict=True)):
            generator = device_generator(self.seed, 0, 0)
            update = local_update(self.model, layout, self.start, own, answers, self.training, generator)
            learned[place] = update.vectors["difference"]
        return learned
