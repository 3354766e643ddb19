"""Hybrid logical clock: version times that grow whatever the physical clock does.

Kulkarni et al., "Logical Physical Clocks" (2014), with time and counter in one number: microseconds since
1970, which a burst of more than one version a microsecond merely pushes ahead of the physical clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MAX_TIME: Final = 2**63


def system_time_us() -> int:
    """The physical clock, microseconds since 1970."""
    return time.time_ns() // 1_000


class HybridClock:
    """Issues version times. One thread uses it; every shard of a server may share one."""

    __slots__ = ("_last", "_physical")

    def __init__(self, physical: Callable[[], int] = system_time_us, last: int = 0) -> None:
        self._physical = physical
        self._last = last

    @property
    def last(self) -> int:
        """The largest time issued or observed."""
        return self._last

    def physical_us(self) -> int:
        """The physical clock that this one follows, microseconds; for ages, never for versions."""
        return self._physical()

    def tick(self) -> int:
        """Issue 1 + max(physical, last issued or observed)."""
        self._last = 1 + max(self._physical(), self._last)
        return self._last

    def observe(self, version_time: int) -> None:
        """Never issue a time up to ``version_time`` again: it was received or restored."""
        if not 0 <= version_time < MAX_TIME:
            raise ValueError(f"version time {version_time} is not in [0, 2^63)")
        self._last = max(self._last, version_time)
