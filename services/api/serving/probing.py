"""This region's freshness: how far its parameters and its recommendations are, and which probes it knows of.

The item index, the change streams that feed it and those of the marked updates each have their watermarks
(``Freshness``); every move is noted, and probes are looked up in these notes when somebody asks. The stamps of
processor and trainers are read from the log at that moment, too: where nobody measures, nothing is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from services.api.problems import Problem
from services.api.serving.freshness import Freshness
from services.coordination.contract import CoordinationError
from services.freshness.stages import Stage
from services.freshness.stamps import StampFormatError, decode_stamp, stamp_message
from services.freshness.tracker import Probe, Tracker
from services.freshness.updates import LOG, SLOTS, Update, update_stamp
from services.messagelog.contract import LogError, Message, Record
from services.parameter_server.types import Mark, ParameterError, ShardChanges
from services.tokens import Token, log_fingerprint

READ: Final = 500
READS: Final = 20
"""Stamps read in one go, and how often in one refresh, at most."""
BEHIND: Final = 2_000
"""Stamps of the past that a new API reads."""
RETRY_S: Final = 0.5

log = logging.getLogger(__name__)


class Backends(Protocol):
    """What probes need beyond the API's own parts (``probe_backends``). Only ``updates`` belongs on the loop."""

    def stamps(self, offset: int, most: int) -> list[Record]:
        """Stamps from ``offset`` on. Raises LogError."""
        ...

    def stamps_end(self) -> int:
        """Where the stamps end. Raises LogError."""
        ...

    def updates(self) -> AsyncGenerator[ShardChanges]:
        """The change streams of the marked updates, for ever. Raises ParameterError."""
        ...

    def push(self, count: int) -> list[Update]:
        """Push marked updates, one after the other. Raises ParameterError, CoordinationError."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Watched:
    """One stage's watermarks of one log, and since when they are watched (Unix ms)."""

    stage: Stage
    log: int
    since_ms: float


class Probing:
    """Belongs to one event loop. ``recommendations`` and ``parameters`` are advanced by whoever follows the
    parameter servers; ``updates`` from here, once somebody asks for a marked update."""

    def __init__(
        self,
        incarnation: str,
        partitions: int,
        region: str = "home",
        *,
        append: Callable[[Sequence[Message]], Awaitable[object]] | None = None,
        backends: Backends | None = None,
        now_ms: Callable[[], float] = lambda: time.time() * 1e3,
    ) -> None:
        """``incarnation`` and ``partitions`` are those of the events log; ``append`` writes to the log."""
        self.region, self._now_ms = region, now_ms
        self._append, self._backends = append, backends
        self.tracker = Tracker()
        self.parameters = self._watched("parameters", incarnation, partitions)
        self.recommendations = self._watched("recommendations", incarnation, partitions)
        self.updates = Freshness(LOG, SLOTS)
        self._following: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._pushing = asyncio.Lock()
        self._next: int | None = None

    def _watched(self, stage: Stage, name: str, partitions: int) -> Freshness:
        watched = _Watched(stage, log_fingerprint(name), self._now_ms())
        return Freshness(name, partitions, lambda marks: self._moved(watched, marks))

    def _moved(self, watched: _Watched, marks: Mapping[int, Mark]) -> None:
        offsets = {partition: mark.offset for partition, mark in marks.items()}
        self.tracker.move(watched.stage, watched.log, offsets, self._now_ms(), watched.since_ms)

    def of(self, token: Token) -> Mapping[Stage, Freshness] | None:
        """The stages that know of ``token``'s log, None where none does."""
        if self.recommendations.names(token):
            return {"parameters": self.parameters, "recommendations": self.recommendations}
        if self.updates.names(token):
            self.follow_updates()
            return {"parameters": self.updates}
        return None

    def follow_updates(self) -> None:
        """Follow the marked updates from now on, if that is not done yet."""
        if self._following is None and self._backends is not None:
            self.updates = self._watched("parameters", LOG, SLOTS)
            self._following = asyncio.create_task(self._follow(self._backends), name="follow-probes")

    async def _follow(self, backends: Backends) -> None:
        while True:
            try:
                async with aclosing(backends.updates()) as stream:
                    async for changes in stream:
                        if changes.complete:
                            self.updates.advance(changes.shard, changes.shards, changes.watermarks)
            except ParameterError as error:
                log.warning("following the marked updates: %s", error)
            await asyncio.sleep(RETRY_S)

    async def refresh(self) -> None:
        """Read the stamps that came since the last time. Where the log is away, what is known stays."""
        if self._backends is None:
            return
        async with self._reading:
            try:
                for _ in range(READS):
                    records = await asyncio.to_thread(self._read, self._backends)
                    self._take(records)
                    if len(records) < READ:
                        break
            except LogError as error:
                log.warning("stamps of probes cannot be read: %s", error)

    def _read(self, backends: Backends) -> list[Record]:
        if self._next is None:
            self._next = max(0, backends.stamps_end() - BEHIND)
        return backends.stamps(self._next, READ)

    def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            self._next = record.offset + 1
            try:
                self.tracker.stamp(decode_stamp(record.value))
            except StampFormatError as error:
                log.warning("stamp %d cannot be read: %s", record.offset, error)

    async def push(self, count: int) -> list[Probe]:
        """Push ``count`` marked updates from here. Raises Problem unavailable."""
        if self._backends is None:
            raise Problem("unavailable", "There are no parameter servers.")
        self.follow_updates()
        try:
            async with self._pushing:
                updates = await asyncio.to_thread(self._backends.push, count)
        except (ParameterError, CoordinationError) as error:
            log.warning("marked updates were not pushed: %s", error)
            raise Problem(
                "unavailable", "The parameter servers did not take them.", retry_after_s=1
            ) from error
        stamps = [update_stamp(update) for update in updates]
        for stamp in stamps:
            self.tracker.stamp(stamp)
        if self._append is not None:
            await self._append([stamp_message(stamp) for stamp in stamps])
        found = [self.tracker.find(stamp.probes[0].id) for stamp in stamps]
        return [probe for probe in found if probe is not None]

    async def close(self) -> None:
        """Follow no more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        if self._backends is not None:
            self._backends.close()
