"""All items in memory, as columns: what the processor samples from and the API recommends from.

It follows the online store: ``refresh`` applies what changed since the last time. Counters are kept as sums
with a reference time, so that popularity can be had as of any moment without touching the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from featurestore import counters
from featurestore.encoded import Encoded, Keys, Ragged
from featurestore.encoder import Encoder, standardise
from featurestore.online import Cell, EntityKey, OnlineStore
from services.columns import Column, RaggedColumn

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

ENTITY: Final = "item"
DELETED: Final = "deleted"
"""The cell that marks a deleted item. It keeps its row for ever, hidden."""
HIDDEN: Final = "hidden"
"""A client's attribute: true keeps the item out of every list."""
EXPIRES: Final = "expires_at_ms"
"""A client's attribute: the moment (Unix ms) from which on the item is kept out of every list."""
FIRST_SEEN: Final = "@first_seen_ms"
"""When the item became known (Unix ms, acceptance time)."""
CATEGORIES: Final = "categories"

ITEM_KEYS: Final = "item_id"
"""The key space of items: users' seen lists and recent items hold keys of it."""

_NEVER: Final = np.iinfo(np.int64).max
_CHUNK: Final = 4_096


class _Growing(Protocol):
    def grow(self, rows: int) -> None: ...


def key_function(encoder: Encoder, space: str) -> Callable[[Sequence[str]], Keys]:
    """The function from texts to keys of ``space``: the encoder's, or one alike if the schema lacks it."""
    if any(feature.name == space and not feature.is_numeric for feature in encoder.schema.features):
        return partial(encoder.keys, space)
    prefix = space.encode() + b"\0"
    digest = xxhash.xxh3_64_intdigest
    return lambda texts: np.fromiter((digest(prefix + t.encode()) for t in texts), np.uint64, len(texts))


class Catalogue:
    """Every known item by row number: rows are given out in order of arrival and never move.

    Not thread-safe: one thread refreshes and reads. Shapes: N items, M asked for, H half-lives.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._cursor = 0
        columns = encoder.schema.columns(ENTITY)
        self._half_lives = encoder.schema.half_lives(ENTITY)
        half_life_column = {half_life: n for n, half_life in enumerate(self._half_lives)}
        self._counters = [
            (n, feature, half_life_column[feature.half_life_s])
            for n, feature in enumerate(columns.numeric)
            if feature.kind == "counter"
        ]
        categorical, numeric, lists = columns.width
        self._categorical = Column(np.uint64, categorical)
        self._numeric = Column(np.float32, numeric)
        self._lists = tuple(RaggedColumn() for _ in range(lists))
        self._categories = RaggedColumn()
        self._keys = Column(np.uint64)
        self._hidden = Column(np.bool_)
        self._expires_ms = Column(np.int64)
        self._first_seen_ms = Column(np.int64)
        self._counted_ms = Column(np.int64)
        self._counts = Column(np.float64, len(self._half_lives) + 1)
        self._columns: tuple[_Growing, ...] = (
            self._categorical, self._numeric, self._keys, self._hidden, self._expires_ms,
            self._first_seen_ms, self._counted_ms, self._counts, self._categories, *self._lists,
        )  # fmt: skip
        self._hash_items = key_function(encoder, ITEM_KEYS)
        self._hash_categories = key_function(encoder, CATEGORIES)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[str]:
        """The id of each row ``[N]``. It grows in place; do not change it."""
        return self._ids

    @property
    def keys(self) -> Keys:
        """The key of each item's id ``[N]``, as the users' seen lists hold it."""
        return self._keys.values

    @property
    def hidden(self) -> Mask:
        """Which items ``[N]`` are hidden or deleted, expiry aside."""
        return self._hidden.values

    @property
    def first_seen_ms(self) -> Rows:
        """When each item became known ``[N]`` (Unix ms; 0 where nobody recorded it)."""
        return self._first_seen_ms.values

    def row(self, item_id: str) -> int | None:
        """The row of an item, None if it is unknown."""
        return self._row_of.get(item_id)

    def rows(self, item_ids: Sequence[str]) -> Rows:
        """The rows ``[M]`` of M items, -1 where unknown."""
        find = self._row_of.get
        return np.fromiter((find(item, -1) for item in item_ids), np.int64, count=len(item_ids))

    def key_of(self, item_id: str) -> int:
        """The key of a known item's id. Raises KeyError if it is unknown."""
        return int(self._keys.values[self._row_of[item_id]])

    def available(self, now_ms: int) -> Mask:
        """Which items ``[N]`` may be shown: neither hidden, deleted nor expired."""
        mask: Mask = ~self._hidden.values & (self._expires_ms.values > now_ms)
        return mask

    def in_categories(self, names: Sequence[str]) -> Mask:
        """Which items ``[N]`` are in at least one of the named categories."""
        return self._categories.holding(self._hash_categories(names))

    def categories(self, rows: Rows) -> Ragged:
        """The categories of M items as keys (of all categories, whatever the schema encodes)."""
        return self._categories.take(rows)

    def counts(self, now_ms: int | Rows, rows: Rows | None = None) -> Floats:
        """Decayed likes as of ``now_ms``, ``[N or M, H + 1]``: the schema's half-lives in order, the total
        last. Use ``half_lives`` for the order."""
        picked = slice(None) if rows is None else rows
        decayed = counters.Decayed(self._counted_ms.values[picked], self._counts.values[picked])
        return counters.at(decayed, now_ms, self._half_lives)

    @property
    def half_lives(self) -> tuple[float, ...]:
        """The half-lives (seconds) of the columns of ``counts``."""
        return self._half_lives

    def popularity(self, half_life_s: float, now_ms: int) -> Floats:
        """Decayed likes ``[N]`` at the schema's half-life closest to ``half_life_s``."""
        if not self._half_lives:
            return self._counts.values[:, -1]
        column = min(range(len(self._half_lives)), key=lambda n: abs(self._half_lives[n] - half_life_s))
        return self.counts(now_ms)[:, column]

    def encoded(self, rows: Rows, now_ms: int) -> Encoded:
        """The features of M items, counters as of ``now_ms``; the rest as of when the item last changed."""
        numeric = self._numeric.values[rows]
        if self._counters:
            counts = self.counts(now_ms, rows)
            for column, feature, half_life in self._counters:
                numeric[:, column] = standardise(feature, counts[:, half_life])
        return Encoded(self._categorical.values[rows], numeric, tuple(r.take(rows) for r in self._lists))

    def refresh(self, store: OnlineStore, now_ms: int, most: int | None = None) -> Rows:
        """Apply what changed in ``store`` since the last call; returns the rows that changed, ascending.

        Works in bounded chunks, at most about ``most`` items (all if None; call again to go on). Raises
        StoreUnavailable, and then goes on from where it was at the next call.
        """
        changed: list[Rows] = []
        done = 0
        while most is None or done < most:
            ids, cursor = store.changes(ENTITY, self._cursor, _CHUNK)
            if ids:
                cells = store.read([EntityKey(ENTITY, item) for item in ids])
                changed.append(self.apply(ids, cells, now_ms))
            self._cursor = cursor
            done += len(ids)
            if len(ids) < _CHUNK:
                break
        return np.unique(np.concatenate(changed)) if changed else np.zeros(0, np.int64)

    def apply(self, ids: Sequence[str], cells: Sequence[Mapping[str, Cell]], now_ms: int) -> Rows:
        """Take over the stored cells of M items (each once); returns their rows. No cells at all: deleted."""
        known = len(self._ids)
        rows = self._place(ids)
        self._write_features(rows, self.encoder.encode(ENTITY, ids, cells, now_ms))
        self._hidden.values[rows] = [_is_hidden(row) for row in cells]
        self._expires_ms.values[rows] = [_integer(row, EXPIRES, _NEVER) for row in cells]
        first_seen = np.fromiter((_integer(row, FIRST_SEEN, 0) for row in cells), np.int64, count=len(rows))
        # A local guess made by `add` stands until the store knows better.
        self._first_seen_ms.values[rows] = np.where(
            first_seen > 0, first_seen, np.where(rows < known, self._first_seen_ms.values[rows], 0)
        )
        self._write_categories(rows, cells)
        self._write_counts(rows, cells)
        return rows

    def add(self, ids: Sequence[str], now_ms: int) -> Rows:
        """Make room for new items (each once, none known) of which nothing is known but their ids."""
        empty: Mapping[str, Cell] = {FIRST_SEEN: Cell(now_ms, now_ms)}
        return self.apply(ids, [empty] * len(ids), now_ms)

    def count(self, rows: Rows, time_ms: Rows, amount: Floats) -> None:
        """Count E likes of items ``rows`` ``[E]`` here, ahead of the store's word for it at ``time_ms``."""
        touched, event_row = np.unique(rows, return_inverse=True)
        counts = counters.Counts(
            np.zeros(len(touched), np.uint64),
            np.full(len(touched), -1, np.int64),
            counters.Decayed(self._counted_ms.values[touched], self._counts.values[touched]),
        )
        offsets = np.zeros(len(rows), np.int64)
        counts = counters.add(counts, event_row, time_ms, offsets, amount, log=0, half_lives=self._half_lives)
        self._counted_ms.values[touched] = counts.decayed.time_ms
        self._counts.values[touched] = counts.decayed.values

    def _place(self, ids: Sequence[str]) -> Rows:
        """The rows of ``ids``, making new ones where needed."""
        for item in ids:
            if item not in self._row_of:
                self._row_of[item] = len(self._ids)
                self._ids.append(item)
        for column in self._columns:
            column.grow(len(self._ids))
        rows = self.rows(ids)
        self._keys.values[rows] = self._hash_items(ids)
        return rows

    def _write_features(self, rows: Rows, encoded: Encoded) -> None:
        self._categorical.values[rows] = encoded.categorical
        self._numeric.values[rows] = encoded.numeric
        for column, lists in zip(self._lists, encoded.lists, strict=True):
            column.put(rows, lists)

    def _write_categories(self, rows: Rows, cells: Sequence[Mapping[str, Cell]]) -> None:
        names = [_texts(row, CATEGORIES) for row in cells]
        offsets = np.zeros(len(names) + 1, np.int64)
        np.cumsum([len(of) for of in names], out=offsets[1:])
        flat = [name for of in names for name in of]
        self._categories.put(rows, Ragged(self._hash_categories(flat), offsets))

    def _write_counts(self, rows: Rows, cells: Sequence[Mapping[str, Cell]]) -> None:
        """Sum the partitions' counts of each item, as of the newest among them."""
        found = [
            (n, cell.value)
            for n, row in enumerate(cells)
            for name, cell in row.items()
            if name.startswith(counters.PREFIX) and isinstance(cell.value, bytes)
        ]
        where = np.fromiter((n for n, _ in found), np.int64, count=len(found))
        stored = counters.decode([value for _, value in found], self._half_lives).decayed
        newest = np.zeros(len(rows), np.int64)
        np.maximum.at(newest, where, stored.time_ms)
        sums = np.zeros((len(rows), len(self._half_lives) + 1))
        np.add.at(sums, where, counters.at(stored, newest[where], self._half_lives))
        self._counted_ms.values[rows] = newest
        self._counts.values[rows] = sums


def _is_hidden(row: Mapping[str, Cell]) -> bool:
    if not row:
        return True
    return any(name in row and row[name].value is True for name in (DELETED, HIDDEN))


def _integer(row: Mapping[str, Cell], name: str, default: int) -> int:
    value = row[name].value if name in row else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return int(min(max(value, 0), float(2**62)))


def _texts(row: Mapping[str, Cell], name: str) -> Sequence[str]:
    value = row[name].value if name in row else None
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
