"""How fast a total grows of late. Pure; time is passed in."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 10.0
EVERY_S: Final = 1.0


class Rate:
    """Of the last ten seconds or so."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=round(WINDOW_S / EVERY_S) + 1)

    def note(self, total: int, now_s: float) -> None:
        """To be told at any time; once a second is enough."""
        if not self._seen or now_s - self._seen[-1][0] >= EVERY_S:
            self._seen.append((now_s, total))

    def per_s(self, total: int, now_s: float) -> float:
        """Now that it is ``total``."""
        if not self._seen:
            return 0.0
        at_s, before = self._seen[0]
        return (total - before) / max(now_s - at_s, EVERY_S)
