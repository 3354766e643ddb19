"""Consumer groups of the SQLite log: who belongs, who owns what, and the fence around it.

Functions over an open transaction of the file that holds the groups. A member that was not seen for the session
time-out is dropped by whoever looks next; partitions are then dealt anew. An owner is a member *and* the instance
that joined under its name, so a restarted member fences its former self at once. Each partition also carries the
epoch (generation of the group) since which its owner has it, and a commit names that epoch: a member whose partition
was another's meanwhile is refused even when it has the partition back, since the other may have done its work.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.messagelog.contract import Fenced, TopicPartition

SESSION_S: Final = 6.0


@dataclass(frozen=True, slots=True)
class Membership:
    """One member of one group; ``instance`` is new at every join."""

    group: str
    member: str
    instance: str


def join(
    db: sqlite3.Connection,
    me: Membership,
    topics: Mapping[str, int],
    now_ms: int,
    session_s: float = SESSION_S,
) -> None:
    """Enter the group for ``topics`` (name → partitions), taking over from a former self; deals anew."""
    key = (me.group, me.member)
    db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0)", (me.group,))
    db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", (*key, me.instance, now_ms))
    db.execute("DELETE FROM subscriptions WHERE grp = ? AND member = ?", key)
    rows = [(*key, topic, partitions) for topic, partitions in topics.items()]
    db.executemany("INSERT INTO subscriptions VALUES (?, ?, ?, ?)", rows)
    db.executemany("INSERT OR IGNORE INTO readers VALUES (?, ?)", [(me.group, topic) for topic in topics])
    _drop_dead(db, me.group, now_ms, session_s)
    _deal(db, me.group)


def beat(db: sqlite3.Connection, me: Membership, now_ms: int, session_s: float = SESSION_S) -> bool:
    """Say that this member lives, and drop those that do not. False if it was itself dropped or replaced."""
    touched = db.execute(
        "UPDATE members SET seen_at_ms = ? WHERE grp = ? AND member = ? AND instance = ?",
        (now_ms, me.group, me.member, me.instance),
    ).rowcount
    if _drop_dead(db, me.group, now_ms, session_s):
        _deal(db, me.group)
    return bool(touched)


def leave(db: sqlite3.Connection, me: Membership) -> None:
    """Go at once, so that the partitions move."""
    key = (me.group, me.member, me.instance)
    if db.execute("DELETE FROM members WHERE grp = ? AND member = ? AND instance = ?", key).rowcount:
        db.execute("DELETE FROM subscriptions WHERE grp = ? AND member = ?", key[:2])
        _deal(db, me.group)


def generation(db: sqlite3.Connection, group: str) -> int:
    """Grows whenever partitions are dealt anew."""
    row = db.execute("SELECT generation FROM groups WHERE name = ?", (group,)).fetchone()
    return int(row[0]) if row else 0


def replaced(db: sqlite3.Connection, me: Membership) -> bool:
    """Whether another instance joined under this member's name."""
    row = db.execute(
        "SELECT instance FROM members WHERE grp = ? AND member = ?", (me.group, me.member)
    ).fetchone()
    return row is not None and row[0] != me.instance


def owned(db: sqlite3.Connection, me: Membership) -> dict[TopicPartition, int]:
    """The partitions dealt to this very instance, each with the epoch since which it has them."""
    rows = db.execute(
        "SELECT topic, partition, epoch FROM assignments WHERE grp = ? AND member = ? AND instance = ?",
        (me.group, me.member, me.instance),
    )
    return {TopicPartition(topic, partition): epoch for topic, partition, epoch in rows}


def committed(
    db: sqlite3.Connection, group: str, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    """The next offset to read of each of ``partitions`` that has one."""
    found = {}
    for at in partitions:
        row = db.execute(
            "SELECT next_offset FROM offsets WHERE grp = ? AND topic = ? AND partition = ?",
            (group, at.topic, at.partition),
        ).fetchone()
        if row:
            found[at] = int(row[0])
    return found


def commit(
    db: sqlite3.Connection,
    me: Membership,
    offsets: Mapping[TopicPartition, int],
    epochs: Mapping[TopicPartition, int],
) -> None:
    """Record ``offsets`` of partitions held in ``epochs``. Raises Fenced if one was not held all that time."""
    held = owned(db, me).items() & epochs.items()
    lost = sorted(offsets.keys() - {at for at, _ in held})
    if lost:
        names = ", ".join(f"{at.topic}/{at.partition}" for at in lost)
        raise Fenced(f"{me.member} of group {me.group} does not own {names} any more; nothing was written")
    db.executemany(
        "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?)",
        [(me.group, at.topic, at.partition, offset) for at, offset in offsets.items()],
    )


def forget_topic(db: sqlite3.Connection, topic: str) -> None:
    """Drop offsets and owners of a topic that was deleted; its next incarnation is read from the start."""
    groups = db.execute("SELECT DISTINCT grp FROM assignments WHERE topic = ?", (topic,)).fetchall()
    db.execute("DELETE FROM offsets WHERE topic = ?", (topic,))
    db.execute("DELETE FROM assignments WHERE topic = ?", (topic,))
    for (group,) in groups:
        _deal(db, group)


def _drop_dead(db: sqlite3.Connection, group: str, now_ms: int, session_s: float) -> bool:
    horizon = now_ms - int(session_s * 1_000)
    dead = db.execute(
        "SELECT member FROM members WHERE grp = ? AND seen_at_ms < ?", (group, horizon)
    ).fetchall()
    for (member,) in dead:
        db.execute("DELETE FROM members WHERE grp = ? AND member = ?", (group, member))
        db.execute("DELETE FROM subscriptions WHERE grp = ? AND member = ?", (group, member))
    return bool(dead)


def _deal(db: sqlite3.Connection, group: str) -> None:
    """Deal each topic's partitions in turn to the members that read it; an unchanged owner keeps its epoch."""
    db.execute("UPDATE groups SET generation = generation + 1 WHERE name = ?", (group,))
    epoch = generation(db, group)
    readers = db.execute(
        "SELECT topic, partitions, s.member, instance FROM subscriptions s "
        "JOIN members m ON m.grp = s.grp AND m.member = s.member WHERE s.grp = ? ORDER BY topic, s.member",
        (group,),
    ).fetchall()
    before = {
        (topic, partition): (member, instance, since)
        for topic, partition, member, instance, since in db.execute(
            "SELECT topic, partition, member, instance, epoch FROM assignments WHERE grp = ?", (group,)
        )
    }
    db.execute("DELETE FROM assignments WHERE grp = ?", (group,))
    for topic in dict.fromkeys(row[0] for row in readers):
        members: Sequence[tuple[str, str]] = [(row[2], row[3]) for row in readers if row[0] == topic]
        for partition in range(next(row[1] for row in readers if row[0] == topic)):
            owner = members[partition % len(members)]
            known = before.get((topic, partition))
            since = known[2] if known is not None and known[:2] == owner else epoch
            db.execute(
                "INSERT INTO assignments VALUES (?, ?, ?, ?, ?, ?)", (group, topic, partition, *owner, since)
            )
