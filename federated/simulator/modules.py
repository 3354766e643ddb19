"""Any ``torch.nn.Module`` in a cohort: ``functional_call`` under ``vmap(grad)``, buffers by the layout's rule.

Running statistics of batch normalisation move within the client's vector as the module itself moves them; they are
no weights, so no gradient, momentum or proximal term touches them. Padding would count in their statistics: clients
with different batch sizes are not put into one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from federated.layout import Layout, layout_of
from federated.models.model import Inputs, Labels, Metrics, classification_metrics
from federated.simulator.torch_arrays import TorchArrays
from federated.weights import Array

Tensor = Any
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ModuleModel:
    """A module as a ``Model``: ``make`` builds it (its own initialisation is drawn from torch's generator, seeded
    by ours). ``loss`` takes scores [M, C] and labels [M] and gives a loss per row [M]; cross-entropy when absent.

    Modules with dropout or other randomness are refused: their draws would depend on how clients are batched.
    """

    def __init__(self, make: Callable[[], nn.Module], name: str = "module", loss: Loss | None = None) -> None:
        self._make, self.name = make, name
        self.module = make()
        random = [
            type(m).__name__ for m in self.module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)
        ]
        if random:
            raise ValueError(
                f"{name}: {random[0]} draws at random, so its results would depend on the batching"
            )
        self.module.train()
        self.loss = loss or _cross_entropy
        self._layout = layout_of({k: v.detach().numpy() for k, v in self.module.state_dict().items()})

    def layout(self) -> Layout:
        """The module's state dict in its order."""
        return self._layout

    def initial(self, generator: np.random.Generator) -> Array:
        """The weights [D] of a fresh module."""
        before = torch.get_rng_state()
        try:
            torch.manual_seed(int(generator.integers(2**63)))
            made = self._make()
        finally:
            torch.set_rng_state(before)
        return self._layout.flatten({k: v.detach().numpy() for k, v in made.state_dict().items()})

    def state(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """``flat`` [D] as the module's state: float fields as views, so what the module writes lands in ``flat``."""
        state = {}
        for field in self._layout.fields:
            part = flat[self._layout.slices[field.name]].reshape(field.shape)
            if np.dtype(field.dtype).kind in "iub":
                part = part.round().to(getattr(torch, field.dtype))
            state[field.name] = part
        return state

    def loss_and_gradient(
        self, vector: Array, inputs: Inputs, labels: Labels, out: Array | None = None
    ) -> tuple[float, Array]:
        """Mean loss and gradient [D], zero where the field is no weight; statistics in ``vector`` move."""
        flat = torch.from_numpy(vector)
        weights = flat.clone().requires_grad_(True)
        state = self.state(flat)
        names = {
            f.name for f in self._layout.fields if f.kind in ("weight", "local") and f.dtype == "float32"
        }
        trained = {name: part for name, part in self.state(weights).items() if name in names}
        buffers = {name: part for name, part in state.items() if name not in names}
        scores = functional_call(
            self.module, trained | buffers, (torch.from_numpy(np.ascontiguousarray(inputs)),)
        )
        mean = self.loss(scores, torch.from_numpy(np.ascontiguousarray(labels))).mean()
        (gradient,) = torch.autograd.grad(mean, weights)
        result = np.empty_like(vector) if out is None else out
        result[:] = gradient.numpy()
        if not self._layout.only_weights:
            result[self._layout.mask("statistic", "counter", "constant")] = 0.0
        return float(mean.detach()), result

    def logits(self, vector: Array, inputs: Inputs) -> Array:
        """Scores [N, C] in evaluation mode."""
        self.module.eval()
        try:
            with torch.no_grad():
                scores = functional_call(
                    self.module,
                    self.state(torch.from_numpy(vector.copy())),
                    (torch.from_numpy(np.ascontiguousarray(inputs)),),
                )
        finally:
            self.module.train()
        return np.asarray(scores.numpy())

    def metrics(self, vector: Array, inputs: Inputs, labels: Labels) -> Metrics:
        """Right answers, summed cross-entropy and number of examples."""
        return classification_metrics(self.logits(vector, inputs), labels)


class ModuleNetwork:
    """Twin of a ``ModuleModel`` on a batch axis."""

    def __init__(self, model: ModuleModel, arrays: TorchArrays) -> None:
        self._model = model
        self._layout = model.layout()
        self.needs_equal_batches = not self._layout.only_weights
        self._module = model.module.to(arrays.device)
        self._trains = torch.from_numpy(~self._layout.mask("statistic", "counter", "constant")).to(
            arrays.device
        )
        self._gradient = vmap(grad_and_value(self._loss, has_aux=True))

    def row_bytes(self, batch: int) -> int:
        """A guess: activations of a module are about as large as its inputs and weights together, per row."""
        return 64 * batch * max(1, int(self._layout.size**0.5))

    def _loss(
        self, weights: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A copy that the module may write to: what it makes of its buffers is handed out beside the loss.
        buffers = {
            name: part.detach().clone()
            for name, part in self._model.state(weights).items()
            if not self._trained(name)
        }
        trained = {name: part for name, part in self._model.state(weights).items() if self._trained(name)}
        scores = functional_call(self._module, trained | buffers, (inputs,))
        loss = (self._model.loss(scores, labels) * shares).sum()
        state = trained | buffers
        moved = torch.cat([state[f.name].detach().reshape(-1).float() for f in self._layout.fields])
        return loss, moved

    def _trained(self, name: str) -> bool:
        return bool(self._trains[self._layout.slices[name]].all())

    def gradient(
        self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, out: Tensor
    ) -> Tensor:
        """Mean losses [B]; gradients to ``out``, moved statistics to ``weights``."""
        found, (losses, moved) = self._gradient(weights, inputs, labels, shares)
        out.copy_(found)
        if not self._layout.only_weights:
            out[:, ~self._trains] = 0.0
            weights[:, ~self._trains] = moved[:, ~self._trains]
        return losses.detach()

    def scores(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """[B, M, C] in evaluation mode."""
        self._module.eval()
        try:
            with torch.no_grad():
                call = vmap(lambda w, x: functional_call(self._module, self._model.state(w), (x,)))
                return call(weights.expand(len(inputs), -1), inputs)
        finally:
            self._module.train()


def module_network(model: ModuleModel, arrays: TorchArrays) -> ModuleNetwork:
    """The network that trains ``model`` for many clients at once."""
    return ModuleNetwork(model, arrays)


def _cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, labels, reduction="none")
