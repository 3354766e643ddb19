"""Cohorts over a local Ray. Ray is an extra: `pip install ray`, then run this file alone."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.simulated import blobs, iterations, simulate

from federated.data import federate
from federated.models import make_model
from federated.simulator.engines import make_engine
from federated.simulator.on_ray import RayEngine, RayMissing

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'headwater[ray]'"
)


@pytest.fixture(autouse=True)
def tolerated() -> Iterator[None]:
    # Ray's own start leaves sockets and files to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@needs_ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_over_ray_a_run_gives_the_bits_of_this_process(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"population": 30} if strategy == "scaffold" else {}
    model = make_model("perceptron", features=8, classes=4, hidden=8)
    weights = []
    for over_ray in (False, True):
        folder = tmp_path / str(over_ray)
        folder.mkdir()
        simulation = simulate(
            folder,
            federation=federate(blobs(), 30, 7),
            rounds=iterations(3),
            strategy=strategy,
            options=options,
            check=False,
            memory_bytes=40_000,
        )
        if over_ray:
            simulation.learning._engine.close()
            simulation.learning._engine = RayEngine("batched", model, memory_bytes=40_000, cores=2)
        rows = list(simulation.run())
        simulation.close()
        assert [row.trained for row in rows] == [8, 8, 8]
        weights.append(simulation.weights)
    np.testing.assert_array_equal(*weights)


@needs_ray
def test_the_reference_engine_is_not_for_ray() -> None:
    with pytest.raises(ValueError, match="take batched or torch"):
        RayEngine("numpy", make_model("softmax", features=2, classes=2))


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissing, match=r"pip install 'headwater\[ray\]'"):
        RayEngine("batched", make_model("softmax", features=2, classes=2))


def test_the_engine_that_ray_spreads_has_more_than_one_chunk() -> None:
    federation = federate(blobs(), 30, 7)
    simulated = make_engine(
        "batched", make_model("perceptron", features=8, classes=4, hidden=8), memory_bytes=40_000
    )
    from federated.device import LocalTraining
    from federated.simulator import Cohort

    model = make_model("perceptron", features=8, classes=4, hidden=8)
    start = model.initial(np.random.default_rng(0))
    chunks = list(simulated.train(Cohort(np.arange(30), 1, start, LocalTraining(), 1), federation))
    simulated.close()
    assert len(chunks) > 3
