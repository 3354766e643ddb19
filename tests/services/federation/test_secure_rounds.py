"""Secure aggregation between real devices and servers: the sum is that of plain rounds on the same quantised values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.federation import Fleet, ask, create, job, model, reference, reference_of, servers, wait_for
from support.masked_rounds import learned
from support.redis import redis_url
from support.touched import Touched

from federated.client_http import Answer, Call, NetworkLost
from federated.device import INITIAL, device_generator
from federated.job import FederatedJob
from federated.rounds import Accepted
from federated.wire import decode_reply, decode_upload

__all__ = ["redis_url"]
CLIENTS = [str(number) for number in range(5)]


def secure_job(name: str = "job", iterations: int = 2, **sections: dict[str, Any]) -> FederatedJob:
    """A job of five clients whose updates travel under masks."""
    told = {"protocol": "secagg", "dropouts": 0.2, "stage_window_s": 20.0}
    more = {**told, **sections.pop("secure_aggregation", {})}
    return job(name, clients=len(CLIENTS), iterations=iterations, secure_aggregation=more, **sections)


def test_two_servers_learn_the_sum_of_five_devices_and_no_more(tmp_path: Path) -> None:
    made = secure_job()
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        done = Fleet("job", urls, tmp_path / "devices").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}, done
        wait_for(urls[1], phase="finished", valid=2, invalid=0)
        for url in urls:
            np.testing.assert_array_equal(model(url, "job", 2, made), reference(made, CLIENTS, 2))
        ended = ask(urls[0], "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        masked = made.make_masked(made.make_model().layout())
        assert masked is not None
        assert [row["upload_bytes"] for row in ended] == [len(CLIENTS) * masked.plan.masked_bytes] * 2
        assert all(0.5 < row["loss"] < 2.0 for row in ended)


def test_servers_share_the_stages_on_redis(tmp_path: Path, redis_url: str) -> None:
    made = secure_job("on-redis", secure_aggregation={"malicious": True, "colluding": 0.0})
    with servers(tmp_path, 2, redis_url) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        done = Fleet("on-redis", urls, tmp_path / "devices").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}, done
        wait_for(urls[1], "on-redis", phase="finished", valid=2, invalid=0)
        np.testing.assert_array_equal(model(urls[1], "on-redis", 2, made), reference(made, CLIENTS, 2))


def test_servers_simulator_and_plain_sums_agree_to_the_bit_whoever_drops_out(tmp_path: Path) -> None:
    """Six devices, three iterations, in each of which four masked vectors make the sum and two come too late."""
    everybody = [*CLIENTS, "5"]
    rounds = {"update_model_ratio": "0.6", "update_model_time_window_s": 20.0}
    told = {"protocol": "secagg", "dropouts": 0.34, "stage_window_s": 20.0}
    made = job(clients=6, iterations=3, rounds=rounds, secure_aggregation=told)
    counted: dict[int, set[str]] = {1: set(), 2: set(), 3: set()}

    def away(client: str, call: Call) -> None:
        # One device's vectors come too late, another's in the second iteration; the sixth is whoever is slowest.
        if call.method == "POST" and call.path.endswith("/uploads"):
            iteration = decode_upload(call.body, client)[0].iteration
            if len(counted[iteration]) < 4 and (client == "1" or (client == "4" and iteration == 2)):
                raise NetworkLost("away")

    def note(client: str, call: Call, answer: Answer) -> Answer:
        if call.method == "POST" and call.path.endswith("/uploads") and answer.status == 200:
            reply = decode_reply(answer.body, 0.0)
            if isinstance(reply, Accepted):
                counted[reply.iteration].add(client)
        return answer

    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        fleet = Touched("job", urls, tmp_path / "devices", before=away, after=note)
        began = fleet.start(everybody)
        wait_for(urls[1], phase="finished", valid=3, invalid=0)
        found = model(urls[0], "job", 3, made)
        for thread in began.threads:
            thread.join(30)
    cohorts = [sorted(counted[iteration]) for iteration in (1, 2, 3)]
    assert [len(cohort) for cohort in cohorts] == [4, 4, 4]
    np.testing.assert_array_equal(found, reference_of(made, cohorts))
    np.testing.assert_array_equal(found, learned(made, tmp_path / "sums", everybody, cohorts))
    every = replace(made, secure_aggregation=replace(made.secure_aggregation, simulate="protocol"))
    np.testing.assert_array_equal(found, learned(every, tmp_path / "protocol", everybody, cohorts))


VARIANTS: dict[str, dict[str, Any]] = {
    "scaffold": {"strategy": {"name": "scaffold", "population": 5}},
    "fednova": {"strategy": {"name": "fednova"}, "training": {"steps": 4}},
    "shared-mask": {
        "compression": {"upload": "feedback,random_mask:0.5:shared", "download_bits": 8},
        "secure_aggregation": {"step_bits": 20},
    },
    "in-parts": {"servers": {"part_bytes": 64}},
    "graph": {"secure_aggregation": {"protocol": "secagg+", "neighbours": 4}},
    "distrusted": {"secure_aggregation": {"malicious": True, "colluding": 0.0}},
}


def test_every_kind_of_job_on_the_same_servers_gives_the_bits_of_plain_sums(tmp_path: Path) -> None:
    made = {name: secure_job(name, **more) for name, more in VARIANTS.items()}
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        began = []
        for name, one in made.items():
            create(urls[0], one)
            began.append(Fleet(name, urls, tmp_path / name).start(CLIENTS))
        for name, one in made.items():
            wait_for(urls[1], name, phase="finished", valid=2, invalid=0)
            np.testing.assert_array_equal(
                model(urls[0], name, 2, one), reference(one, CLIENTS, 2), err_msg=name
            )
        for started in began:
            for thread in started.threads:
                thread.join(30)


def test_whoever_is_selected_beyond_what_is_needed_counts_as_dropped(tmp_path: Path) -> None:
    rounds = {"mode": "over_selection", "update_model_ratio": "0.6", "over_selection": "1.6"}
    made = secure_job(iterations=1, rounds=rounds)
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        fleet = Fleet("job", [url], tmp_path / "devices")
        began = fleet.start(CLIENTS)
        for thread in began.threads:
            thread.join(60)
        wait_for(url, phase="finished", valid=1)
        counted = [client for client in CLIENTS if began.devices[client].spent.accepted]
        assert len(counted) == 3
        np.testing.assert_array_equal(model(url, "job", 1, made), reference_of(made, [counted]))


def test_noise_of_the_devices_is_in_the_sum_and_no_device_alone_adds_enough(tmp_path: Path) -> None:
    made = secure_job(
        iterations=1,
        privacy={"mechanism": "distributed_gaussian", "clip": 0.5, "noise_multiplier": 1.0},
        secure_aggregation={"colluding": 0.0, "dropouts": 0.0, "clip": 1.0, "step_bits": 12},
    )
    quiet = secure_job(
        iterations=1,
        privacy={"mechanism": "central_gaussian", "clip": 0.5, "noise_multiplier": 1e-9},
        secure_aggregation={"colluding": 0.0, "dropouts": 0.0},
    )
    layout = made.make_model().layout()
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        Fleet("job", [url], tmp_path / "devices").run(CLIENTS)
        wait_for(url, phase="finished", valid=1)
        noisy = model(url, "job", 1, made)
        row = ask(url, "GET", "/v1/fl/jobs/job/rounds")["rounds"][0]
        assert row["loss"] is None
    start = made.make_model().initial(device_generator(made.job.seed, 0, 0, INITIAL))
    with servers(tmp_path / "quiet") as running:
        url = running[0][1]
        create(url, quiet)
        Fleet("job", [url], tmp_path / "still").run(CLIENTS)
        wait_for(url, phase="finished", valid=1)
        apart = (noisy - model(url, "job", 1, quiet)).astype(float) * len(CLIENTS)
    assert np.linalg.norm(noisy - start) > 0.0
    # The sum's noise has a standard deviation of the clip (times how little rounding adds); 83 values tell it within
    # a third.
    assert 0.66 * 0.5 < apart.std() < 1.34 * 0.6, apart.std()
    assert layout.size == len(apart)
