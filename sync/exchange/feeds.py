"""The source's side of all its streams, and what its pullers are known to hold. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from sync.exchange.feed import Feed, FeedConfig, FeedCounts, Shards
from sync.exchange.messages import Batch, Pull, ShardName
from sync.knowledge import Knowledge, met

MAX_PULLERS: Final = 4_096


class Feeds:
    """Streams by the name of their puller, one each: a new one ends the one before."""

    def __init__(self, shards: Shards, config: FeedConfig, member_timeout_s: float = 3_600.0) -> None:
        self.counts = FeedCounts()
        self._shards, self._config, self._timeout_s = shards, config, member_timeout_s
        self._feeds: dict[str, Feed] = {}
        self._held: dict[str, dict[ShardName, Knowledge]] = {}
        self._heard_s: dict[str, float] = {}

    @property
    def pullers(self) -> tuple[str, ...]:
        """Who pulls."""
        return tuple(self._feeds)

    def take(self, puller: str, pull: Pull, now_s: float) -> Batch | None:
        """Hear a pull. It is answered by a later ``ready``, or at once, if that cannot be: with the end of the
        stream."""
        self._heard_s[puller] = now_s
        if pull.held:
            self._held.setdefault(puller, {}).update(pull.held)
        feed = self._feeds.get(puller)
        if pull.number == 1 and (feed is None or feed.stream < pull.stream):
            self._forget_old(now_s)
            if puller not in self._feeds and len(self._feeds) >= MAX_PULLERS:
                return Batch(pull.stream, pull.number, ended=True)
            feed = self._feeds[puller] = Feed(pull.stream, self._shards, self._config, self.counts)
        if feed is None or feed.stream != pull.stream:
            return Batch(pull.stream, pull.number, ended=True)
        feed.take(pull, now_s)
        return None

    def ready(self, now_s: float, clock_us: int = 0) -> Iterator[tuple[str, Batch]]:
        """The batches that can be sent now, with their pullers."""
        for puller, feed in self._feeds.items():
            while (batch := feed.next(now_s, clock_us)) is not None:
                yield puller, batch

    def due_s(self, now_s: float) -> float | None:
        """When to ask ``ready`` again although nothing changes."""
        due = [at for feed in self._feeds.values() if (at := feed.due_s(now_s)) is not None]
        return min(due, default=None)

    def drop(self, puller: str) -> None:
        """The puller is gone: its stream ends; what it holds still counts until it is forgotten."""
        self._feeds.pop(puller, None)

    def held_below(self, shard: ShardName, now_s: float) -> list[Knowledge]:
        """What each puller that was heard of lately is known to hold of ``shard``; nothing where it did not say."""
        return [
            self._held.get(puller, {}).get(shard, {})
            for puller, heard_s in self._heard_s.items()
            if now_s - heard_s <= self._timeout_s
        ]

    def held_by_all(self, shard: ShardName, own: Knowledge, now_s: float) -> dict[int, int]:
        """What this server, with ``own``, and everybody who pulls from it hold."""
        return met([own, *self.held_below(shard, now_s)])

    def _forget_old(self, now_s: float) -> None:
        self._forget(puller for puller, at in self._heard_s.items() if now_s - at > self._timeout_s)

    def _forget(self, pullers: Iterable[str]) -> None:
        for puller in list(pullers):
            self._heard_s.pop(puller, None)
            self._held.pop(puller, None)
            self._feeds.pop(puller, None)
