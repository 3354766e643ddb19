"""The online store in a SQLite file: one row per entity, its cells packed together.

Every row has a sequence number, raised by each write in commit order: that is the change stream. A deleted
entity keeps its row, without cells, as its mark. Claims are kept as digests (16 bytes of the id, 8 of its
owner) in order of arrival, so that the oldest can go first.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from featurestore.cells import merge_row, unpack_row
from featurestore.online import Cell, Claim, EntityKey
from featurestore.sqlite_file import SqliteFile

FORMAT: Final = 1
_KEYS_PER_STATEMENT: Final = 8_192
"""SQLite takes 32,766 parameters; a key needs two."""
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS rows (
    entity TEXT NOT NULL, id TEXT NOT NULL, sequence INTEGER NOT NULL, cells BLOB, UNIQUE (entity, id)
);
CREATE UNIQUE INDEX IF NOT EXISTS rows_by_sequence ON rows (entity, sequence);
CREATE TABLE IF NOT EXISTS last_sequence (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT OR IGNORE INTO last_sequence VALUES (1, 0);
CREATE TABLE IF NOT EXISTS claims (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE, owner BLOB NOT NULL, expires_ms INTEGER NOT NULL
)
"""


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class SqliteStore:
    """An ``OnlineStore`` for one machine. Thread-safe; several processes may open the same file."""

    def __init__(self, path: Path, *, max_claims: int, now_ms: Callable[[], int] = _unix_ms) -> None:
        self._file = SqliteFile(path, _TABLES, FORMAT)
        self._max_claims = max_claims
        self._now_ms = now_ms

    def read(self, keys: Sequence[EntityKey], fields: Sequence[str] | None = None) -> list[dict[str, Cell]]:
        wanted = None if fields is None else frozenset(fields)
        found: list[dict[str, Cell]] = [{} for _ in keys]
        with self._file.reading() as db:
            stored = [
                (start + n, cells)
                for start, part in _parts(keys)
                for n, cells in _select(db, part)
                if cells is not None
            ]
        for n, cells in stored:
            found[n] = unpack_row(cells, wanted)
        return found

    def write(self, rows: Mapping[EntityKey, Mapping[str, Cell]]) -> None:
        if not rows:
            return
        keys = list(rows)
        with self._file.writing() as db:
            old = {start + n: cells for start, part in _parts(keys) for n, cells in _select(db, part)}
            packed = [merge_row(old.get(n), rows[key]) for n, key in enumerate(keys)]
            _put(db, keys, packed)

    def delete(self, keys: Sequence[EntityKey]) -> list[bool]:
        with self._file.writing() as db:
            live = {
                part[n]: None
                for _, part in _parts(keys)
                for n, cells in _select(db, part)
                if cells is not None
            }
            _put(db, list(live), [None] * len(live))
        return [key in live for key in keys]

    def changes(self, entity: str, cursor: int, limit: int) -> tuple[list[str], int]:
        with self._file.reading() as db:
            (last,) = db.execute("SELECT value FROM last_sequence").fetchone()
            # A cursor from the future belongs to a file that is gone: the reader has to start again.
            after = cursor if cursor <= last else 0
            found = db.execute(
                "SELECT id, sequence FROM rows WHERE entity = ? AND sequence > ? ORDER BY sequence LIMIT ?",
                (entity, after, limit),
            ).fetchall()
        return [id for id, _ in found], found[-1][1] if found else after

    def claim(self, claims: Sequence[Claim], ttl_s: float) -> list[bool]:
        if not claims:
            return []
        now_ms = self._now_ms()
        expires_ms = now_ms + round(ttl_s * 1_000)
        ids = [blake2b(claim.id.encode(), digest_size=16).digest() for claim in claims]
        owners = [blake2b(claim.owner.encode(), digest_size=8).digest() for claim in claims]
        with self._file.writing() as db:
            db.executemany(
                "DELETE FROM claims WHERE id = ? AND expires_ms <= ?", ((id, now_ms) for id in ids)
            )
            db.executemany(
                "INSERT OR IGNORE INTO claims (id, owner, expires_ms) VALUES (?, ?, ?)",
                ((id, owner, expires_ms) for id, owner in zip(ids, owners, strict=True)),
            )
            one = "SELECT owner FROM claims WHERE id = ?"
            holders = [db.execute(one, (id,)).fetchone()[0] for id in ids]
            self._prune_claims(db, now_ms, 2 * len(claims) + 64)
        return [holder == owner for holder, owner in zip(holders, owners, strict=True)]

    def scan(self, entity: str, after: str, limit: int) -> list[str]:
        with self._file.reading() as db:
            found = db.execute(
                "SELECT id FROM rows WHERE entity = ? AND id > ? AND cells IS NOT NULL ORDER BY id LIMIT ?",
                (entity, after, limit),
            ).fetchall()
        return [id for (id,) in found]

    def close(self) -> None:
        self._file.close()

    def _prune_claims(self, db: sqlite3.Connection, now_ms: int, most: int) -> None:
        """Drop up to ``most`` of the oldest claims that expired or are too many: twice what a call adds, so
        the bound holds at a constant cost per claim. Arrivals have few gaps, and a gap only drops earlier."""
        db.execute(
            """
            DELETE FROM claims WHERE arrival IN (
                SELECT arrival FROM (SELECT arrival, expires_ms FROM claims ORDER BY arrival LIMIT ?)
                WHERE expires_ms <= ? OR arrival <= (SELECT max(arrival) FROM claims) - ?
            )
            """,
            (most, now_ms, self._max_claims),
        )


def _parts(keys: Sequence[EntityKey]) -> Iterator[tuple[int, Sequence[EntityKey]]]:
    for start in range(0, len(keys), _KEYS_PER_STATEMENT):
        yield start, keys[start : start + _KEYS_PER_STATEMENT]


@lru_cache(maxsize=16)
def _select_statement(size: int) -> str:
    # A join with literal ordinals keeps the order and repeats of the keys, and probes the index once each.
    values = ", ".join(f"({n}, ?, ?)" for n in range(size))
    join = "CROSS JOIN rows ON rows.entity = wanted.entity AND rows.id = wanted.id"
    return f"WITH wanted (n, entity, id) AS (VALUES {values}) SELECT n, cells FROM wanted {join}"  # noqa: S608


def _select(db: sqlite3.Connection, keys: Sequence[EntityKey]) -> list[tuple[int, bytes | None]]:
    """(position in ``keys``, packed cells or None if deleted) of each key that has a row."""
    size = 1 << max(len(keys) - 1, 0).bit_length()  # few sizes, so that prepared statements are found again
    parameters: list[str | None] = [None] * (2 * size)
    parameters[: 2 * len(keys) : 2] = [key.entity for key in keys]
    parameters[1 : 2 * len(keys) : 2] = [key.id for key in keys]
    return db.execute(_select_statement(size), parameters).fetchall()


def _put(db: sqlite3.Connection, keys: Sequence[EntityKey], cells: Sequence[bytes | None]) -> None:
    """Store the packed cells of each key under a sequence number of its own."""
    (last,) = db.execute(
        "UPDATE last_sequence SET value = value + ? RETURNING value", (len(keys),)
    ).fetchone()
    first = last - len(keys) + 1
    db.executemany(
        "INSERT INTO rows (entity, id, sequence, cells) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (entity, id) DO UPDATE SET sequence = excluded.sequence, cells = excluded.cells",
        (
            (key.entity, key.id, first + n, packed)
            for n, (key, packed) in enumerate(zip(keys, cells, strict=True))
        ),
    )
