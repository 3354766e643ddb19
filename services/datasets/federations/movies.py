"""Ratings by user: every user is a client who learns which films it likes; nobody's ratings are pooled."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from services.datasets.dataset import Dataset
from services.datasets.federations.liked import read_liked
from services.datasets.federations.owned import Owned, last_of_each

View = Literal["genres", "items", "liked"]
LIKED_FROM: Final = 4.0
_HELD_OUT: Final = 0.2


def read_ratings(dataset: Dataset, view: View = "genres") -> Owned:
    """Whether a film is liked (a rating of at least 4): two classes.

    ``genres``: inputs float32 [N, G + 1] are the film's categories, by alphabet, and its year, standardised
    over the films (0 where unknown). ``items``: inputs int32 [N, 1] are the film's number. The latest fifth of each
    user's ratings is held out. ``liked``: what the model ``items`` learns from, see ``read_liked``.
    """
    if view == "liked":
        return read_liked(dataset)
    seen = dataset.interactions
    labels = (seen.value >= LIKED_FROM).astype(np.int64)
    owners = seen.user.astype(np.int64)
    # Users without a rating are no clients.
    present, owners = np.unique(owners, return_inverse=True)
    inputs: npt.NDArray[np.float32] | npt.NDArray[np.int32] = (
        item_features(dataset)[seen.item] if view == "genres" else seen.item[:, None]
    )
    return Owned(
        dataset.name,
        inputs,
        labels,
        2,
        owners.astype(np.int64),
        [dataset.users.ids[user] for user in present],
        held_out=last_of_each(owners, seen.timestamp_ms, _HELD_OUT),
        source=dataset.source,
    )


def item_features(dataset: Dataset) -> npt.NDArray[np.float32]:
    """What is public of each item [I, G + 1]: its categories as 0 or 1, and its standardised year."""
    categories = [
        value if isinstance(value := attributes.get("categories"), list) else []
        for attributes in dataset.items.attributes
    ]
    names = sorted({name for item in categories for name in item})
    features = np.zeros((len(dataset.items), len(names) + 1), np.float32)
    place = {name: column for column, name in enumerate(names)}
    for row, item in enumerate(categories):
        features[row, [place[name] for name in item]] = 1.0
    years = np.array(
        [
            float(value) if isinstance(value := attributes.get("year"), int | float) else np.nan
            for attributes in dataset.items.attributes
        ]
    )
    known = np.isfinite(years)
    if known.any() and years[known].std() > 0.0:
        features[known, -1] = (years[known] - years[known].mean()) / years[known].std()
    return features
