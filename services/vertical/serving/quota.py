"""How many rows a party may ask for in a minute: shares of many chosen rows tell of a host's columns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 60.0
_STEP_S: Final = 1.0


class Quota:
    """At most ``most`` rows in any ``WINDOW_S`` seconds, by party.

    Rows are kept by seconds and forgotten a second too late rather than too early, so memory is bounded.
    """

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most, self._monotonic = most, monotonic
        self._taken: dict[str, deque[tuple[float, int]]] = {}

    def take(self, party: str, rows: int) -> bool:
        """Whether ``party`` may ask for so many rows now; they are counted then."""
        now, taken = self._monotonic(), self._taken.setdefault(party, deque())
        while taken and taken[0][0] + WINDOW_S + _STEP_S <= now:
            taken.popleft()
        if sum(count for _, count in taken) + rows > self._most:
            return False
        self._count(taken, now, rows)
        return True

    def spent(self, party: str, rows: int, age_s: float) -> None:
        """``party`` was answered so many rows ``age_s`` ago, by a process before this one. Oldest first."""
        self._count(self._taken.setdefault(party, deque()), self._monotonic() - max(0.0, age_s), rows)

    def _count(self, taken: deque[tuple[float, int]], at: float, rows: int) -> None:
        if taken and at - taken[-1][0] < _STEP_S:
            began, count = taken.pop()
            taken.append((began, count + rows))
        else:
            taken.append((at, rows))
