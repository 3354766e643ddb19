"""A simulated parameter server: the very core that runs in a process, woken only when something is due.

It has shards, feeds whoever pulls from it, and pulls from whom it follows. Its one thread is busy for what its work
costs; messages that come meanwhile wait.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sync.exchange import Batch, FeedConfig, Feeds, Pace, PaceConfig, Pull, Puller, ShardName
from sync.exchange.puller import Taken
from sync.shard import Shard
from sync.simulator.machine import FREE, Costs, MachineClock
from sync.simulator.network import Network
from sync.simulator.queue import EventQueue

STREAMS: Final = 1_000_000
"""Streams of one puller at most; the next puller of the same node begins above them."""


def _nbytes(message: Pull | Batch) -> int:
    return message.nbytes


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """``wait_s``: for how long pulls park; ``patience_s``: how much longer than that and its sending an answer
    may take; ``member_timeout_s``: for how long a silent puller counts as a member; ``poll_s``: between two pulls at
    least, for whoever does not park them.

    ``weigh``: the bytes of a message on the wire; ``unit``: how many of them stand for one byte of the core's own
    reckoning, where a simulated row stands for many.
    """

    feed: FeedConfig = field(default_factory=FeedConfig)
    pace: PaceConfig = field(default_factory=PaceConfig)
    wait_s: float = 1.0
    patience_s: float = 1.0
    member_timeout_s: float = 3_600.0
    costs: Costs = FREE
    poll_s: float = 0.0
    unit: float = 1.0
    weigh: Callable[[Pull | Batch], int] = _nbytes


@dataclass(slots=True)
class _Link:
    """One node that is followed."""

    source: Node
    puller: Puller
    open: set[tuple[int, int]] = field(default_factory=set)
    """(stream, number) of the pulls that were not answered yet."""
    wake_s: float = -1.0
    """When the next pull is looked for, -1 if nobody looks."""
    poll_s: float = 0.0
    """From when on the next pull may go, where they are spaced."""


class Node:
    """One server. ``on_taken`` hears of each batch that it took, by the name of its source."""

    def __init__(
        self,
        name: str,
        place: str,
        queue: EventQueue,
        network: Network,
        clock: MachineClock,
        rng: random.Random,
        config: NodeConfig,
    ) -> None:
        self.name, self.place, self.clock, self.config = name, place, clock, config
        self.shards: dict[ShardName, Shard] = {}
        self.alive = False
        self.on_taken: Callable[[str, Batch, Taken], None] = lambda source, batch, taken: None
        self._queue, self._network, self._rng = queue, network, rng
        self._links: dict[str, _Link] = {}
        self._peers: dict[str, Node] = {}
        self._starts = self._pullers = 0
        self._busy_until_s = 0.0
        self._serves_s: dict[str, float] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self.feeds = Feeds(lambda: self.shards, config.feed, config.member_timeout_s)

    @property
    def pullers(self) -> Mapping[str, Puller]:
        """By the name of who is followed."""
        return {name: link.puller for name, link in self._links.items()}

    def start(self, shards: Mapping[ShardName, Shard]) -> None:
        """Begin, with what was restored or nothing."""
        self.shards = dict(shards)
        self.alive = True
        self._busy_until_s = self._queue.now_s
        self.feeds = Feeds(lambda: self.shards, self.config.feed, self.config.member_timeout_s)

    def crash(self) -> None:
        """Stop at once: all that is not elsewhere is gone, and what is on its way here, too."""
        self.alive = False
        self._starts += 1
        self.shards = {}
        self._links, self._serves_s = {}, {}
        self._inbox.clear()

    def follow(self, sources: Iterable[Node]) -> None:
        """Pull from these, and from nobody else."""
        wanted = {source.name: source for source in sources if source is not self}
        for name in [name for name in self._links if name not in wanted]:
            del self._links[name]
        for name, source in wanted.items():
            if name not in self._links:
                self._links[name] = self._link(source)
                self._pump(name)

    def _link(self, source: Node) -> _Link:
        self._pullers += 1
        config = self.config
        return _Link(
            source,
            Puller(
                lambda: self.shards,
                Pace(config.pace),
                self._pullers * STREAMS,
                random.Random(self._rng.random()),
                self._held,
                config.wait_s,
                config.patience_s,
            ),
        )

    def _held(self, name: ShardName) -> Mapping[int, int]:
        return self.feeds.held_by_all(name, self.shards[name].knowledge, self._queue.now_s)

    def changed(self) -> None:
        """Something was written here: who waits for it is served."""
        for puller in self.feeds.pullers:
            self._plan_serving(puller)

    # The puller's side

    def _pump(self, name: str) -> None:
        """Send what pulls are due to one source."""
        link, now_s = self._links[name], self._queue.now_s
        while now_s >= link.poll_s and (pull := link.puller.ask(now_s)) is not None:
            link.open.add((pull.stream, pull.number))
            link.poll_s = now_s + self.config.poll_s
            self._send_pull(link, pull)
        due_s = max(link.puller.due_s(), link.poll_s)
        if due_s > now_s and not now_s < link.wake_s <= due_s:
            link.wake_s = due_s
            self._later(due_s, lambda: self._woken(name, link))

    def _woken(self, name: str, link: _Link) -> None:
        if self._links.get(name) is link and link.wake_s <= self._queue.now_s:
            link.wake_s = -1.0
            self._pump(name)

    def _send_pull(self, link: _Link, pull: Pull) -> None:
        source, mine = link.source, self._starts
        source._peers[self.name] = self
        starts = source._starts

        def arrive() -> None:
            # A connection to a process that died is not one to its successor.
            if source._starts == starts:
                source._receive(lambda: source._take_pull(self.name, pull))

        nbytes = self.config.weigh(pull)
        self._network.send((self.place, self.name), (source.place, source.name), nbytes, arrive)
        patience_s = link.puller.patience_s(pull)
        self._later(self._queue.now_s + patience_s, lambda: self._overdue(link, pull), mine)

    def _overdue(self, link: _Link, pull: Pull) -> None:
        if (pull.stream, pull.number) in link.open and self._links.get(link.source.name) is link:
            link.open.clear()
            link.puller.overdue(self._queue.now_s)
            self._pump(link.source.name)

    def _take_batch(self, link: _Link, batch: Batch) -> None:
        name = link.source.name
        if self._links.get(name) is not link:
            return
        link.open.discard((batch.stream, batch.number))
        before = {shard: one.token for shard, one in self.shards.items()}
        merged = sum(shard.counts.merged_rows_total for shard in self.shards.values())
        nbytes = round(self.config.weigh(batch) / self.config.unit)
        taken = link.puller.take(batch, nbytes, self._queue.now_s, self.clock())
        if taken.fault:
            link.open.clear()
        merged = sum(shard.counts.merged_rows_total for shard in self.shards.values()) - merged
        self._work(self.config.costs.taking_s(batch, merged))
        self.on_taken(name, batch, taken)
        if any(before[shard] != one.token for shard, one in self.shards.items()):
            self.changed()
        if self.alive and name in self._links:
            self._pump(name)

    # The source's side

    def _take_pull(self, puller: str, pull: Pull) -> None:
        self._work(self.config.costs.message_s)
        ended = self.feeds.take(puller, pull, self._queue.now_s)
        if ended is not None:
            self._send_batch(puller, ended)
        self._serve(puller)

    def _serve(self, puller: str) -> None:
        costs, counts = self.config.costs, self.feeds.counts
        while True:
            scans, rows = counts.found["scan"], counts.rows_total
            batch = next(self.feeds.answers(puller, self._queue.now_s, self.clock()), None)
            if batch is None:
                break
            looked = (counts.found["scan"] - scans) * self._slots() if costs.scanned_row_s else 0
            sent = counts.rows_total - rows
            self._work(costs.serving_s(batch, looked, sent))
            self._send_batch(puller, batch)
        self._plan_serving(puller)

    def _slots(self) -> int:
        return sum(
            shard.table(spec.name).slots for shard in self.shards.values() for spec in shard.specs
        ) // max(1, len(self.shards))

    def _plan_serving(self, puller: str) -> None:
        due_s = self.feeds.due_of(puller, self._queue.now_s)
        if due_s is None:
            return
        due_s = max(due_s, self._queue.now_s)
        planned_s = self._serves_s.get(puller)
        if planned_s is not None and planned_s <= due_s:
            return
        self._serves_s[puller] = due_s
        self._later(due_s, lambda: self._serve_planned(puller, due_s))

    def _serve_planned(self, puller: str, due_s: float) -> None:
        if self._serves_s.get(puller) == due_s:
            del self._serves_s[puller]
            self._receive(lambda: self._serve(puller))

    def _send_batch(self, puller: str, batch: Batch) -> None:
        peer = self._peers[puller]
        links, starts = peer._links, peer._starts
        link = links.get(self.name)
        if link is None:
            return

        def arrive() -> None:
            if peer._starts == starts:
                peer._receive(lambda: peer._take_batch(link, batch))

        def send() -> None:
            nbytes = self.config.weigh(batch)
            self._network.send((self.place, self.name), (peer.place, peer.name), nbytes, arrive)

        # It leaves when the work for it is done.
        if self._busy_until_s > self._queue.now_s:
            self._later(self._busy_until_s, send)
        else:
            send()

    # Time

    def _later(self, when_s: float, action: Callable[[], None], starts: int | None = None) -> None:
        """Do it at ``when_s`` if this start lives on."""
        starts = self._starts if starts is None else starts

        def act() -> None:
            if self._starts == starts and self.alive:
                action()

        self._queue.at(when_s, act)

    def _receive(self, action: Callable[[], None]) -> None:
        """Do it as soon as the thread is free, after what came before."""
        if not self.alive:
            return
        self._inbox.append(action)
        if len(self._inbox) == 1:
            self._drain()

    def _drain(self) -> None:
        while self._inbox:
            if self._busy_until_s > self._queue.now_s:
                self._later(self._busy_until_s, self._drain)
                return
            starts, action = self._starts, self._inbox[0]
            action()
            if self._starts != starts:
                return
            self._inbox.popleft()

    def _work(self, seconds: float) -> None:
        if seconds:
            self._busy_until_s = max(self._busy_until_s, self._queue.now_s) + seconds
