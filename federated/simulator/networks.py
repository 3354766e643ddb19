"""The models by name on a batch axis: B clients' weights [B, D] are trained by one matrix product each.

Written once over NumPy and torch: both know ``matmul``, ``amax``, ``exp``, … under the same names and arguments, and
what they do differently stands in ``arrays``. Gradients by hand are two to three times as fast as ``torch.func.vmap``
of ``grad`` on these small networks (see ``benchmarks``); other modules go through ``modules``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from federated.models import Model, NextCharacter, Perceptron
from federated.simulator.arrays import Arrays

Tensor = Any
"""An array of NumPy or of torch, as the engine's ``Arrays`` makes them."""


class NoTwin(ValueError):
    """The model has no twin on a batch axis; the reference engine trains it client by client."""


class Network(Protocol):
    """A model for B clients at once.

    ``shares`` [B, M] are what each row of a batch weighs: one over the size of its client's batch, 0 for padding.
    """

    @property
    def needs_equal_batches(self) -> bool:
        """Whether padding would change the result (batch normalisation): then only equal batches go together."""

    def row_bytes(self, batch: int) -> int:
        """About how many bytes of activations one client takes at a step with ``batch`` rows."""

    def gradient(
        self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, out: Tensor
    ) -> Tensor:
        """The clients' mean losses [B] at ``weights`` [B, D] on ``inputs`` [B, M, ...] and ``labels`` [B, M]; their
        gradients go to ``out`` [B, D]."""

    def scores(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """[B, M, C] of ``inputs`` [B, M, ...] at ``weights`` [B, D], or at [1, D] for all alike."""


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """Twin of ``Perceptron``."""

    sizes: tuple[int, ...]
    arrays: Arrays
    needs_equal_batches: bool = False

    def row_bytes(self, batch: int) -> int:
        """Inputs, activations and the gradients at them, as float32."""
        return 8 * batch * sum(self.sizes)

    def _layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights [B, rows, columns] and biases [B, 1, columns] as views into ``flat`` [B, D]."""
        layers, start, clients = [], 0, len(flat)
        for rows, columns in zip(self.sizes, self.sizes[1:], strict=False):
            middle = start + rows * columns
            weight = flat[:, start:middle].reshape(clients, rows, columns)
            layers.append((weight, flat[:, None, middle : middle + columns]))
            start = middle + columns
        return layers

    def scores(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Scores [B, M, C]."""
        *hidden, (weight, bias) = self._layers(weights)
        active = inputs
        for hidden_weight, hidden_bias in hidden:
            active = self.arrays.rectify(active @ hidden_weight + hidden_bias)
        return active @ weight + bias

    def gradient(
        self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, out: Tensor
    ) -> Tensor:
        """Mean losses [B]; gradients to ``out``."""
        module = self.arrays.module
        layers, gradients = self._layers(weights), self._layers(out)
        actives = [inputs]
        for weight, bias in layers[:-1]:
            active = module.matmul(actives[-1], weight)
            active += bias
            actives.append(self.arrays.rectify(active))
        weight, bias = layers[-1]
        scores = module.matmul(actives[-1], weight)
        scores += bias
        losses = self.arrays.softmax_loss(scores, labels, shares)
        at_output = scores
        for place in range(len(layers) - 1, -1, -1):
            at_weight, at_bias = gradients[place]
            module.matmul(module.swapaxes(actives[place], 1, 2), at_output, out=at_weight)
            self.arrays.add_rows(at_output, at_bias)
            if place:
                at_active = module.matmul(at_output, module.swapaxes(layers[place][0], 1, 2))
                at_active *= actives[place] > 0.0
                at_output = at_active
        return losses


@dataclass(frozen=True, slots=True)
class CharacterNetwork:
    """Twin of ``NextCharacter``: V characters, a window of C, embeddings of width E, H hidden units."""

    model: NextCharacter
    arrays: Arrays
    needs_equal_batches: bool = False

    def row_bytes(self, batch: int) -> int:
        """Embedded windows, hidden units and scores, with the gradients at them, as float32."""
        model = self.model
        return 8 * batch * (2 * model.context * model.embedding + model.hidden + model.characters)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        layout, clients = self.model.layout(), len(flat)
        return {
            field.name: flat[:, layout.slices[field.name]].reshape(clients, *field.shape)
            for field in layout.fields
        }

    def _forward(self, views: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers [B, M, C], embedded [B, M, C·E], hidden [B, M, H] and scores [B, M, V]."""
        module = self.arrays.module
        numbers = self.arrays.integers(inputs)
        clients, rows, context = numbers.shape
        table = views["embedding.weight"]
        owner = self.arrays.count(len(table))[:, None] if len(table) == clients else 0
        embedded = table[owner, numbers.reshape(clients, rows * context)]
        embedded = embedded.reshape(clients, rows, context * self.model.embedding)
        hidden = module.matmul(embedded, views["hidden.weight"])
        hidden += views["hidden.bias"][:, None]
        hidden = self.arrays.rectify(hidden)
        scores = module.matmul(hidden, views["output.weight"])
        scores += views["output.bias"][:, None]
        return numbers, embedded, hidden, scores

    def scores(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Scores [B, M, V]."""
        return self._forward(self._views(weights), inputs)[3]

    def gradient(
        self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, out: Tensor
    ) -> Tensor:
        """Mean losses [B]; gradients to ``out``."""
        arrays, module = self.arrays, self.arrays.module
        views, gradients = self._views(weights), self._views(out)
        numbers, embedded, hidden, scores = self._forward(views, inputs)
        losses = arrays.softmax_loss(scores, labels, shares)
        module.matmul(module.swapaxes(hidden, 1, 2), scores, out=gradients["output.weight"])
        arrays.add_rows(scores, gradients["output.bias"][:, None])
        at_hidden = module.matmul(scores, module.swapaxes(views["output.weight"], 1, 2))
        at_hidden *= hidden > 0.0
        module.matmul(module.swapaxes(embedded, 1, 2), at_hidden, out=gradients["hidden.weight"])
        arrays.add_rows(at_hidden, gradients["hidden.bias"][:, None])
        at_embedded = module.matmul(at_hidden, module.swapaxes(views["hidden.weight"], 1, 2))
        clients = len(numbers)
        arrays.scatter_add(
            gradients["embedding.weight"],
            numbers.reshape(clients, -1),
            at_embedded.reshape(clients, -1, self.model.embedding),
        )
        return losses


def has_twin(model: Model) -> bool:
    """Whether ``twin`` makes one."""
    return isinstance(model, (Perceptron, NextCharacter))


def twin(model: Model, arrays: Arrays) -> Network:
    """The network that trains ``model`` for many clients at once. Raises NoTwin."""
    if isinstance(model, Perceptron):
        return DenseLayers(model.sizes, arrays)
    if isinstance(model, NextCharacter):
        return CharacterNetwork(model, arrays)
    raise NoTwin(f"model {model.name!r} has no twin on a batch axis: use engine numpy")
