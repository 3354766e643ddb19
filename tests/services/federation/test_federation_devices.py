"""Devices as processes of their own that have Python and NumPy alone, and devices that train with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.federation import Fleet, create, job, model, reference, rows, servers, wait_for

from federated.client_run import numpy_trainer
from federated.client_trainer import NumpyTrainer, client_number
from federated.device import ControlVariates, Instructions, LocalTraining
from federated.torch_client import torch_twin

ROOT = Path(__file__).resolve().parents[3]

# A device as it is in the field: whatever is neither Python's own, nor NumPy, nor ours cannot be imported.
BARE = """
import runpy, sys
allowed = set(sys.stdlib_module_names) | {"numpy", "federated", "__main__"}
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{name} is not on this device")
sys.meta_path.insert(0, Bare())
sys.argv[0] = "federated.client"
runpy.run_module("federated.client", run_name="__main__")
"""


def device(folder: Path, client: str, urls: Sequence[str]) -> subprocess.Popen[bytes]:
    inputs, labels = rows(client)
    data = folder / f"{client}.npz"
    np.savez(data, inputs=inputs, labels=labels)
    servers = [word for url in urls for word in ("--server", url)]
    return subprocess.Popen(
        [sys.executable, "-c", BARE, *servers, "--job", "job", "--client", client, "--data", str(data),
         "--state", str(folder / client), "--budget-seconds", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip


def run_devices(folder: Path, clients: Sequence[str], urls: Sequence[str]) -> list[dict[str, object]]:
    processes = [device(folder, client, urls) for client in clients]
    came = []
    for process in processes:
        told, errors = process.communicate(timeout=110)
        assert process.returncode == 0, errors.decode()
        came.append(json.loads(told))
    return came


def test_a_device_needs_numpy_alone(tmp_path: Path) -> None:
    made = job(
        clients=2, iterations=2, compression={"upload": "top_k:0.2,quantise:1,deflate", "download_bits": 8}
    )
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        came = run_devices(tmp_path, ["0", "1"], [url])
        wait_for(url, phase="finished", valid=2)
    assert [end["accepted"] for end in came] == [2, 2]
    assert [end["ended"] for end in came] == ["finished", "finished"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_servers_and_fifty_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    clients = [str(number) for number in range(50)]
    made = job(clients=50, iterations=3, rounds={"aggregation_group": 8})
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        came = run_devices(tmp_path, clients, urls)
        wait_for(urls[1], phase="finished", valid=3)
        for url in urls:
            np.testing.assert_array_equal(model(url, "job", 3, made), reference(made, clients, 3))
    assert [end["accepted"] for end in came] == [3] * 50


def test_a_device_that_the_job_does_not_know_says_why(tmp_path: Path) -> None:
    with servers(tmp_path) as running:
        data = tmp_path / "rows.csv"
        np.savetxt(data, np.column_stack(rows("0")), delimiter=",")
        ended = subprocess.run(
            [sys.executable, "-m", "federated.client", "--server", running[0][1], "--job", "nojob", "--client", "0",
             "--data", str(data), "--budget-seconds", "1"],
            capture_output=True, cwd=ROOT, check=False, timeout=60,
        )  # fmt: skip
    assert ended.returncode == 1
    assert b"no job 'nojob'" in ended.stderr


@pytest.mark.parametrize(
    ("training", "instructions", "controlled"),
    [
        ({"epochs": 2, "batch_size": 5, "rate": 0.1}, Instructions(), False),
        (
            {"steps": 7, "batch_size": 4, "rate": 0.1, "momentum": 0.9, "clip_norm": 0.5},
            Instructions(),
            False,
        ),
        ({"steps": 7, "batch_size": 4, "rate": 0.1}, Instructions(proximal=0.3), False),
        ({"steps": 5, "batch_size": 4, "rate": 0.1}, Instructions(vectors=("control",)), True),
        ({"steps": 5, "batch_size": 4, "rate": 0.1}, Instructions(full_batch=True), False),
    ],
)
def test_torch_trains_as_numpy_does(
    training: dict[str, float], instructions: Instructions, controlled: bool
) -> None:
    made = replace(
        job(model={"name": "perceptron", "hidden": [8, 5]}),
        training=LocalTraining(**training),  # type: ignore[arg-type]
    )
    plain = numpy_trainer(made, "3", *rows("3"))
    twin = torch_twin(made, "3", *rows("3"))
    generator = np.random.default_rng(0)
    size = plain.layout.size
    start, server, own = (generator.normal(0, 0.3, size).astype(np.float32) for _ in range(3))
    control = ControlVariates(server, own) if controlled else None
    expected = plain.train(start, instructions, 2, control)
    found = twin.train(start, instructions, 2, control)
    assert (found.examples, found.steps) == (expected.examples, expected.steps)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    for name in expected.vectors:
        np.testing.assert_allclose(found.vectors[name], expected.vectors[name], atol=1e-5)


def test_torch_and_numpy_devices_share_a_round(tmp_path: Path) -> None:
    made = job(clients=2, iterations=2)
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        fleet = Fleet("job", [url], tmp_path / "devices")
        fleet.trainers["1"] = torch_twin(made, "1", *rows("1"))
        assert {end.why for end in fleet.run(["0", "1"]).values()} == {"finished"}
        np.testing.assert_allclose(model(url, "job", 2, made), reference(made, ["0", "1"], 2), atol=1e-5)


def test_ids_that_are_numbers_draw_by_that_number() -> None:
    assert client_number("17") == 17
    assert client_number("a") != client_number("b")
    assert isinstance(numpy_trainer(job(), "a", *rows("a")), NumpyTrainer)
