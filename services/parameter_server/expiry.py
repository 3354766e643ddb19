"""Rows that nobody pushed for a table's ``expiry_s`` go, a few slots at a time, in between everything else.

A table is gone through once in a tenth of its expiry, so a row goes at most that much too late; and never more than
once a second. Where a table is too large for that beside the other work, a round takes longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.parameter_server.host import Host
from sync.shard import Shard

LOOK_S: Final = 0.05
"""How often it is seen which tables are due."""
BUDGET_S: Final = 0.002
"""How long one turn may go on, but for its last slice."""
SLICE: Final = 4_096
"""Slots that are looked at in one go at most; all of them may expire."""
WORTHWHILE: Final = 512
"""Slots that are worth a look at all, in a table that has more."""
ROUNDS: Final = 10
LEAST_ROUND_S: Final = 1.0

Place = tuple[str, int, str]
"""Model, shard, table."""


class Pace:
    """How many of a table's slots are to be looked at, so that a round over all takes ``round_s``. Pure."""

    __slots__ = ("_last_s", "_owed", "round_s")

    def __init__(self, expiry_s: float, now_s: float) -> None:
        self.round_s = max(expiry_s / ROUNDS, LEAST_ROUND_S)
        self._owed = 0.0
        self._last_s = now_s

    def due(self, now_s: float, slots: int) -> int:
        """How many slots to look at now, of the ``slots`` that there are; 0 until it is worth it. What a slice
        leaves stays due, up to one round."""
        self._owed = min(self._owed + max(now_s - self._last_s, 0.0) * slots / self.round_s, float(slots))
        self._last_s = now_s
        if not slots or self._owed < min(WORTHWHILE, slots):
            return 0
        taken = min(int(self._owed), SLICE)
        self._owed -= taken
        return taken


@dataclass(slots=True)
class _Round:
    """Where a table's round has come to. ``shard``: as it was then; another in its place begins anew."""

    shard: Shard
    pace: Pace
    slot: int = 0


class Expiry:
    """Lets the shards that ``host`` leads expire rows. ``allowed``: whether a shard may take a step now.

    Used by the server's one thread.
    """

    def __init__(self, host: Host, allowed: Callable[[int], bool], monotonic: Callable[[], float]) -> None:
        self._host, self._allowed, self._monotonic = host, allowed, monotonic
        self._rounds: dict[Place, _Round] = {}
        self._due: deque[Place] = deque()
        self._next_look_s = monotonic()

    def turn(self) -> bool:
        """Look at what is due, for ``BUDGET_S`` at most. Whether a row went."""
        began_s = now = self._monotonic()
        if not self._due and now >= self._next_look_s:
            self._next_look_s = now + LOOK_S
            self._begin_rounds(now)
            self._due.extend(self._rounds)
        worked = False
        while self._due and now < began_s + BUDGET_S:
            worked = self._look(self._due.popleft(), now) or worked
            now = self._monotonic()
        return worked

    def _begin_rounds(self, now: float) -> None:
        """Keep a round for each table that expires and is led here, and for no other."""
        kept: dict[Place, _Round] = {}
        for name, model in self._host.models.items():
            expiring = [spec for spec in model.declaration.tables if spec.expiry_s]
            # What another region writes expires there.
            led = [(number, held) for number, held in self._host.led(model) if self._host.writes(number)]
            for number, held in led if expiring else ():
                for spec in expiring:
                    place = (name, number, spec.name)
                    known = self._rounds.get(place)
                    if known is None or known.shard is not held.shard:
                        known = _Round(held.shard, Pace(spec.expiry_s, now))
                    kept[place] = known
        self._rounds = kept

    def _look(self, place: Place, now: float) -> bool:
        found = self._rounds[place]
        model, number, table = place
        held = self._host.models[model].held.get(number)
        # Since it was seen to be due it may have gone to another server, and come back as a copy.
        mine = number in self._host.fences and held is not None and held.shard is found.shard
        if not mine or not self._allowed(number):
            return False
        limit = found.pace.due(now, found.shard.table(table).slots)
        if not limit:
            return False
        expired, found.slot = found.shard.expire(table, found.slot, limit)
        return expired > 0
