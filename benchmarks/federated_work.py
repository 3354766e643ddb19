"""What the parts of ``federated`` share: federations, jobs and the folders they run in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.data import Federation, Shares, Table
from federated.job import load_job
from federated.models import Model
from federated.simulator.build import Built, build
from federated.simulator.simulation import Evaluate
from federated.weights import Array
from services.datasets.federations import scikit
from services.datasets.federations.open import open_federation

Tables = Mapping[str, Mapping[str, Any]]

_TABLE_SEED: Final = 11


def digits(clients: int, seed: int, partition: str = "iid") -> Federation:
    """Digits over ``clients``; above 50 of them shifted and turned."""
    federation, _ = open_federation("digits", Path(), clients=clients, seed=seed, partition=partition)
    return federation


def given_rows(counts: npt.NDArray[np.int64], seed: int = _TABLE_SEED) -> Federation:
    """Digits as they are, client c with ``counts[c]`` rows drawn with replacement: for what is timed, where whose rows
    they are makes no difference."""
    table: Table = scikit.digits()
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.random.default_rng(seed).integers(0, len(table.labels), int(offsets[-1])).astype(np.int32)
    nobodys = Shares(np.zeros(0, np.int32), np.zeros_like(offsets))
    return Federation(
        table.name,
        table.inputs,
        table.labels,
        table.classes,
        Shares(rows, offsets),
        nobodys,
        table.test_inputs,
        table.test_labels,
    )


def accuracy_on(federation: Federation, model: Model) -> Evaluate:
    """Share of right answers on the test rows, as ``Simulation`` asks for it."""

    def evaluate(weights: Array) -> dict[str, Any]:
        found = model.metrics(weights, federation.test_inputs, federation.test_labels)
        return {"accuracy": found.right / found.seen}

    return evaluate


@contextmanager
def simulated(tables: Tables, federation: Federation, *, evaluated: bool) -> Iterator[Built]:
    """The job of ``tables`` over ``federation``, in a folder that goes with it."""
    job = load_job(tables)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        built = build(
            job,
            federation,
            Path(folder),
            evaluate=(lambda model: accuracy_on(federation, model)) if evaluated else None,
        )
        try:
            yield built
        finally:
            built.simulation.close()


def everyone(cohort: int, iterations: int) -> dict[str, Any]:
    """Rounds of ``cohort`` starts that all upload."""
    return {
        "start_fl_job_threshold": cohort,
        "update_model_ratio": 1,
        "early_uploads": True,
        "fl_iteration_num": iterations,
    }
