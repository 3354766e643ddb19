"""Schedulers, windows that run out, buffered rounds, strategies on single updates, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support.federation import (
    Fleet,
    ask,
    create,
    free_ports,
    job,
    model,
    ready,
    rows,
    server_settings,
    servers,
    state,
    wait_for,
)
from support.service_process import service

from federated.client_http import Call, HttpTransport
from federated.client_steps import Budget
from federated.client_trainer import client_number
from federated.device import INITIAL, Update, device_generator, local_update
from federated.rounds.messages import StartRequest
from federated.wire import encode_start

CLIENTS = [str(number) for number in range(4)]


def test_a_scheduler_watches_and_its_death_stops_nothing(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store'}"
    made = job(iterations=2)
    ports = free_ports(2)
    settings = [
        server_settings(tmp_path / role, port, store, role=role)
        for role, port in zip(("scheduler", "server"), ports, strict=True)
    ]
    with (
        service("scheduler-0", settings[0], "federation") as scheduler,
        service("server-0", settings[1], "federation"),
    ):
        watching, serving = (f"http://127.0.0.1:{port}" for port in ports)
        for url in (watching, serving):
            ready(url)
        create(watching, made)
        with HttpTransport([watching]) as transport:  # it serves operators alone
            body = encode_start(StartRequest("0"))
            assert transport.send(Call("POST", "/v1/fl/jobs/job/clients/0/start", body)).status == 404
        listed = ask(watching, "GET", "/v1/fl/servers")["servers"]
        assert [(row["name"], row["role"]) for row in listed] == [
            ("scheduler-0", "scheduler"), ("server-0", "server"),
        ]  # fmt: skip
        scheduler.kill()
        done = Fleet("job", [serving], tmp_path / "devices").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}
        assert state(serving)["valid"] == 2
        scheduler.start()
        ready(watching)


def test_a_round_that_too_few_come_to_ends_by_its_window_and_the_next_is_valid(tmp_path: Path) -> None:
    made = job(clients=3, iterations=2, rounds={"start_fl_job_time_window_s": 0.5})
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        Fleet("job", [url], tmp_path / "devices").run(["0"], Budget(seconds=0.6))
        wait_for(url, iteration=2, invalid=1)  # nobody asked: a tick applied the window
        done = Fleet("job", [url], tmp_path / "devices").run(["0", "1", "2"])
        assert {end.why for end in done.values()} == {"finished"}
        log = ask(url, "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        assert [(row["valid"], row["why"]) for row in log] == [
            (False, "too_few_starts"),
            (True, "aggregated"),
        ]
        assert "upload_bytes" not in log[0]
        assert log[1]["upload_bytes"] == 3 * 4 * made.make_model().layout().size
        assert log[1]["loss"] > 0


def test_buffered_rounds_need_nobody_to_wait(tmp_path: Path) -> None:
    made = job(iterations=4, rounds={"mode": "buffered", "buffer_size": 2, "max_concurrency": 3})
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        done = Fleet("job", urls, tmp_path / "devices").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}
        found = wait_for(urls[1], phase="finished")
        assert (found["valid"], found["version"]) == (4, 4)
        log = ask(urls[0], "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        assert [row["uploads"] for row in log] == [2, 2, 2, 2]


def test_the_median_of_single_updates(tmp_path: Path) -> None:
    made = job(iterations=1, strategy={"name": "median"})
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        Fleet("job", [url], tmp_path / "devices").run(CLIENTS)
        wait_for(url, phase="finished", valid=1)
        network, strategy = made.make_model(), made.make_strategy()
        layout = network.layout()
        started = strategy.init(layout, network.initial(device_generator(7, 0, 0, INITIAL)))
        contributions = []
        for client in CLIENTS:
            dice = device_generator(7, client_number(client), 1)
            update = local_update(network, layout, started.weights, *rows(client), made.training, dice)
            loss = float(np.float32(update.loss))
            update = Update(update.vectors, update.examples, update.steps, loss)
            contributions.append(strategy.contribution(layout, update))
        expected = strategy.apply_updates(started, contributions).weights
        np.testing.assert_array_equal(model(url, "job", 1, made), expected)


def test_the_command_line(tmp_path: Path) -> None:
    environ = {**os.environ, "HEADWATER__DATA__DIR": str(tmp_path / "data")}
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    def headwater(*words: str, status: int = 0) -> Any:
        command = [sys.executable, "-m", "services.cli.app", "fl", *words, "--format", "json"]
        ended = subprocess.run(command, capture_output=True, check=False, env=environ, timeout=60)
        assert ended.returncode == status, ended.stderr.decode()
        return json.loads(ended.stdout) if ended.stdout.strip() else None

    file = tmp_path / "job.toml"
    file.write_text(job(clients=1, iterations=2).to_toml())
    serving = subprocess.Popen(
        [sys.executable, "-m", "services.cli.app", "fl", "serve", "--job", str(file), "--port", str(port)],
        env=environ, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        ready(url)
        inputs, labels = rows("0")
        np.savez(tmp_path / "rows.npz", inputs=inputs, labels=labels)
        assert headwater("stop", "job", "--yes", "--url", url)["phase"] == "stopped"
        assert headwater("resume", "job", "--url", url)["phase"] == "starting"
        came = headwater("join", url, "--client", "0", "--data", str(tmp_path / "rows.npz"))
        assert (came["ended"], came["accepted"]) == ("finished", 2)
        listed = headwater("list", "--url", url)
        assert [(row["job"], row["phase"], row["valid"]) for row in listed["jobs"]] == [
            ("job", "finished", 2)
        ]
        assert [row["valid"] for row in headwater("log", "job", "--url", url)["rounds"]] == [True, True]
        assert headwater("token", "job", "0", "--valid", "30d", "--url", url)["token"].startswith(
            "fl1.client."
        )
        checked = [sys.executable, "-m", "services.cli.app", "service", "check", "--format", "json"]
        passed = subprocess.run(checked, capture_output=True, check=True, env=environ, timeout=60).stdout
        assert json.loads(passed) == {f"federation-server-{port}": True}
        assert headwater("log", "nojob", "--url", url, status=7) is None
    finally:
        serving.terminate()
        assert serving.wait(20) == 0
