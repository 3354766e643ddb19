"""Secure aggregation in the simulator: sums without masks, every message of the protocol, and plain sums of the same
quantised updates give the same weights, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import job, reference, reference_of
from support.masked_rounds import federation, learned

from federated.job import FederatedJob
from federated.job_sections import JobRefused
from federated.simulator.build import build
from federated.simulator.learning import NothingToApply
from federated.simulator.world import Counted

CLIENTS = [str(number) for number in range(6)]
COHORTS = [CLIENTS, ["0", "1", "3", "5"], ["5", "4", "2", "1", "0"]]
"""0, 33 and 17 % of six clients dropped out."""


def secure_job(simulate: str = "sums", **sections: dict[str, Any]) -> FederatedJob:
    told = {
        "protocol": "secagg",
        "dropouts": 0.4,
        "simulate": simulate,
        **sections.pop("secure_aggregation", {}),
    }
    rounds = {"update_model_ratio": "0.6", **sections.pop("rounds", {})}
    simulation = {"engine": "numpy", "evaluate_every": 0, **sections.pop("simulation", {})}
    tables: dict[str, Any] = {
        "secure_aggregation": told,
        "rounds": rounds,
        "simulation": simulation,
        **sections,
    }
    return job(clients=len(CLIENTS), iterations=len(COHORTS), **tables)


VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedadam": {"strategy": {"name": "fedadam"}},
    "scaffold": {"strategy": {"name": "scaffold", "population": 6}},
    "fednova, unequal steps": {
        "strategy": {"name": "fednova"}, "training": {"steps": 7, "batch_size": 3},
    },
    "adaptive": {"strategy": {"name": "adaptive", "steps": 3}},
    "one shared mask": {"compression": {"upload": "random_mask:0.5:shared"}},
    "a mask with feedback, rounded downloads": {
        "compression": {"upload": "feedback,random_mask:0.4:shared", "download_bits": 8},
    },
    "secagg+": {"secure_aggregation": {"protocol": "secagg+"}},
}  # fmt: skip


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_sums_without_masks_are_those_of_plain_rounds_on_quantised_updates(
    variant: str, tmp_path: Path
) -> None:
    made = secure_job(**VARIANTS[variant])
    np.testing.assert_array_equal(
        learned(made, tmp_path / "sums", CLIENTS, COHORTS), reference_of(made, COHORTS)
    )


@pytest.mark.parametrize("variant", ["fedavg", "scaffold", "one shared mask", "secagg+"])
def test_every_message_of_the_protocol_gives_the_same_bits(variant: str, tmp_path: Path) -> None:
    sums, protocol = secure_job(**VARIANTS[variant]), secure_job("protocol", **VARIANTS[variant])
    np.testing.assert_array_equal(
        learned(protocol, tmp_path / "all", CLIENTS, COHORTS),
        learned(sums, tmp_path / "sums", CLIENTS, COHORTS),
    )


@pytest.mark.parametrize("mechanism", ["distributed_gaussian", "distributed_skellam"])
def test_noise_inside_the_ring_is_that_of_the_protocol(mechanism: str, tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "privacy": {"mechanism": mechanism, "clip": 0.5, "noise_multiplier": 0.5},
        "secure_aggregation": {"clip": 1.0, "step_bits": 10, "colluding": 0.0},
    }
    found = learned(secure_job(**told), tmp_path / "sums", CLIENTS, COHORTS)
    np.testing.assert_array_equal(
        found, learned(secure_job("protocol", **told), tmp_path / "all", CLIENTS, COHORTS)
    )
    still = {
        **told,
        "privacy": {**told["privacy"], "mechanism": "central_gaussian", "noise_multiplier": 1e-9},
    }
    assert np.abs(found - learned(secure_job(**still), tmp_path / "still", CLIENTS, COHORTS)).max() > 0.05


def test_a_sum_of_fewer_than_the_noise_is_sized_for_is_no_sum(tmp_path: Path) -> None:
    made = secure_job(
        privacy={"mechanism": "distributed_gaussian", "clip": 0.5},
        secure_aggregation={"clip": 1.0, "step_bits": 10, "colluding": 0.0},
    )
    masked = made.make_masked(made.make_model().layout())
    assert masked is not None
    assert masked.plan.least == made.rounds.thresholds.uploads_floor == 4
    simulation = build(made, federation(CLIENTS), tmp_path, checkpoints=False).simulation
    with pytest.raises(NothingToApply, match="4 are needed"):
        simulation.learning.learn([Counted(client, 1, 0) for client in range(3)], 0, None, 6)
    simulation.close()


def test_a_server_that_may_cheat_changes_no_bit(tmp_path: Path) -> None:
    told = {"malicious": True, "dropouts": 0.2}
    cohorts = [CLIENTS, CLIENTS[1:], CLIENTS]
    made = secure_job("protocol", secure_aggregation=told, rounds={"update_model_ratio": "0.8"})
    simulation = build(made, federation(CLIENTS), tmp_path, checkpoints=False).simulation
    for version, cohort in enumerate(cohorts):
        simulation.learning.learn([Counted(int(c), version + 1, 0) for c in cohort], version, None, 6)
    np.testing.assert_array_equal(simulation.weights, reference_of(made, cohorts))
    simulation.close()


def test_quantising_moves_the_mean_by_half_a_step_at_most(tmp_path: Path) -> None:
    made = secure_job(secure_aggregation={"step_bits": 12})
    plain = job(clients=6, iterations=1)
    masked = made.make_masked(made.make_model().layout())
    assert masked is not None
    apart = np.abs(reference(made, CLIENTS, 1).astype(float) - reference(plain, CLIENTS, 1))
    assert 0.0 < apart.max() <= 2.0**-13 + 1e-6


@pytest.mark.parametrize("simulate", ["sums", "protocol"])
def test_fewer_than_the_protocol_needs_make_no_version(simulate: str, tmp_path: Path) -> None:
    made = secure_job(simulate)
    simulation = build(made, federation(CLIENTS), tmp_path, checkpoints=False).simulation
    with pytest.raises(NothingToApply, match="needed"):
        simulation.learning.learn([Counted(0, 1, 0), Counted(1, 1, 0)], 0, None, 6)
    simulation.close()


def test_a_whole_simulation_runs_under_masks_and_says_what_uploads_take(tmp_path: Path) -> None:
    made = secure_job(simulation={"engine": "batched", "habits": {"dropout": 0.1}})
    built = build(made, federation(CLIENTS), tmp_path)
    ended = list(built.simulation.run())
    masked = made.make_masked(built.model.layout())
    assert masked is not None
    valid = [row for row in ended if row.valid]
    assert valid
    assert all(row.bytes_up == row.uploads * (masked.plan.masked_bytes + 34) for row in valid)
    built.simulation.close()


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"strategy": {"name": "median"}}, "compares single updates"),
        ({"rounds": {"mode": "buffered", "buffer_size": 3}}, "masks cancel within one cohort"),
        ({"compression": {"upload": "top_k:0.1"}}, "random_mask"),
        ({"secure_aggregation": {"colluding": 0.9}}, "colluding"),
        ({"secure_aggregation": {"threshold": 5}}, "needed"),
        ({"secure_aggregation": {"clip": 1e9}}, "bits|sums hold"),
        ({"rounds": {"update_model_ratio": "0.2"}}, "raise rounds.update_model_ratio"),
        ({"secure_aggregation": {"registrar": "key"}}, "64 hexadecimal digits"),
    ],
)
def test_what_cannot_be_masked_soundly_is_refused_with_the_reason(
    sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobRefused, match=reason):
        secure_job(**sections)
