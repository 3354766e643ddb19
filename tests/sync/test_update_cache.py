"""The update cache: what its dominator does not cover is in it, whatever was written, deleted and evicted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.changes import ChangeRing
from sync.columns import Columns
from sync.exchange.finding import missing
from sync.knowledge import Known
from sync.replica import Replica
from sync.shard import Shard
from sync.table import Table
from tests.support.replicas import Clock, graves, push, rows, update
from tests.support.twins import Told, is_above, told_by

KEYS = st.lists(st.integers(0, 11), max_size=9, unique=True)
STEP = st.tuples(st.sampled_from(["push", "push", "delete", "merge", "bury", "collect", "drop"]), KEYS)


def take(shard: Shard, action: str, keys: list[int], clock: Clock, writer: int) -> None:
    """One of everything that writes rows or removes them."""
    clock.now_us += 1_000
    now = clock.now_us
    some = np.array(keys, np.uint64)
    if action == "push":
        push(shard, keys)
    elif action == "delete":
        shard.delete("rows", some)
    elif action == "merge":
        shard.merge(update(rows((key, now - 10 * key, writer, 0.5) for key in keys)))
    elif action == "bury":
        shard.merge(update(graves((key, now - 10 * key, writer) for key in keys)))
    elif action == "collect":
        shard.collect({shard.writer: now, writer: now - 50})
    else:
        shard.table("rows").drop(some)


def in_ring(ring: ChangeRing, changed_at: np.ndarray) -> set[int]:
    """The slots of all valid entries."""
    entries = zip(ring.ring_sequences[:-1].tolist(), ring.ring_slots.tolist(), strict=True)
    return {slot for sequence, slot in entries if sequence and changed_at[slot] == sequence}


def check_invariant(table: Table) -> None:
    """Every row and grave whose version the dominator does not cover is in its ring."""
    for owner in (table, table.graves):
        columns, ring = owner._columns, owner.ring
        valid = in_ring(ring, columns.changed_at)
        for slot in np.flatnonzero(columns.version_time).tolist():
            version = int(columns.version_time[slot]), int(columns.version_writer[slot])
            assert slot in valid or not is_above(version, ring.dominator)


def not_covered(replica: Replica, vector: dict[int, int]) -> set[int]:
    told: dict[tuple[str, int], Told] = told_by(replica)
    return {
        key for (table, key), (version, _) in told.items() if table == "rows" and is_above(version, vector)
    }


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 14),
    st.lists(STEP, max_size=25),
    st.dictionaries(st.sampled_from([1, 8, 9]), st.integers(0, 26)),
    st.integers(0, 40),
)
def test_whatever_is_not_covered_is_found_by_cache_token_and_scan(
    capacity: int, steps: list[tuple[str, list[int]]], ages: dict[int, int], back: int
) -> None:
    clock = Clock()
    shard = clock.shard(1, change_capacity=capacity)
    table = shard.table("rows")
    for number, (action, keys) in enumerate(steps):
        take(shard, action, keys, clock, 8 + number % 2)
        check_invariant(table)
    vector = {writer: 1_000_000 + 1_000 * age for writer, age in ages.items()}
    known, expected = Known.of(vector), not_covered(shard, vector)
    assert sorted(table.scan(known).tolist()) == sorted(expected)
    cached = table.cached(known)
    if cached is not None:
        assert sorted(table.keys_at(cached).tolist()) == sorted(expected)
        numbers = table.written_at(cached).tolist()
        assert numbers == sorted(numbers)
    since = max(0, shard.token.counter - back)
    changed = set(table.keys_at(table.changed_after(since, 10_000)[1]).tolist())
    for start, kept in ((None, expected), (since, expected & changed)):
        (found,) = [one for one in missing(shard, known, start) if one.table == "rows"]
        # Where the token does not help, all that is not covered is found.
        assert set(found.keys.tolist()) == (kept if found.how == "token" else expected)
        assert len(set(found.keys.tolist())) == len(found.keys)
        assert found.how != "token" or (start is not None and table.reaches(start))
    known_keys = set(table.known_keys(known).tolist())
    assert known_keys == {key for name, key in told_by(shard) if name == "rows"} - expected


def test_a_batch_longer_than_the_ring_leaves_its_end_there() -> None:
    clock = Clock()
    shard = clock.shard(1, change_capacity=4)
    push(shard, range(11))
    table = shard.table("rows")
    check_invariant(table)
    assert table.ring.dominator == {1: shard.knowledge[1]}
    assert in_ring(table.ring, table._columns.changed_at) == {7, 8, 9, 10}
    # Nothing was evicted that is newer than what the dominator says, and the cache can say so.
    assert table.cached(Known.of({})) is None
    assert table.cached(Known.of(shard.knowledge)) is not None


def test_a_slot_that_lives_again_is_not_taken_for_the_row_before() -> None:
    clock = Clock()
    shard = clock.shard(1, change_capacity=8)
    push(shard, [1, 2])
    shard.delete("rows", np.array([1], np.uint64))
    push(shard, [3])
    table = shard.table("rows")
    (slot,) = table.located(np.array([3], np.uint64)).tolist()
    sequences, slots = table.changed_after(0, 10)
    assert slots.tolist().count(slot) == 1
    assert table.keys_at(slots).tolist() == [2, 1, 3]
    assert sequences.tolist() == sorted(sequences.tolist())
    check_invariant(table)


def test_a_loaded_snapshot_is_dominated_or_cached() -> None:
    clock = Clock()
    shard, other = clock.shard(1), clock.shard(2, change_capacity=3)
    for number in range(5):
        push(shard, range(number, number + 4))
        clock.now_us += 10
    shard.delete("rows", np.arange(3, dtype=np.uint64))
    other.restore(shard.state())
    check_invariant(other.table("rows"))
    assert other.table("rows").cached(Known.of({})) is None
    (found, *_) = missing(other, Known.of({}), None)
    assert (found.how, set(found.keys.tolist())) == ("scan", set(range(8)))
    (nothing, *_) = missing(other, Known.of(other.knowledge), None)
    assert (nothing.how, nothing.keys.tolist()) == ("cache", [])


PRIORITIES = st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf])


class Ring:
    """A ring of ``capacity`` over 12 slots, written by hand."""

    def __init__(self, capacity: int) -> None:
        self.columns = Columns(0, 0)
        self.columns.reserve(12)
        self.ring = ChangeRing(capacity)
        self.entries: list[tuple[int, int, float]] = []
        self.sequence = 0

    def enter(self, writes: list[tuple[int, float]]) -> None:
        slots = np.array([slot for slot, _ in writes], np.int32)
        time = np.arange(self.sequence + 1, self.sequence + 1 + len(writes), dtype=np.uint64)
        priority = np.array([priority for _, priority in writes], np.float32)
        writer = np.ones(len(writes), np.uint32)
        self.ring.enter(slots, time, writer, priority, self.sequence, self.columns)
        for slot, one in writes:
            self.sequence += 1
            self.entries.append((self.sequence, slot, one))


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 20),
    st.lists(
        st.lists(st.tuples(st.integers(0, 11), PRIORITIES), max_size=6, unique_by=lambda one: one[0]),
        max_size=9,
    ),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.4, 0.5, 1.0, 3.0, math.inf]),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    st.integers(1, 9),
)
def test_urgent_quantile_and_after_agree_with_a_list(
    capacity: int, writes: list[list[tuple[int, float]]], after: int, least: float, share: float, limit: int
) -> None:
    one = Ring(capacity)
    for some in writes:
        one.enter(some)
    held = one.entries[-capacity:]
    newest = {slot: sequence for sequence, slot, _ in one.entries}
    sequences, slots = one.ring.urgent(after, least, one.columns.changed_at)
    expected = [(n, slot) for n, slot, p in held if n > after and p >= least and p > 0]
    assert list(zip(sequences.tolist(), slots.tolist(), strict=True)) == expected
    ordered = sorted((p for _, _, p in held), reverse=True)
    rank = math.ceil(share * len(ordered))
    assert one.ring.quantile(share) == (ordered[rank - 1] if rank else math.inf)
    assert one.ring.floor == (held[0][0] - 1 if len(one.entries) >= capacity else 0)
    sequences, slots = one.ring.after(after, limit, one.columns.changed_at)
    everything = sorted((sequence, slot) for slot, sequence in newest.items() if sequence > after)
    assert list(zip(sequences.tolist(), slots.tolist(), strict=True)) == everything[:limit]
    # The room that is taken is what changed, not what the ring holds.
    assert one.ring._room(after) <= max(0, min(capacity, one.sequence - after))


@pytest.mark.parametrize(("share", "urgent"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_the_quantile_lets_a_share_through(share: float, urgent: int) -> None:
    one = Ring(8)
    one.enter([(0, 1.0), (1, 4.0), (2, 2.0), (3, 3.0)])
    assert len(one.ring.urgent(0, one.ring.quantile(share), one.columns.changed_at)[0]) == urgent


def test_a_full_table_takes_rows_that_it_has_and_new_ones_for_those_that_left() -> None:
    clock = Clock()
    shard = clock.shard(1, max_rows=256)
    push(shard, range(256))
    later = clock.now_us + 5
    assert shard.merge(update(rows((key, later, 8, 1.0) for key in range(256)))) is not None
    shard.delete("rows", np.arange(10, dtype=np.uint64))
    push(shard, range(1_000, 1_010))
    assert len(shard.table("rows")) == 256
