"""The device client: exact gradients, FedAvg's laws, and NumPy as its only dependency."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from federated import FedAvg, LocalTraining, Perceptron, Update, WeightsMismatch, local_update

MODEL = Perceptron(features=5, hidden=8, classes=3)


def make_data(examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(examples, MODEL.features)).astype(np.float32)
    return inputs, (inputs @ generator.normal(size=(MODEL.features, 3))).argmax(axis=1)


def test_gradients_agree_with_finite_differences() -> None:
    inputs, labels = make_data(20, 1)
    weights = {k: v.astype(np.float64) for k, v in MODEL.initial_weights(np.random.default_rng(2)).items()}
    _, gradients = MODEL.loss_and_gradients(weights, inputs, labels)
    for name, array in weights.items():
        index = tuple(size // 2 for size in array.shape)
        losses = []
        for step in (1e-5, -1e-5):
            moved = {k: v.copy() for k, v in weights.items()}
            moved[name][index] += step
            losses.append(MODEL.loss_and_gradients(moved, inputs, labels)[0])
        assert gradients[name][index] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_one_full_batch_step_on_every_client_is_one_step_on_the_pooled_data() -> None:
    inputs, labels = make_data(60, 3)
    weights = MODEL.initial_weights(np.random.default_rng(4))
    step = LocalTraining(epochs=1, batch_size=1_000, rate=0.5)
    strategy = FedAvg()
    cuts = [(0, 10), (10, 35), (35, 60)]
    updates = [
        local_update(MODEL, weights, inputs[a:b], labels[a:b], step, np.random.default_rng(a))
        for a, b in cuts
    ]
    federated = strategy.apply(strategy.init(weights), updates)
    pooled = local_update(MODEL, weights, inputs, labels, step, np.random.default_rng(9))
    for name, array in federated.weights.items():
        np.testing.assert_allclose(array, weights[name] + pooled.difference[name], rtol=1e-5, atol=1e-6)
    assert federated.round == 1


def test_the_same_seed_gives_the_same_bits_and_training_lowers_the_loss() -> None:
    inputs, labels = make_data(200, 5)
    weights = MODEL.initial_weights(np.random.default_rng(6))

    def train(epochs: int, seed: int) -> Update:
        training = LocalTraining(epochs=epochs, batch_size=16, rate=0.1)
        return local_update(MODEL, weights, inputs, labels, training, np.random.default_rng(seed))

    first, second, other = train(5, 1), train(5, 1), train(5, 2)
    assert all((first.difference[n] == second.difference[n]).all() for n in weights)
    assert any((first.difference[n] != other.difference[n]).any() for n in weights)
    assert train(30, 1).loss < 0.8 * train(1, 1).loss


def test_foreign_and_empty_updates_are_refused_by_name() -> None:
    weights = MODEL.initial_weights(np.random.default_rng(7))
    strategy = FedAvg()
    state = strategy.init(weights)
    with pytest.raises(ValueError, match="at least one update"):
        strategy.apply(state, [])
    foreign = Update({**weights, "hidden.bias": np.zeros(3, np.float32)}, 1, 0.0)
    with pytest.raises(WeightsMismatch, match=r"hidden\.bias"):
        strategy.apply(state, [foreign])
    with pytest.raises(ValueError, match="0 labels"):
        local_update(MODEL, weights, *make_data(0, 1), LocalTraining(), np.random.default_rng(0))


def test_the_device_client_imports_nothing_but_numpy_and_the_standard_library() -> None:
    program = (
        "import sys, federated; "
        "outside = {m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'__main__'}; "
        "print(*sorted(n for n in outside if not n.startswith(('_', 'sitecustomize'))))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) <= {"federated", "numpy", "cython_runtime", "typing_extensions"}
