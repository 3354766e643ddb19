"""Federated jobs on real servers: small jobs, devices' data, devices in threads, and the answer of one process."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.service_process import Running, eventually, service

from federated.client_device import Device
from federated.client_folder import DeviceFolder
from federated.client_http import Call, Clock, HttpTransport
from federated.client_run import fetch_job, numpy_trainer, run_device, terms_of, with_identity
from federated.client_steps import Budget, Done
from federated.client_trainer import Trainer, client_number
from federated.compression import DownloadChain, receive
from federated.device import COMPRESSION, INITIAL, ControlVariates, Update, device_generator, local_update
from federated.job import FederatedJob, load_job
from federated.payload import decode_update, encode_update, shared_seed
from federated.strategies import sum_for
from federated.weights import Array
from services.settings.model import Settings

FEATURES, CLASSES = 6, 3


def job(name: str = "job", clients: int = 4, iterations: int = 2, **sections: dict[str, Any]) -> FederatedJob:
    """A small job in which ``clients`` start and all upload."""
    rounds = {
        "start_fl_job_threshold": clients, "update_model_ratio": 1, "fl_iteration_num": iterations,
        "start_fl_job_time_window_s": 60.0, "update_model_time_window_s": 60.0,
        "global_iteration_time_window_s": 120.0, "come_back_min_s": 0.05, "come_back_max_s": 0.2,
        "aggregation_group": 4, "aggregation_lease_s": 2.0,
    }  # fmt: skip
    tables: dict[str, dict[str, Any]] = {
        "job": {"name": name, "seed": 7},
        "model": {"name": "perceptron", "hidden": [8]},
        "data": {"features": FEATURES, "classes": CLASSES},
        "training": {"steps": 3, "batch_size": 5, "rate": 0.1},
        "rounds": rounds,
    }
    for title, values in sections.items():
        tables[title] = {**tables.get(title, {}), **values}
    return load_job(tables)


def rows(client: str) -> tuple[Array, np.ndarray]:
    """A client's own rows, of its own number."""
    generator = np.random.default_rng(1000 + client_number(client))
    count = 8 + client_number(client) % 5
    inputs = generator.normal(size=(count, FEATURES)).astype(np.float32)
    return inputs, (np.abs(inputs[:, :CLASSES]).argmax(axis=1)).astype(np.int64)


def reference(job: FederatedJob, clients: Sequence[str], iterations: int) -> Array:
    """What devices would start from after ``iterations`` in which all ``clients`` took part, by one process alone."""
    return reference_of(job, [clients] * iterations)


def reference_of(job: FederatedJob, cohorts: Sequence[Sequence[str]]) -> Array:
    """The same, of iterations in which these clients were counted: nobody in one that was void."""
    everybody = {client for clients in cohorts for client in clients}
    model, strategy, scheme = job.make_model(), job.make_strategy(), job.make_scheme()
    layout, seed = model.layout(), job.job.seed
    grid = job.make_grid(layout)
    state = strategy.init(layout, model.initial(device_generator(seed, 0, 0, INITIAL)))
    chain = None if grid is None else DownloadChain.begin(grid, state.weights)
    residuals: dict[str, dict[str, Array]] = {client: {} for client in everybody}
    controls = {client: np.zeros(layout.size, np.float32) for client in everybody}
    masked = job.make_masked(layout)
    for iteration, clients in enumerate(cohorts, 1):
        if not clients:
            continue
        start = state.weights if chain is None else chain.vector()
        asked = strategy.instructions(state)
        total = sum_for(strategy, layout, len(clients))
        for client in clients:
            number = client_number(client)
            inputs, labels = rows(client)
            control = None
            if "control" in asked.vectors:
                control = ControlVariates(state.vectors["control"], controls[client])
            generator = device_generator(seed, number, iteration)
            update = local_update(
                model, layout, start, inputs, labels, asked.adapt(job.training), generator, control
            )
            shared, dice = (
                shared_seed(seed, iteration),
                device_generator(seed, number, iteration, COMPRESSION),
            )
            sent = encode_update(scheme, update.vectors, dice, residuals[client], shared)
            residuals[client] = sent.residuals
            if masked is None:
                read = decode_update(scheme, sent.body, strategy.summed, layout.size, shared)
                loss = float(np.float32(update.loss))
                added = strategy.contribution(layout, Update(read, update.examples, update.steps, loss))
            else:
                # What a plain job would have to be sent for the bits of the masked one.
                quantised = Update(sent.decoded, update.examples, update.steps, update.loss)
                added = masked.plain(quantised, iteration)
            total.add(added)
            if control is not None:
                controls[client] = controls[client] + added.vectors["control"]
        state = strategy.apply(state, total)
        if chain is not None:
            chain.publish(state.weights)
    return state.weights if chain is None else chain.vector()


@dataclass
class Fleet:
    """Devices in threads of this process, over real HTTP."""

    job: str
    servers: Sequence[str]
    folder: Path
    tokens: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    """Of clients that do not train with NumPy."""

    def run(
        self, clients: Sequence[str], budget: Budget | None = None, wait_s: float = 60.0
    ) -> dict[str, Done]:
        """Run all until they end."""
        running = self.start(clients, budget)
        for thread in running.threads:
            thread.join(wait_s)
        assert not any(thread.is_alive() for thread in running.threads), running.done
        if running.errors:
            raise running.errors[0]
        return running.done

    def start(self, clients: Sequence[str], budget: Budget | None = None) -> Started:
        started = Started()
        for client in clients:
            thread = threading.Thread(target=self._run, args=(client, budget, started), daemon=True)
            started.threads.append(thread)
            thread.start()
        return started

    def _run(self, client: str, budget: Budget | None, started: Started) -> None:
        try:
            with self.transport(client) as transport:
                clock = Clock()
                job = fetch_job(transport, self.job, clock, 20.0)
                folder = DeviceFolder(self.folder / client)
                terms = with_identity(terms_of(job), job, client, folder, transport, clock)
                device = Device(
                    client, terms, self.trainers.get(client) or numpy_trainer(job, client, *rows(client)),
                    folder, clock.now(), random.Random(client).random,
                    budget=budget or Budget(seconds=90.0),
                )  # fmt: skip
                started.devices[client] = device
                started.done[client] = run_device(device, transport, clock, clock.now() + 90.0)
        except Exception as error:
            started.errors.append(error)
            raise

    def transport(self, client: str) -> HttpTransport:
        """A client's own network."""
        token = self.tokens.get(client, "")
        return HttpTransport(self.servers, token, first=client_number(client), timeout_s=10.0, **self.options)


@dataclass
class Started:
    threads: list[threading.Thread] = field(default_factory=list)
    devices: dict[str, Device] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)


def server_settings(folder: Path, port: int, store: str = "", **federation: Any) -> Settings:
    return Settings.model_validate({
        "data": {"dir": folder},
        "federation": {"listen": f"127.0.0.1:{port}", "store": store, "heartbeat": 0.5, **federation},
    })  # fmt: skip


def free_ports(count: int) -> list[int]:
    import socket

    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [place.getsockname()[1] for place in held]


@contextmanager
def servers(
    folder: Path, count: int = 1, store: str = "", **federation: Any
) -> Iterator[list[tuple[Running, str]]]:
    """``count`` servers on one store: each with its address."""
    with ExitStack() as stack:
        found = []
        for number, port in enumerate(free_ports(count)):
            settings = server_settings(folder, port, store, **federation)
            running = stack.enter_context(service(f"federation-{number}", settings, "federation"))
            found.append((running, f"http://127.0.0.1:{port}"))
        for _, url in found:
            ready(url)
        yield found


def ready(url: str, timeout_s: float = 30.0) -> None:
    def answers() -> bool:
        try:
            return bool(ask(url, "GET", "/health/ready")["status"] == "ready")
        except OSError:
            return False

    eventually(answers, timeout_s)


def ask(url: str, method: str, path: str, body: bytes | None = None, key: str = "") -> Any:
    """An operator's request; the decoded reply."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url + path, body, headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


def create(url: str, job: FederatedJob, key: str = "") -> None:
    assert ask(url, "POST", "/v1/fl/jobs", job.to_toml().encode(), key)["created"]


def state(url: str, name: str = "job") -> dict[str, Any]:
    """Where a job stands."""
    found: dict[str, Any] = next(row for row in ask(url, "GET", "/v1/fl/jobs")["jobs"] if row["job"] == name)
    return found


def model(
    url: str, name: str, version: int, job: FederatedJob, client: str = "anybody", token: str = ""
) -> Array:
    """The weights that a server hands out."""
    from federated.wire import decode_model

    with HttpTransport([url], token) as transport:
        answer = transport.send(Call("GET", f"/v1/fl/jobs/{name}/clients/{client}/models/{version}"))
    assert answer.status == 200, answer
    layout = job.make_model().layout()
    whole, grid = decode_model(answer.body, layout.size).model, job.make_grid(layout)
    return (
        np.frombuffer(whole, "<f4").astype(np.float32) if grid is None else receive(grid, whole).vector(grid)
    )


def wait_for(url: str, name: str = "job", timeout_s: float = 60.0, **wanted: Any) -> dict[str, Any]:
    """Until the job's state has these values."""
    ends = time.monotonic() + timeout_s
    while True:
        found = state(url, name)
        if all(found[key] == value for key, value in wanted.items()):
            return found
        assert time.monotonic() < ends, (found, wanted)
        time.sleep(0.02)
