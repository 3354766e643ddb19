"""A small generated example of a recommender of two towers: users' features at one company, items' at another."""

from __future__ import annotations

import numpy as np

from federated.vertical.tables import Table


def events(
    rows: int, seed: int, *, users: int = 300, items: int = 100, factors: int = 3
) -> tuple[Table, Table]:
    """Events of a user who was shown an item: the guest's table (the user's features; label 1 where the user took it)
    and the host's (the item's features), aligned by the event's id.

    Whom an item suits is the inner product of latent factors of both, and no column tells it alone: either company by
    itself can guess no better than by chance, but for how often items of all kinds are taken.
    """
    rng = np.random.default_rng(seed)
    tastes, kinds = rng.standard_normal((users, factors)), rng.standard_normal((items, factors))
    user_columns = np.hstack([tastes, rng.standard_normal((users, 2))]) @ rng.standard_normal(
        (factors + 2, factors + 2)
    )
    item_columns = np.hstack([kinds, rng.standard_normal((items, 2))]) @ rng.standard_normal(
        (factors + 2, factors + 2)
    )
    who, what = rng.integers(0, users, rows), rng.integers(0, items, rows)
    suits = 2.0 * (tastes[who] * kinds[what]).sum(axis=1)
    labels = (rng.random(rows) < 0.5 + 0.5 * np.tanh(suits / 2)).astype(np.float64)
    ids = tuple(f"event{row}" for row in range(rows))

    def table(columns: np.ndarray, prefix: str, marks: np.ndarray | None) -> Table:
        names = tuple(f"{prefix}{place}" for place in range(columns.shape[1]))
        return Table(ids, columns, names, marks)

    return table(user_columns[who], "user", labels), table(item_columns[what], "item", None)
