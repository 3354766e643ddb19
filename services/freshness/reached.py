"""When a watermark first covered a position."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

MOVES: Final = 16_384


class Reached:
    """The moves of one watermark (of one stage and partition), the newest ``most`` at least half of.

    Watermarks only count where they rise; a lower one (a server restored from a snapshot) changes nothing of
    what was reached before.
    """

    def __init__(self, since_ms: float = -math.inf, most: int = MOVES) -> None:
        """``since_ms``: from when on moves were watched; what was accepted earlier may have been reached
        earlier than the first move that is known here."""
        self._since_ms, self._most = since_ms, most
        self._offsets: list[int] = []
        self._times_ms: list[float] = []

    @property
    def offset(self) -> int:
        """The newest position that is covered, -1 for none."""
        return self._offsets[-1] if self._offsets else -1

    def move(self, offset: int, at_ms: float) -> None:
        """The watermark was found at ``offset``."""
        if offset <= self.offset:
            return
        if len(self._offsets) >= self._most:
            half = self._most // 2
            # Whatever was accepted before the oldest move that is kept may have been covered by a forgotten one.
            self._since_ms = max(self._since_ms, self._times_ms[half - 1])
            del self._offsets[:half], self._times_ms[:half]
        self._offsets.append(offset)
        self._times_ms.append(at_ms)

    def when(self, offset: int, accepted_at_ms: float) -> float | None:
        """When ``offset``, accepted at that time, was first known to be covered; None where it is not, or was at a
        time that nobody knows here."""
        at = bisect_left(self._offsets, offset)
        if at == len(self._offsets) or accepted_at_ms < self._since_ms:
            return None
        return self._times_ms[at]
