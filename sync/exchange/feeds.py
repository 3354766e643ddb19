"""The source's side of all its streams, and what its pullers are known to hold. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from sync.exchange.feed import Feed, FeedConfig, FeedCounts, Shards
from sync.exchange.messages import Batch, Pull, ShardName
from sync.knowledge import Knowledge, met

MAX_PULLERS: Final = 4_096
"""Whose streams are fed, or of whom is known what they hold."""


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

    def take(self, puller: str, pull: Pull, now_s: float, config: FeedConfig | None = None) -> Batch | None:
        """Hear a pull. It is answered by a later ``ready``, or at once, if that cannot be: with the end of the
        stream. ``config``: how a stream that begins is to be fed, where not as all."""
        feed = self._feeds.get(puller)
        if pull.number == 1 and (feed is None or feed.stream < pull.stream):
            self._forget_old(now_s)
            if puller not in self._heard_s and not self._make_room():
                self.counts.turned_away_total += 1
                return Batch(pull.stream, pull.number, ended=True)
            feed = self._feeds[puller] = Feed(pull.stream, self._shards, config or self._config, self.counts)
            # What it does not name any more another server of its region has by now.
            self._held[puller] = {}
        if feed is None or feed.stream != pull.stream:
            return Batch(pull.stream, pull.number, ended=True)
        self._note_held(puller, pull, now_s)
        feed.take(pull, now_s)
        return None

    def _note_held(self, puller: str, pull: Pull, now_s: float) -> None:
        self._heard_s[puller] = now_s
        held = self._held.setdefault(puller, {})
        for name in pull.unwanted:
            held.pop(name, None)
        for want in pull.wants:
            held.setdefault(want.shard, {})
        held.update((name, vector) for name, vector in pull.held if name in held)

    def ready(self, now_s: float, clock_us: int = 0) -> Iterator[tuple[str, Batch]]:
        """The batches that can be sent now, with their pullers."""
        for puller in self._feeds:
            for batch in self.answers(puller, now_s, clock_us):
                yield puller, batch

    def answers(self, puller: str, now_s: float, clock_us: int = 0) -> Iterator[Batch]:
        """The batches that can be sent now to one puller: for who knows that nothing changed for the others."""
        feed = self._feeds.get(puller)
        while feed is not None and (batch := feed.next(now_s, clock_us)) is not None:
            yield batch

    def due_s(self, now_s: float) -> float | None:
        """When to ask ``ready`` again although nothing changes."""
        due = [at for puller in self._feeds if (at := self.due_of(puller, now_s)) is not None]
        return min(due, default=None)

    def due_of(self, puller: str, now_s: float) -> float | None:
        """When to ask for its ``answers`` again although nothing changes; None if it waits for none."""
        feed = self._feeds.get(puller)
        return None if feed is None else feed.due_s(now_s)

    def drop(self, puller: str) -> None:
        """The puller is gone: its stream ends; what it holds still counts until it is forgotten."""
        self._feeds.pop(puller, None)

    def held_below(self, shard: ShardName, now_s: float) -> list[Knowledge]:
        """What each puller of ``shard`` that was heard of lately is known to hold of it; nothing where it did not
        say. Whoever pulls other shards only has no part in it."""
        return [
            held[shard]
            for puller, heard_s in self._heard_s.items()
            if now_s - heard_s <= self._timeout_s and shard in (held := self._held.get(puller, {}))
        ]

    def held_by_all(self, shard: ShardName, own: Knowledge, now_s: float) -> dict[int, int]:
        """What this server, with ``own``, and everybody who pulls from it hold."""
        return met([own, *self.held_below(shard, now_s)])

    def _make_room(self) -> bool:
        """Whether there is room for one puller more; the one that is gone for longest is forgotten for it.

        What it holds counts no longer then: graves and writers may be forgotten that it has not heard of, and if it
        comes back it gets everything again. One whose stream is not dropped yet is never forgotten so.
        """
        if len(self._heard_s) < MAX_PULLERS:
            return True
        gone = min(
            (p for p in self._heard_s if p not in self._feeds), key=self._heard_s.__getitem__, default=None
        )
        if gone is None:
            return False
        self._forget([gone])
        self.counts.forgotten_total += 1
        return True

    def _forget_old(self, now_s: float) -> None:
        self._forget(puller for puller, at in self._heard_s.items() if now_s - at > self._timeout_s)

    def _forget(self, pullers: Iterable[str]) -> None:
        for puller in list(pullers):
            self._heard_s.pop(puller, None)
            self._held.pop(puller, None)
            self._feeds.pop(puller, None)
