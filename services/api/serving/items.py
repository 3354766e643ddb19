"""The items as recommendations see them: features, embedding rows and retrieval vectors, always in step.

Belongs to one event loop and does no I/O: others hand in what changed (``follow.py``). All of a generation's
vectors are encoded by the same dense weights; the next generation is built beside it and then swapped in, so
whoever reads between two awaits sees one generation from end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from featurestore.encoded import Keys
from featurestore.online import Cell
from models.index import VectorIndex
from models.parameters import RETRIEVAL
from models.training import RecommenderModel
from services.api.serving.popular import Popular
from services.api.serving.rows import KeyIndex, RowStore
from services.catalogue import Catalogue
from services.columns import Column
from services.parameter_server.types import DenseSnapshot, Rows

RowNumbers = npt.NDArray[np.int64]


class Generation:
    """Vectors of all items under one set of dense weights. ``dirty`` rows are still to be encoded."""

    def __init__(self, dense: DenseSnapshot, index: VectorIndex, items: int) -> None:
        self.dense = dense
        self.index = index
        self._dirty: Column[np.bool_] = Column(np.bool_)
        self._encoded: Column[np.bool_] = Column(np.bool_)
        self.mark(np.arange(items, dtype=np.int64), items)

    def mark(self, rows: RowNumbers, items: int) -> None:
        """``rows`` changed, of ``items`` there are."""
        self._dirty.grow(items)
        self._encoded.grow(items)
        self._dirty.values[rows] = True

    def take(self, most: int) -> RowNumbers:
        """Up to ``most`` dirty rows, which are then no longer dirty."""
        rows: RowNumbers = np.flatnonzero(self._dirty.values)[:most]
        self._dirty.values[rows] = False
        return rows

    def put(self, rows: RowNumbers, vectors: Rows) -> None:
        """Set the vectors ``[M, d]`` of ``rows``."""
        self.index.update(rows, vectors)
        self._encoded.values[rows] = True

    @property
    def encoded(self) -> npt.NDArray[np.bool_]:
        """Which rows of the index ``[len(index)]`` have a vector."""
        return self._encoded.values[: len(self.index)]


class ItemState:
    """The catalogue with its rows and vectors. ``catalogue`` is read by others, changed only from here."""

    def __init__(self, catalogue: Catalogue, model: RecommenderModel) -> None:
        self.catalogue = catalogue
        self.model = model
        self.rows = RowStore({table.name: table.dim for table in model.needs.tables})
        self.popular = Popular(catalogue)
        self.current: Generation | None = None
        self._next: Generation | None = None
        self._own = KeyIndex()

    def apply_cells(self, ids: Sequence[str], cells: Sequence[Mapping[str, Cell]], now_ms: int) -> None:
        """Take over the stored cells of some items, known ones or new ones."""
        before = len(self.catalogue)
        rows = self.catalogue.apply(ids, cells, now_ms)
        items = self.catalogue.encoded(rows, now_ms)
        new = rows[rows >= before]
        if len(new):
            self._own.add(self.catalogue.keys[new], new)
        self.rows.watch(np.concatenate(list(self.model.item_keys(items).values())))
        self.popular.touch(rows)
        self._mark(rows)

    def apply_rows(self, table: str, keys: Keys, rows: Rows) -> None:
        """Take over changed embedding rows. An item whose own row changed is encoded anew at once; rows that
        items share (categories) take effect with the next generation."""
        watched = self.rows.update(table, keys, rows)
        if table == RETRIEVAL and len(watched):
            items = self._own.find(watched)
            self._mark(items[items >= 0])

    def own_rows(self, keys: Keys) -> RowNumbers:
        """The rows of the items that ``keys`` (of item ids) name; unknown ones are left out."""
        rows = self._own.find(keys)
        return rows[rows >= 0]

    def begin(self, dense: DenseSnapshot) -> None:
        """Start to build the vectors of newer dense weights."""
        dim = next(table.dim for table in self.model.needs.tables if table.name == RETRIEVAL)
        generation = Generation(dense, VectorIndex(dim), len(self.catalogue))
        self._next = generation
        if self.current is None:
            self._swap()

    @property
    def newest_generation(self) -> int | None:
        """The generation that is being built or else served; None before the first."""
        newest = self._next or self.current
        return None if newest is None else newest.dense.generation

    @property
    def building(self) -> bool:
        """Whether a next generation is on its way."""
        return self._next is not None

    def encode_served(self, most: int, now_ms: int) -> bool:
        """Encode up to ``most`` changed items of the served generation; False when nothing was to do."""
        return self.current is not None and self._encode_some(self.current, most, now_ms)

    def build_next(self, most: int, now_ms: int) -> bool:
        """Encode up to ``most`` items of the next generation, and swap it in once it lacks none; False when
        nothing is being built."""
        if self._next is None:
            return False
        if not self._encode_some(self._next, most, now_ms):
            self._swap()
        return True

    def _encode_some(self, generation: Generation, most: int, now_ms: int) -> bool:
        rows = generation.take(most)
        if len(rows):
            self._encode(generation, rows, now_ms)
        return len(rows) > 0

    def _swap(self) -> None:
        self.current, self._next = self._next, None

    def _mark(self, rows: RowNumbers) -> None:
        for generation in (self.current, self._next):
            if generation is not None:
                generation.mark(rows, len(self.catalogue))

    def _encode(self, generation: Generation, rows: RowNumbers, now_ms: int) -> None:
        items = self.catalogue.encoded(rows, now_ms)
        keys = self.model.item_keys(items)[RETRIEVAL]
        values, _ = self.rows.gather(RETRIEVAL, keys)
        vectors = self.model.encode_items(items, {RETRIEVAL: values}, generation.dense.values)
        generation.put(rows, vectors)
