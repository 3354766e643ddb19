"""The source's side of one stream: which batch comes next. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from sync.exchange.messages import Batch, Piece, Pull, ShardName
from sync.exchange.shard_feed import FeedConfig, FeedCounts, ShardFeed
from sync.replica import Replica

__all__ = ["Feed", "FeedConfig", "FeedCounts", "Shards"]

Shards = Callable[[], Mapping[ShardName, Replica]]
MAX_PULLS: Final = 64
"""Pulls of one stream that wait at most; a puller that sends more is not one of ours."""
LEAST_SHARE: Final = 4_096
"""Bytes of a batch that a shard gets at least, if it gets any."""
MAX_FED: Final = 256
"""Shards of which a batch tells more than that there is news: to look for it takes its time for each."""


class Feed:
    """One stream of one puller. ``shards``: what can be fed now, by name; it may change between calls."""

    __slots__ = (
        "_answered", "_config", "_counts", "_feeds", "_last_s", "_pulls", "_said", "_shards", "_turn", "stream",
    )  # fmt: skip

    def __init__(self, stream: int, shards: Shards, config: FeedConfig, counts: FeedCounts) -> None:
        self.stream = stream
        self._shards, self._config, self._counts = shards, config, counts
        self._feeds: dict[ShardName, ShardFeed] = {}
        self._pulls: dict[int, tuple[Pull, float]] = {}
        self._said: dict[ShardName, int] = {}
        """Which pull spoke last of a shard: an earlier one, that comes late, says nothing of it any more."""
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
            if self._is_last_word(name, pull.number):
                self._feeds.pop(name, None)
        for want in pull.wants:
            if self._is_last_word(want.shard, pull.number):
                self._feeds[want.shard] = ShardFeed(want, self._config, self._counts)

    def _is_last_word(self, name: ShardName, number: int) -> bool:
        last = self._said.setdefault(name, number) <= number
        if last:
            self._said[name] = number
        return last

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
        news = set(ready)
        resting = [
            feed.postponed(shards[name])
            for name, feed in self._feeds.items()
            if name in shards and name not in news and not feed.is_level(shards[name])
        ]
        pieces = (*self._pieces(shards, ready, pull.budget, now_s), *resting)
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
        self._turn += MAX_FED if len(ready) > MAX_FED else 1
        start = self._turn % max(1, len(ready))
        for waiting, name in enumerate(ready[start:] + ready[:start]):
            if room <= 0 or waiting >= MAX_FED:
                yield self._feeds[name].postponed(shards[name])
                continue
            # Nor do the urgent rows of one shard wait for all of another.
            share = max(room // (min(len(ready), MAX_FED) - waiting), min(room, LEAST_SHARE))
            for piece in self._feeds[name].pieces(shards[name], share, now_s):
                room -= 32 + piece.update.nbytes
                yield piece

    def due_s(self, now_s: float) -> float | None:
        """When ``next`` is to be asked again although nothing changes; None if no pull waits."""
        waiting = self._pulls.get(self._answered + 1)
        if waiting is None:
            return None
        pull, since_s = waiting
        shards = self._shards()
        fed = [(feed, shards[name]) for name, feed in self._feeds.items() if name in shards]
        if any(feed.has_news(shard, now_s) for feed, shard in fed):
            # However long the pull has waited: before that there is no batch.
            return self._last_s + self._config.coalesce_s
        later = [at for feed, shard in fed if (at := feed.due_s(shard)) is not None]
        return min([since_s + pull.wait_s, *later])
