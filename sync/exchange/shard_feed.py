"""One shard of one stream: what of it is sent next. Sans-IO.

There is at most one exchange at a time, and its rows are sent oldest change first. Where a link cannot carry
everything at once, urgent rows overtake: they are sent out of turn as soon as they change, and move no knowledge. An
exchange that took as long as the one before, so that the link falls behind, is followed by a rest: rows which change
all the time then cross the link once in a while instead of each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.exchange.finding import How, missing
from sync.exchange.messages import Piece, Want
from sync.exchange.urgent import Overtaking
from sync.knowledge import joined, vector_of
from sync.pushes import Progress, Source
from sync.records import Generation, Graves, Learned, Rows, Update
from sync.replica import Replica, Token
from sync.table import Table

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
URGENT_SHARE: Final = 0.75
"""Of a batch, what urgent rows may take while others wait."""
FALLING_BEHIND: Final = 0.9
"""A link falls behind where an exchange takes so much of the time in which its changes were made."""


@dataclass(frozen=True, slots=True)
class FeedConfig:
    """``coalesce_s``: between two batches at least, so that what changes together travels together.
    ``priority_share``: of recent updates, how many count as urgent. ``max_staleness_s``: for how long the others may
    wait on a link that is too slow. ``state``: whether rows travel with their optimiser state.
    """

    coalesce_s: float = 0.005
    priority_share: float = 0.1
    max_staleness_s: float = 60.0
    state: bool = False


@dataclass(slots=True)
class FeedCounts:
    """Totals of all streams of a source. ``forgotten_total``: pullers that were gone and made room for others;
    ``turned_away_total``: streams that did not begin, as there was no room."""

    batches_total: int = 0
    rows_total: int = 0
    urgent_rows_total: int = 0
    replacements_total: int = 0
    forgotten_total: int = 0
    turned_away_total: int = 0
    found: dict[How, int] = field(default_factory=lambda: {"token": 0, "cache": 0, "scan": 0})
    """Exchanges by how their rows were found."""


@dataclass(slots=True)
class _Exchange:
    """What is still to be sent before the puller may claim ``learned``. ``since_s``: when the one before began, None
    where this one is to catch up."""

    learned: Learned
    token: Token
    epochs: dict[int, int]
    whole: bool
    generations: tuple[Generation, ...]
    keys: list[tuple[str, Keys]]
    begun_s: float
    since_s: float | None
    final: Learned | None = None
    first: bool = True
    pieces: int = 0

    @property
    def left(self) -> int:
        return sum(len(keys) for _, keys in self.keys)


class ShardFeed:
    """One shard of one stream."""

    __slots__ = (
        "_begun_s", "_config", "_counts", "_exchange", "_incarnation", "_not_before_s", "_overtaking", "_progress",
        "known", "retired", "token", "want",
    )  # fmt: skip

    def __init__(self, want: Want, config: FeedConfig, counts: FeedCounts) -> None:
        self.want = want
        self.known, self.retired, self.token = dict(want.knowledge), want.retired, want.token
        self._config, self._counts = config, counts
        self._exchange: _Exchange | None = None
        self._incarnation = 0
        self._begun_s: float | None = None
        self._not_before_s = 0.0
        self._overtaking = Overtaking(config.priority_share)
        self._progress: dict[Source, Progress] = {}

    def has_news(self, shard: Replica, now_s: float) -> bool:
        """Whether a piece could be sent now."""
        if self._exchange is not None:
            return True
        if self.token == shard.token:
            return False
        return now_s >= self._not_before_s or any(self._urgent(shard))

    def is_level(self, shard: Replica) -> bool:
        """Whether everything was sent."""
        return self._exchange is None and self.token == shard.token

    def due_s(self, shard: Replica) -> float | None:
        """From when on there is more to send although nothing changes; None if nothing waits."""
        waits = self._exchange is None and self.token != shard.token and self._not_before_s > 0.0
        return self._not_before_s if waits else None

    def left(self, shard: Replica) -> int:
        """How many rows are still to be told, about."""
        if self._exchange is not None:
            return self._exchange.left
        if self.token is None or self.token.incarnation != shard.token.incarnation:
            return 1
        return max(0, shard.token.counter - self.token.counter)

    def postponed(self, shard: Replica) -> Piece:
        """To say that there is more to tell than what is sent now."""
        return Piece(self.want.shard, self.want.round, Update(), left=max(1, self.left(shard)))

    def pieces(self, shard: Replica, room: int, now_s: float) -> Iterator[Piece]:
        """What to send now, of at most about ``room`` bytes."""
        if self._incarnation != shard.token.incarnation:
            # Another start of this shard, or another one in its place: what is being sent may be gone.
            self._exchange, self._overtaking = None, Overtaking(self._config.priority_share)
            self._incarnation, self._begun_s = shard.token.incarnation, None
        if self._exchange is not None and self._exchange.learned.horizon.retired != shard.horizon.retired:
            # What was told of a retirement in between may have undone rows that were claimed when it began.
            self._exchange = None
        resting = self._exchange is None and now_s < self._not_before_s
        if self._exchange is None and not resting and self.token != shard.token:
            self._exchange = self._begin(shard, now_s)
        exchange = self._exchange
        if resting or (exchange is not None and exchange.left * self._largest_row(shard) > room):
            for piece in self._urgent_pieces(shard, int(room * URGENT_SHARE)):
                room -= piece.update.nbytes
                yield piece
        if exchange is not None:
            yield self._next_piece(shard, exchange, room, now_s)

    def _begin(self, shard: Replica, now_s: float) -> _Exchange:
        """What is known comes first, then which rows there are: whatever changes in between is sent for nothing."""
        whole = not shard.horizon.passed_by(self.known, self.retired, shard.epochs)
        known = shard.known({} if whole else self.known, 0 if whole else self.retired)
        mine = self.token is not None and self.token.incarnation == shard.token.incarnation
        since = self.token.counter if self.token is not None and mine and not whole else None
        found = missing(shard, known, since)
        hows = {one.how for one in found}
        how: How = "scan" if "scan" in hows else "cache" if "cache" in hows else "token"
        self._counts.found[how] += 1
        self._counts.replacements_total += whole
        learned = Learned(dict(shard.knowledge), shard.horizon, self._news_of_sources(shard))
        generations = tuple(one for one in shard.generations() if known.is_below(one.time, one.writer))
        epochs = {
            writer: epoch for writer, epoch in shard.epochs.items()
            if writer in learned.knowledge or epoch < shard.horizon.retired
        }  # fmt: skip
        keys = [(one.table, one.keys) for one in found if len(one.keys)]
        since_s = self._begun_s if how == "token" else None
        self._begun_s = now_s
        final = learned if whole and shard.horizon.retired > self.retired else None
        return _Exchange(learned, shard.token, epochs, whole, generations, keys, now_s, since_s, final)

    def _news_of_sources(self, shard: Replica) -> tuple[tuple[Source, Progress], ...]:
        progress = shard.pushes.progress()
        return tuple(sorted((s, one) for s, one in progress.items() if self._progress.get(s) != one))

    def _next_piece(self, shard: Replica, exchange: _Exchange, room: int, now_s: float) -> Piece:
        rows: list[Rows] = []
        graves: list[Graves] = []
        while exchange.keys and room > 0:
            name, keys = exchange.keys[0]
            table = shard.table(name)
            count = max(1, room // self._row_bytes(table))
            some, rest = keys[:count], keys[count:]
            exchange.keys[0:1] = [(name, rest)] if len(rest) else []
            slots = table.located(some)
            if len(slots) < len(some):
                # Deleted and collected since the exchange began: only a new look tells whether that is known.
                left = max(1, exchange.left)
                self._exchange = self.token = self._begun_s = None
                return Piece(self.want.shard, self.want.round, Update(), left=left)
            if not exchange.whole:
                # What a full replacement does not name is dropped: it names what overtook, too.
                begun = exchange.token.counter
                slots = self._overtaking.unsent(table, slots, begun, last=not exchange.keys)
            for part in self._parts(table, slots):
                room -= part.values.nbytes + part.state.nbytes if isinstance(part, Rows) else 0
                room -= 20 * len(part.keys)
                if isinstance(part, Rows):
                    rows.append(part)
                else:
                    graves.append(part)
        done = not exchange.keys
        # What is final of generations is told at the end: it is also final which there are none of.
        now = done if exchange.final is not None else exchange.first
        generations = exchange.generations if now else ()
        update = Update(
            tuple(rows),
            tuple(graves),
            generations,
            # Rows may be by a writer that was not heard of when the exchange began.
            _epochs(shard, (*rows, *graves), generations)
            | (exchange.epochs if done or exchange.final is not None else {}),
            False,
            exchange.learned if done else None,
            exchange.final,
        )
        self._counts.rows_total += sum(len(part.keys) for part in update.versioned)
        piece = Piece(
            self.want.shard,
            self.want.round,
            update,
            exchange.first,
            exchange.whole,
            exchange.token if done else None,
            exchange.left,
        )
        exchange.first = False
        exchange.pieces += 1
        if done:
            self._end(exchange, now_s)
        return piece

    def _end(self, exchange: _Exchange, now_s: float) -> None:
        self._exchange = None
        self.known = joined(self.known, exchange.learned.knowledge)
        self.retired = max(self.retired, exchange.learned.horizon.retired)
        self.token = exchange.token
        self._progress |= dict(exchange.learned.progress)
        self._overtaking.forget(exchange.token.counter)
        took_s = now_s - exchange.begun_s
        behind = exchange.since_s is not None and (
            exchange.pieces > 1 and took_s >= FALLING_BEHIND * (exchange.begun_s - exchange.since_s)
        )
        self._not_before_s = now_s + min(took_s, self._config.max_staleness_s) if behind else 0.0

    def _urgent(self, shard: Replica) -> Iterator[tuple[Table, npt.NDArray[np.int64], Slots]]:
        known = self.token is not None and self.token.incarnation == shard.token.incarnation
        begun = self.token if known else None
        begun = begun or (self._exchange.token if self._exchange is not None else None)
        return iter(()) if begun is None else self._overtaking.waiting(shard, begun.counter)

    def _urgent_pieces(self, shard: Replica, room: int) -> Iterator[Piece]:
        known = shard.known(self.known, self.retired)
        for table, sequences, slots in self._urgent(shard):
            if room <= 0:
                return
            count = max(1, room // self._row_bytes(table))
            up_to = shard.token.counter if count >= len(slots) else int(sequences[count - 1])
            slots = slots[:count]
            self._overtaking.overtook(table, slots, up_to)
            slots = slots[known.above(*table.versions_at(slots))]
            parts = self._parts(table, slots)
            if not parts:
                continue
            rows = tuple(part for part in parts if isinstance(part, Rows))
            graves = tuple(part for part in parts if isinstance(part, Graves))
            update = Update(rows, graves, epochs=_epochs(shard, parts, ()), urgent=True)
            room -= update.nbytes
            self._counts.urgent_rows_total += len(slots)
            self._counts.rows_total += len(slots)
            yield Piece(self.want.shard, self.want.round, update, left=max(1, self.left(shard)))

    def _parts(self, table: Table, slots: Slots) -> tuple[Rows | Graves, ...]:
        """What is to be sent of ``slots`` [N], without what is empty."""
        rows, graves = table.told(slots)
        if not self._config.state:
            rows = replace(rows, state=rows.state[:, :0])
        return tuple(part for part in (rows, graves) if len(part.keys))

    def _row_bytes(self, table: Table) -> int:
        return 20 + 4 * (table.spec.dim + (table.state_dim if self._config.state else 0))

    def _largest_row(self, shard: Replica) -> int:
        hashed = (spec.name for spec in shard.specs if spec.placement == "hashed")
        return max((self._row_bytes(shard.table(name)) for name in hashed), default=20)


def _epochs(
    shard: Replica, parts: tuple[Rows | Graves, ...], generations: tuple[Generation, ...]
) -> dict[int, int]:
    """The fencing epochs of the writers in ``parts`` and ``generations``."""
    writers = {one.writer for one in generations}
    writers.update(*(vector_of(part.time, part.writer) for part in parts))
    return {writer: shard.epochs[writer] for writer in writers if writer in shard.epochs}
