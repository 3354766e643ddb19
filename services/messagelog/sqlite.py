"""The message log on SQLite in WAL mode: several processes share the files, a killed one loses nothing.

WAL is not atomic across files, so everything that one transaction may touch lives in one file: ``pipeline.db``
holds groups, offsets and every topic that a consumer writes in its transactions. Topics that only the outside
world appends to (``events``) have a file of their own, so that accepting events never waits for the pipeline.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from services.messagelog import sqlite_groups as groups
from services.messagelog import sqlite_topics as topics
from services.messagelog.contract import (
    Fenced,
    Lag,
    LogError,
    Message,
    Record,
    TopicPartition,
    TopicSpec,
)
from services.messagelog.doorbell import Listener
from services.messagelog.sqlite_file import LogFile

PIPELINE: Final = "pipeline"
SEPARATE: Final = frozenset({"events"})
MAX_BYTES: Final = 64 * 2**30
_BEAT_S: Final = 1.0
_RETENTION_STEP: Final = 10_000


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _Files:
    """The files of one user of the log (a producer, a consumer, or the log itself)."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._by_name: dict[str, LogFile] = {}
        for name in (PIPELINE, *sorted(SEPARATE)):
            self._by_name[name] = LogFile(folder, name, max_bytes=max_bytes)

    @property
    def pipeline(self) -> LogFile:
        return self._by_name[PIPELINE]

    def of(self, topic: str) -> LogFile:
        return self._by_name[topic if topic in SEPARATE else PIPELINE]

    def close(self) -> None:
        for file in self._by_name.values():
            file.close()


class SqliteProducer:
    """Appends messages; see the contract."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def append(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            return []
        targets = {self._files.of(message.topic) for message in messages}
        if len(targets) > 1:
            raise LogError("messages to topics of several files cannot be appended at once")
        with targets.pop().writing(ring=True) as db:
            return topics.append(db, messages)

    def close(self) -> None:
        self._files.close()


class SqliteConsumer:
    """A member of a consumer group; see the contract."""

    def __init__(
        self, files: _Files, group: str, names: Sequence[str], member: str, session_s: float
    ) -> None:
        self._files = files
        self._me = groups.Membership(group, member, uuid.uuid4().hex)
        self._topics = tuple(names)
        self._session_s = session_s
        self._epochs: dict[TopicPartition, int] = {}
        self._next: dict[TopicPartition, int] = {}
        self._generation = -1
        self._beat_at = time.monotonic()
        self._turn = 0
        self._closed = False
        self._join()
        bells = {files.of(name).bell_path for name in names} | {files.pipeline.bell_path}
        self._listener = Listener(sorted(bells))

    def _join(self) -> None:
        counts = {}
        for name in self._topics:
            with self._files.of(name).reading() as db:
                counts[name] = topics.partitions(db, name)
        with self._files.pipeline.writing(ring=True) as db:
            groups.join(db, self._me, counts, _now_ms(), self._session_s)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._epochs)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if partition not in self._epochs:
            raise Fenced(f"{self._me.member} does not own {partition.topic}/{partition.partition}")
        self._next[partition] = offset

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._beat()
            self._listener.clear()
            self._follow_assignment()
            records = self._read(max_records)
            remaining = deadline - time.monotonic()
            if records or remaining <= 0:
                return records
            self._listener.wait(remaining)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at < _BEAT_S:
            return
        self._beat_at = now
        with self._files.pipeline.writing(ring=False) as db:
            alive = groups.beat(db, self._me, _now_ms(), self._session_s)
            if groups.replaced(db, self._me):
                raise Fenced(f"another {self._me.member} joined group {self._me.group}; this one is replaced")
        if not alive:
            self._join()

    def _follow_assignment(self) -> None:
        with self._files.pipeline.reading() as db:
            current = groups.generation(db, self._me.group)
        if current == self._generation:
            return
        with self._files.pipeline.snapshot() as db:
            current = groups.generation(db, self._me.group)
            epochs = groups.owned(db, self._me)
            # A partition that left and came back counts as gained: another may have committed meanwhile.
            gained = {at for at, epoch in epochs.items() if self._epochs.get(at) != epoch}
            stored = groups.committed(db, self._me.group, gained)
        self._next = {at: stored.get(at, 0) if at in gained else self._next[at] for at in epochs}
        self._epochs, self._generation = epochs, current

    def _read(self, max_records: int) -> list[Record]:
        """Take from the owned partitions in turn, beginning with another one each time."""
        ordered = sorted(self._epochs)
        self._turn += 1
        records: list[Record] = []
        for step in range(len(ordered)):
            at = ordered[(self._turn + step) % len(ordered)]
            with self._files.of(at.topic).reading() as db:
                found = topics.read(db, at, self._next[at], max_records - len(records))
            if found:
                self._next[at] = found[-1].offset + 1
                records += found
            if len(records) >= max_records:
                break
        return records

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        with self._files.pipeline.writing(ring=False) as db:
            groups.commit(db, self._me, offsets, self._epochs)

    def transact(self, offsets: Mapping[TopicPartition, int], messages: Sequence[Message]) -> None:
        outside = sorted({message.topic for message in messages} & SEPARATE)
        if outside:
            raise LogError(f"{', '.join(outside)}: only producers append there, not transactions")
        with self._files.pipeline.writing(ring=bool(messages)) as db:
            groups.commit(db, self._me, offsets, self._epochs)
            topics.append(db, messages)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with self._files.pipeline.writing(ring=True) as db:
                groups.leave(db, self._me)
        finally:
            self._listener.close()
            self._files.close()


class SqliteLog:
    """The log in ``folder``; see the contract. ``max_bytes`` bounds each file, beyond it appends raise LogFull."""

    def __init__(
        self,
        folder: Path,
        *,
        session_s: float = groups.SESSION_S,
        max_bytes: int = MAX_BYTES,
        now_ms: Callable[[], int] = _now_ms,
    ) -> None:
        self._folder = folder
        self._session_s = session_s
        self._max_bytes = max_bytes
        self._now_ms = now_ms
        self._files = self._open_files()

    def _open_files(self) -> _Files:
        return _Files(self._folder, self._max_bytes)

    def ensure_topic(self, spec: TopicSpec) -> None:
        with self._files.of(spec.name).writing(ring=False) as db:
            topics.create(db, spec)

    def delete_topic(self, topic: str) -> bool:
        with self._files.of(topic).writing(ring=False) as db:
            existed = topics.delete(db, topic)
        with self._files.pipeline.writing(ring=True) as db:
            groups.forget_topic(db, topic)
        return existed

    def incarnation(self, topic: str) -> str:
        with self._files.of(topic).reading() as db:
            return topics.incarnation(db, topic)

    def partitions(self, topic: str) -> int:
        with self._files.of(topic).reading() as db:
            return topics.partitions(db, topic)

    def producer(self) -> SqliteProducer:
        return SqliteProducer(self._open_files())

    def consumer(self, group: str, names: Sequence[str], *, member: str) -> SqliteConsumer:
        files = self._open_files()
        try:
            return SqliteConsumer(files, group, names, member, self._session_s)
        except BaseException:
            files.close()
            raise

    def read(self, partition: TopicPartition, offset: int, max_records: int) -> list[Record]:
        with self._files.of(partition.topic).reading() as db:
            return topics.read(db, partition, offset, max_records)

    def end_offset(self, partition: TopicPartition) -> int:
        with self._files.of(partition.topic).reading() as db:
            return topics.bounds(db, partition)[2]

    def lag(self, group: str, topic: str) -> list[Lag]:
        all_of_it = [TopicPartition(topic, number) for number in range(self.partitions(topic))]
        with self._files.pipeline.reading() as db:
            committed = groups.committed(db, group, all_of_it)
        lags = []
        for at in all_of_it:
            with self._files.of(topic).snapshot() as db:
                _, first, end = topics.bounds(db, at)
                unread = max(committed.get(at, 0), first)
                oldest = topics.read(db, at, unread, 1)
            seconds = max(0.0, (self._now_ms() - oldest[0].accepted_at_ms) / 1e3) if oldest else 0.0
            lags.append(Lag(at.partition, committed.get(at, 0), end, max(0, end - unread), seconds))
        return lags

    def enforce_retention(self) -> int:
        """See the contract. What a group that reads the topic has not committed yet is kept, whatever its age."""
        dropped = 0
        for name in (PIPELINE, *sorted(SEPARATE)):
            file = self._files.of(name)
            with file.reading() as db:
                kept = db.execute("SELECT name, retention_s FROM topics").fetchall()
            for topic, retention_s in kept:
                dropped += self._drop_old(file, topic, self._now_ms() - int(retention_s * 1e3))
        return dropped

    def _drop_old(self, file: LogFile, topic: str, horizon_ms: int) -> int:
        dropped = 0
        with self._files.pipeline.reading() as db:
            readers = [row[0] for row in db.execute("SELECT grp FROM readers WHERE topic = ?", (topic,))]
        for number in range(self.partitions(topic)):
            at = TopicPartition(topic, number)
            with self._files.pipeline.reading() as db:
                unread = [groups.committed(db, group, [at]).get(at, 0) for group in readers]
            keep_from = min(unread, default=2**40 - 1)
            while True:
                with file.writing(ring=False) as db:
                    step = topics.drop_before(db, at, horizon_ms, keep_from, _RETENTION_STEP)
                dropped += step
                if step < _RETENTION_STEP:
                    break
        return dropped

    def close(self) -> None:
        self._files.close()
