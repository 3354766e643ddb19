"""Ids of a file, one after the other: a column of a CSV or Parquet file is read without holding the file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from federated.vertical.tables import TableRefused, check_separator, id_text


def read_ids(path: Path, column: str = "id") -> Iterator[str]:
    """The cells of ``column`` in ``path`` (``.csv`` with a header, or ``.parquet``); empty for a missing cell.

    Raises TableRefused: not readable, no such column, a row of another length, ids that are neither text nor whole
    numbers.
    """
    try:
        yield from _parquet(path, column) if path.suffix == ".parquet" else _csv(path, column)
    except OSError as error:
        raise TableRefused(f"{path} cannot be read: {error.strerror or error}") from error


def _csv(path: Path, column: str) -> Iterator[str]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if header.count(column) != 1:
                check_separator(header, path)
                raise TableRefused(f"{path} has no column {column!r}; it has {', '.join(header[:20])}")
            place = header.index(column)
            for row in reader:
                if row and len(row) != len(header):
                    raise TableRefused(
                        f"{path}, line {reader.line_num}: {len(row)} cells, {len(header)} columns"
                    )
                yield row[place] if row else ""
        except (csv.Error, UnicodeDecodeError) as error:
            raise TableRefused(f"{path} is no CSV in UTF-8: {error}") from error


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise TableRefused(f"{path} has no column {column!r}")
            batches = file.iter_batches(columns=[column])
            cells = (row[column] for batch in batches for row in batch.to_pylist())
            for row, cell in enumerate(cells):
                yield id_text(cell, row, path)
    except pa.ArrowInvalid as error:
        raise TableRefused(f"{path} is no Parquet: {error}") from error
