"""Synchronous steps of a group of trainers: contributions are collected until a step is whole.

Pure: it decides when a step is taken and of what, never how. A step is whole once the group's share of those
who take part have contributed; what came is then handed out in the order of the ranks, whatever the order of
arrival. Steps are numbered from 1 within a generation of the group, and taken one after another.

A member without work *abstains*: it counts as having contributed nothing to every step until it ``join``s
again, so that it costs the others nothing. A newer generation discards whatever waits for an older one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import Final, Generic, Literal, TypeVar

from sync.errors import PeerFault

MAX_MEMBERS: Final = 4_096
_NEVER: Final = 2**62

C = TypeVar("C")


class BadStep(PeerFault):
    """A contribution that no member of the group can make."""


@dataclass(frozen=True, slots=True)
class Group:
    """Who steps together: the ``generation`` of a group of ``members``, and the ``ratio`` of those who take
    part in a step that has to contribute to it (1: all of them).

    Raises BadStep on construction where no such group can exist.
    """

    generation: int
    members: int
    ratio: Decimal = Decimal(1)

    def __post_init__(self) -> None:
        if not (0 < self.generation < _NEVER and 1 <= self.members <= MAX_MEMBERS and 0 < self.ratio <= 1):
            raise BadStep(f"no group has {self}")

    def needed(self, present: int) -> int:
        """ceil(ratio · present), in exact decimals: 28 % of 25 are 7, where floats say 8."""
        return max(1, int((self.ratio * present).to_integral_value(ROUND_CEILING)))


@dataclass(frozen=True, slots=True)
class Taken(Generic[C]):
    """A whole step: what was contributed, with the rank, by ascending rank."""

    number: int
    parts: tuple[tuple[int, C], ...]


@dataclass(slots=True)
class StepCounts:
    """Totals. ``late``: contributions that came after their step was taken; ``discarded``: those of an older
    generation; ``repeated``: those that replaced an earlier one of the same rank and step."""

    steps_total: int = 0
    late_total: int = 0
    discarded_total: int = 0
    repeated_total: int = 0


@dataclass(slots=True)
class Collector(Generic[C]):
    """The steps of one group, as one server sees them. Holds at most one contribution a member: nobody goes on
    before it was answered."""

    counts: StepCounts = field(default_factory=StepCounts)
    _group: Group | None = None
    _open: int = 1
    _first: dict[int, int] = field(default_factory=dict)
    """By rank, the first step that it takes part in, where that is not step 1."""
    _pending: dict[int, tuple[int, C]] = field(default_factory=dict)
    """By rank, the step and what is contributed to it."""

    @property
    def generation(self) -> int:
        """Of the group that is followed now, 0 before the first."""
        return 0 if self._group is None else self._group.generation

    @property
    def open(self) -> int:
        """The step that is collected now."""
        return self._open

    @property
    def waiting(self) -> int:
        """Contributions that wait now."""
        return len(self._pending)

    def follow(self, group: Group) -> Literal["same", "newer", "older"]:
        """Go over to ``group`` if it is newer, discarding what waits in the one before; ``older``: it is not.
        Raises BadStep for two groups under one number."""
        if group == self._group:
            return "same"
        if group.generation < self.generation:
            return "older"
        if group.generation == self.generation:
            raise BadStep(f"{group} is not {self._group}, which has its number")
        self.counts.discarded_total += self.waiting
        self._group, self._open, self._first, self._pending = group, 1, {}, {}
        return "newer"

    def contribute(self, rank: int, step: int, contribution: C) -> bool:
        """Take in the contribution of ``rank`` to ``step``, from which on it takes part; it replaces an earlier
        one (a retry, or the member went back). False: it is late, that step was taken, and nothing is kept.
        Raises BadStep for a rank or a step that cannot be."""
        self._check(rank)
        if not 1 <= step < _NEVER:
            raise BadStep(f"a contribution to step {step}")
        if step < self._open:
            self.counts.late_total += 1
            return False
        self._first[rank] = step
        self.counts.repeated_total += rank in self._pending
        self._pending[rank] = step, contribution
        return True

    def abstain(self, rank: int) -> None:
        """``rank`` takes no part in the open step and those after it, until it joins or contributes."""
        self._check(rank)
        self._first[rank] = _NEVER

    def join(self, rank: int, step: int) -> int:
        """``rank`` takes part from ``step`` on, or from the open one if that is later; returns the open one.

        The member may compute its contribution once the open step is the one that it joined at: from then
        on no step is taken without it (but by a share below 1).
        """
        self._check(rank)
        if not 0 <= step < _NEVER:
            raise BadStep(f"step {step} cannot be joined")
        self._first[rank] = max(step, self._open)
        self._skip()
        return self._open

    def take(self) -> Taken[C] | None:
        """The open step, if it is whole; the next one is open then."""
        if self._group is None:
            return None
        self._skip()
        ranks = sorted(rank for rank, (step, _) in self._pending.items() if step == self._open)
        if not ranks or len(ranks) < self._group.needed(self._present()):
            return None
        taken = Taken(self._open, tuple((rank, self._pending.pop(rank)[1]) for rank in ranks))
        self._open += 1
        self.counts.steps_total += 1
        return taken

    def _present(self) -> int:
        assert self._group is not None
        later = sum(first > self._open for first in self._first.values())
        return self._group.members - later

    def _skip(self) -> None:
        """Pass over steps in which nobody takes part: a server that came later finds the number in use."""
        waits = any(step == self._open for step, _ in self._pending.values())
        if self._group is not None and not waits and not self._present():
            soonest = min(self._first.values())
            if soonest < _NEVER:
                self._open = soonest

    def _check(self, rank: int) -> None:
        members = 0 if self._group is None else self._group.members
        if not 0 <= rank < members:
            raise BadStep(f"rank {rank} in a group of {members}")
