"""Joint predictions of many rows: in batches, several under way, in the order of asking, until all are answered.

What hosts do to a batch decides what becomes of it:

    answered                          its rows are scored; those that a host has not, by the guest's part alone
    late, away, busy, too-many        it is asked again for ``patience_s``; then its rows are scored by the guest's part
                                      alone (or, ``strict``, nothing more is: HostsGone). After that nobody waits for
                                      such a host again until it answers once.
    too-many, for all of that time    HostRefuses: the host never takes so many rows
    anything else                     HostRefuses: asking again would not help
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.vertical.serving.guest import NOT_THERE, Answer

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 5.0
TOO_MANY: Final = "too-many"
_LATER: Final = frozenset({"late", "away", "busy", TOO_MANY})
_FINE: Final = frozenset({"answered", "not-asked"})

Ask = Callable[[Sequence[bytes], str], Awaitable[Answer]]
"""Asks for ids in their normalised form, under a request's id."""


class HostRefuses(Exception):
    """``host`` will not answer, however often it is asked."""

    def __init__(self, host: str, outcome: str) -> None:
        self.host, self.outcome = host, outcome
        super().__init__(f"{host} does not answer with its share: {outcome}")


class HostsGone(Exception):
    """Hosts did not answer for as long as they were waited for."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How rows are asked for. ``batch``: rows at a time. ``in_flight``: batches under way. ``deadline_s``: for each
    question. ``patience_s``: for how long a batch is asked again. ``strict``: rather stop than score without a host.
    """

    batch: int = 1_000
    in_flight: int = 4
    deadline_s: float = 10.0
    patience_s: float = 90.0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.in_flight < 1:
            raise ValueError("batch and in_flight must be 1 or more")


@dataclass(slots=True)
class Tally:
    """Rows that are scored: by all parties, by the guest alone, and why (a row may have several reasons)."""

    joint: int = 0
    degraded: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, reasons: Sequence[str]) -> None:
        """Rows with these reasons (``reasons_of``)."""
        alone = [one for one in reasons if one]
        self.joint += len(reasons) - len(alone)
        self.degraded += len(alone)
        self.reasons.update(reason for one in alone for reason in one.split("; "))


def reasons_of(answer: Answer) -> list[str]:
    """For each row why it was scored without a host, as ``HOST OUTCOME; …``; empty where it was not."""
    troubled = [f"{host} {outcome}" for host, outcome in answer.hosts.items() if outcome not in _FINE]
    found: list[str] = []
    for row, degraded in enumerate(answer.degraded.tolist()):
        absent = [f"{host} {NOT_THERE}" for host, rows in answer.missing.items() if degraded and rows[row]]
        found.append("; ".join(troubled + absent) if degraded else "")
    return found


class Bulk:
    """Asks for all of some ids. ``took`` is given each batch's answer, in order, with where it starts."""

    def __init__(
        self,
        ask: Ask,
        manner: Manner,
        request_id: str,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._manner, self._request_id = ask, manner, request_id
        self._sleep, self._monotonic = sleep, monotonic
        self._given_up: set[str] = set()

    async def run(self, values: Sequence[bytes], start: int, took: Callable[[int, Answer], None]) -> None:
        """Answers of ``values`` from place ``start`` on. Raises HostRefuses, HostsGone, and what ``took`` raises; what
        ``took`` was given stays."""
        waiting: deque[tuple[int, asyncio.Task[Answer]]] = deque()
        try:
            for at in range(start, len(values), self._manner.batch):
                some = values[at : at + self._manner.batch]
                waiting.append((at, asyncio.create_task(self._batch(some, at), name=f"batch-{at}")))
                if len(waiting) == self._manner.in_flight:
                    await self._first(waiting, took)
            while waiting:
                await self._first(waiting, took)
        finally:
            rest = [task for _, task in waiting]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def _first(
        self, waiting: deque[tuple[int, asyncio.Task[Answer]]], took: Callable[[int, Answer], None]
    ) -> None:
        at, task = waiting[0]
        answer = await task
        waiting.popleft()
        took(at, answer)

    async def _batch(self, values: Sequence[bytes], at: int) -> Answer:
        until_s, pause_s = self._monotonic() + self._manner.patience_s, FIRST_PAUSE_S
        while True:
            answer = await self._ask(values, f"{self._request_id}-{at}")
            self._given_up -= {host for host, outcome in answer.hosts.items() if outcome == "answered"}
            troubled = {host: what for host, what in answer.hosts.items() if what not in _FINE}
            for host, outcome in troubled.items():
                if outcome not in _LATER:
                    raise HostRefuses(host, outcome)
            if not troubled or (troubled.keys() <= self._given_up and TOO_MANY not in troubled.values()):
                return answer
            left_s = until_s - self._monotonic()
            if left_s <= 0:
                return self._without(troubled, answer)
            await self._sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _without(self, troubled: dict[str, str], answer: Answer) -> Answer:
        for host, outcome in troubled.items():
            if outcome == TOO_MANY:
                raise HostRefuses(host, outcome)
        if self._manner.strict:
            told = ", ".join(f"{host} {outcome}" for host, outcome in troubled.items())
            raise HostsGone(f"no answer within {self._manner.patience_s:.0f} s: {told}")
        self._given_up |= troubled.keys()
        return answer
