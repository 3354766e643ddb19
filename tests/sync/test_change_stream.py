"""The change stream never misses a row, however small the ring, the limit or the reader's patience."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.changes import ChangeRing, Cursor, scan
from sync.clock import HybridClock
from sync.pushes import Push, Source, Watermark
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec
from sync.stream import Changes

SPECS = tuple(TableSpec(name, 2, Initialiser.uniform(0.1), Optimiser("sgd")) for name in ("a", "b"))
NAMES = ("a", "b")
SOURCE = Source("log", 0)

WRITE = st.tuples(st.just("write"), st.sampled_from(NAMES), st.lists(st.integers(0, 12), max_size=10))
READ = st.tuples(st.just("read"), st.integers(1, 15), st.just(()))
RESTART = st.tuples(st.just("restart"), st.just(0), st.just(()))


def make(capacity: int, writer: int = 1, started_us: int = 0) -> Shard:
    return Shard(0, SPECS, writer, HybridClock(lambda: started_us), change_capacity=capacity)


def write(shard: Shard, offset: int, table: str, keys: list[int]) -> None:
    gradients = np.full((len(keys), 2), offset + 1, np.float32)
    mark = Watermark("events", 0, offset, 0)
    parts = ((table, np.array(keys, np.uint64), gradients),)
    assert shard.push(Push(SOURCE, offset, offset - 1, mark, parts)).status == "applied"


def merge(copy: dict[tuple[str, int], bytes], changes: Changes) -> int:
    count = 0
    for name, (keys, rows) in changes.parts.items():
        assert len(keys) == len(rows) == len(set(keys.tolist())) > 0
        count += len(keys)
        copy.update({(name, key): row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)})
    return count


def stored(shard: Shard) -> dict[tuple[str, int], bytes]:
    rows = {}
    for page in shard.state().rows:
        for key, row in zip(page.keys.tolist(), page.values, strict=True):
            rows[page.table, key] = row.tobytes()
    return rows


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 20), st.lists(st.one_of(WRITE, READ, RESTART), max_size=40))
def test_a_reader_that_catches_up_holds_every_row(
    capacity: int, steps: list[tuple[str, object, object]]
) -> None:
    shard, cursor, copy, offset = make(capacity), Cursor(), dict[tuple[str, int], bytes](), 0
    for action, first, second in steps:
        if action == "write":
            assert isinstance(first, str)
            assert isinstance(second, list)
            write(shard, offset, first, second)
            offset += 1
        elif action == "read":
            assert isinstance(first, int)
            changes = shard.changes(cursor, NAMES, first)
            assert merge(copy, changes) <= first
            assert changes.reset == (cursor.incarnation != shard.incarnation)
            if changes.complete:
                assert copy == stored(shard)
                assert changes.cursor == shard.cursor()
            else:
                assert changes.watermarks == {}
            cursor = changes.cursor
        else:
            again = make(capacity, shard.writer + 1)
            again.restore(shard.state())
            shard = again
    complete = False
    while not complete:
        changes = shard.changes(cursor, NAMES, 3)
        assert changes.complete or changes.cursor != cursor
        merge(copy, changes)
        cursor, complete = changes.cursor, changes.complete
    assert copy == stored(shard)
    assert changes.watermarks == shard.watermarks()
    assert shard.changes(cursor, NAMES, 3).parts == {}


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=15),
    st.integers(0, 90),
    st.integers(1, 9),
)
def test_the_ring_and_the_scan_agree(capacity: int, batches: list[list[int]], after: int, limit: int) -> None:
    small, large = make(capacity), make(10_000)
    for offset, keys in enumerate(batches):
        write(small, offset, "a", keys)
        write(large, offset, "a", keys)
    cursor = Cursor(1, min(after, small.cursor().sequence))
    one, other = small.changes(cursor, ["a"], limit), large.changes(cursor, ["a"], limit)
    assert one.cursor == other.cursor
    assert one.complete == other.complete
    for name in ("a",):
        mine, theirs = one.parts.get(name), other.parts.get(name)
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine[0].tolist() == theirs[0].tolist()
            assert mine[1].tobytes() == theirs[1].tobytes()


def test_rows_come_once_the_longest_unchanged_first() -> None:
    shard = make(100)
    write(shard, 0, "a", [1, 2, 3])
    write(shard, 1, "b", [9])
    write(shard, 2, "a", [1])
    first = shard.changes(Cursor(1, 0), NAMES, 2)
    assert {name: keys.tolist() for name, (keys, _) in first.parts.items()} == {"a": [2, 3]}
    assert (first.complete, first.reset, first.cursor) == (False, False, Cursor(1, 3))
    second = shard.changes(first.cursor, NAMES, 2)
    assert {name: keys.tolist() for name, (keys, _) in second.parts.items()} == {"a": [1], "b": [9]}
    assert (second.complete, second.watermarks["events", 0].offset) == (True, 2)


def test_one_tables_reader_does_not_see_the_other() -> None:
    shard = make(100)
    write(shard, 0, "a", [1])
    write(shard, 1, "b", [2])
    changes = shard.changes(Cursor(1, 0), ["b"], 1)
    assert list(changes.parts) == ["b"]
    assert changes.complete


@pytest.mark.parametrize("cursor", [Cursor(9, 2), Cursor(1, 3), Cursor(1, -1)])
def test_a_cursor_of_another_incarnation_or_from_nowhere_starts_over(cursor: Cursor) -> None:
    shard = make(100)
    write(shard, 0, "a", [1, 2])
    changes = shard.changes(cursor, NAMES, 10)
    assert changes.reset
    assert changes.parts["a"][0].tolist() == [1, 2]


def test_a_cursor_of_an_earlier_start_under_the_same_writer_starts_over() -> None:
    """Coordination began anew, and the folder is older: the writer's id and the numbers come for a second time."""
    before, again = make(100, 7, 1_000_000), make(100, 7, 1_001_000)
    write(before, 0, "a", [1, 2])
    cursor = before.changes(Cursor(), NAMES, 10).cursor
    write(again, 0, "a", [8, 9])
    assert (before.writer, before.cursor().sequence) == (again.writer, again.cursor().sequence)
    changes = again.changes(cursor, NAMES, 10)
    assert (changes.reset, changes.complete) == (True, True)
    assert changes.parts["a"][0].tolist() == [8, 9]


def test_the_ring_reaches_back_as_far_as_it_says() -> None:
    shard = make(4)
    ring = shard.table("a").ring
    assert ring.floor == 0
    write(shard, 0, "a", [1, 2, 3])
    assert ring.floor == 0
    write(shard, 1, "a", [1, 2, 3])
    assert ring.floor == 2


def test_a_ring_that_starts_late_leaves_what_came_before_to_the_scan() -> None:
    changed_at = np.array([2, 0, 1], np.int64)
    ring = ChangeRing(8, base=2)
    for after, expected in ((0, [2, 0]), (1, [0]), (2, [])):
        assert ring.after(after, 9, changed_at)[1].tolist() == expected
        assert scan(after, 9, changed_at)[1].tolist() == expected
    assert scan(0, 1, changed_at)[0].tolist() == [1]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 40), st.integers(0, 2_000_000), st.booleans()
)
def test_a_scan_gives_the_oldest_changes_whatever_their_spread(
    seed: int, rows: int, limit: int, after: int, crowded: bool
) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.choice(2_000_000, rows, replace=False) + 1
    changed_at = (
        np.where(rng.random(rows) < 0.9, numbers // 1_000 + 1_999_000, numbers) if crowded else numbers
    )
    changed_at = np.where(rng.random(rows) < 0.1, 0, changed_at).astype(np.int64)
    expected = sorted((number, slot) for slot, number in enumerate(changed_at.tolist()) if number > after)[
        :limit
    ]
    sequences, slots = scan(after, limit, changed_at)
    assert sequences.tolist() == [number for number, _ in expected]
    assert [changed_at[slot] for slot in slots] == sequences.tolist()
