"""When idle clients knock: a Poisson process over the whole population, so no queue of the population is needed.

Each client asks again after an exponential time of mean ``check_in_s``; together that is one process of rate
N / check_in_s whose every event belongs to a client drawn evenly. It is drawn in blocks, each by (seed, number of the
block), so that its position is two numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.simulator.availability import Availability

BLOCK = 512
STREAM = 17
"""Of ``device_generator``'s counters; the key's client field is 2**63, which is no client."""

Flags = npt.NDArray[np.bool_]
Clients = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class NobodyComes(RuntimeError):
    """No client could start for too long: availability, selection or thresholds leave nobody."""


@dataclass(frozen=True, slots=True)
class Position:
    """Block ``block`` begins at ``begins_s``; ``taken`` of its events are over."""

    block: int = 0
    begins_s: float = 0.0
    taken: int = 0


class Arrivals:
    """The process from ``position`` on. ``patience_s`` bounds how long nobody may come."""

    def __init__(
        self,
        clients: int,
        check_in_s: float,
        seed: int,
        availability: Availability,
        patience_s: float,
        position: Position = Position(),
    ) -> None:
        self._clients, self._seed, self._availability = clients, seed, availability
        self._gap_s, self._patience_s = check_in_s / clients, patience_s
        self.position = position
        self._times, self._who = self._draw(position)

    def next(self, free: Callable[[Clients, Times], Flags], until_s: float) -> tuple[int, float] | None:
        """The next client that can be reached and is ``free``, and when; None when that is not before ``until_s``.

        Raises NobodyComes when there is none for ``patience_s`` seconds.
        """
        first_s = self._now_s()
        while True:
            position = self.position
            times, who = self._times[position.taken :], self._who[position.taken :]
            fits = free(who, times) & self._availability.available(who, times)
            place = int(np.argmax(fits)) if fits.any() else len(times)
            reached_s = float(times[min(place, len(times) - 1)])
            if reached_s >= until_s:
                skipped = int(np.searchsorted(times, until_s, side="left"))
                self._move(position.taken + min(skipped, place))
                return None
            if place < len(times):
                self._move(position.taken + place + 1)
                return int(who[place]), reached_s
            if reached_s - first_s > self._patience_s:
                raise NobodyComes(
                    f"no client could start for {self._patience_s:.0f} s of virtual time: see the availability, the "
                    "selection and how many clients there are for the threshold"
                )
            self._move(BLOCK)

    def skip_to(self, at_s: float) -> None:
        """Let pass, unseen, who knocks before ``at_s``: the process has no memory, so it begins anew there."""
        if at_s > self._now_s():
            self.position = Position(self.position.block + 1, at_s)
            self._times, self._who = self._draw(self.position)

    def _now_s(self) -> float:
        taken = self.position.taken
        return float(self._times[taken - 1]) if taken else self.position.begins_s

    def _move(self, taken: int) -> None:
        position = self.position
        if taken < BLOCK:
            self.position = Position(position.block, position.begins_s, taken)
            return
        self.position = Position(position.block + 1, float(self._times[-1]))
        self._times, self._who = self._draw(self.position)

    def _draw(self, position: Position) -> tuple[Times, Clients]:
        bits = np.random.Philox(key=self._seed | 1 << 127, counter=STREAM << 128 | position.block << 192)
        generator = np.random.Generator(bits)
        times = position.begins_s + np.cumsum(generator.exponential(self._gap_s, BLOCK))
        return times, generator.integers(0, self._clients, BLOCK)
