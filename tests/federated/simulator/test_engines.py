"""Cohorts on a batch axis against the reference, which trains client by client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from federated.data import Padded
from federated.device import LocalTraining
from federated.models import Model, make_model
from federated.simulator import Cohort, Engine, make_engine
from federated.simulator.cohort import Clients, Counts
from federated.simulator.modules import ModuleModel
from federated.weights import Array


@dataclass
class Ragged:
    """Clients with a different number of examples each."""

    inputs: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    sizes: Counts

    @property
    def counts(self) -> Counts:
        return self.sizes

    def rows(self, clients: Clients) -> Padded:
        widest = int(self.sizes[clients].max())
        return Padded(self.inputs[clients, :widest], self.labels[clients, :widest], self.sizes[clients])


def ragged(clients: int, most: int, text: bool = False, seed: int = 0) -> Ragged:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, most + 1, clients)
    labels = generator.integers(0, 5, (clients, most))
    if text:
        return Ragged(generator.integers(0, 5, (clients, most, 4)), labels, sizes)
    inputs = generator.normal(size=(clients, most, 7)).astype(np.float32)
    inputs[..., 0] += labels
    return Ragged(inputs, labels, sizes)


def trained(
    engine: Engine, cohort: Cohort, data: Ragged
) -> dict[int, tuple[dict[str, Array], int, int, float]]:
    found = {}
    for chunk in engine.train(cohort, data):
        for place, client in enumerate(chunk.clients.tolist()):
            assert client not in found
            vectors = {name: vector[place] for name, vector in chunk.vectors.items()}
            found[client] = (
                vectors, int(chunk.examples[place]), int(chunk.steps[place]), float(chunk.losses[place])
            )  # fmt: skip
    engine.close()
    return found


def agree(model: Model, engine: Engine, cohort: Cohort, data: Ragged, within: float = 1e-5) -> None:
    reference = trained(make_engine("numpy", model), cohort, data)
    found = trained(engine, cohort, data)
    assert found.keys() == reference.keys() == set(cohort.clients.tolist())
    for client, (vectors, examples, steps, loss) in reference.items():
        other, *numbers = found[client]
        assert numbers[:2] == [examples, steps]
        assert numbers[2] == pytest.approx(loss, abs=1e-4)
        assert other.keys() == vectors.keys()
        scale = 1.0 / (steps * cohort.training.rate)  # by which a control enlarges a difference
        for name, vector in vectors.items():
            np.testing.assert_allclose(
                other[name], vector, rtol=0, atol=within * (scale if name == "control" else 1.0)
            )


MODELS = {
    "softmax": partial(make_model, "softmax", features=7, classes=5),
    "perceptron": partial(make_model, "perceptron", features=7, classes=5, hidden=(9, 6)),
    "text": partial(make_model, "text", features=4, classes=5, embedding=3, hidden=8),
}
TRAININGS = {
    "epochs": LocalTraining(epochs=2, batch_size=4),
    "odd batches": LocalTraining(epochs=1, batch_size=7),
    "steps": LocalTraining(steps=9, batch_size=5),
    "full batch": LocalTraining(steps=3, batch_size=0),
    "proximal": LocalTraining(epochs=2, batch_size=4, proximal=0.5),
    "momentum": LocalTraining(steps=8, batch_size=3, momentum=0.9, rate=0.02),
    "clip": LocalTraining(epochs=2, batch_size=4, clip_norm=0.3),
    "all": LocalTraining(epochs=2, batch_size=3, clip_norm=0.3, momentum=0.5, proximal=0.1),
}


@pytest.mark.parametrize("engine", ["batched", "torch"])
@pytest.mark.parametrize("training", list(TRAININGS))
@pytest.mark.parametrize("name", list(MODELS))
def test_a_cohort_at_once_learns_what_its_devices_would(name: str, training: str, engine: str) -> None:
    model = MODELS[name]()
    data = ragged(23, 17, text=name == "text")
    clients = np.random.default_rng(1).permutation(23)[:19]
    start = model.initial(np.random.default_rng(2))
    cohort = Cohort(clients, 3, start, TRAININGS[training], seed=5)
    agree(model, make_engine(engine, model, memory_bytes=40_000, threads=2), cohort, data)


@pytest.mark.parametrize("engine", ["batched", "torch"])
def test_controls_correct_each_client_by_its_own(engine: str) -> None:
    model = MODELS["perceptron"]()
    data, generator = ragged(11, 9), np.random.default_rng(3)
    own = generator.normal(0, 0.1, (11, model.layout().size)).astype(np.float32)
    server = own.mean(axis=0)
    cohort = Cohort(
        np.arange(11), 1, model.initial(generator), LocalTraining(steps=5, batch_size=4, clip_norm=1.0), 5,
        server, lambda clients: own[clients],
    )  # fmt: skip
    agree(model, make_engine(engine, model, memory_bytes=30_000), cohort, data)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    model = MODELS["perceptron"]()
    data = ragged(40, 12)
    cohort = Cohort(np.arange(40), 1, model.initial(np.random.default_rng(0)), LocalTraining(), seed=1)
    for name in ("batched", "torch"):
        one, three = (
            trained(make_engine(name, model, memory_bytes=30_000, threads=threads), cohort, data)
            for threads in (1, 3)
        )
        for client, (vectors, *_) in one.items():
            np.testing.assert_array_equal(vectors["difference"], three[client][0]["difference"])


def test_chunks_keep_to_the_budget_and_threads_of_torch_are_restored() -> None:
    model = MODELS["perceptron"]()
    data = ragged(30, 10)
    cohort = Cohort(np.arange(30), 1, model.initial(np.random.default_rng(0)), LocalTraining(), seed=1)
    before = torch.get_num_threads()
    small, large = (make_engine("torch", model, memory_bytes=size) for size in (1, 1 << 20))
    assert [len(chunk.clients) for chunk in small.train(cohort, data)] == [1] * 30
    assert [len(chunk.clients) for chunk in large.train(cohort, data)] == [30]
    small.close()
    large.close()
    assert torch.get_num_threads() == before


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return scores


@pytest.mark.parametrize(
    "make", [Normalised, partial(nn.Linear, 7, 5)], ids=["batch normalisation", "linear"]
)
@pytest.mark.parametrize("training", ["steps", "clip", "momentum"])
def test_a_module_of_torch_trains_on_the_batch_axis(make: Any, training: str) -> None:
    model = ModuleModel(make)
    data = ragged(9, 12)
    data.sizes[:] = np.maximum(data.sizes, 8)  # batch normalisation needs two rows in each batch
    start = model.initial(np.random.default_rng(4))
    cohort = Cohort(np.arange(9), 2, start, TRAININGS[training], seed=5)
    agree(model, make_engine("torch", model), cohort, data)
    statistics = model.layout().mask("statistic")
    if statistics.any():
        (chunk, *_) = make_engine("torch", model).train(cohort, data)
        assert np.abs(chunk.vectors["difference"][:, statistics]).min() > 0
        assert not chunk.vectors["difference"][:, model.layout().mask("counter")].any()


def test_a_module_that_draws_at_random_is_refused() -> None:
    with pytest.raises(ValueError, match="Dropout draws at random"):
        ModuleModel(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))


def test_engines_that_cannot_be_made_say_why() -> None:
    model = MODELS["softmax"]()
    with pytest.raises(ValueError, match="'jax' is none of auto, numpy, batched, torch"):
        make_engine("jax", model)
    with pytest.raises(ValueError, match="use engine torch for device cuda"):
        make_engine("batched", model, device="cuda")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no CUDA device"):
            make_engine("torch", model, device="cuda")
