"""The puller's side of one stream: what to ask of one source, and what to do with its batches. Sans-IO."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.errors import ClockAhead, PeerFault, TableFull
from sync.exchange.messages import Batch, Piece, Pull, ShardName, Want
from sync.exchange.pace import Pace
from sync.knowledge import Knowledge
from sync.replica import Replica, Token

Keys = npt.NDArray[np.uint64]
Shards = Callable[[], Mapping[ShardName, Replica]]

WAIT_S: Final = 1.0
"""How long a pull waits at the source when nothing changes; a source that is silent for longer is gone."""
REPORT_S: Final = 5.0
"""How often the source is told what is held here."""
FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a batch. ``rows``: how many were new; ``learned``: shards whose knowledge moved; ``fault``: why the
    stream ended, or an empty text."""

    rows: int = 0
    learned: tuple[ShardName, ...] = ()
    fault: str = ""


@dataclass(slots=True)
class Standing:
    """How one shard stands to the source. ``left``: changes that the source has still to tell. ``level_s``: when there
    were none the last time; ``served``: whether the source feeds it at all."""

    left: int = 0
    level_s: float = -1.0
    served: bool = False


@dataclass(slots=True)
class PullerCounts:
    """Totals of one puller."""

    batches_total: int = 0
    rows_total: int = 0
    streams_total: int = 0
    faults_total: int = 0
    ahead_total: int = 0
    last_fault: str = ""


@dataclass(slots=True)
class _Shard:
    replica: Replica
    round: int
    token: Token | None = None
    named: dict[str, list[Keys]] | None = None
    """While a full replacement comes: every key that it named so far, by table."""
    standing: Standing = field(default_factory=Standing)


class Puller:
    """Pulls all ``shards()`` from one source. Which those are may change between calls.

    ``first_stream``: larger than that of any puller before of the same name. ``held``: what this server, and who
    pulls from it, are known to hold of a shard. ``rng`` spreads retries.
    """

    def __init__(
        self,
        shards: Shards,
        pace: Pace,
        first_stream: int,
        rng: random.Random,
        held: Callable[[ShardName], Knowledge] | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self.pace = pace
        self.counts = PullerCounts()
        self.clock_ahead_s = 0.0
        """By how much the source's clock was ahead of ours, within half a round trip."""
        self._shards, self._rng, self._held, self._wait_s = shards, rng, held, wait_s
        self._having: dict[ShardName, _Shard] = {}
        self._tokens: dict[ShardName, tuple[Replica, Token]] = {}
        self._stream = first_stream
        self._asked = self._taken = 0
        self._open: dict[int, tuple[float, int]] = {}
        self._early: dict[int, Batch] = {}
        self._retry_s = FIRST_RETRY_S
        self._not_before_s = 0.0
        self._report_s = 0.0

    @property
    def standings(self) -> dict[ShardName, Standing]:
        """How each shard stands to this source."""
        return {name: having.standing for name, having in self._having.items()}

    def ask(self, now_s: float) -> Pull | None:
        """The next pull to send, if one is due now; to be asked again until there is none."""
        if now_s < self._not_before_s:
            return None
        wants, unwanted = self._changed_wants()
        if not self._having:
            return None
        # A new stream shows first that it is heard; its further pulls could otherwise arrive before it.
        window = self.pace.window if self._taken else 1
        window += 1 if (wants or unwanted) and self._taken else 0
        if len(self._open) >= window or not (self.pace.may_ask(now_s) or wants):
            for want in wants:
                # To be wanted again when a pull may go.
                self._having.pop(want.shard)
            return None
        self._asked += 1
        budget = self.pace.budget
        self._open[self._asked] = now_s, budget
        held = self._reported(now_s)
        return Pull(self._stream, self._asked, budget, self._wait_s, wants, unwanted, held)

    def _changed_wants(self) -> tuple[tuple[Want, ...], tuple[ShardName, ...]]:
        """What to say of the shards: which are here now that were not, and the other way round."""
        shards = self._shards()
        wants = []
        for name, replica in shards.items():
            having = self._having.get(name)
            if having is None or having.replica is not replica:
                wants.append(self._want(name, replica, having.round if having else 0))
        unwanted = tuple(name for name in self._having if name not in shards)
        for name in unwanted:
            del self._having[name]
        return tuple(wants), unwanted

    def _want(self, name: ShardName, replica: Replica, round_: int) -> Want:
        known, token = self._tokens.get(name, (None, None))
        token = token if known is replica else None
        round_ = max(round_, self._asked) + 1
        self._having[name] = _Shard(replica, round_, token)
        return Want(name, round_, dict(replica.knowledge), replica.horizon.retired, token)

    def _reported(self, now_s: float) -> tuple[tuple[ShardName, Knowledge], ...]:
        if now_s < self._report_s:
            return ()
        self._report_s = now_s + REPORT_S
        held = self._held or (lambda name: dict(self._having[name].replica.knowledge))
        return tuple((name, held(name)) for name in self._having)

    def due_s(self) -> float:
        """From when on ``ask`` may have something although nothing came in."""
        return max(self._not_before_s, self.pace.due_s)

    def take(self, batch: Batch, nbytes: int, now_s: float, clock_us: int = 0) -> Taken:
        """Take over a batch of ``nbytes``, and those behind it that came too early. ``clock_us``: the physical clock.
        It changes nothing if it is not of this stream or was taken before."""
        if batch.stream != self._stream or batch.number <= self._taken:
            return Taken()
        if batch.number in self._open:
            sent_s, asked = self._open[batch.number]
            self.pace.note(nbytes, asked, sent_s, batch.parked_s, now_s)
            self._note_clock(batch, now_s - sent_s - batch.parked_s, clock_us)
        if batch.ended:
            return self._faulty("the source does not know the stream", now_s, lasting=False)
        self._early[batch.number] = batch
        rows, learned = 0, list[ShardName]()
        while (following := self._early.pop(self._taken + 1, None)) is not None:
            self._taken += 1
            self._open.pop(self._taken, None)
            self.counts.batches_total += 1
            for name, having in self._having.items():
                having.standing.served = name in following.serves
            try:
                for piece in following.pieces:
                    rows += self._take_piece(piece, learned, now_s)
            except (PeerFault, TableFull) as error:
                self.counts.ahead_total += isinstance(error, ClockAhead)
                return replace(self._faulty(str(error), now_s), rows=rows, learned=tuple(learned))
            for having in self._having.values():
                if having.standing.served and not having.standing.left:
                    having.standing.level_s = now_s
        self._retry_s = FIRST_RETRY_S
        return Taken(rows, tuple(learned))

    def _note_clock(self, batch: Batch, round_trip_s: float, clock_us: int) -> None:
        if batch.clock_us and clock_us:
            self.clock_ahead_s = (batch.clock_us - clock_us) / 1e6 + round_trip_s / 2

    def _take_piece(self, piece: Piece, learned: list[ShardName], now_s: float) -> int:
        having = self._having.get(piece.shard)
        if having is None or having.round != piece.round:
            return 0
        if piece.first:
            having.named = {} if piece.whole else None
        whole: dict[str, Keys] | None = None
        if piece.whole and having.named is not None:
            for part in piece.update.versioned:
                having.named.setdefault(part.table, []).append(part.keys)
            if piece.token is not None:
                whole = {table: np.concatenate(parts) for table, parts in having.named.items()}
        delta = having.replica.merge(piece.update, whole)
        having.standing.left = piece.left
        if piece.token is not None:
            having.token, having.named = piece.token, None
            self._tokens[piece.shard] = having.replica, piece.token
            learned.append(piece.shard)
        rows = 0
        if delta is not None:
            rows = sum(len(part.keys) for part in delta.rows) + sum(len(part.keys) for part in delta.graves)
        self.counts.rows_total += rows
        return rows

    def failed(self, now_s: float, why: str = "the source does not answer") -> Taken:
        """The link broke, or an answer is overdue: the stream is over, and another one begins after a pause."""
        return self._faulty(why, now_s, lasting=False)

    def _faulty(self, why: str, now_s: float, *, lasting: bool = True) -> Taken:
        self.counts.faults_total += 1
        self.counts.last_fault = why
        self.counts.streams_total += 1
        self._retry_s = LAST_RETRY_S if lasting else min(self._retry_s * 2.0, LAST_RETRY_S)
        self._not_before_s = now_s + self._retry_s * self._rng.uniform(0.5, 1.0)
        self._stream += 1
        self._asked = self._taken = 0
        self._open.clear()
        self._early.clear()
        self._having.clear()
        return Taken(fault=why)
