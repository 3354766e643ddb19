"""Evaluation on the clients' own data: against straight computations, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated import LocalTraining, Perceptron, device_generator, local_update, make_model
from federated.data import Federation, Padded, Table, federate
from federated.evaluation import (
    ALONE_STREAM,
    ClientCounts,
    compare,
    counts_of,
    distribution,
    evaluate_global,
    own_steps,
    train_alone,
    worst_decile,
)


def counts(right: list[int], seen: list[int], loss: list[float] | None = None) -> ClientCounts:
    return ClientCounts(np.array(right), np.array(loss or [0.0] * len(right)), np.array(seen))


def blobs(clients: int, partition: str = "iid", rows: int = 600) -> Federation:
    generator = np.random.default_rng(0)
    labels = np.arange(rows) % 4
    inputs = (generator.normal(size=(4, 6))[labels] * 2 + generator.normal(size=(rows, 6))).astype(np.float32)
    table = Table("blobs", inputs, labels, 4, inputs[:0], labels[:0])
    return federate(table, clients, 1, partition)


def model() -> Perceptron:
    made = make_model("perceptron", features=6, classes=4)
    assert isinstance(made, Perceptron)
    return made


def test_counts_of_a_batch_are_those_of_each_client_alone() -> None:
    federation = blobs(9, "quantity:1")
    network = model()
    vector = network.initial(np.random.default_rng(2))
    made = evaluate_global(federation, np.arange(9), network, vector, chunk=4)
    for client in range(9):
        data = federation.client(client)
        alone = network.metrics(vector, data.held_inputs, data.held_labels)
        assert (made.right[client], made.seen[client]) == (alone.right, alone.seen)
        assert made.loss[client] == pytest.approx(alone.loss, rel=1e-5)


def test_padding_counts_for_nothing() -> None:
    # The padded rows would be right answers: their label is 0, and so is the guess.
    scores = np.zeros((2, 3, 2))
    scores[:, :, 0] = 5.0
    held = Padded(np.zeros((2, 3, 1)), np.array([[1, 0, 0], [0, 0, 0]]), np.array([2, 0]))
    made = counts_of(scores, held)
    assert made.right.tolist() == [1, 0]
    assert made.seen.tolist() == [2, 0]
    assert made.loss[0] == pytest.approx(2 * np.log(1 + np.exp(-5)) + 5)
    assert made.loss[1] == 0.0


def test_scores_that_are_not_finite_are_wrong_and_the_client_counts_as_diverged() -> None:
    scores = np.zeros((2, 2, 3))
    scores[0, 0] = [np.nan, 1.0, np.inf]
    held = Padded(np.zeros((2, 2, 1)), np.zeros((2, 2), np.int64), np.array([2, 2]))
    made = counts_of(scores, held)
    assert made.right.tolist() == [1, 2]
    assert np.isnan(made.loss[0])
    spread = distribution(made)
    assert spread.diverged == 1
    assert spread.loss == pytest.approx(np.log(3.0))
    assert distribution(counts([0], [1], [np.inf])).loss is None


def test_the_distribution_of_ten_known_clients() -> None:
    made = distribution(counts([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [10] * 10 + [0]))
    assert (made.clients, made.without_data, made.examples) == (10, 1, 100)
    assert made.mean == pytest.approx(0.45)
    assert made.weighted == pytest.approx(0.45)
    assert made.worst_decile == 0.0
    assert made.best_decile == pytest.approx(0.9)
    assert made.quantiles["0.5"] == pytest.approx(0.45)
    assert made.histogram == (1,) * 10
    weighted = distribution(counts([1, 0], [1, 3]))
    assert (weighted.mean, weighted.weighted) == (0.5, 0.25)


@pytest.mark.parametrize("seen", [3, 5, 7, 10])
def test_an_accuracy_on_the_edge_of_a_bin_lies_in_the_upper_one(seen: int) -> None:
    for right in range(seen + 1):
        made = distribution(counts([right], [seen]))
        assert made.histogram.index(1) == min(10 * right // seen, 9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=95))
def test_the_worst_decile_is_the_mean_of_the_smallest_tenth(values: list[float]) -> None:
    count = len(values) // 10 + (len(values) % 10 > 0)
    assert worst_decile(np.array(values)) == pytest.approx(sum(sorted(values)[:count]) / count)


def test_nobody_with_data_and_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no client has held-out data"):
        distribution(counts([0, 0], [0, 0]))
    with pytest.raises(ValueError, match="more right answers"):
        counts([2], [1])
    with pytest.raises(ValueError, match="shapes differ"):
        counts([1, 1], [1])
    with pytest.raises(ValueError, match="do not fit labels"):
        counts_of(np.zeros((1, 2, 3)), Padded(np.zeros((1, 3, 1)), np.zeros((1, 3), np.int64), np.array([3])))
    with pytest.raises(ValueError, match="same held-out rows"):
        compare(counts([1], [2]), counts([1], [3]))


def test_a_comparison_says_whom_the_global_model_serves_better() -> None:
    made = compare(counts([8, 5, 1, 0], [10, 10, 10, 0]), counts([5, 5, 7, 0], [10, 10, 10, 0]))
    assert made.mean_gain == pytest.approx((0.3 + 0.0 - 0.6) / 3)
    assert made.worst_decile_gain == pytest.approx(-0.6)
    assert (made.served_better, made.alike, made.served_worse) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert made.together.mean == pytest.approx(14 / 30)
    assert made.alone.mean == pytest.approx(17 / 30)


def test_joined_parts_are_the_whole() -> None:
    made = ClientCounts.join([counts([1], [2]), counts([3, 0], [3, 1])])
    assert made.right.tolist() == [1, 3, 0]
    assert made.seen.tolist() == [2, 3, 1]
    assert len(ClientCounts.join([]).right) == 0


def test_training_alone_costs_what_the_federation_asked_of_the_client() -> None:
    training = LocalTraining(epochs=2, batch_size=5)
    assert own_steps(training, np.array([5, 12, 20]), 10.0).tolist() == [20, 60, 80]
    assert own_steps(LocalTraining(steps=7), np.array([5, 12]), 2.5).tolist() == [18, 18]
    assert own_steps(LocalTraining(steps=7), np.array([5]), 0.0).tolist() == [1]


def test_a_client_alone_trains_on_its_own_rows_and_is_measured_on_its_held_out_ones() -> None:
    federation, network = blobs(6), model()
    start = network.initial(np.random.default_rng(3))
    training = LocalTraining(epochs=1, batch_size=16, rate=0.1)
    made = train_alone(federation, np.array([4, 1]), network, start, training, participations=3.0, seed=9)
    data = federation.client(4)
    steps = 3 * -(-len(data.labels) // 16)
    update = local_update(
        network, network.layout(), start, data.inputs, data.labels,
        LocalTraining(steps=steps, batch_size=16, rate=0.1), device_generator(9, 4, 0, ALONE_STREAM),
    )  # fmt: skip
    expected = network.metrics(start + update.vectors["difference"], data.held_inputs, data.held_labels)
    assert (made.right[0], made.seen[0]) == (expected.right, expected.seen)
    assert made.loss[0] == pytest.approx(expected.loss)


def test_where_clients_have_one_class_each_being_alone_is_easy() -> None:
    federation, network = blobs(8, "label:1"), model()
    start = network.initial(np.random.default_rng(3))
    clients = np.arange(8)
    alone = train_alone(
        federation, clients, network, start, LocalTraining(steps=20, rate=0.1), participations=2.0, seed=1
    )
    made = compare(evaluate_global(federation, clients, network, start), alone)
    assert made.alone.worst_decile == 1.0
    assert made.mean_gain < -0.5
