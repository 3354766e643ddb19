"""A SQLite file shared by threads and processes: connections, transactions, errors.

WAL with ``synchronous=FULL``: readers never wait for the writer, and what was committed survives a killed
process and a power cut.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from featurestore.online import StoreError, StoreUnavailable

BUSY_TIMEOUT_S: Final = 15.0
MAX_IDLE_READERS: Final = 8
MAX_WAL_BYTES: Final = 64 * 2**20
_BUSY: Final = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CANTOPEN", "SQLITE_BUSY_SNAPSHOT"})


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Turn the sqlite3 exceptions of the block into StoreUnavailable (try again) and StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        kind = StoreUnavailable if name in _BUSY else StoreError
        raise kind(f"{path}: {error}") from error


class SqliteFile:
    """Connections to one database. Thread-safe: one writer at a time, and a bounded pool of readers.

    Raises StoreUnavailable when the file cannot be opened or stays locked, StoreError when its format
    (``PRAGMA user_version``) is not ``version``.
    """

    def __init__(
        self, path: Path, tables: str, version: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        with mapped_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreUnavailable(f"{path}: {error}") from error
            self._writer = self._open(sleep)
        try:
            self._prepare(tables, version)
        except StoreError:
            self._writer.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection whose statements all see one state of the database."""
        with mapped_errors(self.path):
            db = self._take()
            try:
                db.execute("BEGIN")
                yield db
                db.execute("COMMIT")
            except BaseException:
                db.close()
                raise
            self._give(db)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction that is durable once the block ends, or undone if it raises."""
        with mapped_errors(self.path), self._write_lock:
            self._check_open()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close every connection; the last process to do so folds the WAL into the file."""
        with self._write_lock, self._lock:
            self._closed = True
            for db in (*self._readers, self._writer):
                db.close()
            self._readers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed")

    def _take(self) -> sqlite3.Connection:
        with self._lock:
            self._check_open()
            if self._readers:
                return self._readers.pop()
        return self._connect()

    def _give(self, db: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed and len(self._readers) < MAX_IDLE_READERS:
                self._readers.append(db)
                return
        db.close()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=64,
        )
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA journal_size_limit={MAX_WAL_BYTES}")
        db.execute("PRAGMA cache_size=-16384")
        return db

    def _open(self, sleep: Callable[[float], None]) -> sqlite3.Connection:
        db = self._connect()
        # Two processes that turn a new file to WAL at once get SQLITE_BUSY without the busy time-out.
        for attempt in range(100):
            try:
                db.execute("PRAGMA journal_mode=WAL")
                return db
            except sqlite3.OperationalError as error:
                if attempt == 99 or error.sqlite_errorname not in _BUSY:
                    db.close()
                    raise
                sleep(0.02)
        raise AssertionError("unreachable")

    def _prepare(self, tables: str, version: int) -> None:
        with self.writing() as db:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found not in (0, version):
                raise StoreError(f"{self.path}: has format {found}; this version reads {version}")
            for statement in filter(str.strip, tables.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={version}")
