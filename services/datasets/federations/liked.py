"""What each user likes, by item numbers: the data of devices that learn an item table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from federated.recommendation import LeaveOneOut, leave_last_out
from services.datasets.dataset import Dataset
from services.datasets.federations.owned import Owned

_ACTIONS: Final = ("like", "click", "purchase", "play")
_LIKED_FROM: Final = 4.0


def likes_of(
    data: Dataset,
    items: Sequence[str],
    actions: Sequence[str] = _ACTIONS,
    rating_threshold: float = _LIKED_FROM,
) -> LeaveOneOut:
    """What each user of ``data`` likes of ``items``, numbered in their order, the last one held back; items that are
    none of them are passed over."""
    seen, number_of = data.interactions, {item: number for number, item in enumerate(items)}
    numbers = np.array([number_of.get(item, -1) for item in data.items.ids], np.int64)
    named = numbers[seen.item]
    kept = seen.liked(actions, rating_threshold) & (named >= 0)
    owners = seen.user[kept].astype(np.int64)
    return leave_last_out(owners, named[kept], seen.timestamp_ms[kept], len(data.users), len(items))


def read_liked(data: Dataset) -> Owned:
    """Users as clients of the model ``items``, all its items those of the data set: inputs float32 [N, I] are 1 where
    a user likes an item. One row to train on, and the same row with the last like as its label held out."""
    likes = likes_of(data, data.items.ids)
    clients = np.flatnonzero(likes.training.counts)
    judged = likes.held_out[clients] >= 0
    rows = likes.training.mask(clients)
    last = likes.training.offsets[clients + 1] - 1
    return Owned(
        data.name,
        np.concatenate([rows, rows[judged]]),
        np.concatenate([likes.training.items[last], likes.held_out[clients[judged]]]),
        len(data.items),
        np.concatenate([np.arange(len(clients)), np.flatnonzero(judged)]),
        [data.users.ids[client] for client in clients],
        held_out=np.arange(len(clients) + int(judged.sum())) >= len(clients),
        divisible=False,
        source=data.source,
    )
