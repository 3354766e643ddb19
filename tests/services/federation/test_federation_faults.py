"""Servers killed or joining in mid-round, networks that fail: the round goes on, and every update counts once."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.federation import (
    Fleet,
    ask,
    create,
    free_ports,
    job,
    model,
    ready,
    reference,
    rows,
    server_settings,
    servers,
    wait_for,
)
from support.redis import redis_url
from support.service_process import service

from federated.client_device import Device
from federated.client_folder import DeviceFolder
from federated.client_http import Answer, Call, Clock, HttpTransport, NetworkLost
from federated.client_run import numpy_trainer, run_device, terms_of
from federated.client_steps import Budget
from federated.job import FederatedJob

__all__ = ["redis_url"]
CLIENTS = [str(number) for number in range(4)]


def test_the_first_server_is_killed_in_mid_round(tmp_path: Path) -> None:
    made = job(iterations=2, rounds={"early_uploads": True})
    with servers(tmp_path, 2) as running:
        (first, first_url), (_, second_url) = running
        create(first_url, made)
        fleet = Fleet("job", [first_url, second_url], tmp_path / "devices")
        early = fleet.start(["0", "2"])  # at the first server
        wait_for(second_url, uploads=2)
        first.kill()
        done = fleet.run(["1", "3"])
        for thread in early.threads:
            thread.join(30)
        assert {end.why for end in (done | early.done).values()} == {"finished"}
        found = wait_for(second_url, phase="finished")
        assert (found["valid"], found["invalid"]) == (2, 0)
        np.testing.assert_array_equal(model(second_url, "job", 2, made), reference(made, CLIENTS, 2))
        assert [row["name"] for row in ask(second_url, "GET", "/v1/fl/servers")["servers"]][
            -1
        ] == "federation-1"
        first.start()


def test_a_server_that_is_killed_while_it_sums_leaves_its_tasks_to_another(tmp_path: Path) -> None:
    """Killed as soon as the last update is acknowledged, again and again: nothing acknowledged is lost."""
    made = job(iterations=3, rounds={"aggregation_lease_s": 0.5})
    with servers(tmp_path, 2) as running:
        (first, first_url), (_, second_url) = running
        create(first_url, made)
        fleet = Fleet("job", [first_url, second_url], tmp_path / "devices")
        for iteration in range(1, 4):
            done = fleet.run(CLIENTS, Budget(rounds=1))
            first.kill()
            assert {end.why for end in done.values()} <= {"rounds", "finished"}
            wait_for(second_url, version=iteration)
            first.start()
            ready(first_url)
        np.testing.assert_array_equal(model(second_url, "job", 3, made), reference(made, CLIENTS, 3))


def test_a_server_joins_in_mid_round_on_redis(tmp_path: Path, redis_url: str) -> None:
    made = job("joined", iterations=2, rounds={"early_uploads": True})
    with servers(tmp_path, 1, redis_url) as running, ExitStack() as stack:
        first_url = running[0][1]
        create(first_url, made)
        fleet = Fleet("joined", [first_url], tmp_path / "devices")
        early = fleet.start(["0", "1"])
        wait_for(first_url, "joined", uploads=2)
        (port,) = free_ports(1)
        settings = server_settings(tmp_path / "other", port, redis_url)
        stack.enter_context(service("federation-9", settings, "federation"))
        second_url = f"http://127.0.0.1:{port}"
        ready(second_url)
        done = Fleet("joined", [second_url], tmp_path / "devices").run(["2", "3"])
        for thread in early.threads:
            thread.join(30)
        assert {end.why for end in (done | early.done).values()} == {"finished"}
        for url in (first_url, second_url):
            np.testing.assert_array_equal(model(url, "joined", 2, made), reference(made, CLIENTS, 2))


class BadNetwork(HttpTransport):
    """Loses requests before they arrive, and replies after they were made."""

    def __init__(self, servers: list[str], seed: int, share: float) -> None:
        super().__init__(servers)
        self._dice = random.Random(seed)
        self._share = share
        self.calls: list[Call] = []
        self.failed = 0

    def send(self, call: Call) -> Answer:
        luck = self._dice.random()
        if luck < self._share / 2:
            self.failed += 1
            raise NetworkLost("the request never arrived")
        answer = super().send(call)
        self.calls.append(call)
        if luck < self._share:
            self.failed += 1
            raise NetworkLost("the reply never arrived")
        return answer


def device_on(
    made: FederatedJob, client: str, folder: Path, transport: HttpTransport, budget: Budget
) -> Device:
    clock = Clock()
    began = clock.now()
    trainer = numpy_trainer(made, client, *rows(client))
    device = Device(
        client,
        terms_of(made),
        trainer,
        DeviceFolder(folder / client),
        began,
        random.Random(1).random,
        budget=budget,
    )
    run_device(device, transport, clock, began + budget.seconds)
    return device


def test_a_lost_network_costs_time_and_no_update(tmp_path: Path) -> None:
    made = job(clients=1, iterations=3)
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        with BadNetwork([url], 4, 0.3) as network:
            device = device_on(made, "1", tmp_path / "devices", network, Budget(seconds=60))
        assert network.failed >= 2
        assert (device.spent.accepted, device.spent.lost) == (3, network.failed)
        wait_for(url, phase="finished", valid=3)
        np.testing.assert_array_equal(model(url, "job", 3, made), reference(made, ["1"], 3))


def test_a_cut_off_upload_goes_on_where_it_was_at_another_server(tmp_path: Path) -> None:
    made = job(clients=1, iterations=2, servers={"part_bytes": 64})
    body_bytes = 4 * made.make_model().layout().size
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        with BadNetwork(urls, 3, 0.3) as network:
            device = device_on(made, "1", tmp_path / "devices", network, Budget(seconds=60))
        parts = [call for call in network.calls if call.method == "PUT"]
        assert network.failed >= 2
        assert device.spent.accepted == 2
        # A part whose reply was lost is not sent again: the server says that it is there.
        assert sum(len(part.body) for part in parts) == 2 * body_bytes
        np.testing.assert_array_equal(model(urls[1], "job", 2, made), reference(made, ["1"], 2))


def test_a_crashed_device_sends_the_update_that_it_had_trained(tmp_path: Path) -> None:
    made = job(clients=2, iterations=1, compression={"upload": "top_k:0.2,quantise:1,deflate"})
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        with HttpTransport([url]) as network:
            # It ends while its update waits for the second client to start.
            crashed = device_on(made, "0", tmp_path / "devices", network, Budget(seconds=1.0))
            assert crashed.spent.accepted == 0
            assert DeviceFolder(tmp_path / "devices" / "0").pending() is not None
            Fleet("job", [url], tmp_path / "devices").run(["0", "1"])
        wait_for(url, phase="finished", valid=1)
        np.testing.assert_array_equal(model(url, "job", 1, made), reference(made, ["0", "1"], 1))
        folder = DeviceFolder(tmp_path / "devices" / "0")
        assert folder.pending() is None
        assert folder.memory().iteration == 1


@pytest.mark.parametrize(("budget", "why"), [(Budget(bytes=5000), "bytes"), (Budget(seconds=0.5), "seconds")])
def test_a_device_keeps_to_its_budget(tmp_path: Path, budget: Budget, why: str) -> None:
    made = job(clients=1, iterations=1000)
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        with HttpTransport([url]) as network:
            device = device_on(
                made, "1", tmp_path / "devices", network, Budget(None, min(budget.seconds, 30), budget.bytes)
            )
        assert getattr(device.next(1e9), "why", "") == why
        assert device.spent.sent + device.spent.received <= budget.bytes
        assert device.spent.accepted >= (1 if why == "bytes" else 0)
