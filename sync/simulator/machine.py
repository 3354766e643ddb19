"""What a simulated machine is made of: its clock, and what its work takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sync.exchange import Batch
from sync.simulator.queue import EventQueue

START_US: Final = 1_700_000_000_000_000
"""The true time at which a simulation begins, microseconds since 1970."""


class MachineClock:
    """A physical clock: ``skew_s`` off at the beginning, and ``drift`` seconds more with each second."""

    __slots__ = ("_queue", "drift", "skew_s")

    def __init__(self, queue: EventQueue, skew_s: float = 0.0, drift: float = 0.0) -> None:
        self._queue, self.skew_s, self.drift = queue, skew_s, drift

    def __call__(self) -> int:
        now_s = self._queue.now_s
        return START_US + int((now_s * (1.0 + self.drift) + self.skew_s) * 1e6)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a machine's one thread. ``message_s``: for any message in or out; ``scanned_row_s``: for each row
    that is looked at where neither a token nor the update cache can tell; ``found_row_s``: for each row that is found
    by them or sent; ``merged_row_s``: for each row that is merged."""

    message_s: float = 0.0
    scanned_row_s: float = 0.0
    found_row_s: float = 0.0
    merged_row_s: float = 0.0

    def serving_s(self, batch: Batch, looked: int, found: int) -> float:
        """What it takes to answer with ``batch``, for which ``looked`` rows were looked at and ``found`` rows found."""
        return self.message_s + looked * self.scanned_row_s + found * self.found_row_s

    def taking_s(self, batch: Batch, merged: int) -> float:
        """What it takes to take ``batch``, of which ``merged`` rows were new."""
        return self.message_s + merged * self.merged_row_s


FREE: Final = Costs()
