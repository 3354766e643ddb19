"""A classifier of dense layers: any number of hidden ones with ReLU (none: softmax regression)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from federated.layout import Layout, weight_layout
from federated.models.model import (
    Inputs,
    Labels,
    Metrics,
    classification_metrics,
    he_normal,
    softmax_loss,
)
from federated.weights import Array


@dataclass(frozen=True)
class Perceptron:
    """Shape of the network: F features, the widths of the hidden layers, C classes.

    Fields ``hidden.0.weight`` [F, H], ``hidden.0.bias`` [H], …, ``output.weight`` [H, C], ``output.bias`` [C].
    """

    features: int
    hidden: tuple[int, ...]
    classes: int

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"a perceptron's sizes must be at least 1, not {self.sizes}")

    @property
    def name(self) -> str:
        """Under which ``make_model`` makes it."""
        return "perceptron" if self.hidden else "softmax"

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Widths from the features over the hidden layers to the classes."""
        return (self.features, *self.hidden, self.classes)

    @cached_property
    def _layout(self) -> Layout:
        names = [f"hidden.{i}" for i in range(len(self.hidden))] + ["output"]
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for name, rows, columns in zip(names, self.sizes, self.sizes[1:], strict=False):
            shapes += [(f"{name}.weight", (rows, columns)), (f"{name}.bias", (columns,))]
        return weight_layout(shapes)

    def layout(self) -> Layout:
        """How the layers lie in the vector."""
        return self._layout

    def initial(self, generator: np.random.Generator) -> Array:
        """He-scaled normal weights and zero biases [D]."""
        vector = np.zeros(self._layout.size, np.float32)
        for weight, _ in self._layers(vector):
            weight[:] = he_normal(generator, *weight.shape)
        return vector

    def _layers(self, vector: Array) -> list[tuple[Array, Array]]:
        """Weights and biases as views into ``vector``: this runs at every step, so it counts offsets itself."""
        layers, start = [], 0
        for rows, columns in zip(self.sizes, self.sizes[1:], strict=False):
            middle = start + rows * columns
            layers.append((vector[start:middle].reshape(rows, columns), vector[middle : middle + columns]))
            start = middle + columns
        return layers

    def logits(self, vector: Array, inputs: Inputs) -> Array:
        """Class scores [N, C] of ``inputs`` [N, F]."""
        *hidden, (weight, bias) = self._layers(vector)
        active: Array = inputs
        for hidden_weight, hidden_bias in hidden:
            active = np.maximum(active @ hidden_weight + hidden_bias, 0.0)
        scores: Array = active @ weight + bias
        return scores

    def loss_and_gradient(
        self, vector: Array, inputs: Inputs, labels: Labels, out: Array | None = None
    ) -> tuple[float, Array]:
        """Mean cross-entropy of ``inputs`` [N, F] against ``labels`` [N], and its gradient [D]."""
        gradient = np.empty_like(vector) if out is None else out
        layers, gradients = self._layers(vector), self._layers(gradient)
        actives: list[Array] = [inputs]
        for weight, bias in layers[:-1]:
            active = actives[-1] @ weight
            active += bias
            actives.append(np.maximum(active, 0.0, out=active))
        weight, bias = layers[-1]
        scores = actives[-1] @ weight
        scores += bias
        loss, at_output = softmax_loss(scores, labels)
        for place in range(len(layers) - 1, -1, -1):
            at_weight, at_bias = gradients[place]
            np.matmul(actives[place].T, at_output, out=at_weight)
            np.add.reduce(at_output, axis=0, out=at_bias)
            if place:
                at_active = at_output @ layers[place][0].T
                at_active *= actives[place] > 0.0
                at_output = at_active
        return loss, gradient

    def metrics(self, vector: Array, inputs: Inputs, labels: Labels) -> Metrics:
        """Right answers, summed cross-entropy and number of examples."""
        return classification_metrics(self.logits(vector, inputs), labels)


def softmax_regression(features: int, classes: int) -> Perceptron:
    """Multinomial logistic regression: a perceptron without a hidden layer. Its loss is convex."""
    return Perceptron(features, (), classes)
