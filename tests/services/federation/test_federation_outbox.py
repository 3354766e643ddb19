"""What a job learns goes into the parameter servers once for each version, whoever dies when; and holds nothing up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
from support.batches import SCHEMA, SMALL
from support.local_parameters import LocalParameters

from federated.job import load_job
from federated.rounds import JobUnknown, MemoryStore, Phase, Store, StoreUnavailable
from federated.rounds.store import Step
from federated.weights import Array
from models.parameters import RETRIEVAL
from models.training import RecommenderModel
from services.federation.assembly import assemble_job
from services.federation.hosted import HostedJob
from services.federation.outbox import Outbox, StackAway, read_pushes
from services.federation.registry import Registry
from services.federation.teaching import FederatedWriter
from services.federation.versions import first_state, publish
from services.parameter_server.types import Keys, Rows

T = TypeVar("T")
MODEL = RecommenderModel(SCHEMA, SMALL)
ITEMS, DIM = 6, 8
KEYS = np.arange(1, ITEMS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
LEASE_S = 15.0

FILE = load_job(
    {
        "rounds": {"start_fl_job_threshold": 4},
        "model": {"name": "items", "dim": DIM},
        "data": {"items": [f"film-{n}" for n in range(ITEMS)]},
        "into": {"model": "main"},
    }
)


@dataclass
class InMemory:
    """A stack in this process that learns a change as it is. ``after`` is called when a push was applied."""

    parameters: LocalParameters
    after: Callable[[], None] = lambda: None
    away: bool = False
    numbers: list[int] = field(default_factory=list)
    opened: int = 0
    closed: bool = False

    def open(self) -> None:
        self.opened += 1
        if self.away:
            raise StackAway("nobody answers")

    def prepare(self, change: Array) -> tuple[Keys, Rows]:
        if self.away:
            raise StackAway("nobody answers")
        return KEYS, -change.reshape(ITEMS, DIM)

    def push(self, number: int, at_ns: int, keys: Keys, gradients: Rows) -> float:
        if self.away:
            raise StackAway("nobody answers")
        writer = FederatedWriter(self.parameters, "main", 0, lambda: at_ns, "federated-job/job")  # type: ignore[arg-type]
        done = writer.repeat(number, at_ns, keys, gradients)
        self.numbers.append(number)
        self.after()
        return done

    def close(self) -> None:
        self.closed = True


class Mortal(MemoryStore):
    """The store ``base`` as a server sees it that may die."""

    base: MemoryStore
    dead = False

    def transact(self, keys: Sequence[str], step: Step[T]) -> T:
        if self.dead:
            raise StoreUnavailable("this server is dead")
        return self.base.transact(keys, step)

    def put_blob(self, key: str, body: bytes) -> None:
        self.base.put_blob(key, body)

    def get_blob(self, key: str) -> bytes | None:
        return self.base.get_blob(key)


class World:
    """A job whose versions the test makes, and any number of servers."""

    def __init__(self, first: Array | None = None) -> None:
        self.store = MemoryStore()
        self.job: HostedJob = Registry(self.store).create(FILE, first)[0]
        self.header = SimpleNamespace(version=0, attempt=0, phase=Phase.STARTING)
        self.parameters = LocalParameters(MODEL.needs)
        self.now = 1_000.0
        self.state = first_state(self.store, self.job)

    def server(self, name: str, store: Store | None = None) -> tuple[Outbox, InMemory, list[str]]:
        told: list[str] = []
        stack = InMemory(self.parameters)
        outbox = Outbox(
            store or self.store, self.job, SimpleNamespace(header=lambda: self.header), stack, name,  # type: ignore[arg-type]
            told=told.append, clock=lambda: self.now, now_ns=lambda: int(self.now * 1e9),
        )  # fmt: skip
        return outbox, stack, told

    def learn(self, seed: int) -> Array:
        """The next version; gives the change."""
        change = np.random.default_rng(seed).normal(size=ITEMS * DIM).astype(np.float32)
        before = self.state.weights
        self.state = self.state.following({"weights": before + change})
        publish(self.store, self.job, self.header.version + 1, seed, self.state, self.header.attempt)
        self.header = SimpleNamespace(version=self.header.version + 1, attempt=seed, phase=Phase.STARTING)
        self.now += 1.0
        return self.state.weights - before

    def rows(self) -> Rows:
        return self.parameters.pull("main", {RETRIEVAL: KEYS}).rows[RETRIEVAL]


def taught(*changes: Array) -> Rows:
    """The rows after each change was pushed once."""
    parameters = LocalParameters(MODEL.needs)
    stack = InMemory(parameters)
    for number, change in enumerate(changes, 1):
        stack.push(number, 0, *stack.prepare(change))
    return parameters.pull("main", {RETRIEVAL: KEYS}).rows[RETRIEVAL]


def test_each_version_is_pushed_once_by_whichever_server() -> None:
    world = World()
    servers = [world.server("a"), world.server("b")]
    assert not servers[0][0].step(), "there is nothing yet"
    changes = []
    for seed in range(1, 5):
        changes.append(world.learn(seed))
        assert servers[seed % 2][0].step()
        assert not any(outbox.step() for outbox, _, _ in servers)
    np.testing.assert_array_equal(world.rows(), taught(*changes))
    assert [told for _, _, told in servers] == [["applied"] * 2, ["applied"] * 2]
    pushes = read_pushes(world.store, world.job.keys, [1, 2, 3, 4])
    assert [(push.since, push.version, push.refused) for push in pushes.values()] == [
        (n - 1, n, "") for n in range(1, 5)
    ]
    assert len(list(world.store.blobs("job/into/"))) == 1, "only what the next push starts from is kept"


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "reply lost"])
def test_what_ends_between_push_and_record_is_repeated_and_counts_once(killed: bool) -> None:
    world = World()
    mortal = Mortal()
    mortal.base = world.store
    (first, stack, _), (second, repeated, _) = world.server("a", mortal), world.server("b")

    def cut() -> None:
        mortal.dead = killed
        raise StackAway("the reply was lost")

    stack.after = cut
    changes = [world.learn(1)]
    with pytest.raises(ConnectionError):
        first.step()
    np.testing.assert_array_equal(world.rows(), taught(changes[0]))
    changes.append(world.learn(2))  # meanwhile the rounds go on
    assert second.step() == (not killed), "the lease of a dead server has to run out"
    world.now += LEASE_S
    assert second.step()
    if killed:
        assert second.step()
    assert repeated.numbers[0] == stack.numbers[0], "the same push, not one of the new version"
    np.testing.assert_array_equal(world.rows(), taught(*changes))
    assert not second.step()


def test_a_push_that_is_decided_stays_the_same_whatever_is_served_when_it_is_repeated() -> None:
    world = World()
    (first, stack, _), (second, other, _) = world.server("a"), world.server("b")
    change = world.learn(1)
    stack.push = lambda *_: (_ for _ in ()).throw(StackAway("cut off"))  # type: ignore[method-assign]
    with pytest.raises(StackAway):
        first.step()
    other.prepare = lambda change: pytest.fail("it is decided")  # type: ignore[method-assign]
    assert second.step(), "the lease was given back"
    np.testing.assert_array_equal(world.rows(), taught(change))


def test_only_one_server_is_at_a_push_until_its_lease_runs_out() -> None:
    world = World()
    (first, stack, _), (second, _, _) = world.server("a"), world.server("b")
    world.learn(1)
    seen = []
    send = stack.push
    stack.push = lambda *given: (seen.append(second.step()), send(*given))[1]  # type: ignore[method-assign,func-returns-value]
    assert first.step()
    assert seen == [False]


def test_a_stack_that_is_away_gets_all_that_was_learned_at_once_when_it_is_back() -> None:
    world = World()
    outbox, stack, told = world.server("a")
    stack.away = True
    before = world.state.weights
    for seed in range(1, 6):
        world.learn(seed)
        with pytest.raises(StackAway):
            outbox.step()
    assert not list(world.store.blobs("job/into/")), "nothing piles up"
    stack.away = False
    assert outbox.step()
    assert not outbox.step()
    np.testing.assert_array_equal(world.rows(), taught(world.state.weights - before))
    assert told == ["applied"]
    pushes = read_pushes(world.store, world.job.keys, [1, 2, 3, 4, 5])
    assert {version: push.version for version, push in pushes.items()} == dict.fromkeys(range(1, 6), 5)


def test_what_is_refused_is_told_and_the_next_goes_on_without_it() -> None:
    world = World()
    outbox, stack, told = world.server("a")
    world.learn(1)
    prepare = stack.prepare
    stack.prepare = lambda change: (KEYS, np.full((ITEMS, DIM), np.nan, np.float32))  # type: ignore[method-assign]
    assert outbox.step()
    stack.prepare = prepare  # type: ignore[method-assign]
    change = world.learn(2)
    assert outbox.step()
    np.testing.assert_array_equal(world.rows(), taught(change))
    assert told == ["refused", "applied"]
    assert "refused" in read_pushes(world.store, world.job.keys, [1])[1].refused


def test_the_thread_survives_what_fails_and_ends_with_its_job() -> None:
    world = World()
    outbox, stack, told = world.server("a")
    stack.away = True  # when it is opened, and no longer afterwards
    opened = stack.open

    def open_() -> None:
        try:
            opened()
        finally:
            stack.away = False

    stack.open = open_  # type: ignore[method-assign]
    world.learn(1)
    fails = iter([ValueError("our own fault"), StackAway("not now")])
    prepare = stack.prepare

    def prepared(change: Array) -> tuple[Keys, Rows]:
        if (error := next(fails, None)) is not None:
            raise error
        return prepare(change)

    stack.prepare = prepared  # type: ignore[method-assign]
    thread = threading.Thread(target=outbox.run, args=(threading.Event(),))
    thread.start()
    for _ in range(200):
        if told == ["failed", "away", "applied"]:
            break
        thread.join(0.05)
    assert told == ["failed", "away", "applied"]
    assert stack.opened == 1

    def gone() -> None:
        raise JobUnknown("job")

    outbox._desk = SimpleNamespace(header=gone)  # type: ignore[assignment]
    thread.join(10.0)
    assert not thread.is_alive()
    assert stack.closed


def test_the_weights_that_were_told_first_are_what_a_job_begins_with() -> None:
    first, other = (np.full(ITEMS * DIM, value, np.float32) for value in (0.25, 0.5))
    store = MemoryStore()
    job, created = Registry(store).create(FILE, first)
    again, twice = Registry(store).create(FILE, other)
    assert (created, twice) == (True, False)
    for found in (job, again):
        np.testing.assert_array_equal(first_state(store, found).weights, first)
    drawn = assemble_job(FILE, b"key").first_state().weights
    np.testing.assert_array_equal(World().state.weights, drawn)
