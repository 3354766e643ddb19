"""The next character from the ones before it: embedding, one hidden layer, softmax (Bengio et al. 2003)."""

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
class NextCharacter:
    """V characters, a window of C of them, embeddings of width E, H hidden units.

    Inputs are character numbers [N, C], of any type that holds them exactly; labels the next one [N].
    """

    characters: int
    context: int = 8
    embedding: int = 8
    hidden: int = 64

    def __post_init__(self) -> None:
        if min(self.characters, self.context, self.embedding, self.hidden) < 1:
            raise ValueError(f"a text model's sizes must be at least 1, not {self}")

    @property
    def name(self) -> str:
        """Under which ``make_model`` makes it."""
        return "text"

    @cached_property
    def _layout(self) -> Layout:
        return weight_layout(
            [
                ("embedding.weight", (self.characters, self.embedding)),
                ("hidden.weight", (self.context * self.embedding, self.hidden)),
                ("hidden.bias", (self.hidden,)),
                ("output.weight", (self.hidden, self.characters)),
                ("output.bias", (self.characters,)),
            ]
        )

    def layout(self) -> Layout:
        """How the layers lie in the vector."""
        return self._layout

    def initial(self, generator: np.random.Generator) -> Array:
        """Standard normal embeddings, He-scaled weights and zero biases [D]."""
        vector = np.zeros(self._layout.size, np.float32)
        arrays = self._layout.views(vector)
        arrays["embedding.weight"][:] = generator.standard_normal(
            (self.characters, self.embedding), np.float32
        )
        for layer in ("hidden.weight", "output.weight"):
            arrays[layer][:] = he_normal(generator, *arrays[layer].shape)
        return vector

    def _forward(self, arrays: dict[str, Array], inputs: Inputs) -> tuple[Inputs, Array, Array, Array]:
        """Character numbers [N, C], embedded [N, C·E], hidden [N, H] and scores [N, V]."""
        numbers = inputs.astype(np.intp, copy=False)
        embedded = arrays["embedding.weight"][numbers].reshape(len(numbers), self.context * self.embedding)
        hidden: Array = embedded @ arrays["hidden.weight"]
        hidden += arrays["hidden.bias"]
        np.maximum(hidden, 0.0, out=hidden)
        scores: Array = hidden @ arrays["output.weight"]
        scores += arrays["output.bias"]
        return numbers, embedded, hidden, scores

    def logits(self, vector: Array, inputs: Inputs) -> Array:
        """Scores [N, V] of the next character after ``inputs`` [N, C]."""
        return self._forward(self._layout.views(vector), inputs)[3]

    def loss_and_gradient(
        self, vector: Array, inputs: Inputs, labels: Labels, out: Array | None = None
    ) -> tuple[float, Array]:
        """Mean cross-entropy of ``inputs`` [N, C] against ``labels`` [N], and its gradient [D]."""
        gradient = np.empty_like(vector) if out is None else out
        arrays, gradients = self._layout.views(vector), self._layout.views(gradient)
        numbers, embedded, hidden, scores = self._forward(arrays, inputs)
        loss, at_scores = softmax_loss(scores, labels)
        np.matmul(hidden.T, at_scores, out=gradients["output.weight"])
        np.add.reduce(at_scores, axis=0, out=gradients["output.bias"])
        at_hidden = at_scores @ arrays["output.weight"].T
        at_hidden *= hidden > 0.0
        np.matmul(embedded.T, at_hidden, out=gradients["hidden.weight"])
        np.add.reduce(at_hidden, axis=0, out=gradients["hidden.bias"])
        at_embedded = (at_hidden @ arrays["hidden.weight"].T).reshape(-1, self.embedding)
        at_table = gradients["embedding.weight"]
        at_table[:] = 0.0
        np.add.at(at_table, numbers.reshape(-1), at_embedded)
        return loss, gradient

    def metrics(self, vector: Array, inputs: Inputs, labels: Labels) -> Metrics:
        """Right answers, summed cross-entropy and number of examples."""
        return classification_metrics(self.logits(vector, inputs), labels)
