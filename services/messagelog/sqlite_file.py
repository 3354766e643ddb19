"""One connection to one SQLite file of the log: pragmas, schema, write lock, errors.

Foreign exceptions become ours here and nowhere else. Writers of all processes queue on a lock file.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.messagelog.contract import LogError, LogFull, LogUnavailable
from services.messagelog.doorbell import Doorbell
from services.sqlite import alone, write_transaction

FORMAT: Final = 1
PAGE_BYTES: Final = 4_096
_BUSY_MS: Final = 10_000
_KEPT_WAL_BYTES: Final = 64 * 2**20
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS topics (
    name TEXT PRIMARY KEY, incarnation TEXT NOT NULL, retention_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS partitions (
    slot INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    first_offset INTEGER NOT NULL, next_offset INTEGER NOT NULL, UNIQUE (topic, partition)
);
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY, accepted_at_ms INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS groups (name TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    grp TEXT, member TEXT, instance TEXT NOT NULL, seen_at_ms INTEGER NOT NULL, PRIMARY KEY (grp, member)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS subscriptions (
    grp TEXT, member TEXT, topic TEXT, partitions INTEGER NOT NULL, PRIMARY KEY (grp, member, topic)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS assignments (
    grp TEXT, topic TEXT, partition INTEGER, member TEXT NOT NULL, instance TEXT NOT NULL,
    epoch INTEGER NOT NULL, PRIMARY KEY (grp, topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS readers (grp TEXT, topic TEXT, PRIMARY KEY (topic, grp)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (
    grp TEXT, topic TEXT, partition INTEGER, next_offset INTEGER NOT NULL, PRIMARY KEY (grp, topic, partition)
) WITHOUT ROWID;
"""


def translate(error: sqlite3.Error) -> LogError:
    """What the contract calls this SQLite error."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name == "SQLITE_FULL":
        return LogFull(f"the log's file or its disk is full: {error}")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CANTOPEN", "SQLITE_IOERR")):
        return LogUnavailable(f"the log's file cannot be used now: {error}")
    return LogError(f"{name or type(error).__name__}: {error}")


class LogFile:
    """A database file of the log, opened once. Thread-safe; every thread that must not wait opens its own.

    ``max_bytes`` bounds the database; writing beyond it raises LogFull.
    """

    def __init__(self, folder: Path, name: str, *, max_bytes: int) -> None:
        self.bell_path = folder / f"{name}.bell"
        self._mutex = threading.RLock()
        self._closed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._bell = Doorbell(self.bell_path)
        except OSError as error:
            raise LogUnavailable(f"the log's folder {folder} cannot be used: {error.strerror}") from error
        try:
            self._db = sqlite3.connect(
                folder / f"{name}.db",
                isolation_level=None,
                check_same_thread=False,
                timeout=_BUSY_MS / 1_000,
                cached_statements=256,
            )
        except sqlite3.Error as error:
            self._close_descriptors()
            raise translate(error) from error
        try:
            self._prepare(max_bytes)
        except BaseException:
            self.close()
            raise

    def _prepare(self, max_bytes: int) -> None:
        with alone(self._lock_fd), _translated():
            # Alone, since two processes that both switch a new file to WAL lock each other out.
            self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA journal_size_limit = {_KEPT_WAL_BYTES}")
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found not in (0, FORMAT):
                raise LogError(f"the log's file has format {found}; this version reads format {FORMAT}")
            if found == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
            self._db.execute(f"PRAGMA max_page_count = {max(1, max_bytes // PAGE_BYTES)}")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection; each statement sees the newest commit."""
        with self._mutex, _translated():
            yield self._db

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """The connection inside one read transaction: all statements see the same commit."""
        with self._mutex, _translated():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("COMMIT")

    @contextmanager
    def writing(self, *, ring: bool) -> Iterator[sqlite3.Connection]:
        """The connection inside one write transaction: durable when the block ends, undone if it raises.

        ``ring`` wakes the file's listeners after the commit.
        """
        with self._mutex, _translated():
            with alone(self._lock_fd), write_transaction(self._db) as db:
                yield db
            if ring:
                self._bell.ring()

    def _close_descriptors(self) -> None:
        os.close(self._lock_fd)
        self._bell.close()

    def close(self) -> None:
        """Close the connection. A second call does nothing: its descriptors may be another's by then."""
        with self._mutex, _translated():
            if self._closed:
                return
            self._closed = True
            try:
                self._db.close()
            finally:
                self._close_descriptors()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error) from error
