"""Small simulated federations for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from federated.compression import make_scheme
from federated.compression.download import Grid
from federated.data import Federation, Table, federate
from federated.device import LocalTraining
from federated.models import Model, make_model
from federated.rounds import Desk, MemoryStore, Rounds, RoundSettings, Tickets
from federated.selection import make_selection
from federated.simulator import make_engine
from federated.simulator.availability import Availability, make_availability
from federated.simulator.learning import Learning
from federated.simulator.population import Habits, Population
from federated.simulator.simulation import Simulation
from federated.simulator.world import World
from federated.strategies import make_strategy


def blobs(rows: int = 1200, features: int = 8, classes: int = 4, seed: int = 0) -> Table:
    """Normal clouds, one a class, that a small network tells apart."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(0, 2.0, (classes, features))
    labels = generator.integers(0, classes, rows)
    inputs = (centres[labels] + generator.normal(0, 1.0, (rows, features))).astype(np.float32)
    cut = rows * 4 // 5
    return Table("blobs", inputs[:cut], labels[:cut], classes, inputs[cut:], labels[cut:])


def accuracy(model: Model, federation: Federation) -> Callable[[Any], dict[str, Any]]:
    """What ``Simulation`` takes as ``evaluate``."""

    def evaluate(weights: Any) -> dict[str, Any]:
        found = model.metrics(weights, federation.test_inputs, federation.test_labels)
        return {"accuracy": found.right / found.seen}

    return evaluate


def simulate(
    folder: Path,
    *,
    federation: Federation | None = None,
    clients: int = 30,
    partition: str = "iid",
    hidden: int = 8,
    strategy: str = "fedavg",
    options: dict[str, Any] | None = None,
    rounds: RoundSettings | None = None,
    training: LocalTraining | None = None,
    habits: Habits | None = None,
    availability: Availability | None = None,
    selection: str = "everyone",
    engine: str = "batched",
    threads: int = 1,
    compression: str = "",
    download_bits: int = 0,
    seed: int = 7,
    checkpoint_every: int = 10,
    evaluate_every: int = 1,
    check: bool = True,
    memory_bytes: int = 0,
) -> Simulation:
    """A simulation of ``clients`` clients; what is not given is small and quick."""
    federation = federation or federate(blobs(), clients, seed, partition)
    settings = rounds or RoundSettings(start_fl_job_threshold=10, fl_iteration_num=5)
    model = make_model("perceptron", features=federation.features, classes=federation.classes, hidden=hidden)
    store = MemoryStore()
    rules = Rounds(settings, Tickets("simulated", bytes(range(32))), make_selection(selection))
    desk = Desk(store, rules)
    chosen = make_strategy(strategy, max_examples=settings.max_examples, **(options or {}))
    learning = Learning(
        model,
        federation,
        chosen,
        training or LocalTraining(epochs=2, batch_size=8),
        settings,
        make_engine(engine, model, threads=threads, memory_bytes=memory_bytes),
        seed,
        folder=folder,
        scheme=make_scheme(compression) if compression else None,
        grid=Grid.for_layout(model.layout(), download_bits) if download_bits else None,
    )
    world = World(
        desk,
        Population(federation.clients, habits or Habits(), seed),
        federation.counts,
        availability or make_availability("always", seed),
        training=learning.training,
        down_bytes=learning.downloads.bytes_for,
        up_bytes=lambda: learning.body_bytes,
        needs_facts=selection not in ("everyone", "random", "fairness"),
    )
    return Simulation(
        store,
        world,
        learning,
        evaluate=accuracy(model, federation) if check else None,
        evaluate_every=evaluate_every,
        folder=folder,
        checkpoint_every=checkpoint_every,
        fingerprint="test",
    )


def iterations(count: int, **options: Any) -> RoundSettings:
    """Settings of ``count`` iterations of 10 starts and 8 uploads."""
    return replace(RoundSettings(start_fl_job_threshold=10, fl_iteration_num=count), **options)
