"""Rows of a CSV, JSONL or Parquet file, each with its line: the same mapping whatever the format."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NoReturn

from services.datasets.errors import DatasetError, RowError

FORMATS: Final = ("csv", "jsonl", "parquet")
_BATCH: Final = 8_192
# The csv module refuses longer fields; a description may be long, but not without bound.
_MAX_FIELD: Final = 1 * 2**20

Cells = Mapping[str, object]
"""Column name to value. CSV gives text; empty cells and nulls are left out."""


def find(folder: Path, name: str) -> Path | None:
    """The file ``name.csv``, ``.jsonl`` or ``.parquet``. Raises DatasetError if there are several."""
    found = [path for format_ in FORMATS if (path := folder / f"{name}.{format_}").is_file()]
    if len(found) > 1:
        raise DatasetError(f"{folder} has both {found[0].name} and {found[1].name}; keep one")
    return found[0] if found else None


def read_rows(path: Path) -> Iterator[tuple[int, Cells | RowError]]:
    """Line number (row number in Parquet) and cells of each row, or what is wrong with it.

    Raises DatasetError where the file cannot be read at all.
    """
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8: {error}") from error


def _read_csv(path: Path) -> Iterator[tuple[int, Cells | RowError]]:
    csv.field_size_limit(_MAX_FIELD)
    # utf-8-sig: spreadsheets put a byte order mark first.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
        except csv.Error as error:
            raise DatasetError(f"{path}:1: {error}") from error
        if not names or not all(names) or len(set(names)) < len(names):
            raise DatasetError(
                f"{path}:1: the first line must name each column once, but is {','.join(names)!r}"
            )
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield line, RowError(path.name, line, str(error))
                continue
            if row is None:
                return
            if not row:
                continue
            if len(row) != len(names):
                message = f"has {len(row)} fields where the first line names {len(names)} columns"
                yield line, RowError(path.name, line, message)
                continue
            yield line, {name: cell for name, cell in zip(names, row, strict=True) if cell != ""}


def _read_jsonl(path: Path) -> Iterator[tuple[int, Cells | RowError]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text, parse_constant=_refuse)
            except (ValueError, RecursionError) as error:
                yield line, RowError(path.name, line, f"is not JSON: {error}")
                continue
            if not isinstance(row, dict):
                yield line, RowError(path.name, line, "is not a JSON object")
                continue
            yield line, {name: value for name, value in row.items() if value is not None}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _read_parquet(path: Path) -> Iterator[tuple[int, Cells | RowError]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: value for name, value in row.items() if value is not None}
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} is not a Parquet file that can be read: {error}") from error
