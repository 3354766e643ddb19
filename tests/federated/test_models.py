"""Gradients of the NumPy models against torch and finite differences, and what they count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from federated import NextCharacter, Perceptron, make_model, softmax_regression
from federated.models import Model

MODELS: list[Model] = [
    softmax_regression(5, 3),
    Perceptron(5, (8,), 3),
    Perceptron(5, (7, 6, 4), 3),
    NextCharacter(11, context=4, embedding=3, hidden=6),
]


def make_data(model: Model, examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    if isinstance(model, NextCharacter):
        numbers = generator.integers(0, model.characters, (examples, model.context + 1))
        return numbers[:, :-1], numbers[:, -1]
    return generator.normal(size=(examples, 5)).astype(np.float32), generator.integers(0, 3, examples)


def torch_logits(model: Model, arrays: dict[str, torch.Tensor], inputs: np.ndarray) -> torch.Tensor:
    """The same network, written down in torch."""
    if isinstance(model, NextCharacter):
        active = arrays["embedding.weight"][torch.from_numpy(inputs)].flatten(1)
        hidden = ["hidden"]
    else:
        assert isinstance(model, Perceptron)
        active = torch.from_numpy(inputs)
        hidden = [f"hidden.{place}" for place in range(len(model.hidden))]
    for name in hidden:
        active = torch.relu(active @ arrays[f"{name}.weight"] + arrays[f"{name}.bias"])
    return active @ arrays["output.weight"] + arrays["output.bias"]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_loss_gradient_and_scores_agree_with_torch(model: Model) -> None:
    inputs, labels = make_data(model, 40, 1)
    vector = model.initial(np.random.default_rng(2))
    arrays = {
        name: torch.from_numpy(array.copy()).requires_grad_()
        for name, array in model.layout().views(vector).items()
    }
    scores = torch_logits(model, arrays, inputs)
    expected = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels))
    expected.backward()
    before = vector.copy()
    given = np.full(model.layout().size, np.nan, np.float32)
    loss, gradient = model.loss_and_gradient(vector, inputs, labels, given)
    assert gradient is given
    assert (vector == before).all()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, array in model.layout().views(gradient).items():
        grad = arrays[name].grad
        assert grad is not None
        np.testing.assert_allclose(array, grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(model.logits(vector, inputs), scores.detach().numpy(), rtol=1e-4, atol=1e-5)
    counted = model.metrics(vector, inputs, labels)
    assert counted.seen == 40
    assert counted.right == int((scores.argmax(1).numpy() == labels).sum())
    assert counted.loss / counted.seen == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_gradients_agree_with_finite_differences(model: Model) -> None:
    inputs, labels = make_data(model, 20, 3)
    inputs = inputs.astype(np.float64)
    vector = model.initial(np.random.default_rng(4)).astype(np.float64)

    def loss_of(moved: np.ndarray) -> float:
        return model.loss_and_gradient(moved, inputs, labels)[0]

    _, gradient = model.loss_and_gradient(vector, inputs, labels)
    for place in np.random.default_rng(5).choice(len(vector), 15, replace=False):
        step = np.zeros_like(vector)
        step[place] = 1e-6
        expected = (loss_of(vector + step) - loss_of(vector - step)) / 2e-6
        assert gradient[place] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_large_scores_neither_overflow_nor_divide_by_zero() -> None:
    model = softmax_regression(2, 3)
    vector = np.full(9, 1e4, np.float32)
    vector[0] = -1e4
    loss, gradient = model.loss_and_gradient(vector, np.ones((4, 2), np.float32), np.array([0, 1, 2, 0]))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_models_are_made_by_name_and_refuse_what_they_do_not_know() -> None:
    assert make_model("perceptron", features=64, classes=10).layout().size == 64 * 64 + 64 + 640 + 10
    assert make_model("perceptron", features=4, classes=2, hidden=[5, 3]) == Perceptron(4, (5, 3), 2)
    assert make_model("softmax", features=4, classes=2).name == "softmax"
    text = make_model("text", features=6, classes=30, embedding=4, hidden=10)
    assert text == NextCharacter(30, 6, 4, 10)
    assert text.name == "text"
    with pytest.raises(ValueError, match=r"'cnn' is none of items, perceptron, softmax, text"):
        make_model("cnn", features=4, classes=2)
    with pytest.raises(ValueError, match="depth"):
        make_model("softmax", features=4, classes=2, depth=3)
    with pytest.raises(ValueError, match="at least 1"):
        make_model("perceptron", features=4, classes=2, hidden=0)
    with pytest.raises(ValueError, match="at least 1"):
        NextCharacter(0)


def test_a_label_that_is_no_class_is_an_error_and_no_examples_count_nothing() -> None:
    model = softmax_regression(2, 3)
    with pytest.raises(IndexError):
        model.loss_and_gradient(np.zeros(9, np.float32), np.ones((2, 2), np.float32), np.array([0, 3]))
    nothing = model.metrics(np.zeros(9, np.float32), np.ones((0, 2), np.float32), np.zeros(0, np.int64))
    assert (nothing.right, nothing.loss, nothing.seen) == (0, 0.0, 0)


def test_text_learns_what_follows() -> None:
    text = "the cat sat on the mat. " * 20
    letters = sorted(set(text))
    numbers = np.array([letters.index(letter) for letter in text])
    windows = np.lib.stride_tricks.sliding_window_view(numbers, 5)
    model = NextCharacter(len(letters), context=4, embedding=4, hidden=16)
    vector = model.initial(np.random.default_rng(0))
    for _ in range(200):
        _, gradient = model.loss_and_gradient(vector, windows[:, :4], windows[:, 4])
        vector -= np.float32(0.5) * gradient
    counted = model.metrics(vector, windows[:, :4], windows[:, 4])
    assert counted.right > 0.95 * counted.seen
