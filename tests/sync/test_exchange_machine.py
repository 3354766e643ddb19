"""The exchange as a state machine: any order of pushes, pulls, answers, losses, repeats, crashes and restores that can
be thought of, shrunk to the shortest that breaks something."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sync.clock import HybridClock
from sync.exchange import Batch, FeedConfig, Feeds, Pace, PaceConfig, Pull, Puller, ShardName
from sync.knowledge import covers, met
from sync.pushes import Push, Source
from sync.replica import ShardState
from sync.shard import Shard
from sync.simulator import Ledger, Reader, Watcher
from sync.simulator.invariants import difference
from sync.spec import Initialiser, Optimiser, TableSpec

SPECS = (
    TableSpec("rows", 2, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5)),
    TableSpec("dense", 2, Initialiser.uniform(0.1), Optimiser("sgd", 0.5), placement="single", rows=2),
)
NAME: ShardName = ("m", 0)
SERVERS = 3
KEYS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
SERVER = st.integers(0, SERVERS - 1)
CONFIG = FeedConfig(coalesce_s=0.0, priority_share=0.5, max_staleness_s=2.0, state=True)
PACE = PaceConfig(min_bytes=96, max_bytes=96)
"""Few rows fit into a batch, so that exchanges have many."""


@dataclass(slots=True)
class Server:
    number: int
    skew_us: int
    shard: Shard
    watcher: Watcher
    feeds: Feeds
    reader: Reader = field(default_factory=lambda: Reader(2))
    pullers: dict[int, Puller] = field(default_factory=dict)
    saved: ShardState | None = None


class Exchange(RuleBasedStateMachine):
    """Everybody writes, so the later clock wins; everybody may pull from everybody."""

    @initialize(
        skews=st.just((0,) * SERVERS) | st.tuples(*[st.integers(-3, 3)] * SERVERS),
        capacity=st.sampled_from([2, 64]),
    )
    def begin(self, skews: tuple[int, ...], capacity: int) -> None:
        self.now_s, self.writers, self.streams = 0.0, 0, 0
        self.capacity, self.skewed = capacity, any(skews)
        self.ledger = Ledger(["rows"])
        self.servers: list[Server] = []
        self.pulls: list[tuple[int, int, int, Pull]] = []
        """(puller, source, start of the source, pull) on their way."""
        self.batches: list[tuple[int, int, Puller, Batch]] = []
        for number, skew in enumerate(skews):
            self.servers.append(self.server(number, skew * 1_000_000, None))

    def server(self, number: int, skew_us: int, saved: ShardState | None) -> Server:
        self.writers += 1
        clock = HybridClock(lambda: 1_000_000_000 + skew_us + int(self.now_s * 1e6))
        shard = Shard(0, SPECS, self.writers, clock, model="m", change_capacity=self.capacity)
        if saved is not None:
            shard.restore(saved)
        shard.on_delta = lambda delta: self.ledger.record(NAME, delta)
        watcher = Watcher(f"server {number} (writer {self.writers})", NAME, self.ledger)
        server = Server(number, skew_us, shard, watcher, Feeds(lambda: {NAME: shard}, CONFIG), saved=saved)
        server.watcher.look(shard)
        return server

    def passed(self, seconds: float = 0.01) -> None:
        self.now_s += seconds

    @rule(number=SERVER, keys=KEYS, dense=st.booleans(), amount=st.sampled_from([0.01, 1.0, 100.0]))
    def push(self, number: int, keys: list[int], dense: bool, amount: float) -> None:
        self.passed()
        shard = self.servers[number].shard
        source = Source("log", number)
        offset = shard.applied(source) + 1
        parts = [("rows", np.array(keys, np.uint64), np.full((len(keys), 2), amount, np.float32))]
        if dense:
            parts.append(("dense", np.arange(2, dtype=np.uint64), np.full((2, 2), amount, np.float32)))
        assert shard.push(Push(source, offset, offset - 1, None, tuple(parts))).status == "applied"
        if dense:
            shard.publish_dense("dense")

    @rule(number=SERVER, keys=KEYS)
    def delete(self, number: int, keys: list[int]) -> None:
        self.passed()
        self.servers[number].shard.delete("rows", np.array(keys, np.uint64))

    @rule(number=SERVER)
    def collect(self, number: int) -> None:
        """What everyone has. Who comes back from before that must have nothing that is unknown to the others, nor a
        clock that is behind: without fencing, nothing else guards against it."""
        held = met(server.shard.knowledge for server in self.servers)
        for server in self.servers:
            if server.saved is None or self.skewed or not covers(held, server.saved.head.knowledge):
                server.saved = server.shard.state()
        self.servers[number].shard.collect(held)

    @rule(number=SERVER)
    def save(self, number: int) -> None:
        self.servers[number].saved = self.servers[number].shard.state()

    @rule(number=SERVER)
    def crash(self, number: int) -> None:
        old = self.servers[number]
        self.servers[number] = self.server(number, old.skew_us, old.saved)
        self.servers[number].reader = old.reader
        self.batches = [one for one in self.batches if one[0] != number]

    @rule(here=SERVER, there=SERVER, many=st.integers(1, 3))
    def ask(self, here: int, there: int, many: int) -> None:
        if here == there:
            return
        self.passed()
        server = self.servers[here]
        if there not in server.pullers:
            self.streams += 1_000
            server.pullers[there] = Puller(
                lambda: {NAME: server.shard},
                Pace(PACE),
                self.streams,
                random.Random(self.streams),
                wait_s=0.2,
            )
        for _ in range(many):
            pull = server.pullers[there].ask(self.now_s)
            if pull is not None:
                self.pulls.append((here, there, self.servers[there].shard.writer, pull))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), keep=st.sampled_from([False, False, False, True]))
    def deliver_pull(self, data: st.DataObject, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.pulls) - 1))
        here, there, start, pull = self.pulls[at] if keep else self.pulls.pop(at)
        source = self.servers[there]
        puller = self.servers[here].pullers.get(there)
        if source.shard.writer != start or puller is None:
            return
        ended = source.feeds.take(str(here), pull, self.now_s)
        if ended is not None:
            self.batches.append((here, there, puller, ended))

    @rule(there=SERVER, here=SERVER, seconds=st.sampled_from([0.0, 0.3]))
    def answer(self, there: int, here: int, seconds: float) -> None:
        self.passed(seconds)
        puller = self.servers[here].pullers.get(there)
        if puller is None:
            return
        for batch in self.servers[there].feeds.answers(str(here), self.now_s):
            self.batches.append((here, there, puller, batch))

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), keep=st.sampled_from([False, False, False, True]))
    def deliver_batch(self, data: st.DataObject, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.batches) - 1))
        here, there, puller, batch = self.batches[at] if keep else self.batches.pop(at)
        if self.servers[here].pullers.get(there) is puller:
            puller.take(batch, batch.nbytes, self.now_s)
            self.servers[here].watcher.look(self.servers[here].shard)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def lose_batch(self, data: st.DataObject) -> None:
        self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))

    @rule(here=SERVER, there=SERVER)
    def overdue(self, here: int, there: int) -> None:
        if (puller := self.servers[here].pullers.get(there)) is not None:
            puller.failed(self.now_s)

    @rule(seconds=st.sampled_from([0.3, 6.0]))
    def wait(self, seconds: float) -> None:
        self.passed(seconds)

    @rule(here=SERVER, there=SERVER)
    def exchange_all(self, here: int, there: int) -> None:
        """A good moment: what is on its way is lost, and one hears everything from another."""
        if here != there:
            if (puller := self.servers[here].pullers.get(there)) is not None:
                puller.failed(self.now_s)
            self.passed(6.0)
            self.exchange(here, there)
            self.servers[here].watcher.look(self.servers[here].shard)

    @rule(number=SERVER)
    def read(self, number: int) -> None:
        self.servers[number].reader.read(self.servers[number].shard)

    @invariant()
    def due_times_lie_ahead_or_have_something(self) -> None:
        """Who sleeps until ``due_s`` neither spins nor oversleeps."""
        if not hasattr(self, "servers"):
            return
        for server in self.servers:
            for puller in server.feeds.pullers:
                due_s = server.feeds.due_of(puller, self.now_s)
                if due_s is not None and due_s <= self.now_s:
                    # Taken for the count only: what it found is lost, as any answer may be.
                    assert next(server.feeds.answers(puller, self.now_s), None) is not None

    def teardown(self) -> None:
        """Everything is delivered, nobody writes: all agree."""
        if not hasattr(self, "servers"):
            return
        for _ in range(60):
            self.passed(6.0)
            for server in self.servers:
                for puller in server.pullers.values():
                    puller.failed(self.now_s)
            self.passed(6.0)
            for here in range(SERVERS):
                for there in range(SERVERS):
                    self.exchange(here, there)
            if not self.differences():
                break
        assert not self.differences()
        for server in self.servers:
            server.watcher.look(server.shard)
            server.reader.check(f"server {server.number}", server.shard)

    def exchange(self, here: int, there: int) -> None:
        self.pulls.clear()
        self.batches.clear()
        for _ in range(12):
            self.ask(here, there, 3)
            for puller, source, start, pull in self.pulls:
                assert start == self.servers[source].shard.writer
                self.servers[source].feeds.take(str(puller), pull, self.now_s)
            self.pulls.clear()
            self.answer(there, here, 0.0)
            for puller_number, source, puller_of, batch in self.batches:
                assert (puller_number, source) == (here, there)
                puller_of.take(batch, batch.nbytes, self.now_s)
            self.batches.clear()
            self.passed(0.1)

    def differences(self) -> str:
        first, *rest = (server.shard for server in self.servers)
        found = (difference(first, other, self.ledger.epochs[NAME]) for other in rest)
        return next((one for one in found if one), "")


Exchange.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestExchange = Exchange.TestCase
