"""A made-up data set of MovieLens-100K's shape, for where the real one cannot be reached.

Films have one to three genres, a quality and a season of fashion; users prefer a few genres, and rate within
a short visit. So there is something to learn: tastes, popularity, and popularity that moves with time. The
numbers mean nothing beyond that, and whoever shows results on it must say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.datasets.dataset import Attribute, Dataset, Entities, ratings
from services.datasets.movielens import GENRES

NAME: Final = "generated-100k"
_FILM_GENRES: Final = GENRES[1:]
_OCCUPATIONS: Final = (
    "administrator",
    "artist",
    "educator",
    "engineer",
    "librarian",
    "other",
    "programmer",
    "student",
)
_DAY_MS: Final = 86_400_000
_SPAN_DAYS: Final = 215
_START_MS: Final = 874_724_710_000
_LEAST_RATINGS: Final = 20


def generate(seed: int = 7, users: int = 943, items: int = 1_682, interactions: int = 100_000) -> Dataset:
    """A data set that depends on the arguments alone.

    No user rates a film twice, and each rates at least 20. Raises ValueError where that leaves no room.
    """
    if not users * _LEAST_RATINGS <= interactions <= users * items // 2:
        raise ValueError(f"{interactions} ratings do not fit {users} users and {items} items")
    rng = np.random.default_rng(seed)
    genres = _genres(rng, items)
    # A low concentration leaves most users with two or three genres that they seek out.
    taste = rng.dirichlet(np.full(len(_FILM_GENRES), 0.25), size=users)
    affinity = taste @ (genres / genres.sum(axis=1, keepdims=True)).T
    quality = rng.normal(size=items)
    fashion_day = rng.uniform(-30, _SPAN_DAYS, size=items)
    visit_day = np.sort(rng.uniform(0, _SPAN_DAYS - 2, size=users))
    counts = _counts(rng, users, items, interactions)

    weight = 8.0 * affinity + 0.9 * quality
    weight += 1.5 * np.exp(-(((visit_day[:, None] - fashion_day[None, :]) / 25.0) ** 2))
    # The largest of weight + Gumbel noise are a draw without replacement with probability ∝ exp(weight).
    order = np.argsort(-(weight + rng.gumbel(size=weight.shape)), axis=1)
    user = np.repeat(np.arange(users, dtype=np.int32), counts)
    place = np.arange(interactions) - np.repeat(np.cumsum(counts) - counts, counts)
    item = order[user, place].astype(np.int32)

    standing = (
        2.2 + 3.0 * affinity[user, item] + 0.5 * quality[item] + rng.normal(scale=0.8, size=interactions)
    )
    value = np.clip(np.rint(standing + 0.6), 1, 5)
    when = visit_day[user] + rng.exponential(0.3, size=interactions).clip(max=2.0)
    timestamp_ms = _START_MS + (when * _DAY_MS).astype(np.int64) // 1_000 * 1_000
    shuffled = rng.permutation(interactions)
    return Dataset(
        NAME,
        f"generated, seed {seed}",
        Entities(tuple(str(number) for number in range(1, users + 1)), _user_attributes(rng, users)),
        Entities(tuple(str(number) for number in range(1, items + 1)), _item_attributes(rng, genres)),
        ratings(NAME, user[shuffled], item[shuffled], value[shuffled], timestamp_ms[shuffled]),
        generated=True,
    )


def _genres(rng: np.random.Generator, items: int) -> NDArray[np.float64]:
    """float64[items, genres] of 0 and 1: one to three genres each, some genres much more common."""
    common = rng.dirichlet(np.full(len(_FILM_GENRES), 1.5))
    order = np.argsort(-(np.log(common) + rng.gumbel(size=(items, len(_FILM_GENRES)))), axis=1)
    number = rng.choice([1, 2, 3], size=items, p=[0.5, 0.33, 0.17])
    genres = np.zeros((items, len(_FILM_GENRES)))
    for rank in range(3):
        chosen = np.flatnonzero(number > rank)
        genres[chosen, order[chosen, rank]] = 1.0
    return genres


def _counts(rng: np.random.Generator, users: int, items: int, interactions: int) -> NDArray[np.int64]:
    """int64[users] that sum to ``interactions``: each from 20 to ``items``, most of them small."""
    spare = interactions - users * _LEAST_RATINGS
    counts = _LEAST_RATINGS + rng.multinomial(spare, rng.dirichlet(np.full(users, 0.8)))
    while (over := counts - items).max() > 0:
        surplus = int(over[over > 0].sum())
        counts = np.minimum(counts, items)
        room = items - counts
        counts += rng.multinomial(surplus, room / room.sum())
    return counts


def _user_attributes(rng: np.random.Generator, users: int) -> tuple[Mapping[str, Attribute], ...]:
    ages = rng.normal(34, 12, size=users).clip(7, 73).astype(int)
    genders = rng.choice(["F", "M"], size=users, p=[0.29, 0.71])
    occupations = rng.choice(_OCCUPATIONS, size=users)
    return tuple(
        {"age": int(age), "gender": str(gender), "occupation": str(occupation)}
        for age, gender, occupation in zip(ages, genders, occupations, strict=True)
    )


def _item_attributes(
    rng: np.random.Generator, genres: NDArray[np.float64]
) -> tuple[Mapping[str, Attribute], ...]:
    years = (1998 - rng.exponential(8.0, size=len(genres))).clip(1922, 1998).astype(int)
    names = [[_FILM_GENRES[column] for column in np.flatnonzero(row)] for row in genres]
    return tuple(
        {"title": f"Generated {' and '.join(kinds)} {number}", "categories": list(kinds), "year": int(year)}
        for number, (kinds, year) in enumerate(zip(names, years, strict=True), 1)
    )
