"""The reference engine: every client as its device would train, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from federated.data import Padded
from federated.device import ControlVariates, Update, device_generator, local_update
from federated.models import Model
from federated.simulator.cohort import Cohort, Rows, Trained
from federated.weights import Array


class ReferenceEngine:
    """``device.local_update`` client by client, in ascending order: what real devices do, bit for bit.

    ``chunk`` clients are stacked for whoever takes the results.
    """

    name = "numpy"

    def __init__(self, model: Model, chunk: int = 32) -> None:
        if chunk < 1:
            raise ValueError(f"a chunk holds at least 1 client, not {chunk}")
        self._model, self._chunk = model, chunk

    def train(self, cohort: Cohort, data: Rows) -> Iterator[Trained]:
        """The cohort's clients in chunks, ascending."""
        ordered = np.sort(cohort.clients)
        for first in range(0, len(ordered), self._chunk):
            clients = ordered[first : first + self._chunk]
            rows = data.rows(clients)
            controls = None if cohort.controls is None else cohort.controls(clients)
            # What diverges is found by whoever takes the results, as a server finds it.
            with np.errstate(all="ignore"):
                updates = [
                    self._update(cohort, client, rows, place, None if controls is None else controls[place])
                    for place, client in enumerate(clients.tolist())
                ]
            yield Trained(
                clients,
                {name: np.stack([u.vectors[name] for u in updates]) for name in updates[0].vectors},
                np.array([u.examples for u in updates], np.int64),
                np.array([u.steps for u in updates], np.int64),
                np.array([u.loss for u in updates], np.float64),
            )

    def _update(self, cohort: Cohort, client: int, rows: Padded, place: int, own: Array | None) -> Update:
        control = None
        if own is not None and cohort.server_control is not None:
            control = ControlVariates(cohort.server_control, own)
        count = int(rows.counts[place])
        return local_update(
            self._model,
            self._model.layout(),
            cohort.start,
            rows.inputs[place, :count],
            rows.labels[place, :count],
            cohort.training,
            device_generator(cohort.seed, client, cohort.iteration),
            control,
        )

    def close(self) -> None:
        """Nothing is held."""
