"""The seam of shared round state: small records changed atomically, and large bodies. In memory here; SQLite and
Redis stand beside the servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
Step = Callable[[Mapping[str, bytes | None]], tuple[Mapping[str, bytes | None], T]]


class StoreUnavailable(ConnectionError):
    """The store cannot be reached or does not answer in time; nothing is known of the last change."""


class Store(Protocol):
    """What rounds keep and share. Keys are text up to 1 KiB; records are small, blobs may be large."""

    def transact(self, keys: Sequence[str], step: Step[T]) -> T:
        """Read ``keys``, run ``step``, write what it returns, atomically with regard to the keys read.

        ``step`` gets each key's value (None when absent) and returns what to write (None deletes) and the
        result. It may run again after a conflict, so it must be pure. It may write keys that it did not read:
        they are guarded by those it read. What it raises passes through, and nothing is written. Durable when
        it returns. Raises StoreUnavailable.
        """
        ...

    def put_blob(self, key: str, body: bytes) -> None:
        """Keep ``body`` durably; one that is there is replaced as a whole. Raises StoreUnavailable."""
        ...

    def get_blob(self, key: str) -> bytes | None:
        """The body kept under ``key``, or None. Raises StoreUnavailable."""
        ...

    def blobs(self, prefix: str) -> Iterator[str]:
        """Keys of blobs that start with ``prefix``, in order of their UTF-8 bytes."""
        ...

    def delete(self, prefix: str) -> None:
        """Drop all records and blobs whose keys start with ``prefix``; not atomic, may be repeated."""
        ...


def read(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """What stands under ``keys`` at one moment. Raises StoreUnavailable."""
    return store.transact(keys, lambda values: ({}, [values[key] for key in keys]))


class MemoryStore:
    """A store within one process, safe under threads. For tests and the simulator."""

    def __init__(self, records: Mapping[str, bytes] | None = None) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, bytes] = dict(records or {})
        self._blobs: dict[str, bytes] = {}

    def transact(self, keys: Sequence[str], step: Step[T]) -> T:
        with self._lock:
            writes, result = step({key: self._records.get(key) for key in keys})
            for key, value in writes.items():
                if value is None:
                    self._records.pop(key, None)
                else:
                    self._records[key] = value
            return result

    def records(self) -> dict[str, bytes]:
        """A copy of all records, from which another store can go on (blobs are not in it)."""
        with self._lock:
            return dict(self._records)

    def put_blob(self, key: str, body: bytes) -> None:
        with self._lock:
            self._blobs[key] = bytes(body)

    def get_blob(self, key: str) -> bytes | None:
        return self._blobs.get(key)

    def blobs(self, prefix: str) -> Iterator[str]:
        with self._lock:
            found = [key for key in self._blobs if key.startswith(prefix)]
        return iter(sorted(found, key=str.encode))

    def delete(self, prefix: str) -> None:
        with self._lock:
            for kept in (self._records, self._blobs):
                for key in [key for key in kept if key.startswith(prefix)]:
                    del kept[key]
