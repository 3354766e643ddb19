"""What a replica passes on, and what a leader knows of those who follow it. Pure; no I/O, no clock.

All models' steps of one shard stand in one order, the order in which the leader took them, and every replica takes
them in that order. So of two replicas of one leader, one has everything that the other has, and how far a replica
has come is one number. Each process numbers what it passes on for itself (``Stream``); who follows it learns the
numbers from it.

A step is *acknowledged* once enough replicas hold it:

    async    at once
    quorum   once a majority of the replicas, the leader included, hold it
    chain    once all that stand in the chain hold it: each asks the one before it, and says of itself only what
             those behind it hold too
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.coordination.shardmap import Place
from services.parameter_server.replication.election import Replication
from sync.records import Delta, History

KEPT_BYTES: Final = 64 * 2**20
"""Steps that a replicated shard keeps for those who fall behind; who is further behind copies the shard."""

Positions = Mapping[str, tuple[int, int]]
"""By model: (epoch of the newest step, its position)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One delta of one model. ``origin``: its number at whom this process follows (0: it leads)."""

    model: str
    delta: Delta
    origin: int = 0


BEGINNING: Final = 1
"""Number of all that a process began with. Not 0: who holds nothing does not hold that either."""


@dataclass(slots=True)
class Stream:
    """The newest steps of a shard in their order, at most ``max_bytes`` of them (0: none is kept)."""

    max_bytes: int = 0
    number: int = 0
    """Of the newest step."""
    nbytes: int = 0
    _steps: deque[Step] = field(default_factory=deque)

    @property
    def floor(self) -> int:
        """Every step with a number above it is kept."""
        return self.number - len(self._steps)

    def add(self, step: Step) -> int:
        """Number a step and keep it; returns the number."""
        self.number += 1
        self._steps.append(step)
        self.nbytes += step.delta.nbytes
        self.trim()
        return self.number

    def trim(self) -> None:
        """Let go of the oldest steps until the rest fits."""
        while self._steps and self.nbytes > self.max_bytes:
            self.nbytes -= self._steps.popleft().delta.nbytes

    def after(self, number: int, max_bytes: int) -> list[Step]:
        """The oldest steps after ``number``, which is not below ``floor``: ``max_bytes`` of them, one at
        least."""
        found: list[Step] = []
        size = 0
        for at in range(len(self._steps) - (self.number - number), len(self._steps)):
            step = self._steps[at]
            size += step.delta.nbytes
            if found and size > max_bytes:
                break
            found.append(step)
        return found

    def origin(self, number: int) -> int:
        """The origin of step ``number``; of the newest one below it that is kept, or 0."""
        return self._steps[number - self.floor - 1].origin if number > self.floor else 0

    def join(self, positions: Positions, own: Mapping[str, tuple[History, int]]) -> int | set[str]:
        """Where someone at ``positions`` may go on from; or the models that it has to copy first.

        ``own``: by model, under which epochs this process's steps were taken, and how many there are. A copy is
        needed where the other's newest step is not one of this process's, or what followed is not kept any more.
        Steps that the other has already may follow the number; it passes over them.
        """
        oldest: dict[str, int] = {}
        for step in self._steps:
            oldest.setdefault(step.model, step.delta.position)
        to_copy = {
            model
            for model, (history, newest) in own.items()
            if not contains(history, newest, *positions.get(model, (0, 0)))
            or positions.get(model, (0, 0))[1] + 1 < oldest.get(model, newest + 1)
        }
        if to_copy:
            return to_copy
        for at, step in enumerate(self._steps):
            if step.delta.position > positions.get(step.model, (0, 0))[1]:
                return self.floor + at
        return self.number


def contains(history: History, newest: int, epoch: int, position: int) -> bool:
    """Whether the step at ``position`` that was taken under ``epoch`` is one of those of ``history``, which end
    at ``newest``. Position 0 is before the first step, where all agree."""
    if position == 0:
        return True
    if position > newest:
        return False
    taken_under = max((since for since in history if since[1] <= position), default=(0, 1))
    return taken_under[0] == epoch


def common(one: tuple[History, int], other: tuple[History, int]) -> int:
    """Up to which position two lines of steps, each with its newest position, are the same."""
    (history, newest), (history_, newest_) = one, other
    same = 0
    while same < min(len(history), len(history_)) and history[same] == history_[same]:
        same += 1
    first = history[same][1] if same < len(history) else newest + 1
    first_ = history_[same][1] if same < len(history_) else newest_ + 1
    return min(first, first_) - 1


@dataclass(slots=True)
class Followers:
    """How far those who follow a shard's leader hold its steps, by the leader's numbers."""

    replication: Replication
    place: Place
    name: str
    held: dict[str, int] = field(default_factory=dict)
    """By server."""
    polls: dict[str, int] = field(default_factory=dict)
    """By server, how often it said so."""

    def note(self, server: str, number: int) -> None:
        """``server`` holds every step up to ``number``."""
        self.held[server] = number
        self.polls[server] = self.polls.get(server, 0) + 1

    def forget(self, server: str) -> None:
        """``server`` is gone, or another process of its name is there, which may hold less."""
        self.held.pop(server, None)

    def acknowledged(self, number: int) -> int:
        """Up to which number enough replicas hold the steps; ``number`` is the leader's newest."""
        others = [server for server in self.place.replicas if server != self.name]
        if self.replication == "async" or not others:
            return number
        if self.replication == "chain" and self.name in self.place.chain:
            behind = self.place.chain[self.place.chain.index(self.name) + 1 :]
            return min(number, self.held.get(behind[0], 0)) if behind else number
        numbers = sorted([number, *(self.held.get(server, 0) for server in others)], reverse=True)
        return numbers[len(self.place.replicas) // 2]


def upstream(place: Place, name: str, moving_to: str | None) -> str | None:
    """Whom ``name`` asks for a shard's steps; None where it leads it or has nothing to do with it."""
    if name == place.leader or not (name in place.replicas or name == moving_to):
        return None
    if name in place.chain and place.leader in place.chain:
        return place.chain[place.chain.index(name) - 1]
    # Also who is to join a chain: the leader has to know how far it is.
    return place.leader
