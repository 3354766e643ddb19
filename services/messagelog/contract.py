"""The message log seam: topics, partitions, consumer groups, transactions.

Every backend passes the one contract test class in ``tests/services/test_messagelog.py``.

Exceptions::

    LogError                 anything the log refuses or cannot do
    ├── UnknownTopic         the topic was never created
    ├── Fenced               this consumer lost the partition (or was replaced); nothing was written
    ├── LogFull              the backend's bound or the disk is full; nothing was written
    └── LogUnavailable       the backend cannot be reached; retry later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash


class LogError(Exception):
    """The message log refused, or could not do, what was asked."""


class UnknownTopic(LogError):
    """The topic was never created; create it with ``ensure_topic``."""


class Fenced(LogError):
    """The consumer no longer owns the partition; what it tried to write was not written."""


class LogFull(LogError):
    """A bound of the backend, or its disk, is reached; nothing was written."""


class LogUnavailable(LogError):
    """The backend cannot be reached now."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic: its name, number of partitions and how long it keeps messages (seconds)."""

    name: str
    partitions: int
    retention_s: float


@dataclass(frozen=True, slots=True)
class Message:
    """A message to append. ``accepted_at_ms`` is the API's clock (Unix ms), carried unchanged to readers."""

    topic: str
    partition: int
    key: bytes
    value: bytes
    accepted_at_ms: int


@dataclass(frozen=True, slots=True)
class Record:
    """A message read back: where it stands and what it holds. Offsets grow, but may have gaps."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    accepted_at_ms: int


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is behind on one partition: in messages, and in seconds since the oldest unread one
    was accepted (0 when nothing is unread)."""

    partition: int
    committed: int
    end: int
    messages: int
    seconds: float


class Producer(Protocol):
    """Appends messages. Thread-safe."""

    def append(self, messages: Sequence[Message]) -> list[int]:
        """Append ``messages`` and return the offset of each, in order, once all are durable.

        Raises LogFull, LogUnavailable or UnknownTopic, and then a retry may duplicate (at least once).
        """
        ...

    def close(self) -> None: ...


class Consumer(Protocol):
    """A member of a consumer group. One thread uses it."""

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return at most ``max_records`` records of the assigned partitions, in offset order per partition.

        Returns as soon as there is something, or an empty list after ``timeout_s``. Partitions that were
        assigned by a rebalance are read from the group's committed offset (from the start if none).
        """
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions owned now; it changes only inside ``poll``."""
        ...

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make ``offset`` the next one that ``poll`` returns for an owned partition."""
        ...

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record the next offset to read per partition. Raises Fenced if one is not owned any more."""
        ...

    def transact(self, offsets: Mapping[TopicPartition, int], messages: Sequence[Message]) -> None:
        """Commit ``offsets`` and append ``messages`` in one transaction: all of it, or nothing.

        Messages may go to several topics. Raises Fenced if a partition is not owned any more.
        """
        ...

    def close(self) -> None:
        """Leave the group, so that its partitions move at once. A second call does nothing."""
        ...


class MessageLog(Protocol):
    """A log with named topics. Thread-safe; producers and consumers are made from it."""

    def ensure_topic(self, spec: TopicSpec) -> None:
        """Create the topic if it is missing. An existing one keeps its number of partitions; a different
        number in ``spec`` raises LogError naming both."""
        ...

    def delete_topic(self, topic: str) -> bool:
        """Remove the topic, its messages and every group's offsets in it; tells whether it existed."""
        ...

    def incarnation(self, topic: str) -> str:
        """An id that changes when the topic is deleted and made again (Kafka topic id, UUID in SQLite)."""
        ...

    def partitions(self, topic: str) -> int: ...

    def producer(self) -> Producer: ...

    def consumer(self, group: str, names: Sequence[str], *, member: str) -> Consumer:
        """Join ``group`` to read the topics ``names``.

        ``member`` is stable over restarts of one instance (``processor-0``); a restarted member takes over from
        its dead former self without waiting longer than the session time-out.
        """
        ...

    def read(self, partition: TopicPartition, offset: int, max_records: int) -> list[Record]:
        """Read committed records from ``offset`` on without a group (for listing and tools)."""
        ...

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset that the next appended record would get, at least."""
        ...

    def lag(self, group: str, topic: str) -> list[Lag]: ...

    def enforce_retention(self) -> int:
        """Drop what is older than its topic's retention and return how many records went (0 where the
        backend does so by itself)."""
        ...

    def close(self) -> None: ...


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of ``key``: the same on every backend, since ours is the only partitioner."""
    return xxhash.xxh3_64_intdigest(key) % partitions
