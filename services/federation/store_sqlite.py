"""The state of rounds in a folder that several processes of one machine share: a SQLite file, and files beside it.

Records and small bodies are rows; a body above ``LARGEST_ROW`` is a file of its own that a row names (SQLite writes
such a row twice, once to its log and once to its table, and reads it slower than a file). The file is on disk under its
final name before the row is, so a row never names nothing; a file without a row is what a killed process left, and is
swept later. Bodies that several threads store at once share one commit.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from federated.rounds import StoreUnavailable
from services.federation.prefixes import after
from services.sqlite import alone, write_transaction

T = TypeVar("T")
Step = Callable[[Mapping[str, bytes | None]], tuple[Mapping[str, bytes | None], T]]

FORMAT: Final = 1
LARGEST_ROW: Final = 8 * 1024
"""Measured with eight writers on one disk: at 300 bytes rows and files are level, at 30 kB files are twice as fast, at
4 MB six times."""
ORPHAN_S: Final = 3_600.0
"""A file without a row that is older than this belongs to nobody: its writer died before it wrote the row."""
_BUSY_MS: Final = 10_000
_PAGE_KEYS: Final = 500
_KEPT_WAL_BYTES: Final = 64 * 2**20
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blobs (key BLOB PRIMARY KEY, file TEXT, body BLOB);
"""


class SqliteStore:
    """A ``Store`` in ``folder``. Safe under threads and processes of one machine."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._files = folder / "bodies"
        self._write = threading.Lock()
        self._read = threading.Lock()
        self._waiting: list[_Row] = []
        self._queue = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the jobs' secrets are in it
            self._files.mkdir(exist_ok=True)
            self._lock_fd = os.open(folder / "rounds.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"{folder} cannot be used: {error.strerror}") from error
        self._writer = _connect(folder / "rounds.db")
        try:
            with alone(self._lock_fd), _translated():
                # Alone: two processes that switch a new file to WAL lock each other out.
                self._writer.execute("PRAGMA journal_mode = WAL")
                self._writer.execute("PRAGMA synchronous = FULL")
                self._writer.execute(f"PRAGMA journal_size_limit = {_KEPT_WAL_BYTES}")
                found = int(self._writer.execute("PRAGMA user_version").fetchone()[0])
                if found not in (0, FORMAT):
                    raise StoreUnavailable(f"{folder} has format {found}; this version reads {FORMAT}")
                self._writer.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
            self._reader = _connect(folder / "rounds.db")
        except BaseException:
            self._writer.close()
            os.close(self._lock_fd)
            raise
        self._sweep(clock() - ORPHAN_S)

    def close(self) -> None:
        """Let go of the files."""
        with self._write, self._read:
            self._writer.close()
            self._reader.close()
            os.close(self._lock_fd)

    def transact(self, keys: Sequence[str], step: Step[T]) -> T:
        """See ``Store.transact``."""
        with self._writing() as db:
            values: dict[str, bytes | None] = dict.fromkeys(keys)
            for start in range(0, len(keys), _PAGE_KEYS):
                page = [key.encode() for key in keys[start : start + _PAGE_KEYS]]
                marks = ",".join("?" * len(page))
                rows = db.execute(f"SELECT key, value FROM records WHERE key IN ({marks})", page)  # noqa: S608
                values.update((bytes(key).decode(), bytes(value)) for key, value in rows)
            writes, result = step(values)
            for key, value in writes.items():
                if value is None:
                    db.execute("DELETE FROM records WHERE key = ?", (key.encode(),))
                else:
                    db.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (key.encode(), value))
        return result

    def put_blob(self, key: str, body: bytes) -> None:
        """See ``Store.put_blob``."""
        row = _Row(key.encode(), None if len(body) > LARGEST_ROW else bytes(body))
        if row.body is None:
            row.file = self._write_file(body)
        with self._queue:
            self._waiting.append(row)
        with self._write:
            if row.written:
                return
            # Whoever holds the lock writes for all who wait for it: one commit, one wait for the disk.
            with self._queue:
                rows, self._waiting = self._waiting, []
            try:
                replaced = self._insert(rows)
            except BaseException:
                with self._queue:  # the others try for themselves
                    self._waiting[:0] = [other for other in rows if other is not row]
                raise
            for other in rows:
                other.written = True
        self._unlink(replaced)

    def get_blob(self, key: str) -> bytes | None:
        """See ``Store.get_blob``."""
        while True:
            with self._reading() as db:
                found = db.execute("SELECT file, body FROM blobs WHERE key = ?", (key.encode(),)).fetchone()
            if found is None:
                return None
            if found[0] is None:
                return bytes(found[1])
            try:
                return (self._files / str(found[0])).read_bytes()
            except FileNotFoundError:
                continue  # replaced or deleted between the two looks
            except OSError as error:
                raise StoreUnavailable(f"{found[0]}: {error.strerror}") from error

    def blobs(self, prefix: str) -> Iterator[str]:
        """See ``Store.blobs``."""
        first, end = prefix.encode(), after(prefix.encode())
        while True:
            with self._reading() as db:
                rows = db.execute(
                    "SELECT key FROM blobs WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
                    (first, end, _PAGE_KEYS),
                ).fetchall()
            yield from (bytes(key).decode() for (key,) in rows)
            if len(rows) < _PAGE_KEYS:
                return
            first = bytes(rows[-1][0]) + b"\x00"

    def delete(self, prefix: str) -> None:
        """See ``Store.delete``."""
        span = (prefix.encode(), after(prefix.encode()))
        with self._writing() as db:
            where = "WHERE key >= ? AND key < ?"
            files = db.execute(f"SELECT file FROM blobs {where} AND file IS NOT NULL", span).fetchall()  # noqa: S608
            for table in ("records", "blobs"):
                db.execute(f"DELETE FROM {table} {where}", span)  # noqa: S608
        self._unlink(name for (name,) in files)

    def _insert(self, rows: Sequence[_Row]) -> list[str]:
        """Write ``rows``, with the write lock held; gives the files of what they replaced."""
        replaced = []
        with self._committing() as db:
            for row in rows:
                found = db.execute("SELECT file FROM blobs WHERE key = ?", (row.key,)).fetchone()
                if found is not None and found[0] is not None:
                    replaced.append(found[0])
                db.execute(
                    "INSERT OR REPLACE INTO blobs (key, file, body) VALUES (?, ?, ?)",
                    (row.key, row.file, row.body),
                )
        return replaced

    def _write_file(self, body: bytes) -> str:
        name = secrets.token_hex(16)
        path = self._files / name
        try:
            with path.with_suffix(".part").open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".part").rename(path)
            folder = os.open(self._files, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise StoreUnavailable(f"a body cannot be written: {error.strerror}") from error
        return name

    def _unlink(self, names: Iterator[str] | Sequence[str]) -> None:
        for name in names:
            (self._files / name).unlink(missing_ok=True)

    def _sweep(self, before_s: float) -> None:
        """Drop old files that no row names."""
        old = []
        for path in self._files.iterdir():
            try:
                if path.stat().st_mtime < before_s:
                    old.append(path.name)
            except FileNotFoundError:
                continue
        if old:
            with self._reading() as db:
                named = {row[0] for row in db.execute("SELECT file FROM blobs WHERE file IS NOT NULL")}
            self._unlink([name for name in old if name not in named])

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._read, _translated():
            yield self._reader

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._write, self._committing() as db:
            yield db

    @contextmanager
    def _committing(self) -> Iterator[sqlite3.Connection]:
        with alone(self._lock_fd), _translated(), write_transaction(self._writer) as db:
            yield db


class _Row:
    """A blob on its way to the table: a body, or the name of the file that holds it."""

    __slots__ = ("body", "file", "key", "written")

    def __init__(self, key: bytes, body: bytes | None) -> None:
        self.key = key
        self.body = body
        self.file: str | None = None
        self.written = False


def _connect(path: Path) -> sqlite3.Connection:
    with _translated():
        return sqlite3.connect(path, timeout=_BUSY_MS / 1_000, isolation_level=None, check_same_thread=False)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the store's file cannot be used: {error}") from error
