"""Quality on held-back interactions: the API's lists beside popular (all time, last 7 days) and random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from models.metrics import ndcg_at_k, recall_at_k
from services.datasets.dataset import Dataset
from services.demo.baselines import Holdout, Rows, at_random, popular
from services.demo.rest import Rest
from services.settings.model import Settings

K = 10


@dataclass(frozen=True, slots=True)
class Score:
    """Mean Recall@10 and NDCG@10 over all held-back users, and over those whom the first part knows."""

    recall: float
    ndcg: float
    recall_known: float
    ndcg_known: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Scores by method, and how many users stand behind them."""

    users: int
    known_users: int
    scores: dict[str, Score]


def measure(
    rest: Rest, before: Dataset, holdout: Holdout, settings: Settings, progress: Callable[[int], None]
) -> Quality:
    """Ask the API for each held-back user's ten and score them beside the baselines. Raises RestError."""
    row_of = {id_: row for row, id_ in enumerate(before.items.ids)}
    ours: list[Rows] = []
    for user in holdout.users:
        reply = rest.recommend(before.users.ids[user], K)
        ours.append(np.array([row_of[item] for item in reply.item_ids if item in row_of], np.intp))
        progress(1)
    liked = (settings.processor.positive_actions, settings.processor.rating_threshold)
    lists = {
        "headwater": ours,
        "popular, last 7 days": popular(before, holdout, *liked, K, days=7.0),
        "popular, all time": popular(before, holdout, *liked, K),
        "random": at_random(before, holdout, K, seed=7),
    }
    known = holdout.has_history
    return Quality(
        len(holdout.users),
        int(known.sum()),
        {name: _score(rows, holdout, known) for name, rows in lists.items()},
    )


def _score(
    lists: Sequence[Rows], holdout: Holdout, known: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Score:
    recall = np.array(
        [recall_at_k(rows, relevant, K) for rows, relevant in zip(lists, holdout.relevant, strict=True)]
    )
    ndcg = np.array(
        [ndcg_at_k(rows, relevant, K) for rows, relevant in zip(lists, holdout.relevant, strict=True)]
    )
    return Score(
        float(recall.mean()), float(ndcg.mean()), float(recall[known].mean()), float(ndcg[known].mean())
    )
