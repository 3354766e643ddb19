"""The puller's side of one stream: what to ask of one source, and what to do with its batches. Sans-IO."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.errors import ClockAhead, PeerFault, TableFull, Unsettled
from sync.exchange.messages import MAX_ENTRIES, MAX_NAMES, Batch, Piece, Pull, ShardName, Want, fitting
from sync.exchange.pace import Pace
from sync.knowledge import Knowledge
from sync.records import Update, all_of
from sync.replica import Replica, Token

Keys = npt.NDArray[np.uint64]
Shards = Callable[[], Mapping[ShardName, Replica]]

WAIT_S: Final = 1.0
"""How long a pull waits at the source when nothing changes; a source that is silent for longer is gone."""
REPORT_S: Final = 5.0
"""How often the source is told what is held here."""
CHANGES: Final = 8
"""Pulls beyond the window that say which shards are wanted from now on: they cannot wait for an answer."""
FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 5.0
GRACE_S: Final = 1.0
"""How long an answer may take beyond what waiting and sending take."""
LONGEST_SENDING_S: Final = 30.0
LONGEST_PATIENCE_S: Final = 4.0
"""How much longer than that after answers that never came."""


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
    were none the last time, -1 if that never was; ``served``: whether the source feeds it at all."""

    left: int = 0
    level_s: float = -1.0
    served: bool = False


@dataclass(slots=True)
class PullerCounts:
    """Totals of one puller. ``faults``: streams that ended, and pieces that could not be taken; ``ahead``: of these,
    for a version too far in the future."""

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
    retired: int
    """Below which epoch writers were retired here when it was wanted, or the last exchange of this stream ended."""
    named: dict[str, list[Keys]] | None = None
    """While a full replacement comes: every key that it named so far, by table."""
    kept: list[Update] | None = None
    """What came of a full replacement that is taken all at once."""
    heard: bool = False
    """Whether the source is known to feed this round."""
    stale: bool = False
    """A piece of this round was not taken: nothing behind it may be, and the shard is wanted anew."""


class Puller:
    """Pulls all ``shards()`` from one source. Which those are may change between calls.

    ``first_stream``: larger than that of any puller before of the same name. ``held``: what this server, and who
    pulls from it, are known to hold of a shard. ``rng`` spreads retries. A shard whose piece cannot be taken rests for
    some seconds; the others go on.
    """

    def __init__(
        self,
        shards: Shards,
        pace: Pace,
        first_stream: int,
        rng: random.Random,
        held: Callable[[ShardName], Knowledge] | None = None,
        wait_s: float = WAIT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.pace = pace
        self.counts = PullerCounts()
        self.clock_ahead_s = 0.0
        """By how much the source's clock was ahead of ours, within half a round trip."""
        self._shards, self._rng, self._held, self._wait_s = shards, rng, held, wait_s
        self._grace_s, self._patience_s = grace_s, 0.0
        self._having: dict[ShardName, _Shard] = {}
        self._tokens: dict[ShardName, tuple[Replica, Token]] = {}
        self._standings: dict[ShardName, Standing] = {}
        self._resting: dict[ShardName, float] = {}
        """Until when shards are not wanted, as a piece of theirs could not be taken."""
        self._anew: set[ShardName] = set()
        """Shards of which everything is wanted, whatever is here."""
        self._stream = first_stream
        self._asked = self._taken = 0
        self._open: dict[int, tuple[float, int, float]] = {}
        """By number: when a pull went, the bytes that it allows, and their price."""
        self._early: dict[int, Batch] = {}
        self._retry_s = FIRST_RETRY_S
        self._not_before_s = 0.0
        self._report_s = 0.0
        self._unreported: list[ShardName] = []
        """Of what is held of these the source is still to be told."""

    @property
    def standings(self) -> dict[ShardName, Standing]:
        """How each shard stands to this source."""
        return dict(self._standings)

    def ask(self, now_s: float) -> Pull | None:
        """The next pull to send, if one is due now; to be asked again until there is none."""
        if now_s < self._not_before_s:
            return None
        shards = self._wanted_shards(now_s)
        new = {name: replica for name, replica in shards.items() if not self._is_fed(name, replica)}
        unwanted = tuple(name for name in self._having if name not in shards)[:MAX_NAMES]
        changed = bool(new or unwanted)
        # A new stream shows first that it is heard; its further pulls could otherwise arrive before it.
        window = self.pace.window if self._taken else 1
        window += CHANGES if changed and self._taken else 0
        if len(self._open) >= window or not (self.pace.may_ask(now_s) or changed):
            return None
        self._asked += 1
        budget = self.pace.budget
        self._open[self._asked] = now_s, budget, self.pace.pay(budget, now_s)
        for name in unwanted:
            del self._having[name]
        # What does not fit is still new at the next pull, which may go at once.
        some = islice(new.items(), fitting((one.knowledge for one in new.values()), MAX_ENTRIES))
        wants = tuple(self._want(name, replica) for name, replica in some)
        held = self._reported(now_s, MAX_ENTRIES - sum(len(want.knowledge) for want in wants))
        # The first is answered at once: what is wanted a moment later must not wait behind it.
        wait_s = self._wait_s if self._taken else 0.0
        return Pull(self._stream, self._asked, budget, wait_s, wants, unwanted, held)

    def _wanted_shards(self, now_s: float) -> dict[ShardName, Replica]:
        """The shards but for those that rest. What is known of others is forgotten."""
        shards = self._shards()
        self._resting = {name: at for name, at in self._resting.items() if at > now_s and name in shards}
        for name in [n for n, (replica, _) in self._tokens.items() if shards.get(n) is not replica]:
            del self._tokens[name]
        for name in [n for n in self._standings if n not in shards]:
            del self._standings[name]
        return {name: replica for name, replica in shards.items() if name not in self._resting}

    def _is_fed(self, name: ShardName, replica: Replica) -> bool:
        having = self._having.get(name)
        return having is not None and having.replica is replica and not having.stale

    def _want(self, name: ShardName, replica: Replica) -> Want:
        """``name`` anew: rounds are as large as the pulls that begin them."""
        self._having[name] = _Shard(replica, self._asked, replica.horizon.retired)
        self._standings.setdefault(name, Standing()).left = 0
        if name in self._anew:
            return Want(name, self._asked)
        _, token = self._tokens.get(name, (None, None))
        return Want(name, self._asked, dict(replica.knowledge), replica.horizon.retired, token)

    def _reported(self, now_s: float, room: int) -> tuple[tuple[ShardName, Knowledge], ...]:
        """What is said of what is held here: every few seconds of all shards, in as many pulls as that takes."""
        if now_s >= self._report_s and not self._unreported:
            self._report_s = now_s + REPORT_S
            self._unreported = list(self._having)
        held = self._held or (lambda name: dict(self._having[name].replica.knowledge))
        next_ones = [name for name in self._unreported[:MAX_NAMES] if name in self._having]
        vectors = [held(name) for name in next_ones]
        count = fitting(vectors, room)
        said = tuple(zip(next_ones[:count], vectors[:count], strict=True))
        self._unreported = next_ones[count:] + self._unreported[MAX_NAMES:]
        return said

    def patience_s(self, pull: Pull) -> float:
        """How long the answer to ``pull``, which goes now, may take: what waits at the source, stands in line before
        it and is sent, and some more after answers that never came."""
        rate = self.pace.rate
        asked = sum(budget for _, budget, _ in self._open.values())
        # Batches come one behind the other; a rate may have fallen since it was measured.
        line = max(asked, len(self._open) * self.pace.batch_bytes)
        sending_s = min(2.0 * line / rate, LONGEST_SENDING_S) if rate else 0.0
        return pull.wait_s + self._grace_s + sending_s + self._patience_s

    def due_s(self) -> float:
        """From when on ``ask`` may have something although nothing came in."""
        return max(self._not_before_s, min([self.pace.due_s, *self._resting.values()]))

    def take(self, batch: Batch, nbytes: int, now_s: float, clock_us: int = 0) -> Taken:
        """Take over a batch of ``nbytes``, and those behind it that came too early. ``clock_us``: the physical clock.
        It changes nothing if it is not of this stream or was taken before."""
        if batch.stream != self._stream or batch.number not in self._open or batch.number in self._early:
            return Taken()
        sent_s, asked, price_s = self._open[batch.number]
        self.pace.note(nbytes, asked, sent_s, batch.parked_s, now_s, price_s)
        self._note_clock(batch, now_s - sent_s - batch.parked_s, clock_us)
        if batch.ended:
            return self.failed(now_s, "the source does not know the stream")
        self._patience_s = 0.0
        self._early[batch.number] = batch
        rows, learned = 0, list[ShardName]()
        shards = self._shards()
        while (following := self._early.pop(self._taken + 1, None)) is not None:
            self._taken += 1
            self._open.pop(self._taken)
            self.counts.batches_total += 1
            for piece in following.pieces:
                try:
                    rows += self._take_piece(piece, shards, learned)
                except (PeerFault, TableFull) as error:
                    self._rest(piece.shard, error, now_s)
            self._note_standings(following, now_s)
        self._retry_s = FIRST_RETRY_S
        return Taken(rows, tuple(learned))

    def _note_standings(self, batch: Batch, now_s: float) -> None:
        for name, standing in self._standings.items():
            having = self._having.get(name)
            if having is None or having.stale:
                standing.served = False
                continue
            # A batch that answers the pull of a want, or a later one, would tell how far the source is ahead.
            having.heard = having.heard or having.round <= batch.number
            standing.served = name in batch.serves
            if standing.served and having.heard and not standing.left:
                standing.level_s = now_s

    def _rest(self, name: ShardName, error: Exception, now_s: float) -> None:
        """Nothing more of a shard is taken for a while: what comes behind a piece that was not must not be."""
        self.counts.faults_total += 1
        self.counts.ahead_total += isinstance(error, ClockAhead)
        self.counts.last_fault = str(error)
        self._having[name].stale = True
        if isinstance(error, Unsettled):
            self._anew.add(name)
        self._resting[name] = now_s + LAST_RETRY_S * self._rng.uniform(0.5, 1.0)

    def _note_clock(self, batch: Batch, round_trip_s: float, clock_us: int) -> None:
        if batch.clock_us and clock_us:
            self.clock_ahead_s = (batch.clock_us - clock_us) / 1e6 + round_trip_s / 2

    def _take_piece(self, piece: Piece, shards: Mapping[ShardName, Replica], learned: list[ShardName]) -> int:
        having = self._having.get(piece.shard)
        if having is None or having.stale or having.round != piece.round:
            return 0
        if shards.get(piece.shard) is not having.replica:
            # Not ours to write any more; if it comes back, the pieces behind this one would claim too much.
            having.stale = True
            return 0
        if having.replica.horizon.retired != having.retired:
            # Somebody else told of a retirement, another one than the source's perhaps: what it counts as told here may
            # since have been passed over as a retired writer's. It has to know.
            having.stale = True
            return 0
        if piece.first:
            having.named = {} if piece.whole else None
            # It undoes what is claimed here, so it must not be seen half done; and of writers that are retired here
            # already, its rows count together with its end alone.
            untouched = having.replica.is_empty and not having.retired
            having.kept = [] if piece.update.final is not None and not untouched else None
        whole: dict[str, Keys] | None = None
        if piece.whole and having.named is not None:
            for part in piece.update.versioned:
                having.named.setdefault(part.table, []).append(part.keys)
            if piece.token is not None:
                whole = {table: np.concatenate(parts) for table, parts in having.named.items()}
        having.heard = True
        self._standings.setdefault(piece.shard, Standing()).left = piece.left
        update = piece.update
        if having.kept is not None and piece.whole:
            having.kept.append(update)
            if piece.token is None:
                return 0
            update = all_of(having.kept)
        elif piece.token is None:
            update = replace(update, final=None)
        delta = having.replica.merge(update, whole)
        if piece.token is not None:
            having.named = having.kept = None
            having.retired = having.replica.horizon.retired
            self._anew.discard(piece.shard)
            self._tokens[piece.shard] = having.replica, piece.token
            learned.append(piece.shard)
        rows = 0
        if delta is not None:
            rows = sum(len(part.keys) for part in delta.rows) + sum(len(part.keys) for part in delta.graves)
        self.counts.rows_total += rows
        return rows

    def overdue(self, now_s: float) -> Taken:
        """An answer did not come within ``patience_s``: the stream has failed, less is asked for at once from now on,
        and waited for longer. Whoever did neither on a link that is too slow would begin anew for ever."""
        self._patience_s = min(max(1.0, 2.0 * self._patience_s), LONGEST_PATIENCE_S)
        self.pace.forget()
        return self.failed(now_s, "the source does not answer")

    def failed(self, now_s: float, why: str = "the link broke") -> Taken:
        """The link broke, or the answer was that there is no such stream: this one is over, and another begins after
        a pause."""
        self.counts.faults_total += 1
        self.counts.last_fault = why
        self.counts.streams_total += 1
        self._retry_s = min(self._retry_s * 2.0, LAST_RETRY_S)
        self._not_before_s = now_s + self._retry_s * self._rng.uniform(0.5, 1.0)
        self._stream += 1
        self._asked = self._taken = 0
        self.pace.refund(sum(price_s for n, (_, _, price_s) in self._open.items() if n not in self._early))
        self._open.clear()
        self._early.clear()
        self._having.clear()
        for standing in self._standings.values():
            standing.served = False
        return Taken(fault=why)
