"""The client's cache of hot rows: what it keeps, what it claims, and that nobody can tell that it is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.parameters import (
    ALL_KEYS,
    DECLARATION,
    DIM,
    EVERYTHING,
    SOURCE,
    Fleet,
    Kept,
    Numbers,
    gradients,
    recorded,
)

from models.samples import Watermark
from services.coordination.shardmap import Place, ShardMap
from services.parameter_server.client import operations
from services.parameter_server.client.caching import RowCache
from services.parameter_server.client.confirmations import MOST, Claim, Confirmations
from services.parameter_server.client.hotkeys import UNKNOWN, WAYS, HotTable
from services.parameter_server.client.readers import Choice
from services.parameter_server.client.routing import Route
from services.parameter_server.holdings import HostConfig
from services.parameter_server.host import Host
from services.parameter_server.types import Keys, Mark, ParametersRefused, Pulled
from services.rpc.codec import Reply
from sync.clock import HybridClock
from sync.placement import shard_of
from sync.pushes import Push, Source
from sync.records import Delta
from sync.replica import ShardState
from sync.shard import Shard

SHARDS = 3
ITEMS = {"items": ALL_KEYS}


def pull(fleet: Fleet, cache: RowCache | None = None, **others: bool) -> Pulled:
    return fleet.ask(operations.pull(fleet.route, EVERYTHING, None, cache, **others))


def push(fleet: Fleet, offset: int, mark: Watermark | None = None) -> None:
    one = gradients(offset, recorded(offset), fleet.map.shards)
    fleet.ask(
        operations.push(
            fleet.route,
            operations.Gradients(one.source, offset, one.predecessors, 0, mark, one.parts),
        )
    )


def same(one: Pulled, other: Pulled) -> bool:
    return one.watermarks == other.watermarks and all(
        one.rows[table].tobytes() == rows.tobytes() for table, rows in other.rows.items()
    )


class TestHotTable:
    def some(self, table: HotTable, keys: Keys, value: float = 0.0, number: int = 1) -> None:
        """Rows of ``keys`` arrive after they were looked for."""
        known = table.look(keys)
        rows = np.full((len(keys), table.dim), value, np.float32)
        rows[:, 0] = keys.astype(np.float32)
        versions = np.stack([keys + np.uint64(1), np.full(len(rows), 7, np.uint64)], axis=1)
        everything = np.arange(len(keys))
        table.learn(known, everything, ~known.found, rows, versions, np.full(len(rows), number, np.int64))

    def test_what_was_learned_is_found_with_its_version(self) -> None:
        table = HotTable(64, 3)
        keys = np.arange(5, dtype=np.uint64)
        self.some(table, keys, 0.5, 9)
        known = table.look(np.array([3, 77, 3, 0], np.uint64))
        assert known.found.tolist() == [True, False, True, True]
        assert known.rows[known.found].tolist() == [[3.0, 0.5, 0.5], [3.0, 0.5, 0.5], [0.0, 0.5, 0.5]]
        assert known.versions.tolist() == [[4, 7], [int(UNKNOWN)] * 2, [4, 7], [1, 7]]
        assert known.confirmed.tolist() == [9, 0, 9, 9]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.integers(0, 300), max_size=40), max_size=30), st.integers(WAYS, 64))
    def test_it_is_bounded_and_holds_each_key_once_at_its_newest(
        self, batches: list[list[int]], rows: int
    ) -> None:
        table = HotTable(rows, 2)
        newest: dict[int, int] = {}
        for number, batch in enumerate(batches, start=1):
            keys = np.array(batch, np.uint64)
            known, everything = table.look(keys), np.arange(len(keys))
            values = np.stack([keys.astype(np.float32), np.full(len(keys), number, np.float32)], axis=1)
            versions = np.stack([np.full(len(keys), number, np.uint64), keys], axis=1)
            changed = np.ones(len(keys), np.bool_)
            table.learn(known, everything, changed, values, versions, np.full(len(keys), number, np.int64))
            newest |= dict.fromkeys(batch, number)
            assert len(table) <= table.capacity <= rows
            held = table._keys[table._filled]
            assert len(np.unique(held)) == len(held)
            known = table.look(held)
            assert known.found.all()
            for key, row, version, confirmed in zip(
                held.tolist(),
                known.rows.tolist(),
                known.versions.tolist(),
                known.confirmed.tolist(),
                strict=True,
            ):
                assert row == [key, newest[key]]
                assert version == [newest[key], key]
                assert confirmed == newest[key]

    def test_a_scan_of_cold_keys_does_not_flush_hot_ones(self) -> None:
        table = HotTable(512, 2)
        hot = np.arange(300, dtype=np.uint64)
        for _ in range(6):
            self.some(table, hot)
        held = table.look(hot).found
        assert held.sum() > 250
        for start in range(1_000, 5_000, 200):
            self.some(table, np.arange(start, start + 200, dtype=np.uint64))
        assert table.look(hot).found[held].mean() > 0.99

    def test_yesterdays_hot_keys_make_room(self) -> None:
        table = HotTable(256, 2)
        before, now = np.arange(256, dtype=np.uint64), np.arange(10_000, 10_256, dtype=np.uint64)
        for _ in range(50):
            self.some(table, before)
        for _ in range(200):
            self.some(table, now)
        assert table.look(now).found.mean() > 0.8

    def test_it_is_nearly_as_good_as_keeping_the_most_popular(self) -> None:
        generator = np.random.default_rng(5)
        weights = np.arange(1, 20_001, dtype=np.float64) ** -1.1
        table = HotTable(1_024, 1)
        odd = np.uint64(0x9E3779B97F4A7C15)
        for _ in range(300):
            drawn = generator.choice(20_000, 200, p=weights / weights.sum())
            self.some(table, drawn.astype(np.uint64) * odd)
        before = (table.counts.found_total, table.counts.missed_total)
        for _ in range(100):
            drawn = generator.choice(20_000, 200, p=weights / weights.sum())
            self.some(table, drawn.astype(np.uint64) * odd)
        found, missed = table.counts.found_total - before[0], table.counts.missed_total - before[1]
        best = weights[: table.capacity].sum() / weights.sum()
        assert found / (found + missed) > 0.93 * best

    def test_a_confirmation_is_of_the_version_that_was_told(self) -> None:
        table, keys = HotTable(64, 1), np.arange(2, dtype=np.uint64)
        both, rows = np.arange(2), np.full((2, 1), 8.0, np.float32)
        self.some(table, keys, number=1)
        known = table.look(keys)
        # Another pull is answered first, and brings a newer row of key 1.
        newer = np.full((2, 2), 99, np.uint64)
        table.learn(table.look(keys), both, np.array([False, True]), rows, newer, np.array([2, 3]))
        table.learn(known, both, np.zeros(2, np.bool_), rows, newer, np.array([5, 5]))
        found = table.look(keys)
        assert found.confirmed.tolist() == [5, 3]
        assert found.rows.tolist() == [[0.0], [8.0]]
        assert found.versions.tolist() == [[1, 7], [99, 99]]

    def test_rows_that_moved_since_they_were_looked_for_are_found_again(self) -> None:
        table = HotTable(WAYS, 1)
        first, second = np.arange(WAYS, dtype=np.uint64), np.arange(100, 100 + WAYS, dtype=np.uint64)
        self.some(table, first, number=1)
        known = table.look(first)
        for _ in range(9):
            self.some(table, second, number=2)
        assert table.look(second).found.all()
        every, newer = np.arange(WAYS), np.full((WAYS, 2), 99, np.uint64)
        for changed in (np.zeros(WAYS, np.bool_), np.ones(WAYS, np.bool_)):
            table.learn(known, every, changed, np.full((WAYS, 1), 8.0, np.float32), newer, np.full(WAYS, 5))
        found = table.look(second)
        assert found.found.all()
        assert found.rows[:, 0].tolist() == second.tolist()
        assert found.confirmed.tolist() == [2] * WAYS

    def test_it_cannot_be_smaller_than_a_set(self) -> None:
        with pytest.raises(ValueError, match="at least 8"):
            HotTable(WAYS - 1, 4)


def claim(*offsets: int, epoch: int = 1, moves: int = 0) -> Claim:
    return Claim.of([("log", n, offset, offset) for n, offset in enumerate(offsets)], moves, epoch)


class TestConfirmations:
    def test_nothing_claims_more_than_a_later_answer(self) -> None:
        answers = Confirmations()
        first = answers.note(1.0, claim(5, 9, moves=3), 0.0)
        second = answers.note(2.0, claim(7, 9, moves=4), 0.0)
        assert answers.since(first) == claim(5, 9, moves=3)
        third = answers.note(3.0, claim(6, 10, moves=4), 0.0)
        assert [answers.since(n) for n in (first, second, third)] == [
            claim(5, 9, moves=3), claim(6, 9, moves=4), claim(6, 10, moves=4),
        ]  # fmt: skip

    def test_a_partition_that_an_answer_does_not_name_is_not_claimed(self) -> None:
        answers = Confirmations()
        first = answers.note(1.0, claim(5, 9), 0.0)
        answers.note(2.0, claim(8), 0.0)
        assert answers.since(first) == claim(5)

    def test_a_new_leader_ends_what_was_confirmed(self) -> None:
        answers = Confirmations()
        first = answers.note(1.0, claim(5), 0.0)
        second = answers.note(2.0, claim(3, epoch=2), 0.0)
        assert answers.usable_from(0.0) == second > first
        assert answers.note(3.0, claim(9), 0.0) == 0, "a deposed leader confirms nothing"

    def test_an_answer_that_was_overtaken_confirms_nothing(self) -> None:
        answers = Confirmations()
        answers.note(2.0, claim(5), 0.0)
        assert answers.note(1.0, claim(9), 0.0) == 0

    def test_it_is_bounded_and_a_number_serves_for_a_while(self) -> None:
        answers = Confirmations()
        numbers = [answers.note(at / 10, claim(at), 1.0) for at in range(100 * MOST)]
        assert numbers[:10] == [1] * 10
        assert numbers[-1] == 10 * MOST
        assert answers.usable_from(0.0) == 9 * MOST + 1
        assert answers.since(numbers[-1]) == claim(100 * MOST - 10)
        assert answers.usable_from(1e9) == 10 * MOST + 1


class TestPulls:
    def test_only_what_changed_travels(self) -> None:
        fleet, cache = Fleet(("a", "b"), SHARDS), RowCache(4_096)
        push(fleet, 0)
        pull(fleet, cache)
        operation = operations.pull(fleet.route, EVERYTHING, None, cache)
        again = fleet.ask(operation)
        assert same(again, pull(fleet))
        assert cache.counts.unchanged_total == cache.counts.found_total > 190
        changed = len(np.unique(recorded(1)["items"][0]))
        push(fleet, 1)
        before = cache.counts.unchanged_total
        assert same(pull(fleet, cache), pull(fleet))
        rows = sum(len(keys) for keys in EVERYTHING.values())
        assert cache.counts.unchanged_total - before == rows - changed - 3

    @pytest.mark.parametrize("shape", [(("a",), 1), (("a", "b"), SHARDS)])
    def test_rows_of_an_age_are_used_without_asking_and_are_not_called_newer(
        self, shape: tuple[tuple[str, ...], int]
    ) -> None:
        now = [100.0]
        fleet, cache = Fleet(*shape), RowCache(4_096, 5.0, lambda: now[0])
        push(fleet, 0, Watermark("events", 0, 40, 1))
        first = pull(fleet, cache)
        push(fleet, 1, Watermark("events", 0, 50, 2))
        now[0] += 4.0
        operation = operations.pull(fleet.route, EVERYTHING, None, cache)
        assert operation.requests == {}, "everything is young enough"
        assert same(operation.merge({}), first)
        # Another key: its shard is asked, and the rows that were not asked for bound what is claimed.
        few = {"items": np.array([1, ALL_KEYS[3], ALL_KEYS[4]], np.uint64)}
        mixed = fleet.ask(operations.pull(fleet.route, few, None, cache))
        assert mixed.watermarks == {("events", 0): Mark(40, 1)}
        assert pull(fleet, cache, unasked=False).watermarks == {("events", 0): Mark(50, 2)}
        assert same(pull(fleet, cache), pull(fleet)), "what was asked just now is as new as it is"
        push(fleet, 2, Watermark("events", 0, 60, 3))
        now[0] += 5.01
        assert same(pull(fleet, cache), pull(fleet))

    def test_a_key_that_no_one_pushed_is_kept_too(self) -> None:
        fleet, cache = Fleet(), RowCache(4_096)
        pull(fleet, cache)
        before = cache.counts.unchanged_total
        assert same(pull(fleet, cache), pull(fleet))
        assert cache.counts.unchanged_total > before

    def test_repeated_keys_and_none_at_all(self) -> None:
        fleet, cache = Fleet(("a", "b"), SHARDS), RowCache(64)
        push(fleet, 0)
        keys = {"items": np.repeat(ALL_KEYS[:7], 5)}
        for _ in range(3):
            found = fleet.ask(operations.pull(fleet.route, keys, None, cache)).rows["items"]
            assert found.tobytes() == fleet.ask(operations.pull(fleet.route, keys)).rows["items"].tobytes()
        none = {"items": np.array([], np.uint64)}
        assert fleet.ask(operations.pull(fleet.route, none, None, cache)).rows["items"].shape == (0, DIM)
        assert fleet.ask(operations.pull(fleet.route, {}, None, cache)).rows == {}

    @pytest.mark.parametrize(
        "damage",
        [
            lambda flags, rows, versions: (~flags, rows[:0], versions[:0]),
            lambda flags, rows, versions: (flags[1:], rows, versions),
            lambda flags, rows, versions: (flags.astype(np.uint8), rows, versions),
            lambda flags, rows, versions: (flags, rows[1:], versions),
            lambda flags, rows, versions: (flags, rows.astype(np.float64), versions),
            lambda flags, rows, versions: (flags, rows, versions[:, :1]),
            lambda flags, rows, versions: (flags, rows),
        ],
    )
    def test_an_answer_that_makes_no_sense_is_refused(
        self, damage: Callable[..., tuple[np.ndarray, ...]]
    ) -> None:
        fleet, cache = Fleet(), RowCache(64)
        operation = operations.pull(fleet.route, {"items": ALL_KEYS[:9]}, None, cache)
        request = operation.requests["a"]
        reply = fleet.answer("a", request.method, request.body, request.arrays)
        with pytest.raises(ParametersRefused):
            operation.merge({"a": Reply(1, reply.body, damage(*reply.arrays))})
        assert cache.counts.admitted_total == 0


class Replicas:
    """Three real hosts, each a replica of every shard, whose steps reach the others when a test lets them."""

    names = ("a", "b", "c")

    def __init__(self) -> None:
        self.fence = 0
        self.saved: dict[tuple[str, int], ShardState] = {}
        self.waiting: dict[tuple[str, int], list[Delta]] = {}
        self.places = [Place(self.names[shard % 3], self.names) for shard in range(SHARDS)]
        self.hosts = {name: self._start(name) for name in self.names}
        for shard, place in enumerate(self.places):
            self.lead(shard, place.leader)

    def _start(self, name: str) -> Host:
        # The clock stands still, so that several writers give the same times.
        keeper = Kept(lambda _model, shard: self.saved.get((name, shard)))
        host = Host(HostConfig(name, SHARDS, 1_000), keeper, Numbers(), HybridClock(lambda: 1_000))
        host.declare(DECLARATION)
        for shard in range(SHARDS):
            host.follow(shard)
        host.on_step = lambda model, shard, delta: self._told(name, shard, delta)
        return host

    def _told(self, name: str, shard: int, delta: Delta) -> None:
        for other in self.names:
            if other != name:
                self.waiting.setdefault((other, shard), []).append(delta)

    def deliver(self, name: str, shard: int, count: int) -> None:
        steps = self.waiting.get((name, shard), [])
        for delta in steps[:count]:
            self.hosts[name].of(shard)["main"].apply(delta)
        del steps[:count]

    def lead(self, shard: int, name: str) -> None:
        """``name`` leads with what it has; the others copy it, whatever they had."""
        self.fence += 1
        self.hosts[self.places[shard].leader].follow(shard)
        self.places[shard] = Place(name, self.names)
        host = self.hosts[name]
        state = host.of(shard)["main"].state()
        for other in self.names:
            self.waiting[other, shard] = []
            if other != name:
                self._copy(self.hosts[other], state)
        host.lead(shard, self.fence)

    def _copy(self, host: Host, state: ShardState) -> None:
        copy = host.blank(state.head)
        copy.begin(state.head)
        for rows in state.rows:
            copy.put(rows)
        for graves in state.graves:
            copy.bury(graves)
        host.adopt(copy)
        host.settled(copy)

    def restart(self, name: str) -> None:
        """All that ``name`` has is what it saved, maybe long ago; then it leads again what it led."""
        led = [shard for shard, place in enumerate(self.places) if place.leader == name]
        lost = [shard for shard in range(SHARDS) if shard not in led]
        self.hosts[name] = self._start(name)
        for shard in led:
            self.lead(shard, name)
        for shard in lost:
            self.waiting[name, shard] = []
            self._copy(self.hosts[name], self.hosts[self.places[shard].leader].of(shard)["main"].state())

    @property
    def route(self) -> Route:
        return Route(DECLARATION, ShardMap(self.fence, tuple(self.places)))

    def ask(self, choice: Choice | None, cache: RowCache | None, keys: dict[str, Keys]) -> Pulled:
        operation = operations.pull(self.route, keys, choice, cache)
        asked = Fleet.__new__(Fleet)
        asked.hosts = self.hosts
        return asked.ask(operation)


def test_two_leaders_may_give_one_time_to_two_values() -> None:
    world, cache = Replicas(), RowCache(4_096)
    shard = world.hosts["a"].of(0)["main"]
    key = ALL_KEYS[shard_of(ALL_KEYS, SHARDS) == 0][:1]

    def push(owner: Shard, value: float) -> None:
        rows = np.full((1, DIM), value, np.float32)
        assert owner.push(Push(SOURCE, 0, -1, None, (("items", key, rows),))).status == "applied"

    push(shard, 1.0)
    before = world.ask(None, cache, {"items": key})
    deposed, _ = shard.table("items").versions(key)
    world.lead(0, "b")  # which never had that push
    push(world.hosts["b"].of(0)["main"], -1.0)
    time, _ = world.hosts["b"].of(0)["main"].table("items").versions(key)
    assert time == deposed, "else this shows nothing"
    found = world.ask(None, cache, {"items": key})
    assert same(found, world.ask(None, None, {"items": key}))
    assert not same(found, before)


class CachedPullsEqualPlainOnes(RuleBasedStateMachine):
    """Whatever happens to the servers, a pull through the cache gives what a pull without it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Replicas()
        self.cache = RowCache(96)
        self.offset = 0

    shards = st.integers(0, SHARDS - 1)
    names = st.sampled_from(Replicas.names)
    some = st.integers(0, 2**32)

    def shard(self, number: int):  # type: ignore[no-untyped-def]
        return self.world.hosts[self.world.places[number].leader].of(number)["main"]

    @rule(shard=shards, some=some, count=st.integers(1, 30))
    def push(self, shard: int, some: int, count: int) -> None:
        generator = np.random.default_rng(some)
        keys = self.keys_of(shard, generator, count)
        rows = generator.normal(size=(len(keys), DIM)).astype(np.float32)
        source = Source("log", some % 3)
        owner = self.shard(shard)
        offset = owner.applied(source) + 1
        mark = Watermark("events", 0, self.offset, self.offset)
        self.offset += 1
        assert (
            owner.push(Push(source, offset, offset - 1, mark, (("items", keys, rows),))).status == "applied"
        )

    def keys_of(self, shard: int, generator: np.random.Generator, count: int) -> Keys:
        mine = ALL_KEYS[shard_of(ALL_KEYS, SHARDS) == shard]
        found: Keys = generator.choice(mine, min(count, len(mine)), replace=False)
        return found

    @rule(shard=shards, some=some)
    def delete(self, shard: int, some: int) -> None:
        self.shard(shard).delete("items", self.keys_of(shard, np.random.default_rng(some), 5))

    @rule(name=names, shard=shards, count=st.integers(1, 5))
    def replicate(self, name: str, shard: int, count: int) -> None:
        self.world.deliver(name, shard, count)

    @rule(name=names, shard=shards)
    def save(self, name: str, shard: int) -> None:
        self.world.saved[name, shard] = self.world.hosts[name].of(shard)["main"].state()

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.world.restart(name)

    @rule(name=names, shard=shards)
    def fail_over(self, name: str, shard: int) -> None:
        self.world.lead(shard, name)

    @rule(name=names, shard=shards)
    def move(self, name: str, shard: int) -> None:
        self.world.deliver(name, shard, 10_000)
        self.world.lead(shard, name)

    @rule(name=names, shard=shards, some=some)
    def lose_what_was_read(self, name: str, shard: int, some: int) -> None:
        """A leader's last push is read and never replicated; its successor pushes to the same keys."""
        self.world.deliver(name, shard, 10_000)
        self.push(shard, some, 10)
        self.pull(some, 60, False)
        self.world.lead(shard, name)
        self.push(shard, some, 10)
        self.pull(some, 60, False)

    @rule(some=some, count=st.integers(0, 60), followers=st.booleans())
    def pull(self, some: int, count: int, followers: bool) -> None:
        generator = np.random.default_rng(some)
        # Few keys are hot: the cache holds some of the others now and then.
        keys = ALL_KEYS[(generator.random(count) ** 3 * len(ALL_KEYS)).astype(np.intp)]
        wanted = {"items": keys, "dense": np.arange(2, dtype=np.uint64)}
        choice = None
        if followers:
            choice = Choice(tuple(generator.choice(Replicas.names, SHARDS)), frozenset())
        plain = self.world.ask(choice, None, wanted)
        cached = self.world.ask(choice, self.cache, wanted)
        assert same(cached, plain)
        assert cached.moves == plain.moves

    @initialize()
    def begin(self) -> None:
        self.pull(0, 60, False)

    @invariant()
    def bounded(self) -> None:
        assert sum(len(table) for table in self.cache._models["main"].tables.values()) <= 96 + WAYS


class TestWhateverHappens(CachedPullsEqualPlainOnes.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
