"""What a shard tells of its steps makes the same shard elsewhere: replayed, copied while it moves, or both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sync.changes import Cursor
from sync.clock import HybridClock
from sync.errors import BadSpec, OutOfOrder, SnapshotDamaged
from sync.pushes import Push, PushOutcome, Source
from sync.records import Delta, End, Graves, Rows
from sync.shard import Shard
from sync.snapshot import encode, encode_record, records, restore
from sync.spec import Initialiser, Optimiser, TableSpec
from sync.wire import from_parts, to_parts

SPECS = (
    TableSpec("rows", 3, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5), l2=0.01, clip=2.0),
    TableSpec("rare", 2, Initialiser.uniform(0.1), Optimiser("adam", 0.5), admission=2, expiry_s=5),
    TableSpec("dense", 4, Initialiser.uniform(0.1), Optimiser("adagrad", 0.5), placement="single", rows=6),
)
SOURCES = (Source("log", 0), Source("log", 1))

PUSH = st.tuples(st.just("push"), st.integers(0, 1), st.integers(0, 2**20))
DELETE = st.tuples(st.just("delete"), st.integers(0, 1), st.integers(0, 2**20))
OTHER = st.tuples(st.sampled_from(["publish", "expire", "copy", "page", "refused"]), st.just(0), st.just(0))
STEPS = st.lists(st.one_of(PUSH, PUSH, DELETE, OTHER), max_size=30)


def gradients(seed: int) -> tuple[tuple[str, Any, Any], ...]:
    rng = np.random.default_rng(seed)
    keys = [rng.integers(0, 6 if spec.rows else 9, rng.integers(0, 5)).astype(np.uint64) for spec in SPECS]
    return tuple(
        (spec.name, some, rng.standard_normal((len(some), spec.dim)).astype(np.float32))
        for spec, some in zip(SPECS, keys, strict=True)
    )


class World:
    """A shard that is worked on, everything it told, and a clock."""

    def __init__(self) -> None:
        self.now_us = 10_000_000
        self.shard = self.make(1)
        self.deltas: list[Delta] = []
        self.shard.on_delta = self.deltas.append
        self.offsets = [-1, -1]

    def make(self, writer: int) -> Shard:
        return Shard(0, SPECS, writer, HybridClock(lambda: self.now_us), max_graves=3)

    def do(self, action: str, which: int, seed: int) -> None:
        self.now_us += 700_000
        if action in ("push", "refused"):
            offset = self.offsets[which] + 1
            parts = gradients(seed)
            if action == "refused":
                parts = (("rows", np.array([1], np.uint64), np.full((1, 3), np.nan, np.float32)),)
            self.shard.push(Push(SOURCES[which], offset, self.offsets[which], None, parts))
            self.offsets[which] = offset
        elif action == "delete":
            keys = np.random.default_rng(seed).integers(0, 9, 3).astype(np.uint64)
            self.shard.delete(SPECS[which].name, keys)
        elif action == "publish":
            self.shard.publish_dense("dense")
        elif action == "expire":
            self.shard.expire("rare", 0, 100)


def bits(shard: Shard) -> bytes:
    """Everything but where rows lie: two shards with the same bits answer all questions alike."""
    state = shard.state()
    rows: dict[tuple[str, int], tuple[bytes, ...]] = {}
    for page in state.rows:
        for i, key in enumerate(page.keys.tolist()):
            rows[page.table, key] = tuple(
                array[i].tobytes() for array in (page.values, page.state, page.time, page.writer)
            )
    graves = sorted(
        (page.table, key, int(page.time[i]))
        for page in state.graves
        for i, key in enumerate(page.keys.tolist())
    )
    head = replace(state.head, history=(), epochs={})
    return (
        encode(replace(state, head=head, rows=(), graves=())) + repr((sorted(rows.items()), graves)).encode()
    )


def through_bytes(delta: Delta) -> Delta:
    """As a log and a message carry it."""
    (record, _), *rest = records(b"".join(encode_record(delta)))
    assert not rest
    header, arrays = to_parts(record)
    again = from_parts(header, arrays)
    assert isinstance(again, Delta)
    return again


@settings(deadline=None, max_examples=80)
@given(STEPS)
def test_a_replayed_shard_has_the_same_bits(steps: list[tuple[str, int, int]]) -> None:
    world = World()
    for step in steps:
        world.do(*step)
    other = world.make(2)
    for delta in world.deltas:
        other.apply(through_bytes(delta))
    assert bits(other) == bits(world.shard)
    assert [delta.position for delta in world.deltas] == list(range(1, world.shard.position + 1))
    for published in (True, False):
        mine, theirs = (s.dense("dense", published=published) for s in (other, world.shard))
        assert mine.values.tobytes() == theirs.values.tobytes()
        assert mine.number == theirs.number


@settings(deadline=None, max_examples=80)
@given(STEPS, st.integers(1, 4))
def test_a_copy_read_page_by_page_while_pushes_go_on_is_whole_after_the_deltas(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    world = World()
    world.do("push", 0, 7)
    head, pages, copied = None, None, list[Rows | Graves]()
    for action, which, seed in steps:
        if action == "copy" and head is None:
            head, pages = world.shard.head(), world.shard.pages(limit)
        elif action == "page" and pages is not None:
            copied += [page for page in (next(pages, None),) if page is not None]
        else:
            world.do(action, which, seed)
    if head is None or pages is None:
        return
    copied += list(pages)
    other = world.make(2)
    other.begin(head)
    for page in copied:
        (other.put if isinstance(page, Rows) else other.bury)(page)  # type: ignore[arg-type]
    for delta in world.deltas:
        if delta.position > head.position:
            other.apply(delta)
    assert bits(other) == bits(world.shard)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.one_of(PUSH, DELETE, st.just(("read", 0, 0))), max_size=25),
)
@example(3, 1, [("push", 0, 173), ("delete", 0, 0)])
def test_a_reader_of_changes_learns_of_deletions(
    limit: int, capacity: int, steps: list[tuple[str, int, int]]
) -> None:
    world = World()
    shard = Shard(0, SPECS, 1, HybridClock(lambda: world.now_us), change_capacity=capacity, max_graves=3)
    world.shard = shard
    names = [spec.name for spec in SPECS]
    cursor, copy = Cursor(), dict[tuple[str, int], bytes]()

    def read() -> bool:
        nonlocal cursor
        found = shard.changes(cursor, names, limit)
        if found.reset:
            copy.clear()
        for name, (keys, rows) in found.parts.items():
            copy.update({(name, k): row.tobytes() for k, row in zip(keys.tolist(), rows, strict=True)})
        cursor = found.cursor
        return found.complete

    for action, which, seed in steps:
        if action == "read":
            read()
        else:
            world.do(action, which, seed)
    while not read():
        pass
    for (name, key), row in copy.items():
        assert shard.pull(name, np.array([key], np.uint64)).tobytes() == row
    stored = {(page.table, key) for page in shard.state().rows for key in page.keys.tolist()}
    assert stored <= copy.keys()


def test_pushes_together_are_one_step_of_their_sum() -> None:
    world, alone = World(), World()
    keys, ones = np.array([1, 2], np.uint64), np.ones((2, 3), np.float32)
    pushes = [
        Push(SOURCES[0], 0, -1, None, (("rows", keys, ones),)),
        Push(SOURCES[1], 4, -1, None, (("rows", keys[1:], ones[1:]),)),
    ]
    assert world.shard.push_together(pushes) == [PushOutcome("applied", 0), PushOutcome("applied", 4)]
    summed = np.concatenate([keys, keys[1:]]), np.concatenate([ones, ones[1:]])
    alone.shard.push(Push(SOURCES[0], 0, -1, None, (("rows", *summed),)))
    assert world.shard.pull("rows", keys).tobytes() == alone.shard.pull("rows", keys).tobytes()
    assert world.shard.position == 1
    assert [source for source, _ in world.deltas[0].progress] == list(SOURCES)
    times, _ = world.shard.table("rows").versions(keys)
    assert times[0] == times[1]


def test_pushes_together_leave_out_duplicates_and_gaps_and_follow_one_source() -> None:
    world = World()
    keys, ones = np.array([1], np.uint64), np.ones((1, 3), np.float32)
    part = (("rows", keys, ones),)
    world.shard.push(Push(SOURCES[0], 0, -1, None, part))
    pushes = [
        Push(SOURCES[0], 0, -1, None, part),
        Push(SOURCES[0], 1, 0, None, part),
        Push(SOURCES[0], 2, 1, None, ()),
        Push(SOURCES[1], 3, 2, None, part),
    ]
    found = world.shard.push_together(pushes)
    assert [one.status for one in found] == ["duplicate", "applied", "applied", "gap"]
    assert [one.applied for one in found] == [2, 2, 2, -1]
    once = World()
    for offset in range(2):
        once.shard.push(Push(SOURCES[0], offset, offset - 1, None, part))
    assert world.shard.pull("rows", keys).tobytes() == once.shard.pull("rows", keys).tobytes()


def test_a_bad_gradient_refuses_all_that_are_summed_with_it() -> None:
    world = World()
    keys, ones = np.array([1], np.uint64), np.ones((1, 3), np.float32)
    bad = Push(SOURCES[1], 0, -1, None, (("rows", keys, ones * np.float32("inf")),))
    found = world.shard.push_together([Push(SOURCES[0], 0, -1, None, (("rows", keys, ones),)), bad])
    assert [one.status for one in found] == ["refused", "refused"]
    assert all("NaN or infinity" in one.reason for one in found)
    assert len(world.shard.table("rows")) == 0
    assert [world.shard.applied(source) for source in SOURCES] == [0, 0]


def test_the_guard_names_a_gradient_that_is_far_above_the_usual() -> None:
    spec = TableSpec("rows", 3, guard=50.0)
    shard = Shard(0, [spec], 1, HybridClock(lambda: 0))
    keys = np.arange(2_000, dtype=np.uint64)
    shard.push(Push(SOURCES[0], 0, -1, None, (("rows", keys, np.full((2_000, 3), 0.1, np.float32)),)))
    outcome = shard.push(Push(SOURCES[0], 1, 0, None, (("rows", keys[:1], np.full((1, 3), 9, np.float32)),)))
    assert outcome.status == "refused"
    assert "more than 50 times the usual 0.173" in outcome.reason
    assert (
        shard.push(Push(SOURCES[0], 2, 1, None, (("rows", keys[:1], np.full((1, 3), 4, np.float32)),))).status
        == "applied"
    )


def test_a_key_is_admitted_at_its_nth_push_and_expires_untouched() -> None:
    world = World()
    part = (("rare", np.array([5], np.uint64), np.ones((1, 2), np.float32)),)
    for offset in range(3):
        world.shard.push(Push(SOURCES[0], offset, offset - 1, None, part))
        assert len(world.shard.table("rare")) == (offset > 0)
        newest = world.shard.table("rare").ring.ring_priorities[: max(offset, 1)]
        assert (newest > 10.0).tolist() == [[False], [True], [True, False]][offset]
    world.now_us += 4_000_000
    assert world.shard.expire("rare", 0, 10) == (0, 0)
    world.now_us += 1_100_000
    assert world.shard.expire("rare", 0, 10) == (1, 0)
    assert len(world.shard.table("rare")) == 0
    assert len(world.shard.table("rare").graves) == 1
    initial = world.shard.table("rare").initial(part[0][1])
    assert world.shard.pull("rare", part[0][1]).tobytes() == initial.tobytes()


def test_what_was_deleted_starts_anew_under_a_newer_version() -> None:
    world = World()
    keys = np.array([3], np.uint64)
    part = (("rows", keys, np.ones((1, 3), np.float32)),)
    world.shard.push(Push(SOURCES[0], 0, -1, None, part))
    first = world.shard.pull("rows", keys)
    assert world.shard.delete("rows", np.array([3, 4, 3], np.uint64)) == 1
    died = int(world.shard.state().graves[0].time[0])
    world.now_us = 0
    world.shard.push(Push(SOURCES[0], 1, 0, None, part))
    assert world.shard.pull("rows", keys).tobytes() == first.tobytes()
    assert world.shard.table("rows").versions(keys)[0][0] > died
    assert len(world.shard.table("rows").graves) == 0


def test_dense_rows_cannot_be_deleted() -> None:
    with pytest.raises(BadSpec, match="dense"):
        World().shard.delete("dense", np.array([1], np.uint64))


def test_steps_that_do_not_follow_are_refused() -> None:
    world = World()
    for seed in range(3):
        world.do("push", 0, seed)
    other = world.make(2)
    other.apply(world.deltas[0])
    with pytest.raises(OutOfOrder, match="step 3"):
        other.apply(world.deltas[2])
    with pytest.raises(OutOfOrder, match="step 1"):
        other.apply(world.deltas[0])
    other.lead(3, epoch=5)
    with pytest.raises(OutOfOrder, match="epoch 0"):
        other.apply(world.deltas[1])


def test_an_owner_is_fenced_and_its_steps_carry_its_epoch() -> None:
    world = World()
    world.do("push", 0, 1)
    before = world.shard.incarnation
    world.shard.lead(7, epoch=4)
    world.do("push", 0, 2)
    assert (world.deltas[-1].epoch, world.deltas[-1].writer) == (4, 7)
    assert world.shard.history == ((0, 1), (4, 2))
    assert world.shard.incarnation != before
    for writer, epoch in ((8, 4), (7, 9)):
        with pytest.raises(BadSpec, match="does not follow"):
            world.shard.lead(writer, epoch)


def test_a_snapshot_whose_steps_are_missing_is_refused() -> None:
    world = World()
    for seed in range(3):
        world.do("push", 0, seed)
    head = world.shard.head()
    pages = list(world.shard.pages())
    world.do("push", 0, 9)
    data = b"".join(
        b for r in (head, *pages, End(world.shard.position)) for b in map(bytes, encode_record(r))
    )
    with pytest.raises(SnapshotDamaged, match="up to 4; the log ends at 3"):
        restore(world.make(2), data, world.deltas[:3])
    whole = world.make(3)
    restore(whole, data, world.deltas)
    assert bits(whole) == bits(world.shard)
