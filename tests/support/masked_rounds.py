"""A masked job's iterations in the simulator, on the rows of real devices, with clients that are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.federation import CLASSES, rows

from federated.data import Federation, Shares
from federated.job import FederatedJob
from federated.simulator.build import build
from federated.simulator.world import Counted


def federation(clients: Sequence[str]) -> Federation:
    """The devices' own rows; ``clients`` are their numbers from 0 on."""
    found = [rows(client) for client in clients]
    inputs, labels = np.concatenate([r[0] for r in found]), np.concatenate([r[1] for r in found])
    ends = np.cumsum([0, *(len(r[1]) for r in found)])
    none = Shares(np.zeros(0, np.int32), np.zeros(len(clients) + 1, np.int64))
    training = Shares(np.arange(len(labels), dtype=np.int32), ends.astype(np.int64))
    return Federation("rows", inputs, labels, CLASSES, training, none, inputs[:0], labels[:0])


def learned(
    made: FederatedJob, folder: Path, clients: Sequence[str], cohorts: Sequence[Sequence[str]]
) -> np.ndarray:
    """The weights after iterations in which all ``clients`` started and these were counted."""
    folder.mkdir()
    simulation = build(made, federation(clients), folder, checkpoints=False).simulation
    for version, cohort in enumerate(cohorts):
        uploads = [Counted(int(client), version + 1, 0) for client in cohort]
        found = simulation.learning.learn(uploads, version, None, len(clients))
        assert found.clients == len(cohort)
    weights = simulation.weights.copy()
    simulation.close()
    return weights
