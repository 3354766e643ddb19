"""One processor at work: a batch is read, worked through, written to the online store, and sent on.

Order of effects, and why a kill anywhere does no harm:

1. Event ids are claimed in the name of their place in the log; the same place may claim again.
2. The online store is written, in one round trip. Users and counters note the offset that they contain, so a
   batch that is read again changes nothing here.
3. Consumed offsets and samples go to the log in one transaction: each sample is made once.

A processor that was paused for long may have lost its partitions without knowing. So a batch that took longer
than ``OWNERSHIP_S`` to get to step 2 is dropped before it: the store has no fence of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from featurestore.online import Cell, Claim, EntityKey, OnlineStore
from models.negatives import NegativeSampler
from models.samples import Watermark, encode_batch
from services.catalogue import Catalogue
from services.events import Probe
from services.freshness.stamps import Marked, Stamp, Stamps, Unstamped
from services.messagelog.contract import Consumer, LogError, Message, Record, TopicPartition
from services.processor.metrics import ProcessorMetrics
from services.processor.records import Incoming, Rejected, Rules, sort_records
from services.processor.sampling import recall, remember
from services.processor.transform import Context, Outcome, transform, wanted
from services.topics import EVENTS, REJECTED, SAMPLES
from services.workers import now_ms

OWNERSHIP_S: Final = 4.0
"""Below the session time-out of the log: so long after a poll, its partitions are surely still ours."""
SAVE_EVERY_S: Final = 5.0
REFRESH_EVERY_S: Final = 0.5
REFRESH_SHARE: Final = 0.1
"""Share of its time that a processor spends at most on following the changes of items."""
ENTITY: Final = "processor"
SAMPLER: Final = "sampler"


class TooLate(LogError):
    """A batch took so long that its partitions may belong to another processor by now."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a processor reads and remembers."""

    context: Context
    rules: Rules
    max_batch: int
    linger_s: float
    pace_s: float
    dedupe_window_s: float


class Archive(Protocol):
    """Where clean events are kept for long (``keeping.Keeper``)."""

    def take_over(self, partitions: Iterable[int]) -> None: ...

    def drop(self, partitions: Iterable[int]) -> None: ...

    def keep(self, events: Sequence[Incoming], ends: Mapping[int, int]) -> None: ...

    def work(self, clean: Callable[[Sequence[Record]], list[Incoming]]) -> None:
        """Do a bounded piece of whatever is due."""
        ...


class Processor:
    """Consumes the events log. One thread. After any error a new one has to be made, with a new consumer:
    what it holds in memory may be ahead of the store."""

    def __init__(
        self,
        consumer: Consumer,
        store: OnlineStore,
        plan: Plan,
        metrics: ProcessorMetrics,
        archive: Archive | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        stamps: Stamps | None = None,
    ) -> None:
        """Loads all items; raises StoreUnavailable. ``archive`` is given the clean events after each commit,
        ``stamps`` the probes among them."""
        self._consumer, self._store, self._plan, self._metrics = consumer, store, plan, metrics
        self._archive, self._monotonic = archive, monotonic
        self._stamps = stamps or Unstamped()
        self._catalogue = Catalogue(plan.context.recipe.encoder)
        self._samplers: dict[int, NegativeSampler] = {}
        self._saved_s = self._refreshed_s = monotonic()
        self._read_s = -plan.pace_s
        self._refresh_pause_s = REFRESH_EVERY_S
        self._refresh()

    def step(self, timeout_s: float) -> int:
        """Wait for events, at most ``timeout_s``, and work one batch through; how many records it had.

        Raises LogError (Fenced, TooLate, LogUnavailable) or StoreError, and then the batch is read again by
        whoever owns its partitions.
        """
        records = self._read(timeout_s)
        polled_s = self._monotonic()
        self._follow_assignment()
        # A rebalance while lingering may have taken partitions away again.
        records = [record for record in records if record.partition in self._samplers]
        if records:
            self._process(records, polled_s)
            done_s = self._monotonic()
            self._metrics.batch_seconds.observe(done_s - polled_s)
            oldest_ms = min(record.accepted_at_ms for record in records)
            self._metrics.age_seconds.set((now_ms() - oldest_ms) / 1_000)
        if self._archive is not None:
            self._archive.work(self._clean)
        if self._monotonic() - self._refreshed_s >= self._refresh_pause_s:
            self._refresh()
        self._metrics.items.set(len(self._catalogue))
        return len(records)

    def _read(self, timeout_s: float) -> list[Record]:
        """A batch: what there is, and what arrives within the linger.

        Batches that follow each other start at least the pace apart. A batch makes up to one training step a
        partition, and steps cost about the same whatever their size: under load, fewer and larger ones.
        """
        most = self._plan.max_batch
        records = self._consumer.poll(most, timeout_s)
        deadline_s = max(self._monotonic() + self._plan.linger_s, self._read_s + self._plan.pace_s)
        while records and len(records) < most and (left_s := deadline_s - self._monotonic()) > 0:
            more = self._consumer.poll(most - len(records), left_s)
            if not more:
                break
            records += more
        self._read_s = self._monotonic()
        return records

    def _process(self, records: Sequence[Record], polled_s: float) -> None:
        usable, rejected = sort_records(records, self._plan.rules)
        fresh = self._claim(usable)
        keys = wanted(fresh, self._catalogue, self._plan.context.labels)
        stored = dict(zip(keys, self._store.read(keys), strict=True)) if keys else {}
        ends = _ends(records, self._plan.context.recipe.log)
        outcome = transform(fresh, ends, stored, self._catalogue, self._samplers, self._plan.context)
        self._write(outcome, polled_s)
        offsets = {TopicPartition(EVENTS, end.partition): end.offset + 1 for end in ends}
        self._consumer.transact(offsets, [*_sample_messages(outcome), *_rejected_messages(rejected)])
        self._stamp(fresh, ends)
        self._count(records, usable, fresh, rejected, outcome)
        if self._archive is not None:
            self._archive.keep(fresh, {end.partition: end.offset + 1 for end in ends})

    def _stamp(self, fresh: Sequence[Incoming], ends: Sequence[Watermark]) -> None:
        """Say which probes are processed now."""
        probes = [one for one in fresh if type(one.event) is Probe]
        if not probes:
            return
        at_ms = time.time() * 1e3
        for end in ends:
            marked = [
                Marked(one.event.event_id or "", one.offset, one.accepted_at_ms)
                for one in probes
                if one.partition == end.partition
            ]
            if marked:
                self._stamps.put(
                    Stamp("processed", "event", end.log, end.partition, end.offset, at_ms, marked)
                )

    def _clean(self, records: Sequence[Record]) -> list[Incoming]:
        """Usable events of records of the past; the claims on their ids are still theirs."""
        return self._claim(sort_records(records, self._plan.rules)[0])

    def _claim(self, events: list[Incoming]) -> list[Incoming]:
        """The events that are not repeats of one within the window, by its event_id."""
        log = self._plan.context.recipe.log
        claims = [
            Claim(e.event.event_id, f"{log}/{e.partition}/{e.offset}")
            for e in events
            if e.event.event_id is not None
        ]
        if not claims:
            return events
        granted = iter(self._store.claim(claims, self._plan.dedupe_window_s))
        return [e for e in events if e.event.event_id is None or next(granted)]

    def _write(self, outcome: Outcome, polled_s: float) -> None:
        writes = outcome.writes
        if self._monotonic() - self._saved_s >= SAVE_EVERY_S:
            writes.update(self._sampler_cells())
            self._saved_s = self._monotonic()
        if self._monotonic() - polled_s > OWNERSHIP_S:
            raise TooLate(f"a batch took {self._monotonic() - polled_s:.1f} s until its write")
        if outcome.deletes:
            self._store.delete(outcome.deletes)
        self._store.write(writes)

    def _sampler_cells(self) -> dict[EntityKey, dict[str, Cell]]:
        time_ms = now_ms()
        return {
            self._sampler_key(partition): {SAMPLER: Cell(remember(sampler, self._catalogue), time_ms)}
            for partition, sampler in self._samplers.items()
        }

    def _sampler_key(self, partition: int) -> EntityKey:
        return EntityKey(ENTITY, f"{self._plan.context.recipe.log}/{partition}")

    def _follow_assignment(self) -> None:
        """One sampler per owned partition, as its last owner saved it."""
        owned = {tp.partition for tp in self._consumer.assignment()}
        if owned == self._samplers.keys():
            return
        if self._archive is not None:
            self._archive.drop(self._samplers.keys() - owned)
            self._archive.take_over(owned - self._samplers.keys())
        new = sorted(owned - self._samplers.keys())
        rows = self._store.read([self._sampler_key(partition) for partition in new]) if new else []
        restored = {}
        for partition, row in zip(new, rows, strict=True):
            saved = row[SAMPLER].value if SAMPLER in row else None
            restored[partition] = recall(saved if isinstance(saved, bytes) else b"", self._catalogue)
        kept = {partition: sampler for partition, sampler in self._samplers.items() if partition in owned}
        self._samplers = {**kept, **restored}

    def _refresh(self) -> None:
        started_s = self._monotonic()
        self._catalogue.refresh(self._store, now_ms())
        self._refreshed_s = self._monotonic()
        self._refresh_pause_s = max(REFRESH_EVERY_S, (self._refreshed_s - started_s) / REFRESH_SHARE)

    def _count(
        self,
        records: Sequence[Record],
        usable: Sequence[Incoming],
        fresh: Sequence[Incoming],
        rejected: Sequence[Rejected],
        outcome: Outcome,
    ) -> None:
        self._metrics.events.inc(len(records))
        self._metrics.duplicates.inc(len(usable) - len(fresh))
        self._metrics.samples.inc(sum(map(len, outcome.batches)))
        for each in rejected:
            self._metrics.rejected.labels(each.code).inc()


def _ends(records: Sequence[Record], log: str) -> list[Watermark]:
    """The last record of each partition; its acceptance is the latest so far, so that marks never go back."""
    ends: dict[int, Watermark] = {}
    for record in records:
        before = ends.get(record.partition)
        accepted_ms = record.accepted_at_ms if before is None else before.accepted_at_ms
        ends[record.partition] = Watermark(
            log, record.partition, record.offset, max(accepted_ms, record.accepted_at_ms)
        )
    return [ends[partition] for partition in sorted(ends)]


def _sample_messages(outcome: Outcome) -> list[Message]:
    return [
        Message(
            SAMPLES,
            batch.watermark.partition,
            b"",
            encode_batch(batch),
            batch.watermark.accepted_at_ms,
        )
        for batch in outcome.batches
    ]


def _rejected_messages(rejected: Sequence[Rejected]) -> list[Message]:
    return [Message(REJECTED, 0, b"", each.to_json(), each.accepted_at_ms) for each in rejected]
