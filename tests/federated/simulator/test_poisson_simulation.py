"""The simulator draws clients as servers do, and a simulated job ends with its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.simulated import blobs

from federated.data import federate
from federated.job import load_job
from federated.privacy.accounting_statement import most_releases
from federated.rounds import Tickets
from federated.simulator.build import Built, build, ticket_key
from federated.simulator.simulation import Row

CLIENTS, RATE = 40, 0.3


def made(folder: Path, *, seed: int = 7, rounds: dict[str, Any] | None = None, **privacy: Any) -> Built:
    folder.mkdir(exist_ok=True)
    job = load_job(
        {
            "job": {"name": "drawn", "seed": seed},
            "rounds": {
                "start_fl_job_threshold": 2, "update_model_ratio": 0.5, "fl_iteration_num": 6, **(rounds or {}),
            },
            "data": {"clients": CLIENTS},
            "model": {"name": "perceptron", "hidden": 4},
            "training": {"epochs": 1, "batch_size": 8},
            "selection": {"name": "poisson", "rate": RATE},
            "privacy": {"mechanism": "central_gaussian", "noise_multiplier": 2.0, "accountant": "rdp", **privacy},
            "simulation": {"checkpoint_every": 1},
        }
    )  # fmt: skip
    return build(job, federate(blobs(400), CLIENTS, 7), folder)


def finish(built: Built) -> list[Row]:
    rows = list(built.simulation.run())
    built.simulation.close()
    return rows


def drawn(seed: int, iterations: int) -> list[int]:
    tickets = Tickets("drawn", ticket_key(seed))
    return [
        sum(tickets.coin(str(client), iteration) < RATE for client in range(CLIENTS))
        for iteration in range(1, iterations + 1)
    ]


def test_a_simulation_draws_whom_servers_would_draw_and_waits_for_all_of_them(tmp_path: Path) -> None:
    rows = finish(made(tmp_path))
    # Everyone knocks within the start window; nobody drops out.
    assert [row.starts for row in rows] == drawn(7, 6)
    assert len({row.starts for row in rows}) > 2
    assert all(row.valid and row.uploads == row.starts for row in rows)
    assert all(row.closed_s - row.opened_s > 299.0 for row in rows)


def test_another_seed_draws_others_and_the_same_seed_the_same(tmp_path: Path) -> None:
    first, again, other = (
        finish(made(tmp_path / name, seed=seed)) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert [row.starts for row in first] == [row.starts for row in again]
    assert [row.starts for row in other] == drawn(8, 6) != drawn(7, 6)


def test_a_simulated_job_stops_before_it_exceeds_its_budget_and_a_killed_one_does_too(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", budget_epsilon=3.0, rounds={"fl_iteration_num": 50})
    header = whole.simulation.world.desk.header
    limit = whole.simulation.world.desk.rounds.settings.most_releases
    rows = finish(whole)
    assert 2 <= limit == len([row for row in rows if row.valid]) < 50
    assert whole.simulation.world.desk.rounds.over(header()) == "budget"
    killed = made(tmp_path / "killed", budget_epsilon=3.0, rounds={"fl_iteration_num": 50})
    running = killed.simulation.run()
    next(running)
    running.close()
    killed.simulation.checkpoint()
    killed.simulation.close()
    resumed = made(tmp_path / "killed", budget_epsilon=3.0, rounds={"fl_iteration_num": 50})
    assert resumed.simulation.resume()
    finish(resumed)
    assert resumed.simulation.world.desk.rounds.over(resumed.simulation.world.desk.header()) == "budget"
    assert resumed.simulation.world.desk.header().releases == limit
    np.testing.assert_array_equal(resumed.simulation.weights, whole.simulation.weights)


def test_the_limit_is_what_the_accountant_affords(tmp_path: Path) -> None:
    job = load_job(
        {
            "rounds": {"start_fl_job_threshold": 2},
            "data": {"clients": CLIENTS},
            "selection": {"name": "poisson", "rate": RATE},
            "privacy": {"mechanism": "central_gaussian", "noise_multiplier": 2.0, "accountant": "rdp",
                        "budget_epsilon": 3.0},
        }
    )  # fmt: skip
    built = made(tmp_path, budget_epsilon=3.0)
    assert built.simulation.world.desk.rounds.settings.most_releases == most_releases(job.exposure(9))
    built.simulation.close()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_dropouts_do_not_change_who_is_drawn(dropout: float, tmp_path: Path) -> None:
    job = made(tmp_path)
    job.simulation.close()
    rows = finish(_with_dropouts(tmp_path / "again", dropout))
    assert [row.starts for row in rows] == drawn(7, len(rows))
    if dropout:
        assert sum(row.uploads for row in rows) < sum(row.starts for row in rows)


def _with_dropouts(folder: Path, dropout: float) -> Built:
    folder.mkdir()
    job = load_job(
        {
            "job": {"name": "drawn", "seed": 7},
            "rounds": {"start_fl_job_threshold": 2, "update_model_ratio": 0.5, "fl_iteration_num": 4},
            "data": {"clients": CLIENTS},
            "model": {"name": "perceptron", "hidden": 4},
            "training": {"epochs": 1, "batch_size": 8},
            "selection": {"name": "poisson", "rate": RATE},
            "privacy": {"mechanism": "central_gaussian", "noise_multiplier": 2.0, "accountant": "rdp"},
            "simulation": {"habits": {"dropout": dropout}},
        }
    )
    return build(job, federate(blobs(400), CLIENTS, 7), folder)
