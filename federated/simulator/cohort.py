"""A cohort: clients that train from one version of the model; and what they learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federated.data import Padded
from federated.device import LocalTraining
from federated.weights import Array

Clients = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class Rows(Protocol):
    """Where clients' examples come from: ``federated.data.Federation`` is one."""

    @property
    def counts(self) -> Counts:
        """Training rows of each client of the population [C]."""

    def rows(self, clients: Clients) -> Padded:
        """Their training rows, padded."""


@dataclass(frozen=True)
class Cohort:
    """``clients`` [B] (each once) train in ``iteration`` from ``start`` [D] by ``training``.

    ``seed`` and ``iteration`` decide their batches (``device.device_generator``). With SCAFFOLD ``server_control`` is
    the server's c [D] and ``controls`` gives the clients' own [B, D]. ``starts`` gives each client's own start [B, D],
    where layouts have fields that stay on the device.
    """

    clients: Clients
    iteration: int
    start: Array
    training: LocalTraining
    seed: int
    server_control: Array | None = None
    controls: Callable[[Clients], Array] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.server_control is None) != (self.controls is None):
            raise ValueError("SCAFFOLD needs the server's control and the clients' own")
        if self.server_control is not None and self.training.momentum:
            raise ValueError("SCAFFOLD's controls are measured on plain steps: momentum must be 0")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a chunk of a cohort learned: ``clients`` [B], ``vectors["difference"]`` and perhaps
    ``vectors["control"]`` [B, D], ``examples``, ``steps`` and mean ``losses`` [B], perhaps ``bits`` [B]; as
    ``device.Update``, stacked."""

    clients: Clients
    vectors: dict[str, Array]
    examples: Counts
    steps: Counts
    losses: npt.NDArray[np.float64]
    bits: npt.NDArray[np.int8] | None = None

    def at(self, places: npt.NDArray[np.int64]) -> Trained:
        """Some of the clients."""
        return Trained(
            self.clients[places],
            {name: vector[places] for name, vector in self.vectors.items()},
            self.examples[places],
            self.steps[places],
            self.losses[places],
            None if self.bits is None else self.bits[places],
        )

    def quiet(self) -> Trained:
        """The same as under a privacy mechanism: each counts as one example in one step, at loss 0."""
        ones = np.ones_like(self.examples)
        return replace(self, examples=ones, steps=ones, losses=np.zeros_like(self.losses))

    def with_vectors(self, vectors: dict[str, Array]) -> Trained:
        """The same with other vectors."""
        return replace(self, vectors=vectors)


class Engine(Protocol):
    """Trains cohorts. The chunks come in a fixed order, not necessarily that of the clients."""

    name: str

    def train(self, cohort: Cohort, data: Rows) -> Iterator[Trained]:
        """The cohort's clients, each in exactly one chunk."""

    def close(self) -> None:
        """Give back threads and settings; the engine is not used after."""
