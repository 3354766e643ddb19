"""Cohorts trained by Ray tasks, on one machine or many: the chunks of the engine, wherever they are computed.

The chunks are those of the engine itself and each is computed on one core, so every task returns the bits that this
process would have made; what is done with them (coding, sums in integers) is done here, in the chunks' order. Machines
with other processors may round differently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from federated.models import Model
from federated.simulator.batched import BatchedEngine
from federated.simulator.cohort import Cohort, Rows, Trained
from federated.simulator.engines import make_engine

TASKS_AHEAD = 2
"""Per core: enough that none waits, few enough that results do not pile up here."""


class RayMissing(ImportError):
    """Ray is not installed."""


class RayEngine:
    """The engine ``name`` over Ray. ``address`` is that of a cluster, None starts Ray on this machine with ``cores``.

    Data are put into Ray's object store once; a task carries its clients and their controls. Raises RayMissing, and
    ValueError for the reference engine, which has no chunks.
    """

    def __init__(
        self, name: str, model: Model, *, memory_bytes: int = 0, cores: int = 1, address: str | None = None
    ) -> None:
        try:
            ray = import_module("ray")
        except ImportError as error:
            raise RayMissing(
                "simulation.ray needs Ray, which is an extra: pip install 'headwater[ray]'"
            ) from error
        self._ray: Any = ray
        local = make_engine(name, model, memory_bytes=memory_bytes)
        if not isinstance(local, BatchedEngine):
            raise ValueError(f"engine {local.name} trains client by client; over Ray take batched or torch")
        self._local, self.name = local, f"{local.name} over ray"
        self._started_here = not ray.is_initialized()
        if self._started_here:
            options: dict[str, Any] = (
                {"num_cpus": cores, "include_dashboard": False} if address is None else {}
            )
            ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
        self._cores = max(1, int(ray.cluster_resources().get("CPU", cores)))
        self._train: Any = ray.remote(num_cpus=1, max_retries=3)(_train_chunk)
        self._how = (name, model, memory_bytes)
        self._data: tuple[Rows, Any] | None = None

    def train(self, cohort: Cohort, data: Rows) -> Iterator[Trained]:
        """The cohort's chunks in the plan's order; a bounded number of tasks is ahead."""
        if self._data is None or self._data[0] is not data:
            self._data = (data, self._ray.put(data))
        # Where clients remember is here: a task gets the rows of its own clients alone.
        common = self._ray.put(replace(cohort, controls=None, server_control=None))
        waiting: deque[Any] = deque()
        for clients, _ in self._local.plan(cohort, data).chunks:
            own = None if cohort.controls is None else cohort.controls(clients)
            waiting.append(
                self._train.remote(self._how, common, clients, self._data[1], cohort.server_control, own)
            )
            if len(waiting) >= TASKS_AHEAD * self._cores:
                yield self._ray.get(waiting.popleft())
        while waiting:
            yield self._ray.get(waiting.popleft())

    def close(self) -> None:
        """End Ray if it was started here."""
        self._local.close()
        if self._started_here:
            self._ray.shutdown()


_engines: dict[tuple[str, int], tuple[Model, BatchedEngine]] = {}


def _train_chunk(
    how: tuple[str, Model, int], cohort: Cohort, clients: Any, data: Rows, server: Any, own: Any
) -> Trained:
    """In a worker: train ``clients`` as the engine would here. A worker makes its engine once."""
    name, model, memory_bytes = how
    kept = _engines.get((name, memory_bytes))
    if kept is None or kept[0] != model:
        made = make_engine(name, model, memory_bytes=memory_bytes)
        assert isinstance(made, BatchedEngine)
        kept = _engines[name, memory_bytes] = (model, made)
    if own is not None:
        cohort = replace(cohort, server_control=server, controls=lambda _: own)
    return kept[1].train_here(cohort, clients, data)
