"""Embedding rows of the items' keys, kept in memory as columns: what ranking and re-encoding gather from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from featurestore.encoded import Keys
from services.columns import Column

Slots = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class KeyIndex:
    """From 64-bit keys to numbers. Lookups are vectorised; adding costs a copy, so add many at once."""

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(0, np.uint64)
        self._numbers: Slots = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Keys) -> Slots:
        """The numbers ``[N]`` of N keys, -1 where a key is unknown."""
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        numbers: Slots = np.where(self._keys[at] == keys, self._numbers[at], -1)
        return numbers

    def add(self, keys: Keys, numbers: Slots) -> None:
        """Add ``keys`` ``[N]``, none of them known, each once, with their numbers."""
        order = np.argsort(keys)
        at = np.searchsorted(self._keys, keys[order])
        self._keys = np.insert(self._keys, at, keys[order])
        self._numbers = np.insert(self._numbers, at, numbers[order])


class RowStore:
    """The newest row of every watched key, per table. Keys are watched for ever: there are as many as the
    catalogue has values. Shapes: N keys, d the table's width."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        self._index = KeyIndex()
        self._values = {table: Column(np.float32, dim) for table, dim in dims.items()}
        self._known = {table: Column(np.bool_) for table in dims}
        self._wanted: list[Keys] = []

    def __len__(self) -> int:
        return len(self._index)

    def watch(self, keys: Keys) -> None:
        """Keep rows for ``keys`` from now on. Those new here are asked for by ``unknown``."""
        new = np.unique(keys)
        new = new[self._index.find(new) < 0]
        if not len(new):
            return
        first = len(self._index)
        self._index.add(new, np.arange(first, first + len(new), dtype=np.int64))
        for values, known in zip(self._values.values(), self._known.values(), strict=True):
            values.grow(len(self._index))
            known.grow(len(self._index))
        self._wanted.append(new)

    def unknown(self) -> Keys:
        """Watched keys of which a row has not come yet ``[N]``; ``fill`` takes the rows."""
        if not self._wanted:
            return np.zeros(0, np.uint64)
        keys: Keys = np.concatenate(self._wanted)
        slots = self._index.find(keys)
        missing = np.zeros(len(keys), bool)
        for column in self._known.values():
            missing |= ~column.values[slots]
        keys = keys[missing]
        self._wanted = [keys] if len(keys) else []
        return keys

    def fill(self, keys: Keys, rows: Mapping[str, Floats]) -> None:
        """Take rows ``[N, d]`` per table that were asked for. What the change stream brought meanwhile is at
        least as new, and stays."""
        slots = self._index.find(keys)
        for table, values in rows.items():
            known = self._known[table].values
            late = ~known[slots]
            self._values[table].values[slots[late]] = values[late]
            known[slots] = True

    def update(self, table: str, keys: Keys, rows: Floats) -> Keys:
        """Take changed rows ``[N, d]`` of one table; returns the watched ones among the keys."""
        slots = self._index.find(keys)
        watched = slots >= 0
        self._values[table].values[slots[watched]] = rows[watched]
        self._known[table].values[slots[watched]] = True
        return keys[watched]

    def gather(self, table: str, keys: Keys) -> tuple[Floats, Mask]:
        """Rows ``[N, d]`` of ``keys`` (0 where unwatched), and which are watched ``[N]``."""
        slots = self._index.find(keys)
        watched = slots >= 0
        rows = np.zeros((len(keys), self._values[table].values.shape[1]), np.float32)
        rows[watched] = self._values[table].values[slots[watched]]
        return rows, watched
