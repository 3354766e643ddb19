"""What federated learning is known to do, seen on digits. The comparisons of strategies take long: slow tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federated.job import load_job
from federated.simulator.build import build
from services.datasets.federations import open_federation
from services.simulation.evaluate import evaluator


def accuracies(folder: Path, clients: int, partition: str, seed: int, **tables: Any) -> list[float]:
    """Test accuracy after each iteration."""
    federation, _ = open_federation("digits", folder, clients=clients, seed=seed, partition=partition)
    job = load_job({"job": {"seed": seed}, "data": {"clients": clients}, **tables})
    folder = folder / f"{tables.get('strategy', {}).get('name', 'fedavg')}-{seed}"
    folder.mkdir()
    built = build(job, federation, folder, evaluate=evaluator(federation, seed), checkpoints=False)
    rows = list(built.simulation.run())
    built.simulation.close()
    assert all(row.valid for row in rows)
    return [row.metrics["accuracy"] for row in rows if row.metrics]


def rounds(starts: int, iterations: int) -> dict[str, Any]:
    return {"start_fl_job_threshold": starts, "update_model_ratio": 1, "fl_iteration_num": iterations}


def test_fedavg_learns_digits(tmp_path: Path) -> None:
    found = accuracies(tmp_path, 20, "iid", 1, rounds=rounds(5, 15), training={"epochs": 5, "batch_size": 10})
    assert len(found) == 15
    assert found[-1] > 0.93


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scaffold_is_above_fedavg_where_clients_differ_much(tmp_path: Path) -> None:
    """Karimireddy et al. (2020): the mean of the last five of 50 iterations, 20 clients, a fifth of them a round."""
    gains = []
    for seed in range(4):
        last = {
            strategy: np.mean(
                accuracies(
                    tmp_path, 20, "dirichlet:0.1", seed,
                    rounds=rounds(4, 50), training={"steps": 50, "batch_size": 20}, strategy={"name": strategy},
                )[-5:]
            )
            for strategy in ("fedavg", "scaffold")
        }  # fmt: skip
        gains.append(last["scaffold"] - last["fedavg"])
    assert min(gains) > 0.01
    assert np.mean(gains) > 0.03


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fedavg_needs_far_fewer_iterations_than_fedsgd(tmp_path: Path) -> None:
    """McMahan et al. (2017), here to 90 % of the digits."""
    needed = {}
    for strategy, training in (
        ("fedavg", {"epochs": 5, "batch_size": 10}),
        ("fedsgd", {"rate": 0.5}),
    ):
        found = accuracies(
            tmp_path, 20, "iid", 1, rounds=rounds(5, 120), training=training, strategy={"name": strategy}
        )
        needed[strategy] = next(place for place, value in enumerate(found, 1) if value >= 0.9)
    assert needed["fedsgd"] > 3 * needed["fedavg"]


MEASURED = """
import resource, sys, tempfile
import subprocess
import sys
from pathlib import Path
from federated.job import load_job
from federated.simulator.build import build
from services.datasets.federations import open_federation
clients = int(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    federation, _ = open_federation("digits", Path(folder), clients=clients, seed=1)
    job = load_job({
        "rounds": {"start_fl_job_threshold": 100, "fl_iteration_num": 5}, "data": {"clients": clients},
        "training": {"steps": 2, "batch_size": 10}, "strategy": {"name": "scaffold"},
    })
    built = build(job, federation, Path(folder))
    trained = sum(row.trained for row in built.simulation.run())
    assert trained == 5 * 80, trained
    assert built.simulation.learning.states["control"].held <= trained
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    built.simulation.close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, size // 2**20)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_clients_cost_columns_of_numbers() -> None:
    root = Path(__file__).parents[3]

    def measure(clients: int) -> tuple[int, int]:
        ended = subprocess.run(
            [sys.executable, "-c", MEASURED, str(clients)],
            capture_output=True, text=True, check=True, timeout=250,
            env={"PYTHONPATH": f"{root}:{root / 'tests'}", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        peak_mib, files_mib = ended.stdout.split()
        return int(peak_mib), int(files_mib)

    few, many = measure(10_000), measure(100_000)
    assert many[0] - few[0] < 200
    assert many[1] < 20  # the controls of those who took part, and a checkpoint
