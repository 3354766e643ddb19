"""A party's own rows: ids, features, and labels where it has them."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MOST_COLUMNS: Final = 10_000
MOST_ROWS: Final = 50_000_000
_MISSING: Final = frozenset({"", "na", "n/a", "nan", "null"})
_DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,\d+")
NAMED: Final = 5
"""Examples in a message about wrong rows."""


class TableRefused(ValueError):
    """A file that is no table of this kind; the message names file, row and column."""


@dataclass(frozen=True, slots=True)
class Table:
    """N rows. ``ids``: N different, non-empty strings. ``features``: float64 [N, F], finite or NaN (missing).

    ``labels``: float64 [N], finite, or None at a party without. Raises ValueError where shapes differ.
    """

    ids: tuple[str, ...]
    features: npt.NDArray[np.float64]
    names: tuple[str, ...]
    labels: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        rows = len(self.ids)
        if self.features.shape != (rows, len(self.names)):
            raise ValueError(f"features {self.features.shape} of {rows} rows and {len(self.names)} names")
        if self.labels is not None and self.labels.shape != (rows,):
            raise ValueError(f"labels {self.labels.shape} of {rows} rows")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: npt.NDArray[np.int64]) -> Table:
        """The rows at these positions, in this order. Raises IndexError beyond the table."""
        labels = None if self.labels is None else self.labels[rows]
        ids = tuple(self.ids[row] for row in rows.tolist())
        return replace(self, ids=ids, features=self.features[rows], labels=labels)

    def only(self, names: Sequence[str]) -> Table:
        """These columns, in this order. Raises ValueError for one that is not there."""
        places = [self.names.index(name) for name in names]
        return replace(self, features=self.features[:, places], names=tuple(names))

    def align(self, ids: Sequence[str]) -> Table:
        """The rows of ``ids``, in that order (PSI's ordered intersection). Raises ValueError naming what is missing."""
        at = {one: row for row, one in enumerate(self.ids)}
        missing = [one for one in ids if one not in at]
        if missing:
            raise ValueError(f"{len(missing)} ids are not in the table, such as {missing[:NAMED]}")
        return self.take(np.array([at[one] for one in ids], np.int64))

    def digest(self) -> bytes:
        """32 bytes that are equal for the same ids in the same order."""
        hashed = hashlib.sha256()
        for one in self.ids:
            encoded = one.encode()
            hashed.update(len(encoded).to_bytes(4, "little") + encoded)
        return hashed.digest()

    def fingerprint(self) -> bytes:
        """32 bytes that differ for any other ids, names, features or labels. Never leaves the party."""
        hashed = hashlib.sha256(self.digest())
        hashed.update("\0".join(self.names).encode())
        hashed.update(np.ascontiguousarray(self.features).data)
        if self.labels is not None:
            hashed.update(np.ascontiguousarray(self.labels).data)
        return hashed.digest()


def read_table(
    path: Path,
    *,
    id_column: str | None = "id",
    label_column: str | None = None,
    features: Sequence[str] | None = None,
) -> Table:
    """The table in ``path`` (``.csv`` with a header, or ``.parquet``). ``features``: these columns, in this order; all
    others where that is left out.

    Without ``id_column`` rows are numbered from 1.
    An empty cell, ``NA``, ``N/A``, ``NaN`` or ``null`` is a missing feature. Raises TableRefused: not readable, a
    column that is not there, a cell that is no finite number, an empty or repeated id, a missing label.
    """
    try:
        columns = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except OSError as error:
        raise TableRefused(f"{path} cannot be read: {error.strerror or error}") from error
    for wanted in (id_column, label_column, *(features or ())):
        if wanted is not None and wanted not in columns:
            raise TableRefused(f"{path} has no column {wanted!r}; it has {', '.join(list(columns)[:20])}")
    if id_column is None:
        ids = tuple(str(row + 1) for row in range(len(next(iter(columns.values())))))
    else:
        ids = tuple(id_text(one, row, path).strip() for row, one in enumerate(columns.pop(id_column)))
    _check_ids(ids, path)
    labels = None
    if label_column is not None:
        try:
            labels = _numbers(columns.pop(label_column), label_column)
        except _NoNumbers as error:
            raise TableRefused(
                f"{path}, {error}. Labels are numbers: write 1 for yes, and 0 for no"
            ) from error
        if missing := np.flatnonzero(np.isnan(labels)).tolist():
            raise TableRefused(f"{path}: no label in rows {[row + 1 for row in missing[:NAMED]]}")
    names = tuple(columns) if features is None else tuple(features)
    if wrong := [name for name in names if name not in columns or names.count(name) > 1]:
        raise TableRefused(f"{path}: {wrong[0]!r} is asked for twice, or is the column of ids or labels")
    found = np.empty((len(ids), len(names)))
    unread: list[str] = []
    for place, name in enumerate(names):
        try:
            found[:, place] = _numbers(columns[name], name)
        except _NoNumbers as error:
            unread.append(str(error))
    if unread:
        more = f"; and {len(unread) - NAMED} columns more" if len(unread) > NAMED else ""
        raise TableRefused(
            f"{path}, {'; '.join(unread[:NAMED])}{more}. Only numbers are learned from: leave other columns out, "
            "or write categories and dates as numbers"
        )
    return Table(ids, found, names, labels)


def id_text(cell: object, row: int, path: Path) -> str:
    """The text of an id's cell; empty for a missing one. ``row`` from 0.

    Raises TableRefused for what is neither text nor a whole number: 7 that became 7.0 on the way would be another id
    than the other parties'.
    """
    if isinstance(cell, str):
        return cell
    if cell is None:
        return ""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    raise TableRefused(
        f"{path}, row {row + 1}: {str(cell)[:40]!r} is of type {type(cell).__name__}; ids are text or whole numbers: "
        "write the column as text"
    )


def write_csv(table: Table, path: Path, *, id_column: str = "id", label_column: str = "y") -> None:
    """``table`` as ``read_table`` reads it back; numbers as the shortest text that is the same float64."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        labelled = table.labels is not None
        writer.writerow([id_column, *([label_column] if labelled else []), *table.names])
        for row, one in enumerate(table.ids):
            label = [] if table.labels is None else [_text(float(table.labels[row]))]
            writer.writerow([one, *label, *(_text(value) for value in table.features[row].tolist())])


def _text(value: float) -> str:
    if math.isnan(value):
        return ""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _csv(path: Path) -> dict[str, Sequence[Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _check_names(header, path)
            check_separator(header, path)
            rows: list[list[str]] = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise TableRefused(
                        f"{path}, line {reader.line_num}: {len(row)} cells, {len(header)} columns"
                    )
                if len(rows) >= MOST_ROWS:
                    raise TableRefused(f"{path} has more than {MOST_ROWS} rows")
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise TableRefused(f"{path} is no CSV in UTF-8: {error}; save it as one") from error
    if not rows:
        return dict.fromkeys(header, ())
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def _parquet(path: Path) -> dict[str, Sequence[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise TableRefused(f"{path} is no Parquet: {error}") from error
    _check_names(table.column_names, path)
    if table.num_rows > MOST_ROWS:
        raise TableRefused(f"{path} has more than {MOST_ROWS} rows")
    return {name: table.column(name).to_pylist() for name in table.column_names}


def check_separator(header: Sequence[str], path: Path) -> None:
    """Raises TableRefused for what a spreadsheet wrote with another separator than a comma."""
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
        raise TableRefused(f"{path}: columns are parted by {other!r}; write the file with commas")


def _check_names(names: Sequence[str], path: Path) -> None:
    if not names:
        raise TableRefused(f"{path} is empty: a header is expected")
    if len(names) > MOST_COLUMNS:
        raise TableRefused(f"{path} has {len(names)} columns; at most {MOST_COLUMNS}")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated or "" in names:
        raise TableRefused(f"{path}: columns without a name, or of the same: {repeated[:NAMED]}")


def _check_ids(ids: Sequence[str], path: Path) -> None:
    empty = [row + 1 for row, one in enumerate(ids) if not one]
    if empty:
        raise TableRefused(f"{path}: no id in {len(empty)} rows, such as rows {empty[:NAMED]}")
    repeated = [one for one, count in Counter(ids).items() if count > 1]
    if repeated:
        raise TableRefused(f"{path}: {len(repeated)} ids stand more than once, such as {repeated[:NAMED]}")


class _NoNumbers(ValueError):
    """A column with other cells; the message names it, and the first of them."""


def _numbers(cells: Sequence[Any], name: str) -> npt.NDArray[np.float64]:
    try:
        found = np.array([_number(cell) for cell in cells], np.float64)
    except (ValueError, TypeError):
        found = np.full(len(cells), np.inf)
    if not np.isinf(found).any():
        return found
    for row, cell in enumerate(cells):
        try:
            wrong = math.isinf(_number(cell))
        except (ValueError, TypeError):
            wrong = True
        if wrong:
            comma = " (a decimal comma: write a point)" if _DECIMAL_COMMA.fullmatch(str(cell).strip()) else ""
            raise _NoNumbers(f"row {row + 1}, column {name!r}: {str(cell)[:40]!r} is no finite number{comma}")
    return found


def _number(cell: Any) -> float:
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in _MISSING):
        return math.nan
    return float(cell)
