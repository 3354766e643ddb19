"""A source and a puller of a few shards, joined by hand or by a link in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from sync.exchange import Batch, FeedConfig, Feeds, Pace, PaceConfig, Piece, Pull, Puller, ShardName, Taken
from sync.records import Rows
from sync.replica import Replica
from sync.shard import Shard
from tests.support.replicas import DIM, Clock, update
from tests.support.twins import told_by

ROW_BYTES = 20 + 8
"""A row of two values without state on the wire."""
PULLER = "region"


class Pair:
    """Home's shards, a region's replicas of them, and a stream between them that carries everything at once."""

    def __init__(
        self,
        shards: int = 1,
        config: FeedConfig | None = None,
        pace: PaceConfig | None = None,
        *,
        change_capacity: int = 10_000,
        wait_s: float = 1.0,
    ) -> None:
        self.clock, self.now_s = Clock(), 100.0
        self.names: list[ShardName] = [("m", number) for number in range(shards)]
        self.home: dict[ShardName, Shard] = {
            name: self.clock.shard(1 + number, shard_id=number, change_capacity=change_capacity)
            for number, name in enumerate(self.names)
        }
        self.region: dict[ShardName, Shard] = {
            name: self.clock.shard(1_001 + number, shard_id=number, stateless=True)
            for number, name in enumerate(self.names)
        }
        self.served: dict[ShardName, Replica] = dict(self.home)
        self.wanted: dict[ShardName, Replica] = dict(self.region)
        self.feeds = Feeds(lambda: self.served, config or FeedConfig(coalesce_s=0.0))
        self.pace = Pace(pace or PaceConfig())
        self.puller = Puller(lambda: self.wanted, self.pace, 1, random.Random(1), wait_s=wait_s)

    def later(self, seconds: float) -> None:
        """Let time pass for everybody."""
        self.now_s += seconds
        self.clock.now_us += int(seconds * 1e6)

    def ask(self) -> list[Pull]:
        """All pulls that are due, heard by the source."""
        pulls = []
        while (pull := self.puller.ask(self.now_s)) is not None:
            pulls.append(pull)
            if (ended := self.feeds.take(PULLER, pull, self.now_s)) is not None:
                self.take(ended)
                break
        return pulls

    def answer(self) -> list[Batch]:
        """All batches that are due, not taken yet."""
        return [batch for _, batch in list(self.feeds.ready(self.now_s))]

    def take(self, batch: Batch) -> Taken:
        return self.puller.take(batch, batch.nbytes, self.now_s)

    def exchange(self) -> list[Batch]:
        """Ask, answer and take until there is nothing more to tell at this moment."""
        told = []
        for _ in range(10_000):
            self.ask()
            batches = self.answer()
            for batch in batches:
                self.take(batch)
            told += batches
            if not batches:
                return told
        raise AssertionError("the exchange does not end")

    def settle(self, rounds: int = 20) -> None:
        """Exchange for some virtual seconds, past all rests and retries."""
        for _ in range(rounds):
            self.later(5.0)
            self.exchange()

    def equal(self) -> bool:
        """Whether the region's rows and graves are home's, and it claims what home does."""
        return all(
            told_by(self.region[name]) == told_by(self.home[name])
            and self.region[name].knowledge == self.home[name].knowledge
            for name in self.names
        )


def pieces(batches: Sequence[Batch]) -> list[Piece]:
    return [piece for batch in batches for piece in batch.pieces]


def keys_of(some: Sequence[Piece], table: str = "rows") -> list[int]:
    """The keys of all rows and graves, in the order in which they are sent."""
    return [
        key
        for piece in some
        for part in piece.update.versioned
        if part.table == table
        for key in part.keys.tolist()
    ]


def bulk(shard: Shard, first: int, count: int, time: int, writer: int = 77) -> None:
    """Let ``shard`` have ``count`` rows from key ``first`` on, as from another writer."""
    some = Rows(
        "rows",
        np.arange(first, first + count, dtype=np.uint64),
        np.ones((count, DIM), np.float32),
        np.zeros((count, shard.table("rows").state_dim), np.float32),
        np.full(count, time, np.uint64),
        np.full(count, writer, np.uint32),
    )
    shard.merge(update(some))


@dataclass
class Wire:
    """A link that carries one byte after the other: ``rate`` bytes/s, ``delay_s`` each way, and up to ``jitter_s``
    more that keeps the order."""

    rate: float
    delay_s: float
    jitter_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    free_s: float = 0.0
    last_s: float = 0.0
    carried: int = 0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """What is on its way: when it arrives, in which order, and what happens then."""
    number: int = 0

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        self.number += 1
        heappush(self.events, (when_s, self.number, what))

    def deliver(self, now_s: float) -> None:
        """Let happen what is due."""
        while self.events and self.events[0][0] <= now_s:
            heappop(self.events)[2]()

    def arrival_s(self, nbytes: int, now_s: float) -> float:
        """When ``nbytes`` sent now have all come."""
        self.free_s = max(self.free_s, now_s) + nbytes / self.rate
        self.carried += nbytes
        arrival = self.free_s + self.delay_s + self.rng.uniform(0.0, self.jitter_s)
        self.last_s = max(self.last_s, arrival)
        return self.last_s


def run(
    pair: Pair, wire: Wire, seconds: float, each_step: Callable[[float], None], step_s: float = 0.005,
    on_taken: Callable[[Batch], None] = lambda batch: None,
) -> None:  # fmt: skip
    """``pair`` over ``wire`` for some virtual seconds; ``each_step`` works on the shards, on time since the start."""
    start_s = pair.now_s

    def heard(pull: Pull) -> None:
        assert pair.feeds.take(PULLER, pull, pair.now_s) is None

    def taken(batch: Batch) -> None:
        pair.take(batch)
        on_taken(batch)

    while pair.now_s < start_s + seconds:
        each_step(pair.now_s - start_s)
        wire.deliver(pair.now_s)
        while (pull := pair.puller.ask(pair.now_s)) is not None:
            wire.at(pair.now_s + wire.delay_s, lambda pull=pull: heard(pull))
        for batch in pair.answer():
            wire.at(wire.arrival_s(batch.nbytes, pair.now_s), lambda batch=batch: taken(batch))
        pair.later(step_s)
