"""Virtual time: what happens next, in order. One seed, one order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """Actions by the second in which they are due; those of one moment in the order in which they were given."""

    __slots__ = ("_heap", "_number", "events_total", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events_total = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when_s: float, action: Action) -> None:
        """Do ``action`` at ``when_s``, or now if that is past."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._number), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do ``action`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float, max_events: int | None = None) -> bool:
        """Do all that is due up to ``until_s``; then that is the time. False: ``max_events`` came first."""
        left = max_events
        while self._heap and self._heap[0][0] <= until_s:
            if left is not None:
                if left == 0:
                    return False
                left -= 1
            self.now_s, _, action = heapq.heappop(self._heap)
            self.events_total += 1
            action()
        self.now_s = max(self.now_s, until_s)
        return True
