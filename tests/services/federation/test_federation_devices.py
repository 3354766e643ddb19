"""Devices as processes of their own that have Python and NumPy alone, and devices that train with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.bare import ROOT, bare_device
from support.federation import (
    CLASSES,
    FEATURES,
    Fleet,
    ask,
    create,
    free_ports,
    job,
    model,
    reference,
    rows,
    servers,
    wait_for,
)

from federated.client_http import Clock, HttpTransport
from federated.client_run import JobUnreachable, fetch_job, main, numpy_trainer, own_rows
from federated.client_trainer import NumpyTrainer, client_number
from federated.device import ControlVariates, Instructions, LocalTraining
from federated.torch_client import torch_twin
from services.cli.app import main as headwater
from services.cli.exits import Exit


def run_devices(folder: Path, clients: Sequence[str], urls: Sequence[str]) -> list[dict[str, object]]:
    processes = [bare_device(folder, client, urls, rows(client)) for client in clients]
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


class TestOwnRows:
    def save(self, folder: Path, inputs: np.ndarray, labels: np.ndarray) -> Path:
        np.savez(folder / "rows.npz", inputs=inputs, labels=labels)
        return folder / "rows.npz"

    def test_images_are_rows_and_a_table_without_a_header_is_taken(self, tmp_path: Path) -> None:
        images = np.arange(2 * FEATURES, dtype=np.float32).reshape(2, 2, -1)
        inputs, labels = own_rows(job(), self.save(tmp_path, images, np.array([0, CLASSES - 1])))
        np.testing.assert_array_equal(inputs, images.reshape(2, FEATURES))
        np.savetxt(tmp_path / "rows.csv", np.c_[inputs, labels], delimiter=",")
        again = own_rows(job(), tmp_path / "rows.csv")
        np.testing.assert_array_equal(again[0], inputs)
        np.testing.assert_array_equal(again[1], labels)

    def test_other_features_or_labels_than_the_models_are_refused(self, tmp_path: Path) -> None:
        wide = self.save(tmp_path, np.ones((2, FEATURES + 1), np.float32), np.zeros(2, np.int64))
        with pytest.raises(
            ValueError, match=f"rows of {FEATURES + 1} features, the job's model takes {FEATURES}"
        ):
            own_rows(job(), wide)
        for label in (-1, CLASSES):
            labels = np.array([0, label])
            with pytest.raises(ValueError, match="labels from"):
                own_rows(job(), self.save(tmp_path, np.ones((2, FEATURES), np.float32), labels))

    def test_a_device_whose_rows_do_not_fit_takes_no_place_in_the_iteration(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wide = self.save(tmp_path, np.ones((2, FEATURES + 1), np.float32), np.zeros(2, np.int64))
        words = ["--client", "0", "--data", str(wide), "--state", str(tmp_path / "kept")]
        with servers(tmp_path) as running:
            url = running[0][1]
            create(url, job(clients=2))
            with pytest.raises(SystemExit) as ended:
                main(["--server", url, "--job", "job", *words])
            assert ended.value.code == 1
            with pytest.raises(SystemExit) as ended:
                headwater(["fl", "join", url, *words])
            assert ended.value.code == Exit.BAD_INPUT
            assert ask(url, "GET", "/v1/fl/jobs")["jobs"][0]["starts"] == 0
        told = capsys.readouterr().err
        assert told.count(f"rows of {FEATURES + 1} features, the job's model takes {FEATURES}") == 2


def test_what_a_device_is_told_wrong_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "none")
    for extra, said in (
        (["127.0.0.1:1"], "http://HOST:PORT"),
        (["http://127.0.0.1:1", "--token-file", missing], missing),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["--job", "job", "--client", "0", "--data", "rows.npz", "--server", *extra])
        assert ended.value.code == 1
        assert said in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            headwater(["fl", "join", "--client", "0", *extra])
        assert ended.value.code == Exit.USAGE
        assert said in capsys.readouterr().err


def test_the_only_job_is_found_though_the_first_server_is_dead(tmp_path: Path) -> None:
    with servers(tmp_path) as running:
        url, (dead,) = running[0][1], free_ports(1)
        create(url, job(clients=1, iterations=1))
        np.savez(tmp_path / "rows.npz", inputs=rows("0")[0], labels=rows("0")[1])
        words = ["--client", "0", "--data", str(tmp_path / "rows.npz"), "--state", str(tmp_path / "kept")]
        with pytest.raises(SystemExit) as ended:
            headwater(["fl", "join", f"http://127.0.0.1:{dead}", url, *words])
        assert not ended.value.code
        wait_for(url, phase="finished", valid=1)


def test_where_jobs_are_not_listed_one_is_told_to_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashed = "admin:" + "0" * 64
    with servers(tmp_path, tokens=True, keys=(hashed,)) as running, pytest.raises(SystemExit) as ended:
        headwater(["fl", "join", running[0][1], "--client", "0"])
    assert ended.value.code == Exit.USAGE
    told = capsys.readouterr().err
    assert "does not tell which jobs there are" in told
    assert "--job" in told


def test_a_device_without_a_token_is_told_at_once(tmp_path: Path) -> None:
    with servers(tmp_path, tokens=True) as running, HttpTransport([running[0][1]]) as transport:
        create(running[0][1], job())
        clock = Clock()
        began = clock.now()
        with pytest.raises(JobUnreachable, match="status 401: job 'job' takes only devices with a token"):
            fetch_job(transport, "job", clock, 30.0)
        assert clock.now() - began < 10.0
