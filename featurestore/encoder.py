"""From stored cells to what models see: keys, standardised numbers, lists of keys.

Processor, trainer, serving and the federated clients all encode by this one. Rows are read in plain
Python (they arrive as mappings); everything after the extraction of a column is vectorised. ``xxhash`` is
imported by the first value that has to be hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from featurestore import counters
from featurestore.encoded import MISSING, Encoded, Keys, Numbers, Ragged
from featurestore.feature import ID_SOURCE, Feature, SchemaError, suggestion
from featurestore.online import Cell
from featurestore.schema import Schema

Rows = Sequence[Mapping[str, Cell]]
Times = npt.NDArray[np.int64]

CLIP: Final = 8.0
"""Standardised numbers end here on both sides, so that one absurd value cannot wreck a model."""
_PREFIX_LENGTH: Final = len(counters.PREFIX)


class Encoder:
    """Encodes entities by ``schema``. Thread-safe; remembers up to 2 · ``cache_size`` keys per key space."""

    def __init__(self, schema: Schema, cache_size: int = 131_072) -> None:
        self.schema = schema
        keyed = sorted((f for f in schema.features if not f.is_numeric), key=lambda f: f.table is None)
        self._key_spaces = {f.name: f.key_space for f in keyed}  # the name's owner last, so that it wins
        self._caches = {space: _KeyCache(space, cache_size) for space in set(self._key_spaces.values())}

    def width(self, entity: str) -> tuple[int, int, int]:
        """(C, D, L): how many categorical and numeric columns and lists the entity has."""
        return self.schema.columns(entity).width

    def key(self, feature_name: str, value: object) -> int:
        """The 64-bit key of a categorical value: xxh3_64 of the key space's name, NUL and the text.

        The empty text is no value: its key is MISSING.
        """
        return self._cache(feature_name)[text_of(value)]

    def keys(self, feature_name: str, values: Sequence[object]) -> Keys:
        """The keys ``[N]`` of N values. Raises SchemaError for a feature without keys."""
        cache = self._cache(feature_name)
        return cache.keys([value if type(value) is str else text_of(value) for value in values])

    def encode(self, entity: str, ids: Sequence[str], rows: Rows, now_ms: int | Times) -> Encoded:
        """Encode N entities of one kind from their stored cells.

        ``now_ms`` (Unix ms; one moment, or ``[N]``) decides what has expired and how far counts decayed.
        Missing, expired and unusable values become the feature's default, so no row can fail. The order
        of columns is the schema's; numbers are clipped at ±8 standard deviations.
        """
        if len(ids) != len(rows):
            raise ValueError(f"{len(ids)} ids for {len(rows)} rows")
        columns = self.schema.columns(entity)
        now = np.broadcast_to(np.asarray(now_ms, np.int64), len(rows))
        times: list[int] = now.tolist()
        c, d, _ = columns.width
        categorical = np.empty((len(rows), c), np.uint64)
        for n, feature in enumerate(columns.categorical):
            categorical[:, n] = self._categorical(feature, ids, rows, times)
        numeric = np.empty((len(rows), d), np.float32)
        counts = self._counts(entity, rows, now)
        for n, feature in enumerate(columns.numeric):
            raw = counts[feature.half_life_s] if feature.kind == "counter" else _numbers(feature, rows, times)
            numeric[:, n] = standardise(feature, raw)
        lists = tuple(self._list(feature, rows, times) for feature in columns.lists)
        return Encoded(categorical, numeric, lists)

    def missing(self, entity: str) -> Encoded:
        """One entity of which nothing is known, not even its id."""
        return self.encode(entity, [""], [{}], 0)

    def cached_keys(self) -> int:
        """How many keys are remembered now, over all key spaces."""
        return sum(map(len, self._caches.values()))

    def _cache(self, feature_name: str) -> _KeyCache:
        space = self._key_spaces.get(feature_name)
        if space is None:
            hint = suggestion(feature_name, self._key_spaces)
            raise SchemaError(f"no categorical or list feature is named {feature_name!r}{hint}")
        return self._caches[space]

    def _categorical(self, feature: Feature, ids: Sequence[str], rows: Rows, times: list[int]) -> Keys:
        cache = self._caches[feature.key_space]
        if feature.source == ID_SOURCE:
            return cache.keys(ids)
        values = _values(feature.attribute, rows, times)
        default = str(feature.default or "")
        if not feature.buckets:
            return cache.keys([_text_or(value, default) for value in values])
        labels = [str(n) for n in range(len(feature.buckets) + 1)]
        numbers = _floats(values, np.nan)
        choices = np.append(cache.keys(labels), cache.keys([default]))
        bucket = np.searchsorted(feature.buckets, numbers, side="right")
        return choices[np.where(np.isnan(numbers), len(labels), bucket)]

    def _list(self, feature: Feature, rows: Rows, times: list[int]) -> Ragged:
        most = feature.max_values
        default = feature.default if isinstance(feature.default, tuple) else ()
        values = [
            value[-most:] if isinstance(value, list | tuple) else default
            for value in _values(feature.attribute, rows, times)
        ]
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, values), np.int64, count=len(values)), out=offsets[1:])
        texts = [value if type(value) is str else text_of(value) for value in chain.from_iterable(values)]
        return Ragged(self._caches[feature.key_space].keys(texts), offsets)

    def _counts(self, entity: str, rows: Rows, now: Times) -> dict[float, npt.NDArray[np.float64]]:
        """The counters ``[N]`` at ``now`` by half-life, summed over the partitions."""
        half_lives = self.schema.half_lives(entity)
        if not half_lives:
            return {}
        prefix, length = counters.PREFIX, _PREFIX_LENGTH
        found = [
            (n, cell.value)
            for n, row in enumerate(rows)
            for name, cell in row.items()
            if name[:length] == prefix and isinstance(cell.value, bytes)
        ]
        where = np.fromiter((n for n, _ in found), np.int64, count=len(found))
        stored = counters.decode([value for _, value in found], half_lives).decayed
        totals = np.zeros((len(rows), len(half_lives) + 1))
        np.add.at(totals, where, counters.at(stored, now[where], half_lives))
        return {half_life: totals[:, n] for n, half_life in enumerate(half_lives)}


def text_of(value: object) -> str:
    """The one text of a categorical value: ``5``, ``5.0`` and ``"5"`` are the same, true is ``"true"``."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _text_or(value: object, default: str) -> str:
    if type(value) is str:
        return value
    if isinstance(value, bool | int | float) and value == value:
        return text_of(value)
    return default


def _values(attribute: str, rows: Rows, times: list[int]) -> list[object]:
    """The unexpired value of each row, None where there is none."""
    cells = [row.get(attribute) for row in rows]
    return [
        None if cell is None or (cell.ttl_ms and cell.event_time_ms + cell.ttl_ms <= now) else cell.value
        for cell, now in zip(cells, times, strict=True)
    ]


def _floats(values: list[object], default: float) -> npt.NDArray[np.float64]:
    numbers = [value if type(value) is float or type(value) is int else default for value in values]
    try:
        array = np.array(numbers, np.float64)
    except OverflowError:  # an integer beyond any float: as good as unknown
        array = np.array([n if abs(n) < 1e300 else default for n in numbers], np.float64)
    return np.where(np.isfinite(array), array, default)


def _numbers(feature: Feature, rows: Rows, times: list[int]) -> npt.NDArray[np.float64]:
    """Raw numbers ``[N]``; NaN where the default is the mean."""
    default = float(feature.default) if isinstance(feature.default, int | float) else np.nan
    return _floats(_values(feature.attribute, rows, times), default)


def standardise(feature: Feature, raw: npt.NDArray[np.float64]) -> Numbers:
    """Raw values ``[N]`` of a number or counter as the model sees them; NaN becomes the mean (0)."""
    shaped = np.sign(raw) * np.log1p(np.abs(raw)) if feature.transform == "log1p" else raw
    scaled = np.nan_to_num((shaped - feature.mean) / feature.std, nan=0.0, posinf=CLIP, neginf=-CLIP)
    return np.clip(scaled, -CLIP, CLIP).astype(np.float32)


class _Generation(dict[str, int]):
    """Text to key, computing what is missing; looks into an older generation first."""

    def __init__(self, compute: Callable[[str], int], older: dict[str, int]) -> None:
        super().__init__()
        self._compute = compute
        self._older: dict[str, int] = older

    def __missing__(self, text: str) -> int:
        key = self._older.get(text)
        if key is None:
            key = self._compute(text)
        self[text] = key
        return key

    def size(self) -> int:
        return len(self) + len(self._older)

    def retire(self) -> dict[str, int]:
        """Become the older generation: forget the one before, so that generations do not chain."""
        self._older = {}
        return self


class _KeyCache:
    """Keys of one key space. A full generation becomes the older one, so what is in use survives."""

    def __init__(self, space: str, size: int) -> None:
        self._prefix = space.encode() + b"\0"
        self._size = size
        self._young = _Generation(self._compute, {})

    def __getitem__(self, text: str) -> int:
        return self._current()[text]

    def __len__(self) -> int:
        return self._young.size()

    def keys(self, texts: Sequence[str]) -> Keys:
        return np.fromiter(map(self._current().__getitem__, texts), np.uint64, count=len(texts))

    def _current(self) -> _Generation:
        # Threads may race to turn the generation: both results are valid, only some entries are lost.
        if len(self._young) >= self._size:
            self._young = _Generation(self._compute, self._young.retire())
        return self._young

    def _compute(self, text: str) -> int:
        if not text:
            return MISSING
        import xxhash  # an extra of the stack: clients that hash nothing run without it

        return xxhash.xxh3_64_intdigest(self._prefix + text.encode("utf-8", "surrogatepass"))
