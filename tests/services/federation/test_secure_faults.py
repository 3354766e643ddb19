"""Secure aggregation when things break: devices that die in any stage, servers killed between stages, lost messages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import (
    Fleet,
    Started,
    ask,
    create,
    job,
    model,
    ready,
    reference_of,
    rows,
    servers,
    state,
    wait_for,
)
from support.touched import Died, Touched

from federated.client_http import Answer, Call, HttpTransport, NetworkLost
from federated.client_steps import Budget
from federated.job import FederatedJob

CLIENTS = [str(number) for number in range(6)]


def answers(call: Call, stage: str) -> bool:
    """Whether ``call`` is the answer to a stage."""
    return call.method == "POST" and call.path.endswith("/uploads" if stage == "masked" else f"/{stage}")


def secure_job(name: str, *, ratio: str, **secure: Any) -> FederatedJob:
    """One iteration of six devices, whose stages last at most a second and a half."""
    told = {"protocol": "secagg", "colluding": 0.0, "dropouts": 0.3, "stage_window_s": 1.5, **secure}
    windows = {"update_model_ratio": ratio, "update_model_time_window_s": 20.0}
    return job(name, clients=len(CLIENTS), iterations=1, secure_aggregation=told, rounds=windows)


MALICIOUS = {"malicious": True}
CHOOSING = {"protocol": "secagg+", "malicious": True, "neighbours": 4, "dropouts": 0.2}
SCENES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "advertise": ("0.6", ["1", "4"], {}),
    "share": ("0.6", ["1", "4"], {}),
    "masked": ("0.6", ["1", "4"], {}),
    "unmask": ("1", ["1", "4"], {}),
    "choose": ("0.8", ["4"], CHOOSING),
    "consistent": ("1", ["1", "4"], MALICIOUS),
}
"""By the stage that some of six devices leave unanswered: the share that has to upload, who dies, the protocol."""


def test_devices_that_die_in_any_stage_cost_their_update_alone(tmp_path: Path) -> None:
    made = {
        stage: secure_job(f"at-{stage}", ratio=ratio, **more) for stage, (ratio, _, more) in SCENES.items()
    }
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        fleets, began = dict[str, Touched](), dict[str, Started]()
        for stage, one in made.items():
            create(urls[0], one)

            def die(client: str, call: Call, stage: str = stage) -> None:
                if client in SCENES[stage][1] and answers(call, stage):
                    raise Died(client)

            fleets[stage] = Touched(one.job.name, urls, tmp_path / stage, before=die)
            began[stage] = fleets[stage].start(CLIENTS)
        for stage, one in made.items():
            wait_for(urls[1], one.job.name, phase="finished", valid=1, invalid=0)
            for thread in began[stage].threads:
                thread.join(30)
            assert sorted(fleets[stage].died) == SCENES[stage][1]
            devices = began[stage].devices
            counted = [client for client in CLIENTS if devices[client].spent.accepted]
            late = stage in ("unmask", "consistent")
            assert len(counted) == len(CLIENTS) - (0 if late else len(SCENES[stage][1])), stage
            found = model(urls[0], one.job.name, 1, one)
            np.testing.assert_array_equal(found, reference_of(one, [counted]), err_msg=stage)


def test_a_server_is_killed_and_comes_back_between_all_stages(tmp_path: Path) -> None:
    made = job(
        clients=4,
        iterations=1,
        rounds={"aggregation_lease_s": 0.5},
        secure_aggregation={
            "protocol": "secagg", "malicious": True, "colluding": 0.0, "dropouts": 0.1, "stage_window_s": 30.0,
        },
    )  # fmt: skip
    with servers(tmp_path, 2) as running:
        (first, first_url), (_, second_url) = running
        create(first_url, made)
        stages = ["advertise", "share", "masked", "consistent", "unmask"]
        down, turn = [False], threading.Lock()

        def kill(client: str, call: Call) -> None:
            # The last to answer a stage finds a server gone that was there, or there that was gone.
            if client == "0" and stages and answers(call, stages[0]):
                with turn:
                    stages.pop(0)
                    if down[0]:
                        first.start()
                        ready(first_url)
                    else:
                        first.kill()
                    down[0] = not down[0]

        done = Touched("job", [first_url, second_url], tmp_path / "devices", before=kill).run(CLIENTS[:4])
        assert stages == []
        assert {end.why for end in done.values()} == {"finished"}
        wait_for(second_url, phase="finished", valid=1, invalid=0)
        np.testing.assert_array_equal(model(second_url, "job", 1, made), reference_of(made, [CLIENTS[:4]]))
        if down[0]:
            first.start()


def test_lost_requests_and_replies_are_sent_again_and_count_once(tmp_path: Path) -> None:
    made = job(clients=4, iterations=2, secure_aggregation={"protocol": "secagg", "dropouts": 0.2})
    lost = dict[tuple[str, str, str], int]()

    def lose(client: str, call: Call) -> None:
        # Every other request of each kind never arrives.
        if "/secure/" in call.path or call.path.endswith("/uploads"):
            key = (client, call.method, call.path)
            lost[key] = lost.get(key, 0) + 1
            if lost[key] == 1 and client in "01":
                raise NetworkLost("the request never arrived")

    def forget(client: str, call: Call, answer: Answer) -> Answer:
        if call.method == "POST" and client in "23" and lost[client, call.method, call.path] == 1:
            raise NetworkLost("the reply never arrived")
        return answer

    def after(client: str, call: Call, answer: Answer) -> Answer:
        watched = "/secure/" in call.path or call.path.endswith("/uploads")
        return forget(client, call, answer) if watched else answer

    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        done = Touched("job", [url], tmp_path / "devices", before=lose, after=after).run(CLIENTS[:4])
        assert {end.why for end in done.values()} == {"finished"}
        wait_for(url, phase="finished", valid=2, invalid=0)
        np.testing.assert_array_equal(model(url, "job", 2, made), reference_of(made, [CLIENTS[:4]] * 2))


def test_too_few_who_share_make_the_iteration_void_and_the_next_is_whole(tmp_path: Path) -> None:
    made = job(
        clients=4,
        iterations=2,
        secure_aggregation={"protocol": "secagg", "dropouts": 0.2, "stage_window_s": 1.0},
    )

    closed = threading.Event()

    def refuse(client: str, call: Call) -> None:
        if client in "12" and "/secure/1/share" in call.path and not closed.is_set():
            raise NetworkLost("no way through while the window lasts")

    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        began = Touched("job", [url], tmp_path / "devices", before=refuse).start(CLIENTS[:4])
        wait_for(url, invalid=1)
        closed.set()
        wait_for(url, phase="finished", valid=1, invalid=1)
        for thread in began.threads:
            thread.join(30)
        first, second = ask(url, "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        assert (first["valid"], first["why"]) == (False, "secure_aggregation")
        assert first["detail"] == "2 clients answered SHARE, 3 are needed"
        assert second["valid"]
        with HttpTransport([url]) as transport:
            metrics = transport.send(Call("GET", "/metrics")).body.decode()
        assert 'headwater_federation_secure_failures_total{job="job",stage="share"} 1.0' in metrics
        assert 'headwater_federation_secure_stage_seconds_count{job="job",stage="reveal"} 1.0' in metrics


def test_a_device_that_seals_rubbish_costs_its_neighbours_one_iteration(tmp_path: Path) -> None:
    made = job(
        clients=4,
        iterations=2,
        rounds={"update_model_time_window_s": 1.0, "global_iteration_time_window_s": 8.0},
        secure_aggregation={"protocol": "secagg", "colluding": 0.0, "dropouts": 0.2, "stage_window_s": 1.5},
    )

    class Rubbish(HttpTransport):
        def send(self, call: Call) -> Answer:
            if call.path.endswith("/secure/1/share") and call.method == "POST":
                call = replace(call, body=call.body[:-1] + bytes([call.body[-1] ^ 1]))
            return super().send(call)

    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        fleet = Fleet("job", [url], tmp_path / "devices")
        plain = fleet.transport
        fleet.transport = lambda client: Rubbish([url]) if client == "0" else plain(client)  # type: ignore[method-assign]
        began = fleet.start(CLIENTS[:4])
        wait_for(url, phase="finished", valid=1, invalid=1)
        for thread in began.threads:
            thread.join(30)
        assert {end.why for end in began.done.values()} == {"finished"}
        assert began.devices["3"].spent.missed == 1  # its share was the last
        np.testing.assert_array_equal(model(url, "job", 1, made), reference_of(made, [[], CLIENTS[:4]]))


def test_a_server_that_swaps_a_key_is_found_out_and_told_nothing_more(tmp_path: Path) -> None:
    made = job(
        clients=4,
        iterations=1,
        rounds={"update_model_ratio": "0.75"},
        secure_aggregation={
            "protocol": "secagg", "malicious": True, "colluding": 0.0, "dropouts": 0.1, "stage_window_s": 1.0,
        },
    )  # fmt: skip
    asked: list[Call] = []

    def watch(client: str, call: Call) -> None:
        if client == "3":
            asked.append(call)

    def swap(client: str, call: Call, answer: Answer) -> Answer:
        if client != "3" or call.method != "GET" or not call.path.endswith("/share"):
            return answer
        body = bytearray(answer.body)
        if body:
            body[-200] ^= 1  # within the last one's keys and signatures
        return Answer(answer.status, bytes(body), answer.headers, answer.sent, answer.received)

    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        fleet = Touched("job", [url], tmp_path / "devices", before=watch, after=swap)
        done = fleet.run(CLIENTS[:4], Budget(seconds=15.0))
        assert done["3"].why == "refused"
        assert "breaks the protocol of secure aggregation" in done["3"].detail
        assert asked[-1].path.endswith("/share")
        assert asked[-1].method == "GET"


def test_a_server_that_hands_one_device_another_model_learns_no_sum(tmp_path: Path) -> None:
    made = job(
        clients=4,
        iterations=2,
        rounds={"update_model_ratio": "1.0"},
        secure_aggregation={"protocol": "secagg", "colluding": 0.0, "dropouts": 0.1, "stage_window_s": 20.0},
    )
    touched = 0

    def other(client: str, call: Call, answer: Answer) -> Answer:
        nonlocal touched
        if client != "3" or "/models/" not in call.path or touched:
            return answer
        touched += 1
        body = answer.body[:-1] + bytes([answer.body[-1] ^ 0x80])  # the sign of one weight
        return Answer(answer.status, body, answer.headers, answer.sent, answer.received)

    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        Touched("job", [url], tmp_path / "devices", after=other).run(CLIENTS[:4])
        assert touched == 1
        wait_for(url, phase="finished", valid=1, invalid=1)
        first, second = ask(url, "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        assert (first["valid"], second["valid"]) == (False, True)
        assert "spoilt sum" in first["detail"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", ["share", "masked"])
def test_a_devices_process_is_killed_in_mid_iteration(stage: str, tmp_path: Path) -> None:
    made = job(
        clients=5,
        iterations=1,
        training={"steps": 4000},  # so that masked vectors take a while
        rounds={"update_model_ratio": "0.8"},
        secure_aggregation={"protocol": "secagg", "colluding": 0.0, "dropouts": 0.2, "stage_window_s": 4.0},
    )
    with servers(tmp_path, 2) as running, ExitStack() as stack:
        urls = [url for _, url in running]
        create(urls[0], made)
        processes = []
        for client in CLIENTS[:5]:
            inputs, labels = rows(client)
            np.savez(tmp_path / f"{client}.npz", inputs=inputs, labels=labels)
            words = [sys.executable, "-m", "federated.client", "--job", "job", "--client", client]
            words += [word for url in urls for word in ("--server", url)]
            words += [
                "--data",
                str(tmp_path / f"{client}.npz"),
                "--state",
                str(tmp_path / "devices" / client),
            ]
            made_here = subprocess.Popen([*words, "--budget-seconds", "100"], stdout=subprocess.PIPE)
            processes.append(stack.enter_context(made_here))
        ends = time.monotonic() + 60.0
        while state(urls[0])["stage"] != stage:
            assert time.monotonic() < ends
            time.sleep(0.002)
        processes[2].send_signal(signal.SIGKILL)
        wait_for(urls[1], phase="finished", valid=1, invalid=0)
        told = [process.communicate(timeout=60)[0] for process in processes]
        counted = [c for c, body in zip(CLIENTS, told, strict=False) if body and json.loads(body)["accepted"]]
        assert len(counted) == 4
        assert "2" not in counted
        np.testing.assert_array_equal(model(urls[0], "job", 1, made), reference_of(made, [counted]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_servers_are_killed_again_and_again(number: int, tmp_path: Path) -> None:
    test_a_server_is_killed_and_comes_back_between_all_stages(tmp_path)
