"""The source's side of one stream: which batch comes next. Sans-IO.

Per shard of a stream there is at most one exchange at a time, and its rows are sent oldest change first. Where a link
cannot carry everything at once, urgent rows overtake: they are sent out of turn as soon as they change, and move no
knowledge. After an exchange that took long the next one waits in proportion, up to a bound, so that the rows which
change all the time cross the link once in a while instead of each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.exchange.finding import How, missing
from sync.exchange.messages import Batch, Piece, Pull, ShardName, Want
from sync.knowledge import Known, joined
from sync.pushes import Progress, Source
from sync.records import Generation, Graves, Learned, Rows, Update
from sync.replica import Replica, Token
from sync.table import Table

Keys = npt.NDArray[np.uint64]
Sequences = npt.NDArray[np.int64]
Shards = Callable[[], Mapping[ShardName, Replica]]
MAX_PULLS: Final = 64
"""Pulls of one stream that wait at most; a puller that sends more is not one of ours."""
_NONE: Final = np.zeros(0, np.int64)


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
    """Totals of all streams of a source."""

    batches_total: int = 0
    rows_total: int = 0
    urgent_rows_total: int = 0
    replacements_total: int = 0
    found: dict[How, int] = field(default_factory=lambda: {"token": 0, "cache": 0, "scan": 0})
    """Exchanges by how their rows were found."""


@dataclass(slots=True)
class _Exchange:
    """What is still to be sent before the puller may claim ``learned``."""

    learned: Learned
    token: Token
    epochs: Mapping[int, int]
    whole: bool
    generations: tuple[Generation, ...]
    keys: list[tuple[str, Keys]]
    begun_s: float
    first: bool = True
    pieces: int = 0

    @property
    def left(self) -> int:
        return sum(len(keys) for _, keys in self.keys)


class _ShardFeed:
    """One shard of one stream."""

    __slots__ = (
        "_config", "_counts", "_exchange", "_incarnation", "_not_before_s", "_progress", "_sent", "_urgent_from",
        "known", "retired", "token", "want",
    )  # fmt: skip

    def __init__(self, want: Want, config: FeedConfig, counts: FeedCounts) -> None:
        self.want = want
        self.known, self.retired, self.token = dict(want.knowledge), want.retired, want.token
        self._config, self._counts = config, counts
        self._exchange: _Exchange | None = None
        self._incarnation = 0
        self._not_before_s = 0.0
        self._urgent_from: dict[str, int] = {}
        self._sent = _NONE
        """The numbers of the changes that were sent out of turn, so that they are not sent again."""
        self._progress: dict[Source, Progress] = {}

    def has_news(self, shard: Replica, now_s: float) -> bool:
        """Whether a piece could be sent now."""
        if self._exchange is not None:
            return True
        if self.token == shard.token:
            return False
        return now_s >= self._not_before_s or self._has_urgent(shard)

    def due_s(self, shard: Replica) -> float | None:
        """From when on there is more to send although nothing changes; None if nothing waits."""
        waits = self._exchange is None and self.token != shard.token and self._not_before_s > 0.0
        return self._not_before_s if waits else None

    def left(self, shard: Replica) -> int:
        """How many rows are still to be told, about."""
        if self._exchange is not None:
            return self._exchange.left
        if self.token is None or self.token.incarnation != shard.writer:
            return 0
        return max(0, shard.token.counter - self.token.counter)

    def pieces(self, shard: Replica, room: int, now_s: float) -> Iterator[Piece]:
        """What to send now, of at most about ``room`` bytes."""
        if self._incarnation != shard.writer:
            # Another start of this shard, or another one in its place: what is being sent may be gone.
            self._exchange, self._sent, self._urgent_from = None, _NONE, {}
            self._incarnation = shard.writer
        resting = self._exchange is None and now_s < self._not_before_s
        if self._exchange is None and not resting and self.token != shard.token:
            self._exchange = self._begin(shard, now_s)
        exchange = self._exchange
        if resting or (exchange is not None and exchange.left * _row_bytes(shard, self._config) > room):
            for piece in self._urgent_pieces(shard, room * 3 // 4):
                room -= piece.update.nbytes
                yield piece
        if exchange is not None:
            yield self._next_piece(shard, exchange, room, now_s)

    def _begin(self, shard: Replica, now_s: float) -> _Exchange:
        """What is known comes first, then which rows there are: whatever changes in between is sent for nothing."""
        whole = not shard.horizon.passed_by(self.known, self.retired)
        known = shard.known({} if whole else self.known, 0 if whole else self.retired)
        mine = self.token is not None and self.token.incarnation == shard.writer
        since = self.token.counter if self.token is not None and mine and not whole else None
        found = missing(shard, known, since)
        hows = {one.how for one in found}
        how: How = "scan" if "scan" in hows else "cache" if "cache" in hows else "token"
        self._counts.found[how] += 1
        self._counts.replacements_total += whole
        learned = Learned(dict(shard.knowledge), shard.horizon, self._news_of_sources(shard))
        generations = tuple(one for one in shard.generations() if _above(known, one))
        epochs = {
            writer: epoch for writer, epoch in shard.epochs.items()
            if writer in learned.knowledge or epoch < shard.horizon.retired
        }  # fmt: skip
        keys = [(one.table, one.keys) for one in found if len(one.keys)]
        return _Exchange(learned, shard.token, epochs, whole, generations, keys, now_s)

    def _news_of_sources(self, shard: Replica) -> tuple[tuple[Source, Progress], ...]:
        progress = shard.pushes.progress()
        return tuple(sorted((s, one) for s, one in progress.items() if self._progress.get(s) != one))

    def _next_piece(self, shard: Replica, exchange: _Exchange, room: int, now_s: float) -> Piece:
        rows: list[Rows] = []
        graves: list[Graves] = []
        while exchange.keys and room > 0:
            name, keys = exchange.keys[0]
            table = shard.table(name)
            count = max(
                1, room // (20 + 4 * (table.spec.dim + (table.state_dim if self._config.state else 0)))
            )
            some, rest = keys[:count], keys[count:]
            exchange.keys[0:1] = [(name, rest)] if len(rest) else []
            slots, buried = table.newest(some)
            if len(slots) + len(buried.keys) < len(some):
                # Deleted and collected since the exchange began: only a new look tells whether that is known.
                self._exchange, self.token = None, None
                return Piece(self.want.shard, self.want.round, Update())
            if len(self._sent):
                slots = slots[~np.isin(table.written_at(slots), self._sent)]
            if len(slots):
                rows.append(self._rows(table, slots))
            if len(buried.keys):
                graves.append(buried)
            room -= _size(rows[-1:], graves[-1:])
        done = not exchange.keys
        update = Update(
            tuple(rows),
            tuple(graves),
            exchange.generations,
            exchange.epochs,
            False,
            exchange.learned if done else None,
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
        exchange.first, exchange.generations = False, ()
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
        self._sent = self._sent[self._sent > exchange.token.counter]
        took_s = now_s - exchange.begun_s
        congested = exchange.pieces > 1 and not exchange.whole
        self._not_before_s = now_s + min(took_s, self._config.max_staleness_s) if congested else 0.0

    def _has_urgent(self, shard: Replica) -> bool:
        return any(len(sequences) for _, sequences, _ in self._urgent(shard))

    def _urgent(self, shard: Replica) -> Iterator[tuple[Table, Sequences, npt.NDArray[np.int32]]]:
        """By table, the urgent rows that changed since the last were sent, with the numbers of these changes."""
        before = self.token if self.token is not None and self.token.incarnation == shard.writer else None
        begun = before or (self._exchange.token if self._exchange is not None else None)
        if begun is None:
            return
        for spec in shard.specs:
            table = shard.table(spec.name)
            if spec.placement == "hashed":
                since = self._urgent_from.get(spec.name, begun.counter)
                least = table.ring.quantile(self._config.priority_share)
                if least > 0.0:
                    yield table, *table.urgent(since, least)

    def _urgent_pieces(self, shard: Replica, room: int) -> Iterator[Piece]:
        known = shard.known(self.known, self.retired)
        for table, sequences, slots in self._urgent(shard):
            if not len(slots) or room <= 0:
                continue
            count = max(1, room // (20 + 4 * (table.spec.dim + table.state_dim)))
            sequences, slots = sequences[:count], slots[:count]
            self._urgent_from[table.spec.name] = int(sequences[-1])
            self._sent = np.union1d(self._sent, sequences)
            slots = slots[known.above(*table.versions_at(slots))]
            if not len(slots):
                continue
            rows = self._rows(table, slots)
            epochs = {w: shard.epochs.get(w, 0) for w in np.unique(rows.writer).tolist()}
            update = Update((rows,), epochs=epochs, urgent=True)
            room -= update.nbytes
            self._counts.urgent_rows_total += len(slots)
            self._counts.rows_total += len(slots)
            yield Piece(self.want.shard, self.want.round, update, left=self.left(shard))

    def _rows(self, table: Table, slots: npt.NDArray[np.int32]) -> Rows:
        rows = table.stored(slots)
        return rows if self._config.state else replace(rows, state=rows.state[:, :0])


class Feed:
    """One stream of one puller. ``shards``: what can be fed now, by name; it may change between calls."""

    __slots__ = (
        "_answered",
        "_config",
        "_counts",
        "_feeds",
        "_last_s",
        "_pulls",
        "_shards",
        "_turn",
        "stream",
    )

    def __init__(self, stream: int, shards: Shards, config: FeedConfig, counts: FeedCounts) -> None:
        self.stream = stream
        self._shards, self._config, self._counts = shards, config, counts
        self._feeds: dict[ShardName, _ShardFeed] = {}
        self._pulls: dict[int, tuple[Pull, float]] = {}
        self._answered = 0
        self._last_s = -np.inf
        self._turn = 0

    @property
    def waiting(self) -> int:
        """How many pulls wait for an answer."""
        return len(self._pulls)

    def take(self, pull: Pull, now_s: float) -> None:
        """Hear a pull. One that came before is passed over, and so is one too many."""
        if pull.number <= self._answered or pull.number in self._pulls or len(self._pulls) >= MAX_PULLS:
            return
        self._pulls[pull.number] = pull, now_s
        for name in pull.unwanted:
            self._feeds.pop(name, None)
        for want in pull.wants:
            known = self._feeds.get(want.shard)
            if known is None or known.want.round < want.round:
                self._feeds[want.shard] = _ShardFeed(want, self._config, self._counts)

    def next(self, now_s: float, clock_us: int = 0) -> Batch | None:
        """The next batch, if a pull waits for it and there is something to tell, or the pull has waited enough."""
        waiting = self._pulls.get(self._answered + 1)
        if waiting is None:
            return None
        pull, since_s = waiting
        shards = self._shards()
        ready = [
            name
            for name, feed in self._feeds.items()
            if name in shards and feed.has_news(shards[name], now_s)
        ]
        if ready and now_s < self._last_s + self._config.coalesce_s:
            return None
        if not ready and now_s < since_s + pull.wait_s:
            return None
        pieces = tuple(self._pieces(shards, ready, pull.budget, now_s))
        self._answered += 1
        del self._pulls[self._answered]
        self._last_s = now_s
        self._counts.batches_total += 1
        serves = tuple(name for name in self._feeds if name in shards)
        return Batch(self.stream, self._answered, pieces, serves, now_s - since_s, clock_us)

    def _pieces(
        self, shards: Mapping[ShardName, Replica], ready: list[ShardName], room: int, now_s: float
    ) -> Iterator[Piece]:
        # Another shard begins each time, so that none waits for ever behind a large one.
        self._turn += 1
        start = self._turn % max(1, len(ready))
        for name in ready[start:] + ready[:start]:
            if room <= 0:
                return
            for piece in self._feeds[name].pieces(shards[name], room, now_s):
                room -= 32 + piece.update.nbytes
                yield piece

    def due_s(self, now_s: float) -> float | None:
        """When ``next`` is to be asked again although nothing changes; None if no pull waits."""
        waiting = self._pulls.get(self._answered + 1)
        if waiting is None:
            return None
        pull, since_s = waiting
        shards = self._shards()
        due = since_s + pull.wait_s
        for name, feed in self._feeds.items():
            shard = shards.get(name)
            if shard is None:
                continue
            if feed.has_news(shard, now_s):
                due = min(due, self._last_s + self._config.coalesce_s)
            elif (later := feed.due_s(shard)) is not None:
                due = min(due, later)
        return due


def _above(known: Known, one: Generation) -> bool:
    version = np.array([one.time], np.uint64), np.array([one.writer], np.uint32)
    return bool(known.above(*version)[0])


def _row_bytes(shard: Replica, config: FeedConfig) -> int:
    tables = (shard.table(spec.name) for spec in shard.specs if spec.placement == "hashed")
    return max((20 + 4 * (t.spec.dim + (t.state_dim if config.state else 0)) for t in tables), default=20)


def _size(rows: list[Rows], graves: list[Graves]) -> int:
    size = sum(r.values.nbytes + r.state.nbytes + 20 * len(r.keys) for r in rows)
    return size + sum(20 * len(g.keys) for g in graves)
