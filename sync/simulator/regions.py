"""Regions: nodes in one place, one of which is elected to pull over the wide area for the others.

Whoever holds the region's lease follows the servers of all other regions that it may; the others follow it. It
may follow them, too, so that what one of them writes gets out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sync.simulator.node import Node
from sync.simulator.queue import EventQueue


class Region:
    """``upstreams``: whom the leader follows, besides its own members if these are ``writing``, too. A leader that is
    gone is replaced once its lease of ``lease_s`` seconds ran out; it renews at thirds of it."""

    def __init__(
        self,
        queue: EventQueue,
        members: Sequence[Node],
        upstreams: Callable[[], Sequence[Node]],
        lease_s: float = 1.5,
        *,
        writing: bool = True,
    ) -> None:
        self.members, self.lease_s = tuple(members), lease_s
        self.leader: Node | None = None
        self.elections_total = 0
        self._queue, self._upstreams, self._writing = queue, upstreams, writing
        self._expires_s = -1.0
        self._tend()

    def _tend(self) -> None:
        now_s = self._queue.now_s
        if self.leader is not None and self.leader.alive:
            self._expires_s = now_s + self.lease_s
        elif now_s >= self._expires_s:
            self.leader = next((node for node in self.members if node.alive), None)
            self.elections_total += self.leader is not None
            self._expires_s = now_s + self.lease_s
        for node in self.members:
            if node.alive and self.leader is not None:
                among = self.members if self._writing else ()
                others = [*self._upstreams(), *among] if node is self.leader else [self.leader]
                node.follow(others)
        self._queue.after(self.lease_s / 3.0, self._tend)
