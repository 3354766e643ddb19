"""The device's trainer with torch: the same loop and wire, another library for the steps. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from federated.client_trainer import client_number
from federated.device import (
    ControlVariates,
    Instructions,
    LocalTraining,
    Update,
    batch_schedule,
    control_change,
    device_generator,
)
from federated.job import FederatedJob
from federated.layout import Layout
from federated.models import Inputs, Labels, Perceptron
from federated.weights import Array


class TorchTrainer:
    """Trains ``module`` by cross-entropy on ``inputs`` [N, ...] and ``labels`` [N], in batches drawn as every device
    draws them.

    ``names`` maps the layout's fields to the module's parameters and buffers, ``turned`` names those that torch keeps
    transposed. ``device`` is cpu or cuda. Agrees with NumPy's trainer to rounding, not bit for bit.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        inputs: Inputs,
        labels: Labels,
        training: LocalTraining,
        seed: int,
        number: int,
        *,
        names: Mapping[str, str] | None = None,
        turned: frozenset[str] = frozenset(),
        device: str = "cpu",
    ) -> None:
        self.layout = layout
        self._module = module.to(device)
        self._inputs = torch.as_tensor(np.ascontiguousarray(inputs)).to(device)
        self._labels = torch.as_tensor(labels).to(device)
        self._training, self._seed, self._number = training, seed, number
        self._names = (
            dict(names) if names is not None else {field.name: field.name for field in layout.fields}
        )
        self._turned = turned
        self._device = device
        there = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if missing := set(self._names.values()) - there.keys():
            raise ValueError(f"the module has no {', '.join(sorted(missing))}")
        self._tensors = {name: there[place] for name, place in self._names.items()}
        self._trained = [name for name in self._names if isinstance(self._tensors[name], nn.Parameter)]

    def train(
        self, start: Array, instructions: Instructions, iteration: int, control: ControlVariates | None
    ) -> Update:
        """See ``federated.client_trainer.Trainer``."""
        training = instructions.adapt(self._training)
        if control is not None and training.momentum:
            raise ValueError("SCAFFOLD's controls are measured on plain steps: momentum must be 0")
        examples = len(self._labels)
        indices, sizes = batch_schedule(
            device_generator(self._seed, self._number, iteration), examples, training
        )
        self._load(start)
        parameters = [self._tensors[name] for name in self._trained]
        origin = [parameter.detach().clone() for parameter in parameters]
        shift = None if control is None else self._split(control.server - control.client)
        speed = [torch.zeros_like(parameter) for parameter in parameters]
        self._module.train()
        total = 0.0
        for batch, size in zip(indices, sizes.tolist(), strict=True):
            chosen = torch.as_tensor(batch[:size]).to(self._device)
            loss = nn.functional.cross_entropy(self._module(self._inputs[chosen]), self._labels[chosen])
            gradients = list(torch.autograd.grad(loss, parameters))
            total += float(loss.detach()) * size
            with torch.no_grad():
                self._step(parameters, gradients, origin, shift, speed, training)
        steps = len(sizes)
        difference = self.layout.conceal(self._read() - start)
        vectors = {"difference": difference}
        if control is not None:
            vectors["control"] = control_change(difference, control, steps, training.rate, self.layout)
        return Update(vectors, examples, steps, total / int(sizes.sum()))

    @staticmethod
    def _step(
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        origin: list[torch.Tensor],
        shift: list[torch.Tensor] | None,
        speed: list[torch.Tensor],
        training: LocalTraining,
    ) -> None:
        if training.clip_norm:
            norm = float(torch.sqrt(torch.stack([g.double().square().sum() for g in gradients]).sum()))
            if norm > training.clip_norm:
                gradients = [g * (training.clip_norm / norm) for g in gradients]
        for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            moved = gradient
            if training.proximal:
                moved = moved + training.proximal * (parameter - origin[place])
            if shift is not None:
                moved = moved + shift[place]
            if training.momentum:
                speed[place].mul_(training.momentum).add_(moved)
                moved = speed[place]
            parameter.sub_(training.rate * moved)

    def _load(self, vector: Array) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(self._field(vector, name).to(tensor.dtype))

    def _split(self, vector: Array) -> list[torch.Tensor]:
        return [self._field(vector, name) for name in self._trained]

    def _field(self, vector: Array, name: str) -> torch.Tensor:
        value = torch.as_tensor(self.layout.views(vector)[name].copy()).to(self._device)
        return value.T if name in self._turned else value

    def _read(self) -> Array:
        found = {}
        for name, tensor in self._tensors.items():
            value = tensor.detach()
            found[name] = (value.T if name in self._turned else value).cpu().numpy()
        return self.layout.flatten(found)


def torch_twin(
    job: FederatedJob, client: str, inputs: Inputs, labels: Labels, device: str = "cpu"
) -> TorchTrainer:
    """A torch trainer of ``job``'s model, which must be a perceptron or softmax regression. Raises ValueError."""
    model = job.make_model()
    if not isinstance(model, Perceptron):
        raise ValueError(f"model {model.name} has no torch twin here; train it with NumPy")
    layout = model.layout()
    matrices = [field for field in layout.fields if len(field.shape) == 2]
    layers: list[nn.Module] = []
    names: dict[str, str] = {}
    fields = iter(layout.fields)
    for depth, matrix in enumerate(matrices):
        entering, leaving = matrix.shape
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
        weight, bias = next(fields), next(fields)
        names |= {weight.name: f"{2 * depth}.weight", bias.name: f"{2 * depth}.bias"}
    module = nn.Sequential(*layers[:-1])
    turned = frozenset(matrix.name for matrix in matrices)
    return TorchTrainer(
        module, layout, inputs, labels, job.training, job.job.seed, client_number(client),
        names=names, turned=turned, device=device,
    )  # fmt: skip
