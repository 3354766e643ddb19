"""Appends a data set to the event log, and waits until the pipeline has processed it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.datasets.dataset import Dataset
from services.datasets.errors import DatasetError
from services.events import Event, Interaction, ItemEvent, UserEvent, encode_event, partition_key
from services.messagelog.contract import Message, MessageLog, Producer, partition_of

Progress = Callable[[int], None]
"""Told how many more are done."""

_BATCH: Final = 1_000
_POLL_S: Final = 0.1


class NotProcessed(DatasetError):
    """The pipeline did not get to the end of what was imported in time; it may still do so later."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import wrote: the number of events, and the next offset after the last, by partition."""

    events: int
    ends: Mapping[int, int]


def entity_events(dataset: Dataset) -> Iterator[Event]:
    """An event for each item, then each user, at the time of the first interaction.

    Their ids are the same each time, so a second import changes nothing.
    """
    seen = dataset.interactions
    at_ms = int(seen.timestamp_ms.min()) if len(seen) else None
    for id_, attributes in zip(dataset.items.ids, dataset.items.attributes, strict=True):
        yield ItemEvent(id_, dict(attributes), event_id=f"{dataset.name}/item/{id_}", timestamp_ms=at_ms)
    for id_, attributes in zip(dataset.users.ids, dataset.users.attributes, strict=True):
        yield UserEvent(id_, dict(attributes), event_id=f"{dataset.name}/user/{id_}", timestamp_ms=at_ms)


def interaction_events(dataset: Dataset) -> Iterator[Event]:
    """An event for each interaction, in the order that they stand in."""
    seen = dataset.interactions
    users, items = dataset.users.ids, dataset.items.ids
    columns = (seen.user, seen.item, seen.action, seen.value, seen.timestamp_ms)
    rows = zip(*(column.tolist() for column in columns), seen.event_id, strict=True)
    for user, item, action, value, timestamp_ms, event_id in rows:
        yield Interaction(
            users[user],
            items[item],
            seen.actions[action],
            value=None if np.isnan(value) else value,
            event_id=event_id,
            timestamp_ms=timestamp_ms,
        )


def append_events(
    events: Iterable[Event],
    producer: Producer,
    *,
    topic: str,
    partitions: int,
    now_ms: Callable[[], int],
    batch: int = _BATCH,
    progress: Progress = lambda _count: None,
) -> Imported:
    """Append ``events`` in order, ``batch`` at a time, each accepted at the moment its batch is sent.

    Raises what ``Producer.append`` raises; a repeat of the import then counts nothing twice.
    """
    ends: dict[int, int] = {}
    count = 0
    remaining = iter(events)
    while chunk := list(itertools.islice(remaining, batch)):
        messages = []
        accepted_at_ms = now_ms()
        for event in chunk:
            key = partition_key(event)
            partition = partition_of(key, partitions)
            messages.append(Message(topic, partition, key, encode_event(event), accepted_at_ms))
        for message, offset in zip(messages, producer.append(messages), strict=True):
            ends[message.partition] = max(ends.get(message.partition, 0), offset + 1)
        count += len(chunk)
        progress(len(chunk))
    return Imported(count, ends)


def wait_processed(
    log: MessageLog,
    group: str,
    topic: str,
    ends: Mapping[int, int],
    *,
    timeout_s: float,
    progress: Progress = lambda _count: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until ``group`` has committed up to ``ends`` (next offsets by partition).

    Raises NotProcessed when nothing moved for ``timeout_s``: a slow pipeline is waited for, a dead one not.
    """
    done = -1
    target = sum(ends.values())
    moved_at = clock()
    while True:
        committed = {lag.partition: lag.committed for lag in log.lag(group, topic)}
        now_done = sum(min(max(committed.get(partition, 0), 0), end) for partition, end in ends.items())
        if now_done > done:
            progress(now_done - max(done, 0))
            done, moved_at = now_done, clock()
        if done >= target:
            return
        if clock() - moved_at > timeout_s:
            raise NotProcessed(
                f"group {group} stands still at {done} of {target} on {topic} since {timeout_s:g} s; "
                "`headwater status` shows what runs"
            )
        sleep(_POLL_S)
