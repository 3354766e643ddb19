"""What a device computes in a round. NumPy alone; the same code for one device and for a cohort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from federated.device import Update
from federated.recommendation.liked import Liked, Numbers
from federated.recommendation.objective import Objective, Wide
from federated.weights import Array


def device_update(objective: Objective, table: Array, items: Numbers) -> Update:
    """The update of a device that knows ``items`` [n] of the table's [I, d]: the table's negative gradient, flat.

    The private vector is made here and ends here. Raises ValueError where the device knows no item.
    """
    if len(items) == 0:
        raise ValueError("a device that knows no item has nothing to teach")
    alone = Liked(np.unique(items), np.array([0, len(np.unique(items))], np.int64), len(table))
    return cohort_updates(objective, table, alone, np.zeros(1, np.int64))[0]


def cohort_updates(objective: Objective, table: Array, liked: Liked, devices: Numbers) -> list[Update]:
    """The updates of several devices at once: rows of one array [B, I·d], as close to ``device_update`` as float32
    sums in another order are."""
    mask = liked.mask(devices)
    private = objective.private_vectors(table, mask)
    losses, gradients = objective.gradients(table, private, mask)
    differences = -gradients.reshape(len(devices), -1)
    counts = liked.counts[devices]
    return [
        Update({"difference": difference}, int(count), 1, float(loss))
        for difference, count, loss in zip(differences, counts, losses, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Ranking:
    """HR@k and NDCG@k: whether, and how high, the one held-out item is among the first k of the candidates; mean over
    ``devices``."""

    hit_rate: float
    ndcg: float
    devices: int


def rank_held_out(scores: Wide | Array, k: int = 10) -> Ranking:
    """Of candidates' scores [C, 1 + K], the held-out item's first. Ties count against it, so a model that says nothing
    finds nothing. Raises ValueError for no device."""
    if len(scores) == 0:
        raise ValueError("a ranking needs a device with a held-out item")
    places = (scores[:, 1:] >= scores[:, :1]).sum(axis=1)
    hits = places < k
    gains = np.where(hits, 1.0 / np.log2(places + 2.0), 0.0)
    return Ranking(float(hits.mean()), float(gains.mean()), len(scores))
