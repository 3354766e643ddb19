"""Which offset of each source is on disk, from which positions of a shard are. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sync.pushes import NOTHING, Source
from sync.records import Delta


class DurableOffsets:
    """The durable position of one shard, and the offsets of its sources there.

    ``note`` every step that is being written and tell what ``reached`` the disk. Where the log was given up,
    ``stand_still``: nothing counts until a snapshot that was begun (``restart``) is ``complete``. What it remembers is
    bounded by the steps that wait for the disk, and by the number of sources.
    """

    __slots__ = ("_ahead", "_ahead_position", "_base", "_offsets", "_still", "_waiting", "position")

    def __init__(self, position: int = 0, offsets: Mapping[Source, int] | None = None) -> None:
        self.position = position
        """Every step up to it would be there after a crash."""
        self._offsets = dict(offsets or {})
        self._waiting: deque[tuple[int, Source, int]] = deque()
        self._still = False
        self._base: dict[Source, int] | None = None
        self._ahead: dict[Source, int] = {}
        self._ahead_position = 0

    @property
    def standing_still(self) -> bool:
        """Whether steps are written that nothing could be restored from yet, or none are written at all."""
        return self._still

    def of(self, source: Source) -> int:
        """The last durable offset of ``source``, or NOTHING."""
        return self._offsets.get(source, NOTHING)

    def note(self, delta: Delta) -> None:
        """The step was handed out to be written."""
        for source, progress in delta.progress:
            self._waiting.append((delta.position, source, progress.applied))

    def reached(self, position: int) -> None:
        """Every step noted up to ``position`` is on disk."""
        if self._still and self._base is None:
            return
        target = self._ahead if self._still else self._offsets
        while self._waiting and self._waiting[0][0] <= position:
            _, source, offset = self._waiting.popleft()
            target[source] = offset
        if self._still:
            self._ahead_position = max(self._ahead_position, position)
        else:
            self.position = max(self.position, position)

    def stand_still(self) -> None:
        """Steps were dropped: what follows them cannot be restored, until there is a new snapshot."""
        self._still, self._base = True, None
        self._waiting.clear()
        self._ahead = {}

    def begin_anew(self) -> None:
        """The shard is another from now on: nothing of it is durable."""
        self.position, self._offsets = 0, {}

    def restart(self, position: int, offsets: Mapping[Source, int]) -> None:
        """A snapshot begins at ``position``, where the sources stand at ``offsets``; steps after it are noted again."""
        self._base, self._ahead_position = dict(offsets), position

    def complete(self) -> None:
        """The snapshot that ``restart`` told of is on disk."""
        if self._base is None:
            return
        self._offsets = self._base | self._ahead
        self.position = self._ahead_position
        self._still, self._base, self._ahead = False, None, {}
