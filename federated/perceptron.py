"""A classifier that a device trains with NumPy alone: one hidden layer, ReLU, softmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.weights import Array, Weights

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Perceptron:
    """Shape of the network: F features, H hidden units, C classes."""

    features: int
    hidden: int
    classes: int

    def initial_weights(self, generator: np.random.Generator) -> dict[str, Array]:
        """He-scaled normal weights (He et al. 2015) and zero biases, drawn from ``generator``."""

        def layer(rows: int, columns: int) -> Array:
            return generator.normal(0.0, np.sqrt(2.0 / rows), (rows, columns)).astype(np.float32)

        return {
            "hidden.weight": layer(self.features, self.hidden),
            "hidden.bias": np.zeros(self.hidden, np.float32),
            "output.weight": layer(self.hidden, self.classes),
            "output.bias": np.zeros(self.classes, np.float32),
        }

    def logits(self, weights: Weights, inputs: Array) -> Array:
        """Class scores ``[N, C]`` of ``inputs`` ``[N, F]``."""
        hidden = np.maximum(inputs @ weights["hidden.weight"] + weights["hidden.bias"], 0.0)
        scores: Array = hidden @ weights["output.weight"] + weights["output.bias"]
        return scores

    def loss_and_gradients(
        self, weights: Weights, inputs: Array, labels: Labels
    ) -> tuple[float, dict[str, Array]]:
        """Mean cross-entropy of ``inputs`` ``[N, F]`` against ``labels`` ``[N]``, and its gradients."""
        hidden = np.maximum(inputs @ weights["hidden.weight"] + weights["hidden.bias"], 0.0)
        scores = hidden @ weights["output.weight"] + weights["output.bias"]
        scores -= scores.max(axis=1, keepdims=True)
        log_probabilities = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        loss = -float(log_probabilities[rows, labels].mean())

        at_scores = np.exp(log_probabilities)
        at_scores[rows, labels] -= 1.0
        at_scores /= np.float32(len(labels))
        at_hidden = (at_scores @ weights["output.weight"].T) * (hidden > 0.0)
        return loss, {
            "hidden.weight": inputs.T @ at_hidden,
            "hidden.bias": at_hidden.sum(axis=0),
            "output.weight": hidden.T @ at_scores,
            "output.bias": at_scores.sum(axis=0),
        }
