"""Coordination in one SQLite file (WAL), shared by the processes of one machine.

Leases end by the clock: what an ended lease protected is invisible to every read at once, and the next write
or watch of any process removes it, under a revision of its own so that watchers see it go. Deleted keys
leave a mark for watchers; only the newest ``MARKS_KEPT`` marks are kept.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.coordination import recipes
from services.coordination.contract import (
    Change,
    Conflict,
    CoordinationError,
    Entry,
    Lease,
    LeaseLost,
    Unavailable,
)
from services.sqlite import write_transaction

FORMAT: Final = 1
MARKS_KEPT: Final = 10_000
_BUSY_MS: Final = 10_000
_POLL_S: Final = 0.01
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER, revision INTEGER);
CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s REAL, ends_s REAL);
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deleted (key BLOB PRIMARY KEY, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_revision ON entries (revision);
CREATE INDEX IF NOT EXISTS deleted_revision ON deleted (revision);
"""
_LIVE: Final = "(lease IS NULL OR lease IN (SELECT id FROM leases WHERE ends_s > :now))"


class SqliteCoordination:
    """``Coordination`` in a file. ``clock`` is wall time in seconds, the same for all processes that share
    the file; ``sleep`` waits between two looks of a watch."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(
                path, timeout=_BUSY_MS / 1_000, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise Unavailable(f"{path}: {error}") from error
        try:
            self._open(path)
        except BaseException:
            self._db.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            self._use_wal()
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            self._db.execute("INSERT OR IGNORE INTO state VALUES (1, ?, 0)", (FORMAT,))
            (found,) = self._db.execute("SELECT format FROM state").fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"{path}: {error}") from error
        if found != FORMAT:
            raise CoordinationError(f"{path} has format {found}; this version reads {FORMAT}")

    def _use_wal(self) -> None:
        # SQLite's own waiting does not cover this switch: of several processes that make the file at once, all
        # but one are told that it is locked.
        deadline = self._monotonic() + _BUSY_MS / 1_000
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if self._monotonic() >= deadline:
                    raise
            self._sleep(_POLL_S)

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """One write transaction, after what has expired is gone."""
        with self._lock:
            try:
                with write_transaction(self._db) as db:
                    self._expire()
                    yield db
            except sqlite3.Error as error:
                raise Unavailable(str(error)) from error

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                raise Unavailable(str(error)) from error

    def _next_revision(self) -> int:
        (revision,) = self._db.execute(
            "UPDATE state SET revision = revision + 1 RETURNING revision"
        ).fetchall()[0]
        return int(revision)

    def _expire(self) -> None:
        ended = self._db.execute("SELECT id FROM leases WHERE ends_s <= ?", (self._clock(),)).fetchall()
        for (lease_id,) in ended:
            self._drop_lease(lease_id)

    def _drop_lease(self, lease_id: int) -> None:
        self._db.execute("DELETE FROM leases WHERE id = ?", (lease_id,))
        keys = self._db.execute("SELECT key FROM entries WHERE lease = ?", (lease_id,)).fetchall()
        for (key,) in keys:
            self._drop_key(key)

    def _drop_key(self, key: bytes) -> None:
        self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
        revision = self._next_revision()
        self._db.execute("INSERT OR REPLACE INTO deleted VALUES (?, ?)", (key, revision))
        self._db.execute(
            "DELETE FROM deleted WHERE revision <= "
            "(SELECT revision FROM deleted ORDER BY revision DESC LIMIT 1 OFFSET ?)",
            (MARKS_KEPT,),
        )

    def get(self, key: str) -> Entry | None:
        with self._read() as db:
            row = db.execute(
                f"SELECT value, revision FROM entries WHERE key = :key AND {_LIVE}",  # noqa: S608
                {"key": key.encode(), "now": self._clock()},
            ).fetchone()
        return None if row is None else Entry(key, row[0], row[1])

    def scan(self, prefix: str) -> list[Entry]:
        start = prefix.encode()
        with self._read() as db:
            rows = db.execute(
                "SELECT key, value, revision FROM entries WHERE key >= :start "  # noqa: S608
                f"AND (:end IS NULL OR key < :end) AND {_LIVE} ORDER BY key",
                {"start": start, "end": recipes.prefix_end(start), "now": self._clock()},
            ).fetchall()
        return [Entry(key.decode(), value, revision) for key, value, revision in rows]

    def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, expect_revision: int | None = None
    ) -> int:
        with self._write() as db:
            if lease is not None:
                self._require(lease.id)
            if expect_revision is not None:
                row = db.execute("SELECT revision FROM entries WHERE key = ?", (key.encode(),)).fetchone()
                found = 0 if row is None else row[0]
                if found != expect_revision:
                    raise Conflict(f"{key} has revision {found}, expected {expect_revision}")
            revision = self._next_revision()
            db.execute(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
                (key.encode(), value, revision, None if lease is None else lease.id),
            )
            db.execute("DELETE FROM deleted WHERE key = ?", (key.encode(),))
        return revision

    def delete(self, key: str) -> bool:
        with self._write() as db:
            found = db.execute("SELECT 1 FROM entries WHERE key = ?", (key.encode(),)).fetchone() is not None
            if found:
                self._drop_key(key.encode())
        return found

    def lease(self, ttl_s: float) -> recipes.StoreLease:
        with self._write() as db:
            cursor = db.execute(
                "INSERT INTO leases (ttl_s, ends_s) VALUES (?, ?)", (ttl_s, self._clock() + ttl_s)
            )
            lease_id = cursor.lastrowid
        assert lease_id is not None
        return recipes.StoreLease(self, lease_id)

    def _require(self, lease_id: int) -> None:
        if self._db.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone() is None:
            raise LeaseLost(f"lease {lease_id} ended")

    def renew(self, lease_id: int) -> None:
        """Give a lease another full TTL (``Lease.keep_alive``)."""
        with self._write() as db:
            self._require(lease_id)
            db.execute("UPDATE leases SET ends_s = ? + ttl_s WHERE id = ?", (self._clock(), lease_id))

    def end(self, lease_id: int) -> None:
        """End a lease and remove its keys (``Lease.revoke``)."""
        with self._write():
            self._drop_lease(lease_id)

    def acquire(self, name: str, owner: str, lease: Lease) -> int | None:
        return recipes.acquire(self, name, owner, lease)

    def increment(self, name: str) -> int:
        return recipes.increment(self, name)

    def watch(self, prefix: str, after_revision: int, timeout_s: float) -> list[Change]:
        deadline = self._monotonic() + timeout_s
        while True:
            changes = self._changes(prefix.encode(), after_revision)
            remaining = deadline - self._monotonic()
            if changes or remaining <= 0:
                return changes
            self._sleep(min(_POLL_S, remaining))

    def _changes(self, start: bytes, after: int) -> list[Change]:
        with self._read() as db:
            overdue = db.execute(
                "SELECT 1 FROM leases WHERE ends_s <= ? LIMIT 1", (self._clock(),)
            ).fetchone()
            if overdue is not None:
                with self._write():
                    pass
            rows = db.execute(
                "SELECT key, value, revision FROM entries WHERE revision > :after AND key >= :start "
                "AND (:end IS NULL OR key < :end) "
                "UNION ALL SELECT key, NULL, revision FROM deleted WHERE revision > :after AND key >= :start "
                "AND (:end IS NULL OR key < :end) ORDER BY 3",
                {"start": start, "end": recipes.prefix_end(start), "after": after},
            ).fetchall()
        return [Change(key.decode(), value, revision) for key, value, revision in rows]

    def close(self) -> None:
        with self._lock:
            self._db.close()
