"""Since when a client knows what of a shard: the answers that confirmed its cached rows, numbered, and what each
said of the shard's freshness. Pure; time is passed in.

A row that is used without asking must not look fresher than it is. So each keeps the number of the answer that
confirmed it last, and a reader claims no more than that answer and all later ones of that shard claimed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.parameter_server.messages import WireMark

MOST: Final = 64
"""Answers remembered per shard. Rows that an older one confirmed are asked for again."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What may be claimed of a shard's rows: its ``marks``, by log and partition, ``moves``, and the fencing ``epoch``
    of the steps that they contain."""

    marks: tuple[WireMark, ...]
    moves: int
    epoch: int

    @staticmethod
    def of(marks: Sequence[WireMark], moves: int, epoch: int) -> Claim:
        """The claim that an answer makes."""
        return Claim(tuple(sorted(marks)), moves, epoch)

    def least(self, other: Claim) -> Claim:
        """What holds of rows of both. ``moves`` of two leaders cannot be compared: -1, before all of either."""
        theirs = {mark[:2]: mark for mark in other.marks}
        marks = tuple(min(mark, theirs[mark[:2]]) for mark in self.marks if mark[:2] in theirs)
        moves = min(self.moves, other.moves) if self.epoch == other.epoch else -1
        return Claim(marks, moves, min(self.epoch, other.epoch))

    def within(self, other: Claim) -> bool:
        """Whether rows that ``other`` holds of satisfy this, too."""
        return self.least(other) == self


@dataclass(frozen=True, slots=True)
class _Answer:
    asked_s: float
    """Before this the server was not asked: its rows are of then or later."""
    claim: Claim
    """The least of its own and all later answers' claims."""


class Confirmations:
    """The newest answers about one shard, at most ``MOST``, all of one leader's epoch, the newest heard of."""

    __slots__ = ("_answers", "_first", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self._answers: deque[_Answer] = deque()
        self._first = 1

    def usable_from(self, oldest_s: float) -> int:
        """The number from which on all answers were asked for at ``oldest_s`` or later; those before are forgotten."""
        while self._answers and self._answers[0].asked_s < oldest_s:
            self._answers.popleft()
            self._first += 1
        return self._first

    def since(self, number: int) -> Claim:
        """What may be claimed of rows that answers from ``number`` on confirmed."""
        return self._answers[number - self._first].claim

    @property
    def _next(self) -> int:
        return self._first + len(self._answers)

    @property
    def newest(self) -> int:
        """The number of the newest answer, 0 where there is none."""
        return self._next - 1 if self._answers else 0

    def note(self, asked_s: float, claim: Claim, spacing_s: float) -> int:
        """Take an answer that was asked for at ``asked_s``: its number, or 0 where rows are not to be used by it, as it
        is of a deposed leader, or was overtaken. A number is used again for ``spacing_s`` where it claims no more."""
        overtaken = bool(self._answers) and asked_s < self._answers[-1].asked_s
        if claim.epoch < self.epoch or overtaken:
            return 0
        if claim.epoch > self.epoch:
            # Rows of the leader before may hold what was never replicated: none is used unasked any more.
            self._first, self.epoch = self._next, claim.epoch
            self._answers.clear()
        if self._answers:
            newest = self._answers[-1]
            if asked_s - newest.asked_s < spacing_s and newest.claim.within(claim):
                return self.newest
        self._lower(claim)
        self._answers.append(_Answer(asked_s, claim))
        if len(self._answers) > MOST:
            self._answers.popleft()
            self._first += 1
        return self.newest

    def _lower(self, claim: Claim) -> None:
        """Let no earlier answer claim more than this one does."""
        for at in range(len(self._answers) - 1, -1, -1):
            answer = self._answers[at]
            if answer.claim.within(claim):
                break
            self._answers[at] = replace(answer, claim=answer.claim.least(claim))
