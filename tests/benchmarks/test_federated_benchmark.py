"""The benchmark of federated learning: both sides do the same work, and every measurement gives its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    federated,
    federated_bytes,
    federated_flower,
    federated_memory,
    federated_picture,
    federated_recommendation,
    federated_rounds,
    federated_servers,
    federated_speed,
    federated_valid,
)
from benchmarks.federated_loop import LoopedClient, Work, loop_round
from benchmarks.federated_work import everyone, given_rows, simulated
from federated.data import Federation
from federated.device import LocalTraining
from federated.simulator.build import first_weights
from federated.weights import Array


def learned(federation: Federation, training: LocalTraining, engine: str) -> tuple[Array, Array]:
    """Weights before and after three rounds of everyone in the simulator."""
    length = {"steps": training.steps} if training.steps else {"epochs": training.epochs}
    tables = {
        "rounds": everyone(federation.clients, 3),
        "model": {"name": "perceptron", "hidden": [16, 8]},
        "training": {**length, "batch_size": training.batch_size, "rate": training.rate},
        "simulation": {"engine": engine, "checkpoint_every": 0, "evaluate_every": 0},
    }
    with simulated(tables, federation, evaluated=False) as built:
        start = first_weights(built.simulation)
        assert [row.trained for row in built.simulation.run()] == [federation.clients] * 3
        return start, built.simulation.weights.copy()


@pytest.mark.parametrize(
    "training",
    [LocalTraining(steps=4, batch_size=6), LocalTraining(epochs=2, batch_size=5)],
    ids=["steps", "epochs of unequal clients"],
)
@pytest.mark.parametrize("engine", federated_speed.ENGINES)
def test_the_plain_loop_learns_what_the_engines_learn(training: LocalTraining, engine: str) -> None:
    federation = given_rows(np.array([5, 11, 30, 17]))
    start, expected = learned(federation, training, engine)
    client = LoopedClient(Work((64, 16, 8, 10), training))
    data = [(rows.inputs, rows.labels) for rows in map(federation.client, range(4))]
    weights = start
    for iteration in (1, 2, 3):
        weights = loop_round(client, weights, data, iteration)
    assert np.abs(expected - start).max() > 1e-2
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


def test_given_rows_are_as_many_as_asked_for_and_lie_in_the_table() -> None:
    federation = given_rows(np.array([3, 1, 7]))
    assert federation.counts.tolist() == [3, 1, 7]
    assert (federation.training.rows < len(federation.labels)).all()
    assert np.array_equal(federation.training.rows, given_rows(np.array([3, 1, 7])).training.rows)


def test_a_peer_that_is_not_there_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(federated_flower, "available", lambda: False)
    sizes = federated_speed.Sizes(cohort=4, others=0, rounds=1)
    rows = {row.work: row for row in federated_speed.measure(sizes)}
    row = rows["64-64-10, 10 steps of 20, cohort 4, whole rounds"]
    assert (row.peer, row.ratio, row.met) == (None, None, None)
    assert row.peer_name == federated_flower.NAME
    assert "pip install -r benchmarks/peers/flower/requirements.lock" in row.note
    assert len(rows) == 1 + len(federated_speed.ENGINES)
    assert all(row.ours > 0.0 for row in rows.values())


def test_the_lock_names_flower_and_pins_everything() -> None:
    folder = Path(federated_flower.__file__).parent / "peers" / "flower"
    lines = (folder / "requirements.lock").read_text().splitlines()
    assert any(line.startswith("flwr==") for line in lines)
    assert all("==" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(not federated_flower.available(), reason=federated_flower.INSTALL)
def test_flower_learns_what_the_plain_loop_learns() -> None:
    federation = given_rows(np.array([20, 9, 14]))
    work = Work((64, 8, 10), LocalTraining(steps=3, batch_size=5))
    start = np.random.default_rng(0).normal(0, 0.1, 64 * 8 + 8 + 8 * 10 + 10).astype(np.float32)
    with federated_flower.flower(federation, work, start, 1) as (round_s, finish):
        assert round_s() > 0.0
        assert round_s() > 0.0
        found = finish()
    client, expected = LoopedClient(work), start
    data = [(rows.inputs, rows.labels) for rows in map(federation.client, range(3))]
    for iteration in (1, 2):
        expected = loop_round(client, expected, data, iteration)
    assert np.abs(expected - start).max() > 1e-2
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


class TestValid:
    def test_chance_is_the_binomials(self) -> None:
        chances = {way.uploads: way.chance for way in federated_valid.WAYS}
        assert chances == pytest.approx({60: 0.98750, 80: 0.95260}, abs=1e-5)

    def test_both_ways_are_mostly_valid_and_end_in_their_windows(self) -> None:
        rows = federated_valid.measure(federated_valid.Sizes(iterations=10))
        assert len(rows) == 4
        for row in rows:
            if row.unit == "s":
                assert 0.0 < row.ours <= 2 * federated_valid.WINDOW_S
                assert row.met
            else:
                assert row.ours >= 0.6
                assert row.peer == 0.0


def test_a_run_of_rounds_ends_at_its_target_or_at_its_bound() -> None:
    reached = federated_rounds._rounds_to("fedavg", "iid", 0.5, 0.3, 0, 20)
    assert 1.0 <= reached < 20.0
    assert federated_rounds._rounds_to("fedsgd", "iid", 1.1, 0.3, 0, 4) == 4.0


def test_bytes_are_those_of_whole_bodies() -> None:
    case = federated_bytes.Case(6, 6, 3, federated_bytes.FEW, True)
    rows = federated_bytes.measure(federated_bytes.Sizes((case,), seeds=(0,)))
    up, beside, down, lost = rows
    weights = 64 * 64 + 64 + 64 * 10 + 10
    # float32 with the frame of an upload; what MindSpore sends is two fifths of the weights in a byte each.
    assert up.peer == 4 * weights + 34
    assert beside.peer == pytest.approx(0.4 * weights, rel=0.03)
    assert down.peer == 4 * weights
    assert up.ours * 50 < up.peer
    assert down.ours < 4 * weights
    assert lost.unit == "points"


def test_memory_is_that_of_a_process_with_its_clients() -> None:
    held = federated_memory.held_by(600, 1)
    assert 0 < held.before <= held.most
    assert held.clients_per_s > 0.0


def test_two_servers_take_a_round_of_uploads() -> None:
    loads = ((federated_servers.SPARSE, 6), ("", 3))
    rows = federated_servers.measure(federated_servers.Sizes(loads, width=200))
    assert [row.unit for row in rows] == ["uploads/s", "s", "starts/s", "uploads/s", "s"]
    assert all(row.ours > 0.0 for row in rows)
    assert f"{4 * (75 * 200 + 10):,} bytes each" in rows[3].note


def test_federated_recommendation_has_a_row_for_each_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    owners, items = np.repeat(np.arange(40), 12), generator.integers(0, 150, 480)
    split = federated_recommendation.leave_last_out(owners, items, np.arange(480), 40, 150)
    known = federated_recommendation.by_device(owners, items, 40, 150)
    monkeypatch.setattr(federated_recommendation, "_movielens", lambda: (split, known))
    sizes = federated_recommendation.Sizes(seeds=(0, 1), rounds=3, cohort=10, sweeps=2)
    rows = federated_recommendation.measure(sizes)
    assert ["HR@10" in rows[0].work, "NDCG@10" in rows[1].work] == [True, True]
    assert all(row.peer is not None and row.met is not None for row in rows)


def test_the_picture_is_a_png_of_every_curve(tmp_path: Path) -> None:
    curves = federated_picture.learn(federated_picture.Sizes(rounds=2))
    assert [len(curve.accuracy) for curve in (*curves.unequal, *curves.sent)] == [2] * 6
    sent = [curve.bytes[-1] for curve in curves.sent]
    assert sent[0] > sent[1] > sent[2]
    federated_picture.draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_prints_rows_of_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = federated.Measures(
        federated_speed.Sizes(cohort=4, others=0, rounds=1),
        federated_memory.Sizes((600,), rounds=1),
        federated_rounds.Sizes((0,), (0.3,), (1.0,), 3, (0,)),
        federated_bytes.Sizes((federated_bytes.Case(5, 5, 2, federated_bytes.FEW, True),), (0,)),
        federated_valid.Sizes(2),
        federated_servers.Sizes(((federated_servers.SPARSE, 3),), width=50),
        federated_recommendation.Sizes((0,), 2, 10, 1, aim=None),
    )
    monkeypatch.setattr(federated, "QUICK", tiny)
    # The thread limits of children are not to outlive this test.
    monkeypatch.setattr(federated, "limit_threads", lambda environ: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "federated", "--quick", "--json"])
    assert command.main() == 0
    printed = json.loads(capsys.readouterr().out)
    works = [row["work"] for row in printed["rows"]]
    assert len(set(works)) == len(works)
    for start in ("64-64-10", "largest memory", "FedAvg", "SCAFFOLD", "upload, 5", "download, 5", "accuracy lost",
                  "valid iterations", "longest iteration", "uploads: 3", "from the last upload",
                  "federated recommendation"):  # fmt: skip
        assert any(work.startswith(start) for work in works), start
