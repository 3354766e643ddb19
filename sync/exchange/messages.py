"""The two messages between a puller and a source, and what they consist of.

A *stream* belongs to one puller and one source. Its ``Pull``s are numbered from 1, several may be on their way, and
each is answered by the ``Batch`` of the same number, at once or when there is something to tell. Batches are taken
in order; where one is missing the puller begins a new stream. So a source may count on a batch having been taken
whenever it hears of a later one, and need not be told what the puller has by now.

An *exchange* is what brings one shard of a puller to what the source knew when it began: any number of pieces, the
last of which says what may be claimed from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from sync.knowledge import MAX_WRITERS, Knowledge
from sync.records import Update
from sync.replica import Token

ShardName = tuple[str, int]
"""A model, and the number of one of its shards."""
MAX_NAMES: Final = 1_024
"""Shards that a pull wants, does not want any more, or says something of, at most of each: a source that hears it
answers nobody else meanwhile. Who has more to say says it in several pulls."""
MAX_ENTRIES: Final = MAX_WRITERS
"""Writers in all vectors of a pull together; those of one shard always fit."""


def fitting(vectors: Iterable[Knowledge], room: int) -> int:
    """How many of ``vectors``, from the first on, a pull with ``room`` for so many entries may have."""
    count = 0
    for vector in vectors:
        room -= len(vector)
        if room < 0 or count == MAX_NAMES:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Want:
    """What a puller knows of a shard, of which it wants everything newer.

    ``round``: pieces of earlier rounds are not taken any more. ``token``: the source's own, of the last exchange with
    it that was taken completely; None if there was none since the puller began.
    """

    shard: ShardName
    round: int
    knowledge: Knowledge = field(default_factory=dict)
    retired: int = 0
    token: Token | None = None


@dataclass(frozen=True, slots=True)
class Pull:
    """Leave to send one batch.

    ``budget``: its bytes, about. ``wait_s``: how long it may wait for something to tell. ``wants``: shards whose
    feeding begins, or begins anew; ``unwanted``: where it ends. ``held``: what the puller, and everybody who pulls
    from it, is known to hold by now. Of each at most ``MAX_NAMES``, with ``MAX_ENTRIES`` in all vectors.
    """

    stream: int
    number: int
    budget: int
    wait_s: float
    wants: tuple[Want, ...] = ()
    unwanted: tuple[ShardName, ...] = ()
    held: tuple[tuple[ShardName, Knowledge], ...] = ()

    @property
    def entries(self) -> int:
        """Writers in all its vectors."""
        wanted = sum(len(want.knowledge) for want in self.wants)
        return wanted + sum(len(vector) for _, vector in self.held)

    @property
    def nbytes(self) -> int:
        """Roughly what it takes on the wire."""
        wants = sum(32 + 12 * len(want.knowledge) for want in self.wants)
        return 40 + wants + sum(16 + 12 * len(vector) for _, vector in self.held)


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one shard. ``first``: of an exchange; ``whole``: of a full replacement, after which what it did not
    name is gone. ``token`` comes with what may be claimed. ``left``: rows that the source has still to tell."""

    shard: ShardName
    round: int
    update: Update
    first: bool = False
    whole: bool = False
    token: Token | None = None
    left: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The answer to a pull, maybe of nothing.

    ``parked_s``: how long the pull waited at the source. ``clock_us``: the source's physical clock when it answered.
    ``serves``: which of the wanted shards the source feeds at present; of those that it is ahead of, each has a piece.
    ``ended``: it does not know the stream.
    """

    stream: int
    number: int
    pieces: tuple[Piece, ...] = ()
    serves: tuple[ShardName, ...] = ()
    parked_s: float = 0.0
    clock_us: int = 0
    ended: bool = False

    @property
    def nbytes(self) -> int:
        """Roughly what it takes on the wire, in float32."""
        return 48 + sum(32 + piece.update.nbytes for piece in self.pieces)
