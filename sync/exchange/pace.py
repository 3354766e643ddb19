"""How much to ask for, and when: a link's rate and delay as its batches show them. Sans-IO.

A pull that asks for little has its answer soon and pays the delay often; one that asks for much holds up what is
urgent. So a batch has about as many bytes as the link carries in ``target_s``, and as many pulls are open as fill
the link meanwhile. The rate is the largest of the last few seconds at which bytes came in between a pull and its
answer, the delay the least of half a minute (as in Cardwell et al., "BBR", 2016). Where bytes are limited, a pull pays
for all that it allows when it goes, and is given back what was not sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_RATE_MEMORY_S: Final = 10.0
_DELAY_MEMORY_S: Final = 30.0
_MAX_SAMPLES: Final = 256
_UNIT: Final = 1_460
"""Below one packet there is nothing to save."""


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """``min_bytes``, ``max_bytes``: of one batch. ``target_s``: how long one is to be on the link. ``max_bandwidth``:
    bytes a second that are asked for at most; 0: any. ``window``: pulls that are open at least, ``max_window``: at
    most.
    """

    min_bytes: int = 65_536
    max_bytes: int = 8 * 2**20
    target_s: float = 0.1
    max_bandwidth: int = 0
    window: int = 3
    max_window: int = 16


class Pace:
    """What one link can do. ``brake``: in [0, 1], by how much batches are to be smaller at the moment."""

    __slots__ = (
        "_arrived",
        "_brief",
        "_config",
        "_delays",
        "_limit",
        "_not_before_s",
        "_rates",
        "batch_bytes",
        "brake",
        "bytes_total",
        "rate",
        "round_trip_s",
    )  # fmt: skip

    def __init__(self, config: PaceConfig, brake: Callable[[], float] = lambda: 0.0) -> None:
        self._config, self.brake = config, brake
        self._rates: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._delays: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._arrived: deque[tuple[float, int]] = deque([(-math.inf, 0)], maxlen=_MAX_SAMPLES)
        """When bytes came, and how many had by then."""
        self._not_before_s = 0.0
        self._limit = float(config.max_window)
        """Pulls that may be open, by what went wrong before."""
        self.bytes_total = 0
        self.batch_bytes = 0
        """Bytes of the last batch: what tells little has more than it was asked for."""
        self.rate = 0.0
        """Bytes a second that the link was seen to carry, 0 while unknown."""
        self.round_trip_s = 0.0
        """The least time between a pull and its answer, waiting at the source taken off; 0 while unknown."""
        self._brief: deque[float] = deque(maxlen=_MAX_SAMPLES)
        """When batches came within the last second that told all that there was."""

    @property
    def budget(self) -> int:
        """Bytes that the next batch may have. What is open together allows no more than fills the link."""
        filling = self._filling
        return max(self._whole * filling // max(self.window, filling), min(self._config.min_bytes, _UNIT))

    @property
    def _whole(self) -> int:
        """Bytes that the link carries while one batch is to be on it."""
        config = self._config
        limit = (
            self.rate
            if not config.max_bandwidth
            else min(self.rate or config.max_bandwidth, config.max_bandwidth)
        )
        # Who takes over a batch does nothing else meanwhile: there is less in one where others wait.
        most = (1.0 - min(max(self.brake(), 0.0), 1.0)) * config.max_bytes
        return int(min(max(min(limit * config.target_s, most), config.min_bytes), config.max_bytes))

    @property
    def window(self) -> int:
        """Pulls that may be open at once: what fills the link for one and a half round trips, and as many as are
        answered meanwhile, so that one waits at the source whenever something changes."""
        answered = math.ceil(1.5 * len(self._brief) * self.round_trip_s) + 1
        return min(max(answered, self._filling), self._config.max_window, int(self._limit))

    @property
    def _filling(self) -> int:
        """Pulls of whole batches that fill the link."""
        config = self._config
        wanted = round(1.5 * self.rate * self.round_trip_s / self._whole) + 1
        return min(max(wanted, config.window), config.max_window)

    def may_ask(self, now_s: float) -> bool:
        """Whether the next pull may go now."""
        return now_s >= self._not_before_s

    @property
    def due_s(self) -> float:
        """From when on the next pull may go."""
        return self._not_before_s

    def pay(self, nbytes: int, now_s: float) -> float:
        """A pull goes that allows ``nbytes``. Returns how long these are to last, seconds: the price."""
        price_s = self._price_s(nbytes)
        self._not_before_s = max(self._not_before_s, now_s - self._config.target_s) + price_s
        return price_s

    def refund(self, price_s: float) -> None:
        """What was paid for is not coming."""
        self._not_before_s -= price_s

    def forget(self) -> None:
        """An answer never came: the link may be another one now, so what it carried before says nothing any more. Or
        too much was open, and stood in line: half as much is from now on, until answers come again (as TCP does)."""
        self._limit = max(1.0, self.window / 2.0)
        self._rates.clear()
        self._delays.clear()
        self._brief.clear()
        self.rate = self.round_trip_s = 0.0

    def note(
        self, nbytes: int, asked: int, sent_s: float, parked_s: float, now_s: float, price_s: float = 0.0
    ) -> None:
        """A batch of ``nbytes`` came, for a pull of ``sent_s`` that allowed ``asked`` at a price."""
        self.bytes_total += nbytes
        self.batch_bytes = nbytes
        self._limit = min(self._limit + 1.0 / self._limit, float(self._config.max_window))
        self._arrived.append((now_s, self.bytes_total))
        # Who gets all that was asked for sees what the link carries; others see what there was to tell. Several batches
        # together, since a network may hold some up and then deliver them at one moment.
        answered_s = sent_s + parked_s
        if nbytes * 2 >= asked and now_s > answered_s:
            before = next((total for at, total in reversed(self._arrived) if at <= answered_s), 0)
            self._rates.append((now_s, (self.bytes_total - before) / (now_s - answered_s)))
        self._delays.append((now_s, max(now_s - answered_s, 0.0)))
        while self._rates and self._rates[0][0] < now_s - _RATE_MEMORY_S:
            self._rates.popleft()
        while self._delays and self._delays[0][0] < now_s - _DELAY_MEMORY_S:
            self._delays.popleft()
        self.rate = max((rate for _, rate in self._rates), default=0.0)
        self.round_trip_s = min(delay for _, delay in self._delays)
        if nbytes * 2 < asked:
            self._brief.append(now_s)
        while self._brief and self._brief[0] < now_s - 1.0:
            self._brief.popleft()
        # What is small is free: it is what a link without news costs.
        used = nbytes if nbytes >= _UNIT else 0
        self.refund(price_s * (1.0 - used / max(asked, 1)))

    def _price_s(self, nbytes: int) -> float:
        """How long ``nbytes`` are to last, where bytes are limited."""
        allowed = self._config.max_bandwidth
        return nbytes / allowed if allowed else 0.0
