"""SignDS in whole rounds: simulated clients learn, real ones upload a few bytes, unsound jobs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bare import bare_device
from support.federation import ask, create, model, servers, wait_for
from support.federation import job as server_job
from support.federation import rows as own_rows

from federated.compression import BodyRefused
from federated.job import load_job
from federated.job_sections import JobRefused
from federated.payload import encode_update
from federated.privacy.signds import reports_of
from federated.simulator.build import build
from federated.simulator.simulation import Simulation
from federated.sums import ContributionRefused
from services.datasets.federations import open_federation
from services.federation.assembly import assemble_job
from services.simulation.evaluate import evaluator


def tables(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {
        "rounds": {"start_fl_job_threshold": 60, "update_model_ratio": 1, "fl_iteration_num": 10},
        "training": {"epochs": 2, "batch_size": 10},
        "strategy": {"name": "signds"},
        "privacy": {"mechanism": "signds"},
    }
    for title, values in more.items():
        made[title] = {**made.get(title, {}), **values}
    return made


def simulate(folder: Path, **more: dict[str, Any]) -> tuple[list[Any], np.ndarray]:
    folder.mkdir()
    federation, _ = open_federation("digits", folder, clients=60, seed=1)
    made = build(load_job(tables(**more)), federation, folder, evaluate=evaluator(federation, 1))
    rows = list(made.simulation.run())
    weights = made.simulation.learning.weights.copy()
    made.simulation.close()
    return rows, weights


def test_simulated_clients_learn_by_votes(tmp_path: Path) -> None:
    rows, weights = simulate(tmp_path / "one")
    assert all(row.valid for row in rows)
    assert rows[0].metrics["accuracy"] < 0.2
    assert rows[-1].metrics["accuracy"] > 0.35
    scheme = reports_of(load_job(tables()).privacy)
    # A frame's head, the bit, and a report: the same for everyone.
    assert {row.bytes_up for row in rows} == {60 * (34 + 1 + scheme.most_bytes(4_810))}
    # How large chunks are, and how many threads train them, changes no bit.
    again, same = simulate(tmp_path / "two", simulation={"memory_bytes": 2**24, "threads": 2})
    np.testing.assert_array_equal(weights, same)
    assert [row.metrics for row in again] == [row.metrics for row in rows]


def test_real_devices_with_numpy_alone_vote_over_http(tmp_path: Path) -> None:
    made = server_job(
        clients=3, iterations=2, privacy={"mechanism": "signds", "sign_k": 0.1}, strategy={"name": "signds"}
    )
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        devices = [bare_device(tmp_path, str(client), urls, own_rows(str(client))) for client in range(3)]
        for process in devices:
            _, errors = process.communicate(timeout=110)
            assert process.returncode == 0, errors.decode()
        found = wait_for(urls[1], phase="finished")
        assert (found["valid"], found["invalid"]) == (2, 0)
        rounds = ask(urls[1], "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        assert [row["uploads"] for row in rounds] == [3, 3]
        layout = made.make_model().layout()
        named = reports_of(made.privacy).plan(layout.size).named
        before, after = (model(urls[0], "job", version, made) for version in (1, 2))
        # Whole votes: every weight moved by a multiple of rate · 2 r_est, at most all h of all devices.
        state = assemble_job(made, b"k" * 32).first_state()
        steps = (after - before) / np.float32(0.1 * 2.0 * state.scalars["magnitude"])
        powers = [power for power in (0.5, 1.0, 2.0, 4.0) if near_whole(steps / power)]
        assert powers
        assert 0 < np.abs(np.rint(steps / powers[-1])).sum() <= 3 * named


def near_whole(steps: np.ndarray) -> bool:
    return bool(np.abs(steps - np.rint(steps)).max() < 1e-3)


def test_servers_refuse_what_is_no_report() -> None:
    made = server_job(clients=3, privacy={"mechanism": "signds", "sign_k": 0.1}, strategy={"name": "signds"})
    hosted = assemble_job(made, b"k" * 32)
    scheme, size = reports_of(made.privacy), hosted.layout.size
    named = scheme.plan(size).named
    vector = np.zeros(size, np.float32)
    vector[:named] = -1.0
    body = encode_update(scheme, {"difference": vector}, np.random.default_rng(1), bit=1).body
    assert len(body) == hosted.most_payload == 1 + scheme.most_bytes(size)
    taken = hosted.contribution(body, 1, 10**6, 10**6, 0.0)
    assert (taken.weight, dict(taken.scalars)) == (1.0, {"bit": 1.0})
    np.testing.assert_array_equal(taken.vectors["difference"], vector)
    for wrong in (b"", body[1:], b"\x02" + body[1:], body + b"\0", body[:-1], bytes(len(body))):
        with pytest.raises((BodyRefused, ContributionRefused)):
            hosted.contribution(wrong, 1, 1, 1, 0.0)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"strategy": {"name": "fedavg"}}, "go together only"),
        ({"privacy": {"mechanism": "none"}}, "go together only"),
        ({"strategy": {"name": "scaffold", "population": 60}}, "go together only"),
        ({"compression": {"upload": "quantise:8"}}, "private by itself"),
        ({"secure_aggregation": {"protocol": "secagg"}}, "private by itself|secure"),
        ({"rounds": {"mode": "buffered", "buffer_size": 10}}, "threshold of one version"),
        ({"strategy": {"server_rate": 0.5}}, "sign_global_lr"),
        ({"strategy": {"magnitude_epsilon": 0.5}}, "privacy.magnitude_epsilon"),
        ({"privacy": {"sign_k": 0.5}}, "a quarter"),
        ({"data": {"features": 3, "classes": 2}, "model": {"name": "softmax"}}, "raise it to 0.13 at least"),
        ({"selection": {"name": "poisson", "rate": 0.5}, "data": {"clients": 600}}, "poisson"),
    ],
)  # fmt: skip
def test_unsound_jobs_are_refused(more: dict[str, dict[str, Any]], reason: str) -> None:
    given = tables(**more)
    if more.get("strategy", {}).get("name", "signds") != "signds":
        given["strategy"] = more["strategy"]
    with pytest.raises(JobRefused, match=reason):
        load_job(given)


def test_a_job_of_signds_is_written_and_read_the_same(tmp_path: Path) -> None:
    made = load_job(tables())
    path = tmp_path / "job.toml"
    path.write_text(made.to_toml())
    assert load_job(path) == made
    assert made.make_strategy().server_rate == 0.1


def test_a_simulation_resumes_with_the_threshold_that_its_clients_were_told(tmp_path: Path) -> None:
    federation, _ = open_federation("digits", tmp_path, clients=60, seed=1)
    made = load_job(tables(simulation={"checkpoint_every": 2}, rounds={"fl_iteration_num": 6}))

    def begin(name: str) -> Simulation:
        (tmp_path / name).mkdir(exist_ok=True)
        return build(made, federation, tmp_path / name).simulation

    whole, cut = begin("whole"), begin("cut")
    list(whole.run())
    running = cut.run()
    for _ in range(3):
        next(running)
    cut.close()
    again = begin("cut")
    assert again.resume()
    list(again.run())
    assert again.weights.tobytes() == whole.weights.tobytes()
    assert again.learning.state.scalars == whole.learning.state.scalars
    whole.close()
    again.close()
