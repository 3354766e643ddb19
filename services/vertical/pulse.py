"""Signs of life of a party's own work, and a clock that counts only time in which this process could work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from federated.vertical.parties import Workers

MOST_STEP_S: Final = 5.0
"""All threads of a network look at the clock more often: what lies between two looks beyond that was a pause."""
Item = TypeVar("Item")


class Pulse:
    """Rises with everything that this party's role gets done: others tell by it who computes from who hangs."""

    def __init__(self) -> None:
        self.count = 0

    def beat(self) -> None:
        """Something was done."""
        self.count += 1

    def watched(self, items: Iterable[Item], every: int = 1) -> Iterator[Item]:
        """``items``, of which each ``every``-th one taken is a beat."""
        for place, item in enumerate(items):
            if place % every == 0:
                self.beat()
            yield item


class WatchedWorkers:
    """``workers`` whose chunks of work are beats: one step of a role may take them long."""

    def __init__(self, workers: Workers, pulse: Pulse) -> None:
        self._workers, self._pulse = workers, pulse

    def map(self, function: Callable[[Any], Any], chunks: Iterable[Any]) -> Sequence[Any]:
        """See ``Workers``."""
        return self._workers.map(function, self._pulse.watched(chunks))


class SteadyClock:
    """Seconds that never jump: two looks are at most ``MOST_STEP_S`` apart, however long this process stood still.

    A machine that slept, or a process that was stopped, heard nobody meanwhile; that is not the others' silence.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._lock = monotonic, threading.Lock()
        self._last_s, self._now_s = monotonic(), 0.0

    def __call__(self) -> float:
        """Seconds since this clock was made."""
        with self._lock:
            seen_s = self._monotonic()
            self._now_s += min(max(0.0, seen_s - self._last_s), MOST_STEP_S)
            self._last_s = seen_s
            return self._now_s
