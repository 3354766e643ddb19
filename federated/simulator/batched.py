"""Whole cohorts at once on a batch axis, in chunks that fit a budget of memory; on NumPy or torch, cpu or cuda.

The batches are those of ``device.batch_schedule``, so the results agree with the reference to float32's rounding.
Clients are ordered by their number of steps, most first: at each step a prefix of the chunk still trains, and nothing
is computed for those who are done. Short batches are padded with rows of weight 0.

Threads: each takes whole chunks, and one chunk is computed on one core, so the bits do not depend on their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.device import LocalTraining, batch_schedule, device_generator
from federated.layout import Layout
from federated.simulator.arrays import Arrays
from federated.simulator.cohort import Clients, Cohort, Counts, Rows, Trained
from federated.simulator.networks import Network

Tensor = Any

VECTORS_PER_CLIENT = 5
"""Weights, gradient, difference, and room for momentum or a control."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cohort is cut: chunks of clients [B] with their counts [B]."""

    chunks: tuple[tuple[Clients, Counts], ...]


class BatchedEngine:
    """Trains ``network``, the twin of a model with ``layout``, within ``memory_bytes`` per thread."""

    def __init__(
        self,
        name: str,
        network: Network,
        layout: Layout,
        arrays: Arrays,
        *,
        memory_bytes: int,
        threads: int = 1,
    ) -> None:
        if memory_bytes < 1 or threads < 1:
            raise ValueError(f"memory_bytes and threads must be at least 1, not {memory_bytes}, {threads}")
        self.name = name
        self._network, self._layout, self._arrays = network, layout, arrays
        self._memory_bytes, self._threads = memory_bytes, threads
        self._pool = ThreadPoolExecutor(threads, "cohort", initializer=arrays.enter_thread)

    def plan(self, cohort: Cohort, data: Rows) -> Plan:
        """The chunks of ``cohort``: a function of the cohort, the data's counts and the budget alone."""
        counts = data.counts[cohort.clients]
        training = cohort.training
        steps = np.array([training.steps_for(count) for count in counts.tolist()], np.int64)
        order = np.lexsort((cohort.clients, -counts, -steps))
        clients, counts = cohort.clients[order], counts[order]
        width = 4 * int(np.prod(data.rows(clients[:1]).inputs.shape[2:])) + 8 if len(clients) else 0
        chunks: list[tuple[Clients, Counts]] = []
        first = 0
        while first < len(clients):
            most = int(counts[first])
            batch = training.batch_for(most)
            touched = training.steps_for(most) * batch
            room = self._memory_bytes // (
                4 * VECTORS_PER_CLIENT * self._layout.size
                + width * (most + touched)
                + self._network.row_bytes(batch)
            )
            last = min(first + max(1, room), len(clients))
            if self._network.needs_equal_batches:
                last = min(last, first + int(np.searchsorted(-counts[first:], -most, side="right")))
            chunks.append((clients[first:last], counts[first:last]))
            first = last
        return Plan(tuple(chunks))

    def train(self, cohort: Cohort, data: Rows) -> Iterator[Trained]:
        """The cohort's clients, chunk by chunk in the plan's order; a bounded number of chunks is ahead."""
        start = self._arrays.put(cohort.start)
        waiting: deque[Future[Trained]] = deque()
        try:
            for clients, _ in self.plan(cohort, data).chunks:
                waiting.append(self._pool.submit(self.train_chunk, cohort, clients, data, start))
                if len(waiting) > self._threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the threads and restore what they changed."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._arrays.leave()

    def train_here(self, cohort: Cohort, clients: Clients, data: Rows) -> Trained:
        """Train one of the plan's chunks on a thread of this engine, and wait for it."""
        return self._pool.submit(self.train_chunk, cohort, clients, data).result()

    def train_chunk(
        self, cohort: Cohort, clients: Clients, data: Rows, start: Tensor | None = None
    ) -> Trained:
        """Train ``clients`` [B], most steps first, at once."""
        arrays, training = self._arrays, cohort.training
        start = arrays.put(cohort.start) if start is None else start
        rows = data.rows(clients)
        counts = rows.counts
        schedule = stack_schedules(cohort, clients, counts)
        indices = arrays.put(schedule.indices)
        batches = arrays.rows(arrays.put(rows.inputs), indices)
        answers = arrays.rows(arrays.put(rows.labels), indices)
        shares = arrays.put(schedule.shares)

        weights = arrays.copies(start, len(clients))
        gradient = arrays.empty(*weights.shape)
        velocity = arrays.copies(start * 0.0, len(clients)) if training.momentum else None
        own = None if cohort.controls is None else arrays.put(cohort.controls(clients))
        server = None if cohort.server_control is None else arrays.put(cohort.server_control)
        correction = None if own is None else server - own
        losses = np.zeros(len(clients), np.float64)
        # What diverges is found by whoever takes the results; NumPy need not warn at each step.
        with np.errstate(all="ignore"):
            for step, active in enumerate(schedule.active):
                left, right = schedule.edges[step], schedule.edges[step] + schedule.widths[step]
                part, current = gradient[:active], weights[:active]
                at_step = shares[:active, left:right]
                mean = self._network.gradient(
                    current, batches[:active, left:right], answers[:active, left:right], at_step, part
                )
                losses[:active] += arrays.take(mean) * schedule.sizes[:active, step]
                if training.clip_norm:
                    self._clip(part, training.clip_norm)
                if training.proximal:
                    part += training.proximal * (current - start)
                if correction is not None:
                    part += correction[:active]
                if velocity is not None:
                    moving = velocity[:active]
                    moving *= training.momentum
                    moving += part
                    current -= training.rate * moving
                else:
                    part *= training.rate
                    current -= part
            weights -= start
        return self._trained(clients, counts, schedule, weights, losses, server, training)

    def _clip(self, gradient: Tensor, largest_norm: float) -> None:
        module = self._arrays.module
        norms = module.sqrt((gradient * gradient).sum(1))
        gradient *= (largest_norm / module.clip(norms, largest_norm, None))[:, None]

    def _trained(
        self,
        clients: Clients,
        counts: Counts,
        schedule: Schedules,
        difference: Tensor,
        losses: npt.NDArray[np.float64],
        server: Tensor | None,
        training: LocalTraining,
    ) -> Trained:
        layout, arrays = self._layout, self._arrays
        vectors = {"difference": arrays.take(difference)}
        if server is not None:
            work = arrays.put((schedule.steps * training.rate).astype(np.float32))
            vectors["control"] = arrays.take(-server - difference / work[:, None])
        if not layout.only_weights:
            vectors["difference"][:, layout.mask("counter", "constant", "local")] = 0.0
            if "control" in vectors:
                vectors["control"][:, ~layout.mask("weight")] = 0.0
        return Trained(clients, vectors, counts, schedule.steps, losses / schedule.sizes.sum(axis=1))


@dataclass(frozen=True, slots=True)
class Schedules:
    """The batches of B clients, side by side: step s has the columns ``edges[s]`` to ``edges[s] + widths[s]``.

    ``indices`` [B, W] into each client's rows, ``shares`` [B, W] (one over the batch's size, 0 for padding), ``sizes``
    [B, S], ``steps`` [B], ``active`` [S] clients that still train.
    """

    indices: npt.NDArray[np.int64]
    shares: Array32
    sizes: npt.NDArray[np.int64]
    steps: Counts
    active: list[int]
    edges: list[int]
    widths: list[int]


Array32 = npt.NDArray[np.float32]


def stack_schedules(cohort: Cohort, clients: Clients, counts: Counts) -> Schedules:
    """``device.batch_schedule`` of each client, padded to the widest batch; clients by falling number of steps."""
    drawn = [
        batch_schedule(device_generator(cohort.seed, client, cohort.iteration), count, cohort.training)
        for client, count in zip(clients.tolist(), counts.tolist(), strict=True)
    ]
    steps = np.array([len(sizes) for _, sizes in drawn], np.int64)
    most, widest = int(steps.max()), max(indices.shape[1] for indices, _ in drawn)
    indices = np.zeros((len(clients), most, widest), np.int64)
    sizes = np.zeros((len(clients), most), np.int64)
    for place, (batches, lengths) in enumerate(drawn):
        indices[place, : batches.shape[0], : batches.shape[1]] = batches
        sizes[place, : len(lengths)] = lengths
    filled = np.arange(widest) < sizes[:, :, None]
    shares = np.where(filled, 1.0 / np.maximum(sizes, 1)[:, :, None], 0.0).astype(np.float32)
    active = np.count_nonzero(steps[:, None] > np.arange(most), axis=0)
    return Schedules(
        indices.reshape(len(clients), -1),
        shares.reshape(len(clients), -1),
        sizes,
        steps,
        active.tolist(),
        [step * widest for step in range(most)],
        [int(width) for width in sizes.max(axis=0)],
    )
