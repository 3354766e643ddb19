"""Whole runs in virtual time: every mode ends, learns, repeats bit for bit, and goes on where it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.simulated import blobs, iterations, simulate

from federated.data import federate
from federated.device import ControlVariates, LocalTraining, device_generator, local_update
from federated.models import make_model
from federated.rounds import RoundSettings
from federated.simulator.arrivals import NobodyComes
from federated.simulator.availability import make_availability
from federated.simulator.checkpoints import CheckpointRefused
from federated.simulator.population import Habits
from federated.simulator.simulation import CHECKPOINT, Row, Simulation
from federated.simulator.states import StatesFull
from federated.strategies import make_strategy, sum_for


def finish(simulation: Simulation) -> list[Row]:
    rows = list(simulation.run())
    simulation.close()
    return rows


def accuracy(rows: list[Row]) -> float:
    metrics = rows[-1].metrics
    assert metrics is not None
    return float(metrics["accuracy"])


MODES: dict[str, dict[str, Any]] = {
    "sync": {"rounds": iterations(6)},
    "over-selection": {"rounds": iterations(6, mode="over_selection")},
    "buffered": {
        "rounds": iterations(8, mode="buffered", buffer_size=8, max_concurrency=20),
        "habits": Habits(compute_spread=1.5, check_in_s=2.0),
    },
    "compressed both ways": {
        "rounds": iterations(10),
        "compression": "top_k:0.2,quantise:1,deflate",
        "download_bits": 8,
    },
    "scaffold": {"rounds": iterations(6), "strategy": "scaffold", "options": {"population": 30}},
    "single updates": {"rounds": iterations(6), "strategy": "median"},
    "diurnal": {
        "rounds": iterations(6),
        "availability": make_availability("diurnal", 3, share=0.8),
        "selection": "eligible",
        "habits": Habits(charging=0.9, unmetered=0.9, check_in_s=20.0),
    },
}


@pytest.mark.parametrize("mode", list(MODES))
def test_every_mode_ends_and_learns_and_repeats_to_the_bit(mode: str, tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        simulation = simulate(tmp_path / str(number), **MODES[mode])
        rows = finish(simulation)
        assert [row.iteration for row in rows] == list(range(1, len(rows) + 1))
        assert all(row.valid for row in rows)
        assert all(0.0 <= row.opened_s <= row.closed_s for row in rows)
        assert accuracy(rows) > 0.9
        runs.append((simulation.weights.tobytes(), [{**_plain(row)} for row in rows]))
    assert runs[0] == runs[1]


def _plain(row: Row) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: value for name, value in asdict(row).items() if name != "wall_s"}


def test_the_reference_engine_in_the_simulator_is_what_devices_and_a_server_compute(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, engine="numpy", rounds=iterations(3), check=False)
    federation = federate(blobs(), 30, 7)
    model = make_model("perceptron", features=8, classes=4, hidden=8)
    strategy = make_strategy("fedavg", max_examples=10_000)
    state = strategy.init(model.layout(), model.initial(device_generator(7, 0, 0, 2)))
    learn, cohorts = simulation.learning.learn, []

    def watched(uploads: Any, version: int, oldest: Any, started: int) -> Any:
        cohorts.append(sorted(upload.client for upload in uploads))
        return learn(uploads, version, oldest, started)

    simulation.learning.learn = watched  # type: ignore[method-assign]
    finish(simulation)
    for iteration, cohort in enumerate(cohorts, 1):
        total = sum_for(strategy, model.layout(), 10)
        for client in reversed(cohort):
            data = federation.client(client)
            update = local_update(
                model, model.layout(), state.weights, data.inputs, data.labels,
                LocalTraining(epochs=2, batch_size=8), device_generator(7, client, iteration),
            )  # fmt: skip
            total.add(strategy.contribution(model.layout(), update))
        state = strategy.apply(state, total)
    assert len(cohorts) == 3
    np.testing.assert_array_equal(simulation.weights, state.weights)


def test_controls_stay_with_the_clients_that_made_them(tmp_path: Path) -> None:
    simulation = simulate(
        tmp_path,
        engine="numpy",
        rounds=iterations(2),
        strategy="scaffold",
        options={"population": 30},
        check=False,
    )
    federation = federate(blobs(), 30, 7)
    model = make_model("perceptron", features=8, classes=4, hidden=8)
    rows = simulation.run()
    next(rows)
    controls = simulation.learning.states["control"]
    assert controls.held == 8
    all_clients = np.arange(30)
    taken = np.flatnonzero(controls.get(all_clients).any(axis=1))
    client = int(taken[0])
    zero = np.zeros(model.layout().size, np.float32)
    data = federation.client(client)
    update = local_update(
        model, model.layout(), model.initial(device_generator(7, 0, 0, 2)), data.inputs, data.labels,
        LocalTraining(epochs=2, batch_size=8), device_generator(7, client, 1), ControlVariates(zero, zero),
    )  # fmt: skip
    np.testing.assert_array_equal(controls.get(np.array([client]))[0], update.vectors["control"])
    assert len(list(rows)) == 1
    simulation.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_all_engines_agree_over_a_whole_run(threads: int, tmp_path: Path) -> None:
    weights = {}
    for engine in ("numpy", "batched", "torch"):
        (tmp_path / engine).mkdir()
        simulation = simulate(
            tmp_path / engine, engine=engine, threads=threads, rounds=iterations(3), check=False
        )
        finish(simulation)
        weights[engine] = simulation.weights
    for engine in ("batched", "torch"):
        np.testing.assert_allclose(weights[engine], weights["numpy"], rtol=0, atol=2e-5)


UNRELIABLE = Habits(dropout=0.15, stragglers=0.15, straggler_factor=10_000.0, check_in_s=20.0)


@pytest.mark.parametrize(
    "settings",
    [
        RoundSettings(start_fl_job_threshold=100, update_model_ratio=Decimal("0.6"), fl_iteration_num=40),
        RoundSettings(
            start_fl_job_threshold=100,
            mode="over_selection",
            over_selection=Decimal("1.575"),
            fl_iteration_num=40,
        ),
    ],
    ids=["ratio .6", "126 starts for 80 uploads"],
)
def test_a_third_that_drops_out_or_straggles_voids_few_iterations(
    settings: RoundSettings, tmp_path: Path
) -> None:
    simulation = simulate(
        tmp_path, clients=400, rounds=settings, habits=UNRELIABLE, check=False,
        training=LocalTraining(steps=1, batch_size=1),
    )  # fmt: skip
    rows = finish(simulation)
    assert len(rows) == 40
    assert sum(row.valid for row in rows) >= 38
    tally = simulation.world.tally
    # Some are both.
    assert (tally.dropped + tally.straggling) / tally.admitted == pytest.approx(0.3, abs=0.03)
    for row in rows:
        assert row.closed_s - row.opened_s <= 2 * 300.0


def test_the_same_third_voids_most_iterations_where_everyone_is_waited_for(tmp_path: Path) -> None:
    settings = RoundSettings(start_fl_job_threshold=100, update_model_ratio=Decimal(1), fl_iteration_num=5)
    simulation = simulate(tmp_path, clients=400, rounds=settings, habits=UNRELIABLE, check=False)
    rows = finish(simulation)
    assert [row.valid for row in rows] == [False] * 5
    assert {row.why for row in rows} == {"too_few_uploads"}
    assert all(row.closed_s - row.opened_s <= 600.0 + 1e-6 for row in rows)
    assert simulation.learning.state.iteration == 0


def test_slow_networks_and_large_bodies_take_longer(tmp_path: Path) -> None:
    took = {}
    for name, uplink, compression in (
        ("fast", 1e6, ""), ("slow", 5.0, ""), ("coded", 5.0, "top_k:0.1,quantise:1,deflate"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        simulation = simulate(
            tmp_path / name, rounds=iterations(4), compression=compression, check=False,
            habits=Habits(uplink=uplink, network_spread=0.0, check_in_s=1.0),
        )  # fmt: skip
        rows = finish(simulation)
        took[name] = sum(row.closed_s - row.opened_s for row in rows[1:])
        assert all(row.bytes_up > 0 and row.bytes_down > 0 for row in rows)
    assert took["fast"] < took["coded"] < took["slow"]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("after", [1, 4])
def test_a_run_that_stops_anywhere_goes_on_to_the_same_weights(mode: str, after: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = simulate(tmp_path / "whole", checkpoint_every=3, **MODES[mode])
    finish(whole)

    first = simulate(tmp_path / "parts", checkpoint_every=2, **MODES[mode])
    rows = first.run()
    for _ in range(after):
        next(rows)
    # Nothing is closed and no checkpoint written: as a process that is killed here.
    second = simulate(tmp_path / "parts", checkpoint_every=2, **MODES[mode])
    assert second.resume() is (after > 2)
    assert len(second.rows) == after // 2 * 2 - (2 if after % 2 == 0 else 0) if after > 2 else not second.rows
    finish(second)
    assert second.weights.tobytes() == whole.weights.tobytes()
    assert [_plain(row) for row in second.rows] == [_plain(row) for row in whole.rows]
    first.close()


KILLED = """
import sys
from pathlib import Path
from support.simulated import iterations, simulate
simulation = simulate(
    Path(sys.argv[1]), rounds=iterations(40), compression="top_k:0.2,quantise:1,deflate",
    strategy="scaffold", options={"population": 30}, download_bits=8, checkpoint_every=3, check=False,
)
simulation.resume()
for row in simulation.run():
    print(row.iteration, flush=True)
print(simulation.weights.tobytes().hex(), flush=True)
simulation.close()
"""


def test_a_killed_process_resumes_to_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    path = f"{root}:{root / 'tests'}"

    def run(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": path},
        )

    undisturbed = run(tmp_path / "whole")
    whole, _ = undisturbed.communicate(timeout=100)
    assert undisturbed.returncode == 0
    for kill_at in (5, 20):
        killed = run(tmp_path / "parts")
        assert killed.stdout is not None
        for line in killed.stdout:
            if int(line) >= kill_at:
                killed.kill()
                break
        killed.stdout.close()
        assert killed.wait(timeout=10) == -signal.SIGKILL
    resumed = run(tmp_path / "parts")
    rest, _ = resumed.communicate(timeout=100)
    assert resumed.returncode == 0
    assert rest.splitlines()[-1] == whole.splitlines()[-1]
    assert 15 < int(rest.splitlines()[0]) <= 22


def test_a_run_begun_anew_takes_the_checkpoint_of_the_one_before_away(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "strategy": "scaffold", "options": {"population": 30}, "rounds": iterations(8), "checkpoint_every": 4,
    }  # fmt: skip
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = simulate(tmp_path / "whole", **settings)
    finish(whole)
    for stop_after in (6, 2):  # the second writes over what the first one's clients remember
        cut = simulate(tmp_path / "parts", **settings)
        for _, _ in zip(range(stop_after), cut.run(), strict=False):
            pass
        cut.close()
    again = simulate(tmp_path / "parts", **settings)
    assert not again.resume()
    finish(again)
    assert np.array_equal(again.weights, whole.weights)


def test_uploads_of_invalid_iterations_are_forgotten(tmp_path: Path) -> None:
    rounds = RoundSettings(
        mode="buffered", buffer_size=10, max_concurrency=20, fl_iteration_num=60,
        global_iteration_time_window_s=100.0, update_model_ratio=Decimal(1), aggregation_group=4,
    )  # fmt: skip
    simulation = simulate(tmp_path, rounds=rounds, habits=Habits(dropout=0.5, check_in_s=120.0), check=False)
    rows = finish(simulation)
    assert sum(not row.valid and row.uploads > 0 for row in rows) > 5
    assert sum(row.valid for row in rows) > 5
    assert len(simulation.world._counted) < rounds.buffer_size
    assert len(simulation.learning.downloads.published) <= rounds.max_staleness + 1


def test_a_checkpoint_of_other_settings_or_damaged_is_refused(tmp_path: Path) -> None:
    finish(simulate(tmp_path, rounds=iterations(2), check=False))
    other = simulate(tmp_path, rounds=iterations(2), check=False)
    other._fingerprint = "another"
    with pytest.raises(CheckpointRefused, match="belongs to a run with other settings"):
        other.resume()
    body = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(body[: len(body) // 2])
    with pytest.raises(CheckpointRefused, match="is no checkpoint"):
        other.resume()
    other.close()


def test_a_diverging_client_is_left_out_and_the_round_goes_on(tmp_path: Path) -> None:
    table = blobs()
    table.inputs[:20] = np.inf
    federation = federate(table, 30, 7)
    simulation = simulate(tmp_path, federation=federation, rounds=iterations(5), evaluate_every=5)
    rows = finish(simulation)
    refused = sum((row.refused or {}).get("not_finite", 0) for row in rows)
    assert refused > 0
    assert all(row.valid and row.trained + sum((row.refused or {}).values()) == row.uploads for row in rows)
    assert np.isfinite(simulation.weights).all()


@pytest.mark.parametrize("rate", [1e14, 1e30])
@pytest.mark.parametrize("strategy", ["fedavg", "krum"])
@pytest.mark.parametrize("compression", ["", "quantise:1"])
def test_where_everyone_diverges_iterations_are_invalid_and_say_why(
    compression: str, strategy: str, rate: float, tmp_path: Path
) -> None:
    simulation = simulate(
        tmp_path,
        strategy=strategy,
        compression=compression,
        rounds=iterations(3),
        training=LocalTraining(steps=3, rate=rate),
    )
    before = simulation.weights.copy()
    rows = finish(simulation)
    assert [row.valid for row in rows] == [False] * 3
    assert all(sum((row.refused or {}).values()) == row.uploads and "refused" in row.failure for row in rows)
    assert np.array_equal(simulation.weights, before)


def test_buffers_that_diverge_follow_each_other(tmp_path: Path) -> None:
    rounds = RoundSettings(mode="buffered", buffer_size=5, max_concurrency=20, fl_iteration_num=4)
    simulation = simulate(tmp_path, rounds=rounds, training=LocalTraining(steps=3, rate=1e30))
    assert [(row.valid, row.uploads) for row in finish(simulation)] == [(False, 5)] * 4


def test_a_model_that_leaves_its_range_is_not_published(tmp_path: Path) -> None:
    simulation = simulate(
        tmp_path, strategy="fedavg", options={"server_rate": 1e30}, download_bits=8, rounds=iterations(2)
    )
    rows = finish(simulation)
    assert [row.valid for row in rows] == [False] * 2
    assert all("diverged" in row.failure and row.bytes_up > 0 for row in rows)
    assert np.isfinite(simulation.weights).all()


def test_nobody_who_may_come_and_too_much_state_are_errors_that_say_so(tmp_path: Path) -> None:
    unwanted = simulate(tmp_path, selection="eligible", habits=Habits(charging=0.0), check=False)
    unwanted.world._patience_s = 2_000.0
    with pytest.raises(NobodyComes, match="none could start for 2000 s"):
        finish(unwanted)
    simulation = simulate(tmp_path, strategy="scaffold", options={"population": 30}, check=False)
    simulation.learning._state_bytes = 100
    simulation.learning.states["control"] = simulation.learning._open("control", None)
    with pytest.raises(StatesFull, match="state_bytes"):
        finish(simulation)


def test_only_clients_that_are_counted_are_trained(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, rounds=iterations(5), habits=Habits(dropout=0.1), check=False)
    rows = finish(simulation)
    assert sum(row.trained for row in rows) == sum(row.uploads for row in rows if row.valid)
    assert sum(row.starts for row in rows) > sum(row.trained for row in rows)
