"""Topics and messages in one file of the SQLite log: functions over an open transaction."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from services.messagelog.contract import LogError, Message, Record, TopicPartition, TopicSpec, UnknownTopic

_OFFSET_BITS: Final = 40
_MAX_OFFSET: Final = 2**_OFFSET_BITS
"""A message's row id is its partition's slot, then its offset: one B-tree, and each partition is a range."""


def create(db: sqlite3.Connection, spec: TopicSpec) -> None:
    """Make the topic, or check that the one there has as many partitions. Raises LogError."""
    have = partitions(db, spec.name) if exists(db, spec.name) else 0
    if have:
        if have != spec.partitions:
            raise LogError(
                f"topic {spec.name} has {have} partitions, not {spec.partitions}; that cannot change"
            )
        db.execute("UPDATE topics SET retention_s = ? WHERE name = ?", (spec.retention_s, spec.name))
        return
    db.execute("INSERT INTO topics VALUES (?, ?, ?)", (spec.name, uuid.uuid4().hex, spec.retention_s))
    db.executemany(
        "INSERT INTO partitions (topic, partition, first_offset, next_offset) VALUES (?, ?, 0, 0)",
        [(spec.name, partition) for partition in range(spec.partitions)],
    )


def delete(db: sqlite3.Connection, topic: str) -> bool:
    """Remove the topic with its messages; tells whether it existed."""
    for (slot,) in db.execute("SELECT slot FROM partitions WHERE topic = ?", (topic,)).fetchall():
        low = slot << _OFFSET_BITS
        db.execute("DELETE FROM messages WHERE id >= ? AND id < ?", (low, low + _MAX_OFFSET))
    db.execute("DELETE FROM partitions WHERE topic = ?", (topic,))
    return bool(db.execute("DELETE FROM topics WHERE name = ?", (topic,)).rowcount)


def exists(db: sqlite3.Connection, topic: str) -> bool:
    """Whether the topic is in this file."""
    return db.execute("SELECT 1 FROM topics WHERE name = ?", (topic,)).fetchone() is not None


def incarnation(db: sqlite3.Connection, topic: str) -> str:
    """The id of this making of the topic. Raises UnknownTopic."""
    row = db.execute("SELECT incarnation FROM topics WHERE name = ?", (topic,)).fetchone()
    if row is None:
        raise _unknown(topic)
    return str(row[0])


def partitions(db: sqlite3.Connection, topic: str) -> int:
    """How many partitions the topic has. Raises UnknownTopic."""
    count = int(db.execute("SELECT COUNT(*) FROM partitions WHERE topic = ?", (topic,)).fetchone()[0])
    if count == 0:
        raise _unknown(topic)
    return count


def bounds(db: sqlite3.Connection, at: TopicPartition) -> tuple[int, int, int]:
    """Slot, first kept offset and next offset of a partition. Raises UnknownTopic."""
    row = db.execute(
        "SELECT slot, first_offset, next_offset FROM partitions WHERE topic = ? AND partition = ?",
        (at.topic, at.partition),
    ).fetchone()
    if row is None:
        raise _unknown(f"{at.topic}/{at.partition}")
    return int(row[0]), int(row[1]), int(row[2])


def append(db: sqlite3.Connection, messages: Sequence[Message]) -> list[int]:
    """Append and return the offset of each message, in the order given. Raises UnknownTopic."""
    offsets = [0] * len(messages)

    def target(index: int) -> tuple[str, int]:
        return messages[index].topic, messages[index].partition

    for (topic, partition), group in groupby(sorted(range(len(messages)), key=target), key=target):
        slot, _, following = bounds(db, TopicPartition(topic, partition))
        rows = []
        for offset, index in enumerate(group, following):
            message = messages[index]
            offsets[index] = offset
            rows.append((slot << _OFFSET_BITS | offset, message.accepted_at_ms, message.key, message.value))
        db.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)
        db.execute("UPDATE partitions SET next_offset = ? WHERE slot = ?", (following + len(rows), slot))
    return offsets


def read(db: sqlite3.Connection, at: TopicPartition, offset: int, limit: int) -> list[Record]:
    """At most ``limit`` records from ``offset`` on, or from the first kept one. Raises UnknownTopic."""
    slot, first, _ = bounds(db, at)
    low = slot << _OFFSET_BITS
    rows = db.execute(
        "SELECT id, accepted_at_ms, key, value FROM messages WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
        (low + max(offset, first), low + _MAX_OFFSET, limit),
    )
    return [
        Record(at.topic, at.partition, id_ - low, key, value, time_ms) for id_, time_ms, key, value in rows
    ]


def drop_before(
    db: sqlite3.Connection, at: TopicPartition, horizon_ms: int, keep_from: int, limit: int
) -> int:
    """Drop at most ``limit`` leading records accepted before ``horizon_ms``, none from ``keep_from`` on."""
    slot, first, _ = bounds(db, at)
    low = slot << _OFFSET_BITS
    rows = db.execute(
        "SELECT id, accepted_at_ms FROM messages WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
        (low + first, low + max(first, keep_from), limit),
    ).fetchall()
    old = 0
    for _, accepted_at_ms in rows:
        if accepted_at_ms >= horizon_ms:
            break
        old += 1
    if old:
        following = rows[old - 1][0] - low + 1
        db.execute("DELETE FROM messages WHERE id >= ? AND id < ?", (low, low + following))
        db.execute("UPDATE partitions SET first_offset = ? WHERE slot = ?", (following, slot))
    return old


def _unknown(name: str) -> UnknownTopic:
    return UnknownTopic(f"there is no topic {name}; make it with ensure_topic")
