"""The device: local steps against a straight computation, the rule of the batches, and NumPy as its only need."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import federated
from federated import (
    ControlVariates,
    Instructions,
    LocalTraining,
    Perceptron,
    Update,
    WeightsMismatch,
    batch_schedule,
    device_generator,
    local_update,
)
from federated.device import COMPRESSION

MODEL = Perceptron(5, (8,), 3)
LAYOUT = MODEL.layout()
START = MODEL.initial(np.random.default_rng(4))


def make_data(examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(examples, MODEL.features)).astype(np.float32)
    return inputs, (inputs @ generator.normal(size=(MODEL.features, 3))).argmax(axis=1)


def train(
    training: LocalTraining, examples: int = 23, seed: int = 7, control: ControlVariates | None = None
) -> Update:
    return local_update(
        MODEL, LAYOUT, START, *make_data(examples, 3), training, device_generator(seed, 1, 2), control
    )


def straight(
    training: LocalTraining, examples: int = 23, control: ControlVariates | None = None
) -> np.ndarray:
    """The same steps in float64, written as the formulas stand."""
    inputs, labels = make_data(examples, 3)
    indices, sizes = batch_schedule(device_generator(7, 1, 2), examples, training)
    start = START.astype(np.float64)
    weights, velocity = start.copy(), np.zeros_like(start)
    for batch, size in zip(indices, sizes, strict=True):
        rows = batch[:size]
        _, gradient = MODEL.loss_and_gradient(weights, inputs[rows].astype(np.float64), labels[rows])
        if training.clip_norm:
            gradient = gradient * min(1.0, training.clip_norm / np.linalg.norm(gradient))
        gradient = gradient + training.proximal * (weights - start)
        if control is not None:
            gradient = gradient + control.server - control.client
        velocity = training.momentum * velocity + gradient
        weights = weights - training.rate * velocity
    return weights - start


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(epochs=2, batch_size=8),
        LocalTraining(steps=7, batch_size=8, rate=0.3),
        LocalTraining(steps=5, batch_size=0, rate=0.3),
        LocalTraining(steps=9, batch_size=4, proximal=0.7),
        LocalTraining(epochs=3, batch_size=6, momentum=0.9),
        LocalTraining(steps=6, batch_size=4, rate=0.5, clip_norm=0.2),
        LocalTraining(steps=6, batch_size=4, momentum=0.5, proximal=0.1, clip_norm=0.3),
    ],
    ids=str,
)
def test_local_steps_are_what_the_formula_says(training: LocalTraining) -> None:
    update = train(training)
    np.testing.assert_allclose(update.vectors["difference"], straight(training), rtol=1e-4, atol=2e-6)
    assert update.vectors["difference"].dtype == np.float32
    assert update.examples == 23
    assert (
        update.steps
        == training.steps_for(23)
        == len(batch_schedule(device_generator(0, 0, 0), 23, training)[1])
    )


def test_scaffold_corrects_each_step_and_measures_the_new_control() -> None:
    generator = np.random.default_rng(8)
    server, client = (generator.normal(0.0, 0.1, LAYOUT.size).astype(np.float32) for _ in range(2))
    control = ControlVariates(server, client)
    training = LocalTraining(steps=6, batch_size=5, rate=0.2)
    update = train(training, control=control)
    moved = straight(training, control=control)
    np.testing.assert_allclose(update.vectors["difference"], moved, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(update.vectors["control"], -server - moved / (6 * 0.2), rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="momentum must be 0"):
        train(replace(training, momentum=0.5), control=control)


def test_the_same_numbers_give_the_same_bits_and_training_lowers_the_loss() -> None:
    training = LocalTraining(epochs=5, batch_size=16)
    first, second, other = train(training, 200), train(training, 200), train(training, 200, seed=8)
    assert (first.vectors["difference"] == second.vectors["difference"]).all()
    assert (first.vectors["difference"] != other.vectors["difference"]).any()
    assert first.loss == second.loss
    assert train(replace(training, epochs=30), 200).loss < 0.8 * train(replace(training, epochs=1), 200).loss


def test_the_loss_is_the_mean_over_examples_seen() -> None:
    inputs, labels = make_data(23, 3)
    still = train(LocalTraining(epochs=1, batch_size=10, rate=1e-12))
    assert still.loss == pytest.approx(MODEL.loss_and_gradient(START, inputs, labels)[0], rel=1e-5)


def test_epochs_see_every_example_once_per_pass() -> None:
    indices, sizes = batch_schedule(device_generator(1, 2, 3), 23, LocalTraining(epochs=3, batch_size=8))
    assert indices.shape == (9, 8)
    assert sizes.tolist() == [8, 8, 7] * 3
    seen = [batch[:size] for batch, size in zip(indices, sizes, strict=True)]
    passes = [np.concatenate(seen[start : start + 3]) for start in (0, 3, 6)]
    for order in passes:
        assert sorted(order.tolist()) == list(range(23))
    assert passes[0].tolist() != passes[1].tolist()
    assert (indices[2, 7:] == 0).all()


def test_steps_walk_through_reshuffled_passes_without_a_short_batch() -> None:
    indices, sizes = batch_schedule(device_generator(1, 2, 3), 10, LocalTraining(steps=7, batch_size=4))
    assert sizes.tolist() == [4] * 7
    walked = indices.reshape(-1)
    for start in (0, 10):
        assert sorted(walked[start : start + 10].tolist()) == list(range(10))
    assert len(set(walked[20:].tolist())) == 8
    indices, sizes = batch_schedule(device_generator(1, 2, 3), 3, LocalTraining(steps=4, batch_size=32))
    assert indices.shape == (4, 3)
    assert all(sorted(batch) == [0, 1, 2] for batch in indices.tolist())
    indices, sizes = batch_schedule(device_generator(1, 2, 3), 1, LocalTraining(epochs=2, batch_size=8))
    assert (indices.tolist(), sizes.tolist()) == ([[0], [0]], [1, 1])


def test_every_client_iteration_and_stream_has_a_generator_of_its_own() -> None:
    numbers = [
        (s, c, i, k) for s in (0, 1) for c in (0, 1, 2**40) for i in (0, 1, 999) for k in (0, COMPRESSION)
    ]
    drawn = {device_generator(*four).bytes(16) for four in numbers}
    assert len(drawn) == len(numbers)
    assert device_generator(5, 6, 7).bytes(16) == device_generator(5, 6, 7).bytes(16)
    # Long draws do not run into the next iteration's: the counter's low 128 bits are a device's own.
    state = device_generator(5, 6, 7, 1).bit_generator.state["state"]
    assert state["counter"].tolist() == [0, 0, 1, 7]
    assert state["key"].tolist() == [5, 6]
    for wrong in ((-1, 0, 0), (0, 2**64, 0), (0, 0, -3)):
        with pytest.raises(ValueError, match="64 bits"):
            device_generator(*wrong)


def test_instructions_change_what_they_name() -> None:
    training = LocalTraining(epochs=3, batch_size=8, rate=0.2, momentum=0.9)
    assert Instructions().adapt(training) == training
    assert Instructions(proximal=0.5).adapt(training) == replace(training, proximal=0.5)
    assert Instructions(steps=4).adapt(training) == replace(training, epochs=None, steps=4)
    whole = Instructions(full_batch=True).adapt(training)
    assert (whole.steps, whole.batch_size, whole.momentum, whole.rate) == (1, 0, 0.0, 0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 1, "steps": 1},
        {"epochs": 0},
        {"steps": -1},
        {"batch_size": -1},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"proximal": -0.1},
        {"momentum": 1.0},
        {"clip_norm": -1.0},
    ],
    ids=str,
)
def test_training_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|not both"):
        LocalTraining(**wrong)  # type: ignore[arg-type]


def test_data_and_weights_that_do_not_fit_are_refused() -> None:
    inputs, labels = make_data(6, 1)
    for some_inputs, some_labels, start, message in (
        (inputs[:0], labels[:0], START, "0 labels"),
        (inputs[:5], labels, START, "5 inputs and 6 labels"),
        (inputs, labels - 5, START, "negative"),
        (inputs, labels, START[:-1], "start: float32"),
        (inputs, labels, START.astype(np.float64), "start: float32"),
    ):
        with pytest.raises((ValueError, WeightsMismatch), match=message):
            local_update(
                MODEL, LAYOUT, start, some_inputs, some_labels, LocalTraining(), device_generator(0, 0, 0)
            )


BLOCKED_IMPORT = """
import sys

class NumPyAlone:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"numpy", "federated"} | set(sys.stdlib_module_names):
            raise ImportError(f"{name} is not for a device")

sys.meta_path.insert(0, NumPyAlone())
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
import numpy as np
from federated import LocalTraining, device_generator, local_update, make_model
model = make_model("perceptron", features=4, classes=2)
update = local_update(model, model.layout(), model.initial(np.random.default_rng(0)), np.ones((3, 4), np.float32),
                      np.array([0, 1, 0]), LocalTraining(), device_generator(1, 2, 3))
print(update.examples, *sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""


def test_the_device_path_needs_numpy_and_the_standard_library_alone() -> None:
    modules = [
        "federated",
        "federated.device",
        "federated.layout",
        "federated.models",
        "federated.packing",
        "federated.strategies",
        "federated.sums",
        "federated.weights",
    ]
    # -I -S: no site-packages hooks, which import on their own; NumPy and the package by path.
    paths = [str(Path(str(package.__file__)).parents[1]) for package in (np, federated)]
    program = f"import sys; sys.path += {paths!r}\n" + BLOCKED_IMPORT
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, *modules], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    examples, *outside = found.stdout.split()
    assert examples == "3"
    assert {name for name in outside if not name.startswith("_")} <= {"federated", "numpy", "cython_runtime"}
