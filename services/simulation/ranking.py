"""How well an item table recommends: of what each client held out, how much is among the first ten of all items that
it does not know, beside what most clients like. The measures are those of ``headwater evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.data import Federation
from federated.recommendation import ItemTable
from federated.weights import Array
from models.metrics import ndcg_at_k, recall_at_k

K: Final = 10
_CHUNK: Final = 256
"""Clients whose scores for all items are made at once."""

Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]
Scores = Callable[[Rows], npt.NDArray[np.floating]]
"""Scores [N, I] for rows [N, I] that are 1 where a client knows an item."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Recall@10 and NDCG@10, mean over held-out items."""

    recall: float
    ndcg: float


def held_out_rows(federation: Federation, clients: Numbers) -> Iterator[tuple[Rows, Numbers]]:
    """What the clients know [n, I] and one held-out item of each row [n], by chunks of clients; nobody's test rows
    where no client holds an item out."""
    if not len(clients):
        for start in range(0, len(federation.test_labels), _CHUNK):
            yield (
                federation.test_inputs[start : start + _CHUNK],
                federation.test_labels[start : start + _CHUNK],
            )
    for start in range(0, len(clients), _CHUNK):
        rows = federation.held_out_rows(clients[start : start + _CHUNK])
        yield rows.inputs[rows.mask], rows.labels[rows.mask]


def rank(federation: Federation, clients: Numbers, scores: Scores) -> Ranking | None:
    """``scores`` on the held-out items of ``clients`` [B]; None where there are none. Equal scores stand in the
    items' order; a row with a score that is not finite recommends nothing."""
    recall, ndcg = list[float](), list[float]()
    for known, wanted in held_out_rows(federation, clients):
        found = scores(known)
        best = np.argsort(-found, axis=1, kind="stable")[:, :K]
        for row, label in enumerate(wanted):
            ranked, relevant = (
                best[row] if np.isfinite(found[row]).all() else best[row, :0],
                np.atleast_1d(label),
            )
            recall.append(recall_at_k(ranked, relevant, K))
            ndcg.append(ndcg_at_k(ranked, relevant, K))
    return Ranking(float(np.mean(recall)), float(np.mean(ndcg))) if recall else None


def popularity(federation: Federation) -> Scores:
    """How many clients know each item, by what they train on; an item that a row knows already comes last."""
    counts = np.zeros(federation.classes)
    for start in range(0, federation.clients, _CHUNK):
        rows = federation.rows(np.arange(start, min(start + _CHUNK, federation.clients)))
        counts += np.asarray(rows.inputs.max(axis=1, initial=0), np.float64).sum(axis=0)
    return lambda known: np.where(known > 0, -1.0, counts)


def ranking_evaluator(
    federation: Federation, clients: Numbers, model: ItemTable
) -> Callable[[Array], dict[str, Any]]:
    """The function that ``Simulation`` calls after a version: the two measures of the model."""

    def evaluate(weights: Array) -> dict[str, Any]:
        found = rank(federation, clients, lambda known: model.logits(weights, known))
        return {} if found is None else {f"{name}_at_{K}": value for name, value in asdict(found).items()}

    return evaluate


def final_ranking(
    federation: Federation, clients: Numbers, model: ItemTable, weights: Array
) -> dict[str, Any] | None:
    """The measures at the end beside those of popular items; None where nothing is held out."""
    ours = rank(federation, clients, lambda known: model.logits(weights, known))
    popular = rank(federation, clients, popularity(federation))
    if ours is None or popular is None:
        return None
    held_out = federation.held_out.sizes[clients].sum() if len(clients) else len(federation.test_labels)
    return {
        "k": K,
        "items": federation.classes,
        "held_out": int(held_out),
        "model": asdict(ours),
        "popular": asdict(popular),
    }
