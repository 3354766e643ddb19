"""What a recommender must beat: popular (all time, last days) and random, on interactions held back by time.

Pure: data sets in, lists of item rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.datasets.dataset import Dataset

Rows = NDArray[np.intp]
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Holdout:
    """The held-back part of a data set, by user.

    ``users`` U rows of users with at least one liked item there; ``relevant`` their liked item rows;
    ``seen`` the item rows that each met in the first part; ``has_history`` bool[U].
    """

    users: Rows
    relevant: tuple[Rows, ...]
    seen: tuple[Rows, ...]

    @property
    def has_history(self) -> NDArray[np.bool_]:
        """bool[U]: whether the first part knows the user."""
        return np.array([len(rows) > 0 for rows in self.seen], np.bool_)


def _rows_by_user(user: NDArray[np.int32], item: NDArray[np.int32], users: Rows) -> tuple[Rows, ...]:
    """Item rows of each of ``users``, each once."""
    order = np.argsort(user, kind="stable")
    starts = np.searchsorted(user[order], users, side="left")
    ends = np.searchsorted(user[order], users, side="right")
    items = item[order].astype(np.intp)
    return tuple(np.unique(items[a:b]) for a, b in zip(starts, ends, strict=True))


def hold_out(before: Dataset, after: Dataset, actions: Sequence[str], rating_threshold: float) -> Holdout:
    """Users with a liked item in ``after``, what they liked there, and what they had seen in ``before``.

    An item that the user had already seen before is not asked for again.
    """
    test = after.interactions
    liked = test.liked(actions, rating_threshold)
    users = np.unique(test.user[liked]).astype(np.intp)
    seen = _rows_by_user(before.interactions.user, before.interactions.item, users)
    relevant = _rows_by_user(test.user[liked], test.item[liked], users)
    fresh = tuple(np.setdiff1d(a, b) for a, b in zip(relevant, seen, strict=True))
    asked = [n for n, rows in enumerate(fresh) if len(rows)]
    return Holdout(users[asked], tuple(fresh[n] for n in asked), tuple(seen[n] for n in asked))


def popular(
    before: Dataset,
    holdout: Holdout,
    actions: Sequence[str],
    rating_threshold: float,
    k: int,
    *,
    days: float | None = None,
) -> list[Rows]:
    """The ``k`` most liked items of the last ``days`` of ``before`` (of all of it if None) that each user
    has not seen; ties by item order."""
    train = before.interactions
    counted = train.liked(actions, rating_threshold)
    if days is not None and len(train):
        counted &= train.timestamp_ms > train.timestamp_ms.max() - days * DAY_MS
    likes = np.bincount(train.item[counted], minlength=len(before.items))
    ranked = np.argsort(-likes, kind="stable")
    return [ranked[~np.isin(ranked, seen)][:k] for seen in holdout.seen]


def at_random(before: Dataset, holdout: Holdout, k: int, seed: int) -> list[Rows]:
    """``k`` items that each user has not seen, drawn evenly."""
    generator = np.random.default_rng(seed)
    every = np.arange(len(before.items), dtype=np.intp)
    return [
        generator.choice(np.setdiff1d(every, seen), size=min(k, len(every) - len(seen)), replace=False)
        for seen in holdout.seen
    ]
