"""Pushes are applied once: who pushed what, and how far each source has come.

The identity of a push is (log incarnation, partition, offset) of the micro-batch that caused it. Each names
its predecessor on this shard. At or below the applied offset it is a duplicate; with the applied offset as
its predecessor it is next; anything else is a gap, since something before it was lost or overtaken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from sync.errors import BadPush, TooManySources

NOTHING: Final = -1
"""The applied offset of a source that never pushed, and the predecessor of its first push."""

Status = Literal["applied", "duplicate", "gap", "refused"]
Part = tuple[str, npt.NDArray[np.uint64], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """Where pushes come from: an incarnation of a log, and one of its partitions."""

    log: str
    partition: int


@dataclass(frozen=True, slots=True)
class Watermark:
    """The newest event contained: its log's incarnation, partition, offset and acceptance time (Unix ms)."""

    log: str
    partition: int
    offset: int
    accepted_at_ms: int


Watermarks = Mapping[tuple[str, int], Watermark]
"""By (log incarnation, partition)."""


@dataclass(frozen=True, slots=True)
class Push:
    """Gradients of one micro-batch for one shard; ``parts`` may be empty, the offset advances all the same.

    Each part: table name, keys uint64 ``[N]``, gradients float32 ``[N, dim]``. Gradients of a key that occurs
    more than once are summed before the optimiser sees them.
    """

    source: Source
    offset: int
    predecessor: int
    watermark: Watermark | None = None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """What became of a push. ``applied``: the source's applied offset now. ``reason``: why refused, else
    ''."""

    status: Status
    applied: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a source has come on this shard."""

    applied: int
    watermark: Watermark | None = None


@dataclass(slots=True)
class PushTable:
    """The applied offset of every source. Part of the shard's snapshot, atomic with its rows."""

    max_sources: int = 65_536
    _progress: dict[Source, Progress] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._progress)

    def applied(self, source: Source) -> int:
        """The last applied offset of ``source``, or NOTHING."""
        progress = self._progress.get(source)
        return NOTHING if progress is None else progress.applied

    def decide(
        self,
        source: Source,
        offset: int,
        predecessor: int,
        applied: int | None = None,
        new_sources: int = 0,
    ) -> Literal["next", "duplicate", "gap"]:
        """What a push at ``offset`` after ``predecessor`` is. Changes nothing.

        ``applied`` and ``new_sources``: the source's applied offset and the room for sources that others take,
        as they will be once what is about to be applied was.

        Raises BadPush where no log can produce the pair, TooManySources where a new source finds no room.
        """
        if not (NOTHING <= predecessor < offset < 2**63 and 0 <= source.partition < 2**31 and source.log):
            raise BadPush(f"offset {offset} after {predecessor} of {source.log!r}/{source.partition}")
        fresh = applied is None and source not in self._progress
        applied = self.applied(source) if applied is None else applied
        if offset <= applied:
            return "duplicate"
        if predecessor != applied:
            return "gap"
        if fresh and len(self._progress) + new_sources >= self.max_sources:
            raise TooManySources(
                f"{self.max_sources} sources are known; {source.log!r}/{source.partition} is new"
            )
        return "next"

    def advance(self, source: Source, offset: int, watermark: Watermark | None) -> None:
        """Record that ``offset`` is done. A push without a watermark keeps the source's last one."""
        if watermark is None and source in self._progress:
            watermark = self._progress[source].watermark
        self._progress[source] = Progress(offset, watermark)

    def forget(self, log: str) -> int:
        """Drop every source of a retired log; returns how many. Its pushes would be taken for new again."""
        retired = [source for source in self._progress if source.log == log]
        for source in retired:
            del self._progress[source]
        return len(retired)

    def watermarks(self) -> dict[tuple[str, int], Watermark]:
        """The newest event of every event partition that the rows contain."""
        newest: dict[tuple[str, int], Watermark] = {}
        for progress in self._progress.values():
            mark = progress.watermark
            if mark is None:
                continue
            known = newest.get((mark.log, mark.partition))
            if known is None or known.offset < mark.offset:
                newest[mark.log, mark.partition] = mark
        return newest

    def progress(self) -> dict[Source, Progress]:
        """A copy of the whole table."""
        return dict(self._progress)

    def progress_of(self, sources: Collection[Source]) -> tuple[tuple[Source, Progress], ...]:
        """How far those of ``sources`` that are known have come, in their order."""
        return tuple((one, self._progress[one]) for one in sorted(sources) if one in self._progress)
