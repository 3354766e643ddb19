"""Labelled rows in a CSV: the one format that a device reads of its own and a simulation reads of every client.

The first line names the columns: one is ``label`` (or ``target``, ``y``), one may name the client (``client``,
``client_id``, ``user``, ``user_id``), all others are features, in their order. A file whose first line is numbers alone
has no such line: its last column is the label. Fields are in UTF-8 and parted by commas; a feature is a finite 32-bit
number; an empty line is passed over, an empty field is refused.

A label that is a whole number is that number, however it is written (``3`` and ``3.0`` are one class). A simulation
numbers the classes that occur in all its clients' labels, whatever they are called; a device, which sees its own rows
alone, takes labels that are numbers already: whole, from 0.

A file is read whole before any of it is used, so one wrong row does not become a model. NumPy alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

LABEL_COLUMNS: Final = ("label", "target", "y")
CLIENT_COLUMNS: Final = ("client", "client_id", "user", "user_id")
MOST_PROBLEMS: Final = 20
"""Wrong rows that are told of one file; the others are counted."""
_MAX_FIELD: Final = 2**20
_LARGEST: Final = float(np.finfo(np.float32).max)


class RowsRefused(ValueError):
    """The file holds no labelled rows. ``problems``: the line (0: the whole file) and what is wrong, of the first of
    ``total``."""

    def __init__(self, path: Path, problems: Sequence[tuple[int, str]], total: int | None = None) -> None:
        self.problems = tuple(problems)
        self.total = len(self.problems) if total is None else total
        line, what = self.problems[0]
        more = f" (and {self.total - 1} more)" if self.total > 1 else ""
        super().__init__(f"{path}:{line}: {what}{more}" if line else f"{path}: {what}")


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Inputs float32 [N, F], the labels [N], the features' names [F], and whose each row is [N]
    (nothing where no column was asked to say so)."""

    inputs: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    features: tuple[str, ...]
    clients: tuple[str, ...] = ()

    def numbers(self, path: Path) -> npt.NDArray[np.int64]:
        """The labels as whole numbers [N] from 0. Raises RowsRefused, naming ``path``."""
        for label in self.labels:
            # 2^53 has 16 digits: what is longer was not read as a number.
            if not (label.isascii() and label.isdecimal() and len(label) <= 16):
                raise RowsRefused(path, [(0, f"the label {label!r} is no whole number from 0")])
        return np.array([int(label) for label in self.labels], np.int64)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which is which: their number, the features' places with their names, the label's place, the client's."""

    count: int
    features: tuple[tuple[int, str], ...]
    label: int
    client: int | None


def read_labelled(path: Path, *, by_client: bool = False) -> LabelledRows:
    """The rows of ``path``; with ``by_client`` a column must name the client, without it such a column is a feature.

    Raises RowsRefused, and OSError where the file cannot be read.
    """
    csv.field_size_limit(_MAX_FIELD)
    values: list[list[float]] = []
    labels: list[str] = []
    clients: list[str] = []
    problems: list[tuple[int, str]] = []
    total = 0
    columns: _Columns | None = None
    for line, cells in _lines(path):
        if columns is None:
            columns, headed = _columns(path, cells, by_client)
            if headed:
                continue
        problem = cells if isinstance(cells, str) else _add(cells, columns, values, labels, clients)
        if problem:
            total += 1
            if len(problems) < MOST_PROBLEMS:
                problems.append((line, problem))
    if problems:
        raise RowsRefused(path, problems, total)
    if columns is None or not values:
        raise RowsRefused(path, [(0, "has a header but no row" if columns else "is empty")])
    names = tuple(name for _, name in columns.features)
    return LabelledRows(np.array(values, np.float32), tuple(labels), names, tuple(clients))


def _lines(path: Path) -> Iterator[tuple[int, list[str] | str]]:
    """The number of each line that is not empty and its fields, or what is wrong with it."""
    # utf-8-sig: spreadsheets put a byte order mark first.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield line, str(error)
                continue
            except UnicodeDecodeError as error:
                raise RowsRefused(path, [(0, f"is not UTF-8: {error}")]) from error
            if row is None:
                return
            if row:
                yield line, row


def _columns(path: Path, first: list[str] | str, by_client: bool) -> tuple[_Columns, bool]:
    """The columns by the first line, and whether that names them."""
    if isinstance(first, str):
        raise RowsRefused(path, [(1, first)])
    if all(_number(cell) is not None for cell in first):
        if by_client:
            raise RowsRefused(
                path, [(1, f"names no columns, of which one must be {_one_of(CLIENT_COLUMNS)}")]
            )
        if len(first) < 2:
            raise RowsRefused(path, [(1, "has one column; a row needs a label and at least one feature")])
        features = tuple((place, f"feature {place}") for place in range(len(first) - 1))
        return _Columns(len(first), features, len(first) - 1, None), False
    if not all(first) or len(set(first)) < len(first):
        raise RowsRefused(
            path, [(1, f"the first line must name each column once, but is {','.join(first)!r}")]
        )
    label = _place(path, first, LABEL_COLUMNS)
    client = _place(path, first, CLIENT_COLUMNS) if by_client else None
    features = tuple((place, name) for place, name in enumerate(first) if place not in (label, client))
    if not features:
        text = f"there is no column beside {first[label]!r}; a row needs at least one feature"
        raise RowsRefused(path, [(1, text)])
    return _Columns(len(first), features, label, client), True


def _place(path: Path, names: Sequence[str], wanted: Sequence[str]) -> int:
    for name in wanted:
        if name in names:
            return list(names).index(name)
    text = f"has the columns {few(names)}, but none of {', '.join(wanted)}; name one of them so"
    raise RowsRefused(path, [(1, text)])


def _add(
    cells: list[str],
    columns: _Columns,
    values: list[list[float]],
    labels: list[str],
    clients: list[str],
) -> str:
    """Put a row to the others; what is wrong with it, else an empty text."""
    if len(cells) != columns.count:
        return f"has {len(cells)} fields where the first line has {columns.count}"
    if "" in cells:
        return f"field {cells.index('') + 1} is empty"
    row = [_number(cells[place]) for place, _ in columns.features]
    if None in row:
        wrong = cells[columns.features[row.index(None)][0]]
        return f"a feature is no finite 32-bit number: {wrong[:40]!r}"
    values.append([value for value in row if value is not None])
    labels.append(_label(cells[columns.label]))
    if columns.client is not None:
        clients.append(cells[columns.client])
    return ""


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    # False for NaN too.
    return value if abs(value) <= _LARGEST else None


def _label(text: str) -> str:
    value = _number(text)
    # Beyond 2^53 a float is not the number that stands there.
    return str(int(value)) if value is not None and abs(value) < 2.0**53 and value.is_integer() else text


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def few(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
