"""The requests that wait for a server, without I/O: bounded by number and bytes, fair among peers.

Peers are served in turn, each in its own order. Where a bound is reached, the newest request of whoever has most
in the queue makes room, unless the newcomer has as much: so a peer that floods is refused, not its neighbours.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Line(Generic[T]):
    """One peer's requests with their sizes."""

    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    size: int = 0


class FairQueue(Generic[T]):
    """At most ``count`` requests of together ``size`` bytes; a larger one is taken when nothing else waits."""

    def __init__(self, count: int, size: int) -> None:
        self._max_count, self._max_size = count, size
        self._count = self._size = 0
        self._lines: OrderedDict[bytes, _Line[T]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._size

    def put(self, peer: bytes, request: T, size: int) -> list[T]:
        """Add a request; those that have to be refused for it, the new one itself perhaps."""
        refused: list[T] = []
        while self._count and (self._count >= self._max_count or self._size + size > self._max_size):
            victim = self._heaviest(peer, size)
            if victim is None:
                return [*refused, request]
            refused.append(self._drop_newest(victim))
        line = self._lines.setdefault(peer, _Line())
        line.waiting.append((request, size))
        line.size += size
        self._count += 1
        self._size += size
        return refused

    def take(self) -> T | None:
        """The next request of the next peer in turn; None where nothing waits."""
        if not self._lines:
            return None
        peer, line = next(iter(self._lines.items()))
        request, size = line.waiting.popleft()
        self._removed(peer, line, size)
        if line.waiting:
            self._lines.move_to_end(peer)
        return request

    def _heaviest(self, newcomer: bytes, size: int) -> bytes | None:
        """Who has more than ``newcomer`` would have, of what has run out; None for nobody."""
        own = self._lines.get(newcomer)
        if self._count >= self._max_count:
            mine = 1 + (len(own.waiting) if own else 0)
            load = {peer: len(line.waiting) for peer, line in self._lines.items()}
        else:
            mine = size + (own.size if own else 0)
            load = {peer: line.size for peer, line in self._lines.items()}
        peer = max(load, key=load.__getitem__)
        return peer if load[peer] > mine else None

    def _drop_newest(self, peer: bytes) -> T:
        line = self._lines[peer]
        request, size = line.waiting.pop()
        self._removed(peer, line, size)
        return request

    def _removed(self, peer: bytes, line: _Line[T], size: int) -> None:
        line.size -= size
        self._count -= 1
        self._size -= size
        if not line.waiting:
            del self._lines[peer]
