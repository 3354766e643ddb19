"""Emulated links in virtual time: delay, jitter, a shared rate, loss, duplication, reordering and partitions.

Every place (a node, or a region whose nodes share it) has one uplink, on which what leaves it is sent byte after byte,
and may have a downlink. So may each node within its place. Between two places there is a path with a delay. Messages
of one sender to one receiver keep their order unless the path reorders.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from sync.simulator.queue import EventQueue


@dataclass(frozen=True, slots=True)
class Path:
    """From one place to another. ``delay_s`` one way, up to ``jitter_s`` more; shares in [0, 1] of the messages that
    are lost, come twice, or may overtake others."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicates: float = 0.0
    reordered: float = 0.0


DIRECT = Path()


@dataclass(slots=True)
class NetworkCounts:
    """Totals of all links."""

    messages_total: int = 0
    bytes_total: int = 0
    lost_total: int = 0
    duplicated_total: int = 0
    crossing_bytes_total: int = 0
    """Of messages from one place to another."""
    sent_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By place, of what left it."""


class Network:
    """All links. ``within``: the path between two nodes of one place."""

    def __init__(self, queue: EventQueue, rng: random.Random, within: Path = DIRECT) -> None:
        self.counts = NetworkCounts()
        self._queue, self._rng, self._within = queue, rng, within
        self._paths: dict[tuple[str, str], Path] = {}
        self._rates: dict[str, float] = {}
        self._arriving: dict[str, float] = {}
        self._free_s: dict[str, float] = {}
        self._taken_s: dict[str, float] = {}
        self._last_s: dict[tuple[str, str], float] = {}
        self._cut: set[tuple[str, str]] = set()

    def connect(self, one: str, other: str, path: Path) -> None:
        """Set the path between two places, both ways."""
        self._paths[one, other] = self._paths[other, one] = path

    def limit(self, place: str, bytes_a_second: float, arriving: float = 0.0) -> None:
        """Give a place an uplink of this rate, for what leaves it, and a downlink for what is ``arriving``; 0: any. In
        the place of a place, a node has them for all that it sends and gets."""
        self._rates[place], self._arriving[place] = bytes_a_second, arriving

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two places any more, what is on its way included."""
        self._cut |= {(one, other), (other, one)}

    def heal(self, one: str | None = None, other: str | None = None) -> None:
        """Let everything pass again between two places, or all."""
        self._cut -= {(one, other), (other, one)} if one and other else set(self._cut)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes."""
        return (one, other) in self._cut

    def calm(self) -> None:
        """No more losses, duplicates and disorder, on any path."""
        self._paths = {ends: Path(path.delay_s, path.jitter_s) for ends, path in self._paths.items()}

    def send(
        self, sender: tuple[str, str], receiver: tuple[str, str], nbytes: int, deliver: Callable[[], None]
    ) -> None:
        """Have ``deliver`` called when the message arrives. Ends are (place, node)."""
        here, there = sender[0], receiver[0]
        self.counts.messages_total += 1
        self.counts.bytes_total += nbytes
        crossing = here != there
        left_s = self._leave(sender[1], nbytes, self._queue.now_s) if sender[1] != here else self._queue.now_s
        if crossing:
            self.counts.crossing_bytes_total += nbytes
            self.counts.sent_bytes[here] += nbytes
            left_s = self._leave(here, nbytes, left_s)
        path = self._paths.get((here, there), DIRECT) if crossing else self._within
        rng = self._rng
        if (here, there) in self._cut or (path.loss and rng.random() < path.loss):
            self.counts.lost_total += 1
            return
        copies = 1
        if path.duplicates and rng.random() < path.duplicates:
            self.counts.duplicated_total += 1
            copies = 2
        ends = sender[1], receiver[1]
        for _ in range(copies):
            at_s = left_s + path.delay_s + (rng.random() * path.jitter_s if path.jitter_s else 0.0)
            if not (path.reordered and rng.random() < path.reordered):
                at_s = self._last_s[ends] = max(at_s, self._last_s.get(ends, 0.0))
            sent_at = self._rates.get(here, 0.0) if crossing else 0.0
            first_s = at_s - nbytes / sent_at if sent_at else at_s
            stops = [one for one in ((there,) if crossing else ()) + receiver[1:] if self._arriving.get(one)]
            self._come(stops, nbytes, first_s, at_s, lambda: self._arrive(here, there, deliver))

    def _leave(self, place: str, nbytes: int, now_s: float) -> float:
        """When the last byte has left, of a message that may from ``now_s`` on."""
        rate = self._rates.get(place, 0.0)
        if not rate:
            return now_s
        left_s = max(now_s, self._free_s.get(place, 0.0)) + nbytes / rate
        self._free_s[place] = left_s
        return left_s

    def _come(
        self, stops: list[str], nbytes: int, first_s: float, last_s: float, arrive: Callable[[], None]
    ) -> None:
        """Pass the downlinks of ``stops``, each from when the first byte is there: a message takes none of a downlink
        while it is on its way. The last byte would come at ``last_s``."""
        if not stops:
            self._queue.at(last_s, arrive)
            return

        def take() -> None:
            stop, *others = stops
            begun_s = max(self._queue.now_s, self._taken_s.get(stop, 0.0))
            self._taken_s[stop] = done_s = max(last_s, begun_s + nbytes / self._arriving[stop])
            self._come(others, nbytes, begun_s, done_s, arrive)

        self._queue.at(first_s, take)

    def _arrive(self, here: str, there: str, deliver: Callable[[], None]) -> None:
        if (here, there) in self._cut:
            self.counts.lost_total += 1
        else:
            deliver()
