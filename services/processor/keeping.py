"""Clean events on their way to the offline log, so that a killed processor leaves no hole there.

The offline log buffers for up to a minute, which is far more than the events log's offsets lag behind. So it
has offsets of its own, in the online store, written after each flush; whoever takes a partition over reads
again from there. Rows carry their place in the log, and the offline log's reader drops what was written twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from featurestore.offline import EVENTS as COLUMNS
from featurestore.offline import OfflineError, OfflineLog
from featurestore.online import Cell, EntityKey, OnlineStore
from services.events import Impression, Interaction
from services.messagelog.contract import MessageLog, Record, TopicPartition
from services.processor.records import Incoming
from services.processor.transform import Labels
from services.topics import EVENTS, PROCESSOR_GROUP
from services.workers import now_ms

ENTITY: Final = "offline"
OFFSET: Final = "offset"
_CHUNK: Final = 2_000

Clean = Callable[[Sequence[Record]], list[Incoming]]

log = logging.getLogger(__name__)


class Keeper:
    """Writes clean events as Parquet. One thread. It never raises OfflineError: what could not be written stays
    behind the saved offset, and is written by the next processor that takes the partition over."""

    def __init__(
        self,
        folder: Path,
        writer: str,
        events: MessageLog,
        store: OnlineStore,
        incarnation: str,
        labels: Labels,
    ) -> None:
        self._offline = OfflineLog(folder, COLUMNS, writer)
        self._events, self._store = events, store
        self._incarnation, self._labels = incarnation, labels
        self._next: dict[int, int] = {}  # per partition: everything before it was handed over
        self._holes: dict[int, tuple[int, int]] = {}  # per partition: from, to
        self._failed: set[int] = set()

    def take_over(self, partitions: Iterable[int]) -> None:
        """The processor goes on where its group is; what was not written before that is a hole to fill.

        Raises LogError, StoreError.
        """
        wanted = sorted(partitions)
        starts = {lag.partition: lag.committed for lag in self._events.lag(PROCESSOR_GROUP, EVENTS)}
        rows = self._store.read([self._key(partition) for partition in wanted]) if wanted else []
        for partition, row in zip(wanted, rows, strict=True):
            saved = row[OFFSET].value if OFFSET in row else 0
            offset, start = saved if isinstance(saved, int) else 0, starts.get(partition, 0)
            self._next[partition] = max(offset, start)
            self._failed.discard(partition)
            if offset < start:
                self._holes[partition] = (offset, start)

    def drop(self, partitions: Iterable[int]) -> None:
        """The partitions belong to another now."""
        for partition in partitions:
            self._next.pop(partition, None)
            self._holes.pop(partition, None)

    def keep(self, events: Sequence[Incoming], ends: Mapping[int, int]) -> None:
        """Take the clean events of a batch. ``ends``: per partition of the batch, the offset after it."""
        if self._append(events):
            self._next.update(ends)
        else:
            self._failed.update(ends)

    def _append(self, events: Sequence[Incoming]) -> bool:
        try:
            self._offline.append(self._columns(events))
        except OfflineError as error:
            log.error("%s; the events stay in the events log", error)
            return False
        return True

    def work(self, clean: Clean) -> None:
        """Fill a bounded piece of a hole, and write what has been buffered for long.

        ``clean`` picks the usable events of records. Raises LogError, StoreError.
        """
        self._fill(clean)
        try:
            flushed = self._offline.flush_if_due()
        except OfflineError as error:
            log.error("%s; trying again", error)
            return
        if flushed:
            self._save()

    def close(self) -> None:
        """Write everything and remember it. Raises StoreError."""
        try:
            self._offline.close()
        except OfflineError as error:
            log.error("%s; the events stay in the events log", error)
            return
        self._save()

    def _fill(self, clean: Clean) -> None:
        """Write a bounded piece of a hole, if there is one."""
        if not self._holes:
            return
        partition, (offset, end) = next(iter(self._holes.items()))
        records = self._events.read(TopicPartition(EVENTS, partition), offset, _CHUNK)
        records = [record for record in records if record.offset < end]
        if records and not self._append(clean(records)):
            self._failed.add(partition)
        if records and records[-1].offset + 1 < end:
            self._holes[partition] = (records[-1].offset + 1, end)
        else:
            del self._holes[partition]

    def _save(self) -> None:
        time_ms = now_ms()
        done = {
            partition: self._holes[partition][0] if partition in self._holes else offset
            for partition, offset in self._next.items()
            if partition not in self._failed
        }
        if done:
            self._store.write({self._key(p): {OFFSET: Cell(offset, time_ms)} for p, offset in done.items()})

    def _key(self, partition: int) -> EntityKey:
        return EntityKey(ENTITY, f"{self._incarnation}/{partition}")

    def _columns(self, events: Sequence[Incoming]) -> dict[str, list[object]]:
        """One row per item that took part; events about an item or user alone are in the online store."""
        rows: list[tuple[object, ...]] = []
        for e in events:
            event = e.event
            at = (e.time_ms, e.accepted_at_ms)
            if isinstance(event, Interaction):
                liked = self._labels.of(event)
                shown = event.recommendation_id
                item = ("interaction", event.user_id, event.item_id, event.action, event.value, liked, shown)
                rows.append((*at, *item, self._incarnation, e.partition, e.offset, 0))
            elif isinstance(event, Impression):
                for place, item_id in enumerate(event.item_ids):
                    item = ("impression", event.user_id, item_id, "", None, None, event.recommendation_id)
                    rows.append((*at, *item, self._incarnation, e.partition, e.offset, place))
        columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS.names)
        return {name: list(column) for name, column in zip(COLUMNS.names, columns, strict=True)}
