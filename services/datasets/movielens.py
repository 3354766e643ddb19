"""MovieLens-100K, read from either of its two packagings into the same records.

The data set: F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM
Transactions on Interactive Intelligent Systems 5, 4. 943 users, 1,682 films, 100,000 ratings from 1 to 5.

Both packagings hold the ratings in the same order, which settles ties of time. A film's title and year are
written together in one (``Toy Story (1995)``) and apart in the other; one rule reads both. The category
``unknown`` says that there is none, so it becomes no category.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.datasets.dataset import Attribute, Dataset, Entities, ratings
from services.datasets.errors import DatasetDamaged

NAME: Final = "ml-100k"
GENRES: Final = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
"""In the order of the flags in GroupLens' ``u.item``."""

DIGEST: Final = "45e213b7c95842da3eb943a3b54ac301e9c11c044ad541e11c3aa6a379870ac2"
"""``Dataset.digest`` of the genuine data, whichever packaging it was read from."""

_WHEEL_FOLDER: Final = "recbole/dataset_example/ml-100k/ml-100k"
# "(V)" marks a film made for video; the other packaging took it for the year.
_TITLE: Final = re.compile(r"(?P<title>.*?)\s*(?:\((?P<year>\d{4})\))?\s*(?:\(V\))?\s*", re.DOTALL)
_RATING_COLUMNS: Final = 4


def read_grouplens(archive: bytes) -> Dataset:
    """Read GroupLens' ``ml-100k.zip``. Raises DatasetDamaged."""
    data, item, user = _members(archive, ("ml-100k/u.data", "ml-100k/u.item", "ml-100k/u.user"))
    users = [line.split("|") for line in user.decode("latin-1").splitlines()]
    films = [line.split("|") for line in item.decode("latin-1").splitlines()]
    if {len(row) for row in films} != {5 + len(GENRES)}:
        raise DatasetDamaged("u.item has rows with other than 24 fields")
    items = [
        _film(row[0], row[1], [genre for genre, flag in zip(GENRES, row[5:], strict=True) if flag == "1"])
        for row in films
    ]
    return _dataset("GroupLens", _users(users), items, data)


def read_wheel(archive: bytes) -> Dataset:
    """Read the copy inside the wheel of ``recbole`` 1.2.1. Raises DatasetDamaged."""
    parts = _members(archive, tuple(f"{_WHEEL_FOLDER}.{kind}" for kind in ("inter", "item", "user")))
    # Each begins with a line that names its columns.
    data, item, user = (part.partition(b"\n")[2] for part in parts)
    users = [line.split("\t") for line in user.decode().splitlines()]
    films = [line.split("\t") for line in item.decode().splitlines()]
    if {len(row) for row in films} != {4}:
        raise DatasetDamaged("ml-100k.item has rows with other than 4 fields")
    items = [_film(row[0], _joined(row[1], row[2]), row[3].split(" ")) for row in films]
    return _dataset("recbole wheel", _users(users), items, data)


def _members(archive: bytes, names: Sequence[str]) -> list[bytes]:
    try:
        with zipfile.ZipFile(BytesIO(archive)) as opened:
            return [opened.read(name) for name in names]
    except (zipfile.BadZipFile, KeyError) as error:
        raise DatasetDamaged(f"the archive cannot be read: {error}") from error


def _joined(title: str, year: str) -> str:
    """Title and year as GroupLens writes them."""
    return "unknown" if title == "unkonwn" else f"{title} ({year})"


def _film(id_: str, title_and_year: str, genres: Sequence[str]) -> tuple[str, Mapping[str, Attribute]]:
    match = _TITLE.fullmatch(title_and_year)
    assert match is not None, "every text matches"
    year = match["year"]
    attributes: dict[str, Attribute] = {
        "title": " ".join(match["title"].split()),
        "categories": [genre for genre in GENRES if genre in genres and genre != "unknown"],
    }
    return id_, attributes | ({"year": int(year)} if year else {})


def _users(rows: Sequence[Sequence[str]]) -> list[tuple[str, Mapping[str, Attribute]]]:
    try:
        return [
            (id_, {"age": int(age), "gender": gender, "occupation": occupation})
            for id_, age, gender, occupation, _zip_code in rows
        ]
    except ValueError as error:
        raise DatasetDamaged(f"the users cannot be read: {error}") from error


def _dataset(
    source: str,
    users: Sequence[tuple[str, Mapping[str, Attribute]]],
    items: Sequence[tuple[str, Mapping[str, Attribute]]],
    data: bytes,
) -> Dataset:
    try:
        table = np.array(data.split(), dtype=np.int64).reshape(-1, _RATING_COLUMNS)
    except ValueError as error:
        raise DatasetDamaged(f"the ratings cannot be read: {error}") from error
    seen = ratings(
        NAME,
        _index(table[:, 0], [id_ for id_, _ in users]),
        _index(table[:, 1], [id_ for id_, _ in items]),
        table[:, 2].astype(np.float64),
        table[:, 3] * 1_000,
    )
    return Dataset(NAME, source, _entities(users), _entities(items), seen)


def _entities(rows: Sequence[tuple[str, Mapping[str, Attribute]]]) -> Entities:
    return Entities(tuple(id_ for id_, _ in rows), tuple(attributes for _, attributes in rows))


def _index(numbers: NDArray[np.int64], ids: Sequence[str]) -> NDArray[np.int32]:
    """Where each of ``numbers`` stands among ``ids``."""
    known = np.array(ids, dtype=np.int64)
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known[order], numbers), len(known) - 1)
    if not np.array_equal(known[order][place], numbers):
        raise DatasetDamaged("a rating names a user or a film that the data set lacks")
    return order[place].astype(np.int32)
