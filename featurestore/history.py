"""The history of feature values in the offline log, and entities as they were at a moment.

A value is kept in the column of its type, so that any Parquet reader can use it, and comes back as a cell
that encodes to the same keys and numbers: whole numbers return as floats and true as ``"true"``, which the
encoder does not tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from featurestore.as_of import as_of
from featurestore.encoder import text_of
from featurestore.offline import POSITION_FIELDS, TIME
from featurestore.online import Cell, EntityKey, Value

HISTORY: Final = pa.schema(
    [
        (TIME, pa.int64()),
        ("accepted_at_ms", pa.int64()),
        ("entity", pa.string()),
        ("id", pa.string()),
        ("feature", pa.string()),
        ("number", pa.float64()),
        ("text", pa.string()),
        ("texts", pa.list_(pa.string())),
        ("data", pa.binary()),
        ("ttl_ms", pa.int64()),
        *POSITION_FIELDS,
    ]
)
_VALUES: Final = ("number", "text", "texts", "data")
_EXACT: Final = 2**53


@dataclass(frozen=True, slots=True)
class Written:
    """The cells that one message of the log set, and where that message stands."""

    rows: Mapping[EntityKey, Mapping[str, Cell]]
    accepted_at_ms: int
    log: str
    partition: int
    offset: int


def history_columns(messages: Iterable[Written]) -> dict[str, list[object]]:
    """What ``messages`` wrote, as columns for an ``OfflineLog`` of the schema ``HISTORY``."""
    columns: dict[str, list[object]] = {name: [] for name in HISTORY.names}
    for message in messages:
        cells = [(key, name, cell) for key, row in message.rows.items() for name, cell in row.items()]
        for position, (key, name, cell) in enumerate(cells):
            stored = dict.fromkeys(_VALUES) | _typed(cell.value)
            values = {
                TIME: cell.event_time_ms, "accepted_at_ms": message.accepted_at_ms, "entity": key.entity,
                "id": key.id, "feature": name, "ttl_ms": cell.ttl_ms, "log": message.log,
                "partition": message.partition, "offset": message.offset, "position": position, **stored,
            }  # fmt: skip
            for column, value in values.items():
                columns[column].append(value)
    return columns


def rows_as_of(
    history: pa.Table,
    entity: str,
    ids: Sequence[str],
    time_ms: npt.NDArray[np.int64],
    features: Sequence[str],
    *,
    inclusive: bool = True,
) -> list[dict[str, Cell]]:
    """What was known of each of Q entities at its own moment, ready for ``Encoder.encode(..., time_ms)``.

    Shapes: ids and time_ms ``[Q]``. A value counts from when it had both happened and been accepted, so a
    late event is not seen earlier than serving saw it. ``inclusive``: see ``as_of``.
    """
    entities = history.column("entity").to_numpy()
    names = history.column("feature").to_numpy()
    encoded = history.column("id").combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    known = {id: code for code, id in enumerate(encoded.dictionary.to_pylist())}
    query = np.fromiter((known.get(id, -1) for id in ids), np.int64, count=len(ids))
    times, accepted = history.column(TIME).to_numpy(), history.column("accepted_at_ms").to_numpy()
    rows: list[dict[str, Cell]] = [{} for _ in ids]
    for feature in features:
        of = np.flatnonzero((entities == entity) & (names == feature))
        found = as_of(codes[of], times[of], query, time_ms, visible_ms=accepted[of], inclusive=inclusive)
        hits = np.flatnonzero(found >= 0)
        picked, where = np.unique(of[found[hits]], return_inverse=True)
        cells = _cells(history.take(pa.array(picked)))
        for row, cell in zip(hits.tolist(), where.tolist(), strict=True):
            rows[row][feature] = cells[cell]
    return rows


def _typed(value: Value) -> dict[str, object]:
    """The one column that keeps ``value`` (none for None)."""
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) > _EXACT):
        return {"text": text_of(value)}
    if isinstance(value, int | float):
        return {"number": float(value)}
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, bytes):
        return {"data": value}
    return {} if value is None else {"texts": [text_of(part) for part in value]}


def _cells(table: pa.Table) -> list[Cell]:
    columns = [table.column(name).to_pylist() for name in (*_VALUES, TIME, "ttl_ms")]
    cells = []
    for *values, time_ms, ttl_ms in zip(*columns, strict=True):
        cells.append(Cell(next((v for v in values if v is not None), None), time_ms, ttl_ms))
    return cells
