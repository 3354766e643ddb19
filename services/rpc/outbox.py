"""What is on its way to peers, without I/O: bounded by bytes, so that who asks and never reads fills no memory.

Arrays are sent from where they lie, and stay in memory until ZeroMQ has passed them to the system. Small frames
are copied, and only the number of messages bounds them.

Whether a message has left is told by a thread of pyzmq's, which also lets go of its memory. Where the processor is
short that thread comes late, and then a peer can be refused who has read everything: the bound is kept on what is in
memory, not on what is unread. It is told ``busy``, and asks again.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Tracker(Protocol):
    """Knows whether a message has left."""

    @property
    def done(self) -> bool: ...


class Outbox:
    """At most ``per_peer`` bytes to one peer and ``total`` to all; one answer may always be on its way to each."""

    def __init__(self, per_peer: int, total: int) -> None:
        self._per_peer, self._total = per_peer, total
        self._lines: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._sizes: dict[bytes, int] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that were on their way when last looked at."""
        return self._size

    def has_room(self, peer: bytes, size: int) -> bool:
        """Whether an answer of ``size`` bytes may follow what is on its way to ``peer``."""
        if peer in self._lines:
            self._sweep(peer)
        waiting = self._sizes.get(peer, 0)
        return not waiting or (waiting + size <= self._per_peer and self._size + size <= self._total)

    def sent(self, peer: bytes, tracker: Tracker, size: int) -> None:
        """Remember an answer until ``tracker`` says that it has left."""
        if tracker.done:
            return
        if peer not in self._lines:
            # Seldom enough to look after everybody: peers that are gone never ask for room again.
            for other in list(self._lines):
                self._sweep(other)
            self._lines[peer] = deque()
        self._lines[peer].append((tracker, size))
        self._sizes[peer] = self._sizes.get(peer, 0) + size
        self._size += size

    def _sweep(self, peer: bytes) -> None:
        line = self._lines[peer]
        while line and line[0][0].done:
            _, size = line.popleft()
            self._sizes[peer] -= size
            self._size -= size
        if not line:
            del self._lines[peer], self._sizes[peer]
