"""Messages between this party and one other, without I/O: at least once on the wire, exactly once to the role.

A message is cut into *units*, numbered from 1 in each attempt. Units are sent until the peer says up to which number it
has them; they are taken in order, repeats are dropped, a gap is a fault.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

import xxhash

from federated.vertical.parties import MOST_BODY, MOST_KIND, Incoming, PeerFault

UNIT_BYTES: Final = 4 * 2**20
MOST_UNITS: Final = 256
"""Units in one frame."""
REMEMBERED: Final = 1_024
"""Units whose content is remembered, to tell a repeat from a change."""
MOST_WAITING: Final = 65_536
"""Messages that wait for the role, however small: an empty one takes memory, too."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a message; ``last`` ends it."""

    number: int
    kind: str
    last: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Bytes that wait to be sent before a role's Send has to wait, and bytes received that the role has not asked for
    before no more are taken. One message may exceed either."""

    out_bytes: int = 2**30
    in_bytes: int = 2**29


@dataclass(slots=True)
class ChannelCounts:
    """``repeated_total``: units that came again. ``resent_total``: units that were sent again. ``confirmed_total``:
    units that the peer has."""

    sent_total: int = 0
    resent_total: int = 0
    received_total: int = 0
    repeated_total: int = 0
    confirmed_total: int = 0


class Channel:
    """Both directions between us and ``peer``."""

    def __init__(self, peer: str, limits: ChannelLimits) -> None:
        self.peer = peer
        self.counts = ChannelCounts()
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        """Begin anew: a new attempt."""
        self._out: deque[Unit] = deque()
        self._next = 1
        self._sent = 0
        self.out_bytes = 0
        self.received = 0
        self._part = bytearray()
        self._part_kind = ""
        self._in: deque[Incoming] = deque()
        self._in_bytes = 0
        self._seen: OrderedDict[int, int] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Whether one more message may be put."""
        return self.out_bytes < self._limits.out_bytes

    @property
    def pending(self) -> bool:
        """Whether units wait for the peer to confirm them."""
        return bool(self._out)

    @property
    def first(self) -> int | None:
        """The number of the first unit that the peer has not confirmed."""
        return self._out[0].number if self._out else None

    def put(self, kind: str, body: bytes) -> None:
        """Queue a message for the peer."""
        for start in range(0, max(1, len(body)), UNIT_BYTES):
            data = body[start : start + UNIT_BYTES]
            self._out.append(Unit(self._next, kind, start + UNIT_BYTES >= len(body), data))
            self._next += 1
        self.out_bytes += len(body)

    def outgoing(self, most_bytes: int = 2 * UNIT_BYTES) -> list[Unit]:
        """The first units that the peer has not confirmed, of about ``most_bytes``."""
        found: list[Unit] = []
        size = 0
        for unit in self._out:
            if found and (size + len(unit.data) > most_bytes or len(found) >= MOST_UNITS):
                break
            found.append(unit)
            size += len(unit.data)
        for unit in found:
            self.counts.sent_total += 1
            self.counts.resent_total += unit.number <= self._sent
            self._sent = max(self._sent, unit.number)
        return found

    def confirmed(self, number: int) -> None:
        """The peer has all units up to ``number``. Raises PeerFault for one that was never sent."""
        if number >= self._next:
            raise PeerFault(
                self.peer, "confirmation", f"confirms message part {number}, which was never sent"
            )
        while self._out and self._out[0].number <= number:
            self.out_bytes -= len(self._out.popleft().data)
            self.counts.confirmed_total += 1

    def take_in(self, units: list[Unit]) -> None:
        """Units of the peer, in their order. What there is no room for is not taken, and comes again.

        Raises PeerFault: a gap, a number that came before with other content, a message that changes its kind or
        exceeds the bound.
        """
        for unit in units:
            digest = xxhash.xxh3_64_intdigest(unit.data, seed=unit.last) ^ xxhash.xxh3_64_intdigest(
                unit.kind.encode()
            )
            if unit.number <= self.received:
                self.counts.repeated_total += 1
                if self._seen.get(unit.number, digest) != digest:
                    raise PeerFault(self.peer, "replay", f"part {unit.number} came again with other content")
                continue
            if unit.number != self.received + 1:
                raise PeerFault(self.peer, "gap", f"part {unit.number} came after part {self.received}")
            if self._in_bytes >= self._limits.in_bytes or len(self._in) >= MOST_WAITING:
                return
            self._take(unit)
            self.received = unit.number
            self.counts.received_total += 1
            self._seen[unit.number] = digest
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)

    def _take(self, unit: Unit) -> None:
        # A part without data that does not end a message could come for ever.
        fits = len(unit.data) <= UNIT_BYTES and (unit.last or unit.data)
        if not 0 < len(unit.kind) <= MOST_KIND or not fits:
            raise PeerFault(
                self.peer, "malformed", f"a part of {len(unit.data)} bytes, kind {unit.kind[:MOST_KIND]!r}"
            )
        if self._part and unit.kind != self._part_kind:
            raise PeerFault(self.peer, "malformed", f"a {self._part_kind!r} that goes on as {unit.kind!r}")
        if len(self._part) + len(unit.data) > MOST_BODY:
            raise PeerFault(self.peer, "malformed", f"a {unit.kind!r} of more than {MOST_BODY} bytes")
        if not unit.last:
            self._part_kind = unit.kind
            self._part += unit.data
            return
        body = unit.data
        if self._part:
            self._part += unit.data
            body, self._part = bytes(self._part), bytearray()
        self._in.append(Incoming(self.peer, unit.kind, body))
        self._in_bytes += len(body)

    @property
    def waiting(self) -> bool:
        """Whether a whole message of the peer waits for the role."""
        return bool(self._in)

    def pop(self) -> Incoming | None:
        """The next whole message of the peer."""
        if not self._in:
            return None
        message = self._in.popleft()
        self._in_bytes -= len(message.body)
        return message
