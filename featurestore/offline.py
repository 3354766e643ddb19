"""The offline log: an append-only set of Parquet files, a folder per day of event time.

::

    events/2026-11-30/processor-0-5f3a...-00000007.parquet

A file appears whole or not at all (written aside, synced, renamed). What is buffered and not yet flushed
is lost with the process, so commit offsets after ``flush``; rows carry their log position, and the reader
drops those that were delivered and written twice.

Exceptions::

    OfflineError             a file cannot be written or read; names it
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

DAY_MS: Final = 86_400_000
TIME: Final = "event_time_ms"
POSITION: Final = ("log", "partition", "offset", "position")
"""Where in the message log a row comes from; ``position`` counts the rows of one message."""
POSITION_FIELDS: Final = (
    ("log", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("position", pa.int32()),
)
EVENTS: Final = pa.schema(
    [
        (TIME, pa.int64()),
        ("accepted_at_ms", pa.int64()),
        ("kind", pa.string()),
        ("user_id", pa.string()),
        ("item_id", pa.string()),
        ("action", pa.string()),
        ("value", pa.float64()),
        ("liked", pa.bool_()),
        ("recommendation_id", pa.string()),
        *POSITION_FIELDS,
    ]
)
"""Clean events, one row per item that took part."""


class OfflineError(Exception):
    """The offline log cannot be written or read."""


class OfflineLog:
    """Appends rows of one schema (``event_time_ms`` and POSITION_FIELDS among them). One thread uses it.

    At most ``max_rows`` rows are buffered; a flush happens before there would be more, and once the oldest
    is ``max_age_s`` old. ``writer`` is unique among living processes (``processor-0``).
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        writer: str,
        *,
        max_rows: int = 50_000,
        max_age_s: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        missing = {TIME, *POSITION}.difference(schema.names)
        if missing:
            raise ValueError(f"the schema of an offline log lacks {', '.join(sorted(missing))}")
        self._folder = folder
        self._schema = schema
        self._prefix = f"{writer}-{uuid.uuid4().hex[:12]}"
        self._files = 0
        self._max_rows = max_rows
        self._max_age_s = max_age_s
        self._monotonic = monotonic
        self._buffer: list[pa.Table] = []
        self._buffered = 0
        self._oldest_s = 0.0
        for stale in folder.glob(f"*/.{writer}-*.tmp"):  # left by this writer's former, killed self
            stale.unlink(missing_ok=True)

    @property
    def buffered(self) -> int:
        """Rows that are not yet on disk."""
        return self._buffered

    def append(self, columns: Mapping[str, Sequence[object]]) -> None:
        """Take rows, given as equally long columns. Raises OfflineError if a flush that is due fails (then
        these rows were not taken), ValueError if they do not fit the schema."""
        table = pa.Table.from_pydict(dict(columns), schema=self._schema)
        if not table.num_rows:
            return
        if self._buffered + table.num_rows > self._max_rows or self._is_old():
            self.flush()
        if not self._buffer:
            self._oldest_s = self._monotonic()
        self._buffer.append(table)
        self._buffered += table.num_rows

    def flush_if_due(self) -> list[Path]:
        """Flush once the oldest buffered row is ``max_age_s`` old."""
        return self.flush() if self._is_old() else []

    def flush(self) -> list[Path]:
        """Write what is buffered, a file per day, and return the files. Nothing is forgotten on failure."""
        if not self._buffer:
            return []
        table = pa.concat_tables(self._buffer)
        days = table.column(TIME).to_numpy() // DAY_MS
        written = [
            self._write(day_name(day), table.take(pa.array(np.flatnonzero(days == day))))
            for day in np.unique(days)
        ]
        self._buffer.clear()
        self._buffered = 0
        return written

    def close(self) -> None:
        self.flush()

    def _is_old(self) -> bool:
        return bool(self._buffer) and self._monotonic() - self._oldest_s >= self._max_age_s

    def _write(self, day: str, table: pa.Table) -> Path:
        folder = self._folder / day
        name = f"{self._prefix}-{self._files:08d}"
        aside, final = folder / f".{name}.tmp", folder / f"{name}.parquet"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            aside.replace(final)
            _sync_folder(folder)
        except OSError as error:
            raise OfflineError(f"{final}: cannot be written: {error}") from error
        self._files += 1
        return final


def read_days(
    folder: Path, schema: pa.Schema, start_ms: int, end_ms: int, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The rows with event time in [start_ms, end_ms), a table per day, in time order, each row once.

    Raises OfflineError naming a file that cannot be read.
    """
    wanted = schema.names if columns is None else list(columns)
    needed = list(dict.fromkeys([*wanted, TIME, *POSITION]))
    for day in sorted(days_in(folder)):
        if day < start_ms // DAY_MS or day * DAY_MS >= end_ms:
            continue
        files = sorted(path for path in (folder / day_name(day)).glob("*.parquet") if path.name[0] != ".")
        if files:
            table = pa.concat_tables([_read_file(path, needed) for path in files])
            yield table.take(pa.array(_chosen_rows(table, start_ms, end_ms))).select(wanted)


def read(
    folder: Path, schema: pa.Schema, start_ms: int, end_ms: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """``read_days`` in one table, which has to fit memory."""
    tables = list(read_days(folder, schema, start_ms, end_ms, columns))
    empty = schema.empty_table()
    return pa.concat_tables(tables) if tables else empty.select(columns if columns else schema.names)


def drop_before(folder: Path, time_ms: int) -> int:
    """Remove the days that ended before ``time_ms``; returns how many files went."""
    dropped = 0
    for day in sorted(days_in(folder)):
        if (day + 1) * DAY_MS <= time_ms:
            for path in (folder / day_name(day)).iterdir():
                path.unlink()
                dropped += 1
            (folder / day_name(day)).rmdir()
    return dropped


def day_name(day: int) -> str:
    """The folder of a day, counted since 1970: ``2026-11-30``."""
    return str(np.datetime64(int(day), "D"))


def days_in(folder: Path) -> list[int]:
    """The days that the log has folders for."""
    if not folder.is_dir():
        return []
    days = []
    for path in folder.iterdir():
        try:
            days.append(int(np.datetime64(path.name, "D").astype(np.int64)))
        except ValueError:  # not one of ours
            continue
    return days


def _read_file(path: Path, columns: list[str]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise OfflineError(f"{path}: cannot be read: {error}") from error


def _chosen_rows(table: pa.Table, start_ms: int, end_ms: int) -> npt.NDArray[np.int64]:
    """Rows inside the range, by event time; of those with one log position only the first."""
    time_ms = table.column(TIME).to_numpy()
    log = table.column("log").combine_chunks().dictionary_encode().indices
    position = [log.to_numpy(zero_copy_only=False), *(table.column(name).to_numpy() for name in POSITION[1:])]
    order = np.lexsort(position)
    same = np.ones(max(len(order) - 1, 0), bool)
    for part in position:
        same &= part[order][1:] == part[order][:-1]
    first = np.ones(len(order), bool)
    first[1:] = ~same
    rows = order[first]
    rows = rows[(time_ms[rows] >= start_ms) & (time_ms[rows] < end_ms)]
    in_time: npt.NDArray[np.int64] = rows[np.argsort(time_ms[rows], kind="stable")]
    return in_time


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
