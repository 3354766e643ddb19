"""An item table learned on devices beside the same model on pooled data: HR@10 and NDCG@10 on MovieLens-100K.

Leave-one-out by time, each user's last item among 99 that the user never had; these are drawn once and are the same
for all seeds and both ways.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console

from benchmarks.report import Row
from benchmarks.turns import Figures, faced
from federated.recommendation import (
    LeaveOneOut,
    Rounds,
    SquaredError,
    by_device,
    draw_negatives,
    evaluate,
    learn,
    leave_last_out,
    pooled,
    popular,
    table_of,
)
from federated.recommendation.liked import Liked, Numbers
from services.datasets import movielens
from services.datasets.download import user_cache
from services.datasets.errors import DatasetUnavailable
from services.datasets.open import open_dataset

PEER: Final = "the same model on pooled data"
RATIO_AIM: Final = 0.98
NEGATIVES: Final = 99
_NEGATIVES_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Seeds, rounds of ``cohort`` devices, and sweeps of alternating least squares on the pooled data; the least ratio
    that is wanted of them."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rounds: int = 200
    cohort: int = 100
    sweeps: int = 15
    aim: float | None = RATIO_AIM


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    console.print("federated: recommendation")
    try:
        split, known = _movielens()
    except DatasetUnavailable as error:
        yield Row("federated recommendation, MovieLens-100K: not measured, the data are not here", "HR@10",
                  0.0, RATIO_AIM, None, peer_name=PEER, note=str(error))  # fmt: skip
        return
    negatives = draw_negatives(known, NEGATIVES, np.random.default_rng(_NEGATIVES_SEED))
    objective = SquaredError()
    ours, peer = [], []
    for seed in sizes.seeds:
        *_, state = learn(objective, split.training, Rounds(sizes.rounds, sizes.cohort, seed))
        ours.append(evaluate(objective, table_of(state), split, negatives))
        table = pooled(objective, split.training, sizes.sweeps, seed)
        peer.append(evaluate(objective, table, split, negatives))
    floor = popular(split, negatives)
    note = (
        f"{split.training.devices} devices, {sizes.rounds} rounds of {sizes.cohort}, {len(sizes.seeds)} seeds"
    )
    for name, field, least in (("HR@10", "hit_rate", floor.hit_rate), ("NDCG@10", "ndcg", floor.ndcg)):
        yield faced(
            f"federated recommendation, MovieLens-100K, {name} among {NEGATIVES} negatives",
            "of the users" if name == "HR@10" else name,
            Figures(tuple(getattr(one, field) for one in ours)),
            Figures(tuple(getattr(one, field) for one in peer)),
            PEER,
            aim=sizes.aim,
            note=f"{note}; popularity {least:.4f}",
        )


def _movielens() -> tuple[LeaveOneOut, Liked]:
    """Every rating counts as a sign of interest, as in the papers that report these figures."""
    dataset, _ = open_dataset(movielens.NAME, user_cache(os.environ), allow_generated=False)
    seen = dataset.interactions
    owners: Numbers = seen.user.astype(np.int64)
    items: Numbers = seen.item.astype(np.int64)
    users, catalogue = len(dataset.users), len(dataset.items.ids)
    split = leave_last_out(owners, items, seen.timestamp_ms, users, catalogue)
    return split, by_device(owners, items, users, catalogue)
