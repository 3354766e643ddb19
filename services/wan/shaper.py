"""When bytes come out of a link, without I/O: bytes in with a time, bytes out with the time of their release.

A direction is a transmitter of a given rate that all connections share, first come, first served (virtual finishing
times: no loop over bytes or ticks), and then a way of a given delay. Bytes of one connection never overtake each
other: where jitter would let them, the later ones wait for the earlier. Times are seconds of the caller's clock and
never go back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.wan.conditions import LinkConditions

MAX_UNREAD_BYTES: Final = 256 * 2**20
"""Bytes of all connections of a direction that arrived and are not read by who they are for; beyond it nothing more
is taken in, whatever the queue's bound."""


class End(Enum):
    """How a connection's bytes end. It travels behind them."""

    EOF = "eof"
    """The sender will send no more; the other direction goes on."""
    RESET = "reset"
    """The connection broke."""


@dataclass(slots=True)
class Parcel:
    """What was taken in at once: it has left the transmitter at ``sent_s`` and arrives at ``release_s``."""

    load: bytes | End
    sent_s: float
    jitter: float
    """Which part of the conditions' jitter it gets, in [0, 1)."""
    release_s: float = 0.0

    @property
    def size(self) -> int:
        return len(self.load) if isinstance(self.load, bytes) else 0


class Flow:
    """One connection's bytes in one direction. Made by ``Shaper.open``."""

    def __init__(self, shaper: Shaper, draws: random.Random) -> None:
        self._shaper, self._draws = shaper, draws
        self.parcels: deque[Parcel] = deque()
        self.last_release_s = float("-inf")
        self.under_way = 0
        """Bytes taken in and not released."""
        self.unread = 0
        """Bytes released that the receiver has not taken."""

    @property
    def congested(self) -> bool:
        """Whether it fills the link's bound alone, with what its own receiver has not read: others may go on."""
        conditions = self._shaper.conditions
        return bool(self.unread) and self.under_way + self.unread > conditions.headroom_bytes

    def send(self, load: bytes | End, now_s: float) -> float:
        """Take ``load`` in; when it will be released."""
        shaper = self._shaper
        parcel = Parcel(load, now_s, self._draws.random() if shaper.conditions.jitter_s else 0.0)
        parcel.sent_s = shaper.transmit(parcel.size, now_s)
        self.last_release_s = shaper.place(parcel, self.last_release_s)
        self.parcels.append(parcel)
        self.under_way += parcel.size
        shaper.under_way += parcel.size
        return parcel.release_s

    @property
    def next_release_s(self) -> float | None:
        """When the next bytes are due; None where none are under way."""
        return self.parcels[0].release_s if self.parcels else None

    def take(self, now_s: float) -> Iterator[bytes | End]:
        """What is due, in order. Of the bytes the receiver's reading is to be told (``read``)."""
        while self.parcels and self.parcels[0].release_s <= now_s:
            parcel = self.parcels.popleft()
            size = parcel.size
            self.under_way -= size
            self.unread += size
            self._shaper.released(size)
            yield parcel.load

    def read(self, size: int) -> None:
        """The receiver took ``size`` of the bytes that were released."""
        self.unread -= size
        self._shaper.unread -= size

    def close(self) -> None:
        """Forget it, with all that is under way."""
        self._shaper.forget(self)
        self.parcels.clear()
        self.under_way = self.unread = 0


class Shaper:
    """One direction of a link, shared by its connections. The same seed draws the same jitter."""

    def __init__(self, conditions: LinkConditions, seed: int = 0) -> None:
        self.conditions = conditions
        self.under_way = 0
        """Bytes taken in and not released, of all connections."""
        self.unread = 0
        """Bytes released that no receiver has taken, of all connections."""
        self.released_total = 0
        self._seed, self._opened = seed, 0
        self._free_s = float("-inf")
        self._flows: set[Flow] = set()

    @property
    def full(self) -> bool:
        """Whether nobody may send now. All or nothing: a nearly full link would otherwise be fed single bytes."""
        return self.under_way > self.conditions.headroom_bytes or self.unread > MAX_UNREAD_BYTES

    def open(self) -> Flow:
        """A new connection's bytes in this direction."""
        self._opened += 1
        flow = Flow(self, random.Random(f"{self._seed}/{self._opened}"))
        self._flows.add(flow)
        return flow

    def transmit(self, size: int, now_s: float) -> float:
        """Occupy the transmitter with ``size`` bytes as soon as it is free; when the last of them has left it."""
        rate = self.conditions.rate_bits_s
        self._free_s = max(now_s, self._free_s) + (8 * size / rate if rate else 0.0)
        return self._free_s

    def place(self, parcel: Parcel, before_s: float) -> float:
        """Set when ``parcel`` arrives, not before its predecessor's ``before_s``."""
        conditions = self.conditions
        arrives_s = parcel.sent_s + conditions.delay_s + parcel.jitter * conditions.jitter_s
        parcel.release_s = max(arrives_s, before_s)
        return parcel.release_s

    def released(self, size: int) -> None:
        """Account for ``size`` bytes that arrived."""
        self.under_way -= size
        self.unread += size
        self.released_total += size

    def forget(self, flow: Flow) -> None:
        """Give up what ``flow`` holds. The time that its bytes occupied the transmitter stays occupied."""
        self._flows.discard(flow)
        self.under_way -= flow.under_way
        self.unread -= flow.unread

    def change(self, conditions: LinkConditions, now_s: float) -> None:
        """From now on the link is like this. What has left the transmitter arrives as it would have; what still waits
        for it leaves at the new rate, in the same order, and takes the new delay."""
        old_rate = self.conditions.rate_bits_s
        self.conditions = conditions
        waiting = [(parcel, flow) for flow in self._flows for parcel in flow.parcels if parcel.sent_s > now_s]
        waiting.sort(key=lambda one: one[0].sent_s)
        before_s = {
            flow: max((p.release_s for p in flow.parcels if p.sent_s <= now_s), default=float("-inf"))
            for flow in {flow for _, flow in waiting}
        }
        self._free_s = now_s
        on_the_wire = True
        for parcel, flow in waiting:
            size = parcel.size
            if on_the_wire and size:
                # Part of the first one may have left already.
                size = min(size, round((parcel.sent_s - now_s) * old_rate / 8))
                on_the_wire = False
            parcel.sent_s = self.transmit(size, now_s)
            before_s[flow] = self.place(parcel, before_s[flow])
            flow.last_release_s = before_s[flow]
