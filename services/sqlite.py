"""What all our SQLite files have in common: a write transaction, and a lock that writers of all processes queue on."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def write_transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """``db`` inside one write transaction: durable when the block ends, undone if it raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite itself rolls back on some errors (disk full)
            db.execute("ROLLBACK")
        raise


@contextmanager
def alone(lock_fd: int) -> Iterator[None]:
    """Hold the lock on an open file. The kernel hands it on in the moment it is free; SQLite's own waiting sleeps in
    growing steps and lets one writer starve another."""
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
