"""How well a model serves each client, on the client's own held-out data: the spread of it, not the mean alone.

Everything here works on counts per client, as ``counts_of`` takes them from a batched forward pass; who runs the model
(the simulator, a device) is no matter. The comparison of the global model with one trained alone asks for the same
work from both: the steps that a client took for the federation (``own_steps``), from the same first weights, on the
same training rows, measured on the same held-out rows. ``train_alone`` is its slow and clear reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from federated.data.federation import Federation, Padded
from federated.device import LocalTraining, device_generator, local_update
from federated.models import Model
from federated.weights import Array

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BINS: Final = 10
ALONE_STREAM: Final = 16
"""Stream of ``device_generator`` for training alone."""


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """Of C clients [C]: right answers, summed loss and examples seen. Raises ValueError where they do not fit."""

    right: Numbers
    loss: Floats
    seen: Numbers

    def __post_init__(self) -> None:
        if not self.right.shape == self.loss.shape == self.seen.shape or self.right.ndim != 1:
            raise ValueError(f"shapes differ: {self.right.shape}, {self.loss.shape}, {self.seen.shape}")
        if ((self.right < 0) | (self.right > self.seen)).any():
            raise ValueError("a client has more right answers than examples, or fewer than none")

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """The clients of all parts, one after the other."""
        every = list(parts)
        return cls(
            np.concatenate([part.right for part in every] or [np.zeros(0, np.int64)]),
            np.concatenate([part.loss for part in every] or [np.zeros(0)]),
            np.concatenate([part.seen for part in every] or [np.zeros(0, np.int64)]),
        )

    @property
    def accuracy(self) -> Floats:
        """Share of right answers [C], NaN for a client without examples."""
        with np.errstate(invalid="ignore"):
            return self.right / self.seen


@dataclass(frozen=True, slots=True)
class Distribution:
    """Accuracy over the clients that have held-out data.

    ``mean`` counts every client alike, ``weighted`` every example. ``worst_decile`` and ``best_decile`` are means over
    ceil(C / 10) clients. ``histogram`` counts clients in ``BINS`` equal bins from 0 to 1, 1 included in the last.
    ``loss`` is the mean over the examples of clients with a finite loss; ``diverged`` counts the others.
    """

    clients: int
    without_data: int
    examples: int
    mean: float
    weighted: float
    deviation: float
    worst_decile: float
    best_decile: float
    quantiles: dict[str, float]
    histogram: tuple[int, ...]
    loss: float | None
    diverged: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The global model against each client's own, both on that client's held-out data.

    ``gain`` is global less local accuracy: its mean over clients, and over the tenth of them that gain least.
    ``served_better``, ``alike`` and ``served_worse`` are shares of the clients.
    """

    together: Distribution
    alone: Distribution
    mean_gain: float
    worst_decile_gain: float
    served_better: float
    alike: float
    served_worse: float


def counts_of(logits: npt.NDArray[np.floating], held_out: Padded) -> ClientCounts:
    """Counts of B clients from scores [B, M, K] on their padded rows; among equal scores the first class wins.

    A score that is not finite makes the client's loss NaN and the answer wrong. Raises ValueError on another shape.
    """
    labels, mask = held_out.labels, held_out.mask
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(f"scores {logits.shape} do not fit labels {labels.shape}")
    wide = logits.astype(np.float64)
    finite = np.isfinite(wide).all(axis=2)
    wide[~finite] = 0.0
    right = (wide.argmax(axis=2) == labels) & mask & finite
    wide -= wide.max(axis=2, keepdims=True, initial=-np.inf)
    losses = np.log(np.exp(wide).sum(axis=2)) - np.take_along_axis(wide, labels[:, :, None], axis=2)[:, :, 0]
    losses[~finite] = np.nan
    return ClientCounts(
        right.sum(axis=1), np.where(mask, losses, 0.0).sum(axis=1), np.asarray(held_out.counts, np.int64)
    )


def distribution(counts: ClientCounts) -> Distribution:
    """How accuracy spreads over the clients. Raises ValueError when no client has held-out data."""
    having = counts.seen > 0
    accuracy = counts.accuracy[having]
    if len(accuracy) == 0:
        raise ValueError("no client has held-out data: with 5 rows or more a client holds one out")
    seen, loss = counts.seen[having], counts.loss[having]
    finite = np.isfinite(loss)
    return Distribution(
        clients=len(accuracy),
        without_data=int((~having).sum()),
        examples=int(seen.sum()),
        mean=float(accuracy.mean()),
        weighted=float(counts.right.sum() / seen.sum()),
        deviation=float(accuracy.std()),
        worst_decile=worst_decile(accuracy),
        best_decile=-worst_decile(-accuracy),
        quantiles={
            f"{share:g}": float(value)
            for share, value in zip(QUANTILES, np.quantile(accuracy, QUANTILES), strict=True)
        },
        # In whole numbers: 3 of 5 lies in the bin from .6 on, which quotients of floats do not promise.
        histogram=tuple(
            np.bincount(np.minimum(counts.right[having] * BINS // seen, BINS - 1), minlength=BINS).tolist()
        ),
        loss=float(loss[finite].sum() / seen[finite].sum()) if finite.any() else None,
        diverged=int((~finite).sum()),
    )


def worst_decile(values: Floats) -> float:
    """Mean of the ceil(C / 10) smallest of ``values`` [C]: whoever is served worst, also where there are few."""
    worst = -(-len(values) // 10)
    return float(np.partition(values, worst - 1)[:worst].mean())


def compare(together: ClientCounts, alone: ClientCounts) -> Comparison:
    """The global model against local ones, for the same clients in the same order.

    Raises ValueError when they were measured on different numbers of rows.
    """
    if not np.array_equal(together.seen, alone.seen):
        raise ValueError("both models must be measured on the same held-out rows of the same clients")
    having = together.seen > 0
    both = distribution(together), distribution(alone)
    # In right answers, not in quotients: equal is equal.
    difference = (together.right - alone.right)[having]
    gain = difference / together.seen[having]
    return Comparison(
        *both,
        mean_gain=float(gain.mean()),
        worst_decile_gain=worst_decile(gain),
        served_better=float((difference > 0).mean()),
        alike=float((difference == 0).mean()),
        served_worse=float((difference < 0).mean()),
    )


def own_steps(training: LocalTraining, examples: Numbers, participations: float) -> Numbers:
    """Steps [C] of a model trained alone that cost as much as ``participations`` rounds cost its client, on average.

    At least one, so that there is a model. ``examples`` [C] are training rows.
    """
    each = np.array([training.steps_for(int(count)) for count in examples], np.float64)
    return np.maximum(np.rint(each * participations), 1.0).astype(np.int64)


def train_alone(
    federation: Federation,
    clients: Numbers,
    model: Model,
    start: Array,
    training: LocalTraining,
    *,
    participations: float,
    seed: int,
) -> ClientCounts:
    """Held-out counts of each of ``clients`` [B] with a model of its own, trained from ``start`` [D] on its rows alone.

    One client after the other: the reference for whoever trains them in batches.
    """
    steps = own_steps(training, federation.counts[clients], participations)
    right, loss, seen = (
        np.zeros(len(clients), np.int64),
        np.zeros(len(clients)),
        np.zeros(len(clients), np.int64),
    )
    for place, (client, work) in enumerate(zip(clients, steps, strict=True)):
        data = federation.client(int(client))
        update = local_update(
            model,
            model.layout(),
            start,
            data.inputs,
            data.labels,
            replace(training, epochs=None, steps=int(work)),
            device_generator(seed, int(client), 0, ALONE_STREAM),
        )
        own = start + update.vectors["difference"]
        metrics = model.metrics(own, data.held_inputs, data.held_labels)
        right[place], loss[place], seen[place] = metrics.right, metrics.loss, metrics.seen
    return ClientCounts(right, loss, seen)


def evaluate_global(
    federation: Federation, clients: Numbers, model: Model, vector: Array, chunk: int = 1_024
) -> ClientCounts:
    """Held-out counts of each of ``clients`` [B] with the one model ``vector`` [D], by chunks of clients."""
    parts = []
    for start in range(0, len(clients), chunk):
        rows = federation.held_out_rows(clients[start : start + chunk])
        some, width, features = rows.inputs.shape
        scores = model.logits(vector, rows.inputs.reshape(some * width, features))
        parts.append(counts_of(scores.reshape(some, width, scores.shape[-1]), rows))
    return ClientCounts.join(parts)
