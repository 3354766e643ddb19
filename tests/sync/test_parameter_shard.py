"""Shards: pull and push against the reference, atomic and applied once, refusals, generations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.changes import Cursor
from sync.clock import HybridClock
from sync.errors import BadPush, BadShape, BadSpec, PeerFault, TableFull, TooManySources, UnknownTable
from sync.placement import shard_of
from sync.pushes import Part, Push, Source, Watermark
from sync.reference import ReferenceTable
from sync.shard import Shard
from sync.snapshot import decode, encode
from sync.spec import Initialiser, Optimiser, TableSpec

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]

SPECS = (
    TableSpec("sgd", 3, Initialiser.uniform(0.1), Optimiser("sgd", 0.5)),
    TableSpec("rowwise", 9, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5)),
    TableSpec("dense", 4, Initialiser.uniform(0.1), Optimiser("adagrad", 0.5), placement="single", rows=6),
)
SOURCE = Source("samples-log", 0)
KEYS = st.lists(st.integers(0, 5) | st.sampled_from([2**63, 2**64 - 1]), max_size=8)


def uint64(keys: list[int]) -> Keys:
    return np.array(keys, np.uint64)


def make(writer: int = 1, now_us: int = 1_000, max_rows: int = 2**31 - 1, max_sources: int = 9) -> Shard:
    clock = HybridClock(lambda: now_us)
    return Shard(0, SPECS, writer, clock, max_rows=max_rows, max_sources=max_sources)


def part(name: str, keys: list[int], seed: int = 0) -> Part:
    dim = next(spec.dim for spec in SPECS if spec.name == name)
    gradients = np.random.default_rng(seed).standard_normal((len(keys), dim)).astype(np.float32)
    return name, uint64(keys), gradients


def push(shard: Shard, offset: int, *parts: Part, predecessor: int | None = None) -> str:
    before = offset - 1 if predecessor is None else predecessor
    return shard.push(
        Push(SOURCE, offset, before, Watermark("events-log", 0, offset, 10 * offset), parts)
    ).status


def everything(shard: Shard) -> bytes:
    """All bits of a shard but the incarnation that a restart changes."""
    state = shard.state()
    return encode(replace(state, head=replace(state.head, knowledge={})))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(KEYS, KEYS, st.lists(st.integers(0, 5), max_size=4), st.integers(0, 99)), max_size=12)
)
def test_equals_the_reference_bit_for_bit(
    steps: list[tuple[list[int], list[int], list[int], int]],
) -> None:
    shard = make()
    model = {spec.name: ReferenceTable(spec) for spec in SPECS}
    time = 1_000
    for offset, (*batches, seed) in enumerate(steps):
        parts = tuple(part(spec.name, keys, seed) for spec, keys in zip(SPECS, batches, strict=True))
        assert push(shard, offset, *parts) == "applied"
        if any(batches):
            time = 1 + max(time, *(model[name].newest(keys) for name, keys, _ in parts))
        for name, keys, gradients in parts:
            model[name].push(keys, gradients, (time, 1))
        for name, table in model.items():
            asked = uint64([*range(6), 2**63, 2**64 - 1][: 6 if name == "dense" else 8])
            assert shard.pull(name, asked).tobytes() == table.pull(asked).tobytes()
            times, writers = shard.table(name).versions(asked)
            known = [table.rows[key].version if key in table.rows else (0, 0) for key in asked.tolist()]
            assert list(zip(times.tolist(), writers.tolist(), strict=True)) == known
            assert len(shard.table(name)) == len(table.rows)


def test_a_pull_of_unknown_keys_stores_nothing() -> None:
    shard = make()
    shard.pull("rowwise", np.arange(1_000, dtype=np.uint64))
    assert len(shard.table("rowwise")) == 0
    assert shard.cursor().sequence == 0


def test_grows_and_keeps_its_rows() -> None:
    shard, keys = make(), np.arange(20_000, dtype=np.uint64) ** 2
    ones = np.ones((len(keys), 3), np.float32)
    initial = shard.pull("sgd", keys)
    for offset, start in enumerate(range(0, len(keys), 1_000)):
        batch = slice(start, start + 1_000)
        push(shard, offset, ("sgd", keys[batch], ones[batch]))
    assert shard.pull("sgd", keys).tobytes() == (initial - np.float32(0.5)).tobytes()
    assert shard.counts.inserted_rows_total == len(shard.table("sgd")) == len(keys)


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_many_shards_give_the_one_shard_answer(shards: int) -> None:
    one, many = make(), [make() for _ in range(shards)]
    rng = np.random.default_rng(3)
    for offset in range(30):
        keys = rng.integers(0, 40, 25).astype(np.uint64)
        gradients = rng.standard_normal((25, 9)).astype(np.float32)
        push(one, offset, ("rowwise", keys, gradients))
        homes = shard_of(keys, shards)
        for number, shard in enumerate(many):
            mine = homes == number
            push(shard, offset, ("rowwise", keys[mine], gradients[mine]))
    keys = np.arange(50, dtype=np.uint64)
    homes = shard_of(keys, shards)
    for number, shard in enumerate(many):
        mine = keys[homes == number]
        assert shard.pull("rowwise", mine).tobytes() == one.pull("rowwise", mine).tobytes()


def test_a_push_sent_again_changes_nothing() -> None:
    shard = make()
    push(shard, 0, part("sgd", [1, 2]))
    before = everything(shard)
    assert push(shard, 0, part("sgd", [1, 2])) == "duplicate"
    assert push(shard, 2, part("sgd", [1, 2])) == "gap"
    assert everything(shard) == before
    assert (shard.counts.duplicate_total, shard.counts.gap_total) == (1, 1)


def test_an_empty_push_advances_the_offset_and_the_watermark() -> None:
    shard = make()
    assert push(shard, 0) == "applied"
    assert push(shard, 1, part("sgd", [])) == "applied"
    assert shard.applied(SOURCE) == 1
    assert shard.watermarks()["events-log", 0].offset == 1
    assert shard.knowledge == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e6, 3e38])
def test_refuses_all_parts_when_one_gradient_is_bad_and_names_it(bad: float) -> None:
    shard = make()
    push(shard, 0, part("sgd", [1]))
    before = shard.state()
    name, keys, gradients = part("rowwise", [4, 77])
    gradients[1, 8] = bad
    outcome = shard.push(Push(SOURCE, 1, 0, None, (part("sgd", [1, 5]), (name, keys, gradients))))
    assert outcome.status == "refused"
    assert "rowwise" in outcome.reason
    assert "77" in outcome.reason
    assert outcome.applied == shard.applied(SOURCE) == 1
    assert (shard.counts.refused_total, shard.counts.last_refusal) == (1, outcome.reason)
    after = shard.state()
    same = replace(after.head, pushes=before.head.pushes, position=before.head.position)
    assert encode(replace(after, head=same)) == encode(before)
    assert push(shard, 1) == "duplicate"
    assert push(shard, 2, part("sgd", [1])) == "applied"


def test_refuses_finite_gradients_whose_sum_is_not() -> None:
    gradients = np.full((2, 3), 9e5 / 3**0.5, np.float32)
    assert push(make(), 0, ("sgd", uint64([1, 2]), gradients)) == "applied"
    assert push(make(), 0, ("sgd", uint64([1, 1]), gradients)) == "refused"


@pytest.mark.parametrize(
    ("bad", "error", "named"),
    [
        (("other", uint64([1]), np.ones((1, 3), np.float32)), UnknownTable, "other"),
        (("sgd", uint64([1]), np.ones((1, 4), np.float32)), BadShape, r"\[1, 4\]"),
        (("sgd", uint64([1, 2]), np.ones((1, 3), np.float32)), BadShape, r"\[2, 3\]"),
        (("sgd", uint64([1]), np.ones(3, np.float32)), BadShape, r"\[3\]"),
        (("sgd", uint64([1]), np.ones((1, 3))), BadShape, "float64"),
        (("sgd", np.array([1]), np.ones((1, 3), np.float32)), BadShape, "int64"),
        (("sgd", uint64([1]).reshape(1, 1), np.ones((1, 3), np.float32)), BadShape, r"\[1, 1\]"),
        (("sgd", [1], np.ones((1, 3), np.float32)), BadShape, "list"),
        (("dense", uint64([6]), np.ones((1, 4), np.float32)), BadShape, "key 6"),
        (part("sgd", [2]), BadPush, "two parts"),
    ],
)
def test_a_malformed_push_changes_nothing(bad: Part, error: type[PeerFault], named: str) -> None:
    shard = make()
    push(shard, 0, part("sgd", [1]))
    before = everything(shard)
    with pytest.raises(error, match=named):
        push(shard, 1, part("sgd", [1]), bad)
    assert everything(shard) == before


def test_a_malformed_pull_is_the_peers_fault() -> None:
    with pytest.raises(UnknownTable, match="other"):
        make().pull("other", uint64([1]))
    with pytest.raises(BadShape, match="int64"):
        make().pull("sgd", np.array([1]))


def test_takes_arrays_as_they_come_off_the_wire() -> None:
    name, keys, gradients = part("rowwise", [3, 9])
    frame = b"x" + keys.tobytes() + gradients.tobytes()
    loose = np.frombuffer(frame, np.uint64, 2, offset=1), np.frombuffer(frame, np.float32, 18, offset=17)
    assert not loose[0].flags.aligned
    assert not loose[0].flags.writeable
    shard, other = make(), make()
    assert push(shard, 0, (name, loose[0], loose[1].reshape(2, 9))) == "applied"
    assert push(other, 0, (name, keys, gradients)) == "applied"
    assert shard.pull(name, loose[0]).tobytes() == other.pull(name, keys).tobytes()


def test_a_full_table_refuses_new_rows_and_keeps_the_offset() -> None:
    shard = make(max_rows=2)
    push(shard, 0, part("sgd", [1, 2]))
    before = everything(shard)
    with pytest.raises(TableFull, match="3 rows"):
        push(shard, 1, part("rowwise", [1]), part("sgd", [2, 3]))
    assert everything(shard) == before
    assert push(shard, 1, part("sgd", [1, 2, 1])) == "applied"


def test_one_source_too_many_changes_nothing() -> None:
    shard = make(max_sources=1)
    push(shard, 0)
    before = everything(shard)
    with pytest.raises(TooManySources):
        shard.push(Push(Source("another", 0), 0, -1, None, (part("sgd", [1]),)))
    assert everything(shard) == before


def test_versions_grow_past_every_row_touched_whatever_the_clock_says() -> None:
    clock = [5_000]
    shard = Shard(0, SPECS, 8, HybridClock(lambda: clock[0]))
    push(shard, 0, part("sgd", [1, 2]))
    clock[0] = 10
    push(shard, 1, part("sgd", [2, 3]), part("rowwise", [2]))
    times, writers = shard.table("sgd").versions(uint64([1, 2, 3, 4]))
    assert times.tolist() == [5_001, 5_002, 5_002, 0]
    assert writers.tolist() == [8, 8, 8, 0]
    assert shard.table("rowwise").versions(uint64([2]))[0].tolist() == [5_002]
    assert shard.knowledge == {8: 5_002}


def test_a_restored_shard_writes_above_what_it_restored_even_when_the_clock_went_back() -> None:
    first = make(writer=1, now_us=9_000)
    push(first, 0, part("sgd", [1]))
    again = make(writer=2, now_us=10)
    again.restore(decode(encode(first.state())))
    push(again, 1, part("sgd", [2]))
    assert again.table("sgd").versions(uint64([1, 2]))[0].tolist() == [9_001, 9_002]
    assert again.knowledge == {1: 9_001, 2: 9_002}


def test_a_write_beats_every_row_that_was_taken_over_even_where_that_is_ahead_of_the_clock() -> None:
    first, second = make(writer=1, now_us=9_000), make(writer=2, now_us=10)
    push(first, 0, part("sgd", [1]), part("rowwise", [4]))
    state = first.state()
    second.restore(replace(state, head=replace(state.head, clock=0)))
    push(second, 1, part("sgd", [5]), part("rowwise", [4]))
    assert second.table("sgd").versions(uint64([5]))[0].tolist() == [9_002]
    assert second.table("rowwise").versions(uint64([4]))[0].tolist() == [9_002]


def test_a_new_row_does_not_inherit_what_its_slot_held() -> None:
    shard, clean = make(), make()
    for offset in range(2):
        if offset:
            columns = shard.table("rowwise")._columns
            columns.state[1:] = 9.0
            columns.values[1:] = 9.0
        push(shard, offset, part("rowwise", [offset]))
        push(clean, offset, part("rowwise", [offset]))
    assert everything(shard) == everything(clean)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**32))
def test_killed_and_restored_equals_undisturbed_bit_for_bit(
    snapshot_at: int, killed_at: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    log = [
        [
            part(spec.name, rng.integers(0, 6, rng.integers(0, 5)).tolist(), int(rng.integers(99)))
            for spec in SPECS
        ]
        for _ in range(12)
    ]
    undisturbed, shard = make(), make()
    for offset, parts in enumerate(log):
        push(undisturbed, offset, *parts)
    stored = encode(shard.state())
    for offset, parts in enumerate(log[: max(killed_at, snapshot_at)]):
        push(shard, offset, *parts)
        if offset + 1 == snapshot_at:
            stored = encode(shard.state())
    again = make(writer=2)
    again.restore(decode(stored))
    # The trainer goes on from what it remembers as acknowledged, learns of the gap, and rewinds.
    offset = min(killed_at, len(log) - 1)
    while offset < len(log):
        status = push(again, offset, *log[offset])
        offset = again.applied(SOURCE) + 1
        assert status in ("applied", "duplicate", "gap")
    for mine, theirs in zip(again.state().rows, undisturbed.state().rows, strict=True):
        assert mine.table == theirs.table
        for name in ("keys", "values", "state", "time"):
            assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes(), (mine.table, name)


def test_a_dense_generation_stands_still_until_the_next_is_published() -> None:
    shard = make()
    initial = shard.dense("dense")
    assert initial.number == 0
    assert initial.values.tobytes() == shard.pull("dense", np.arange(6, dtype=np.uint64)).tobytes()
    assert shard.publish_dense("dense") == 0
    push(shard, 0, part("dense", [1]), part("sgd", [9]))
    assert shard.dense("dense") is initial
    live = shard.dense("dense", published=False)
    assert live.values.tobytes() == shard.pull("dense", np.arange(6, dtype=np.uint64)).tobytes()
    assert live.values.tobytes() != initial.values.tobytes()
    assert shard.publish_dense("dense") == 1
    first = shard.dense("dense")
    push(shard, 1, part("sgd", [9]))
    assert shard.publish_dense("dense") == 1
    push(shard, 2, part("dense", [1]))
    assert (shard.dense("dense"), first.watermarks["events-log", 0].offset) == (first, 0)
    assert shard.publish_dense("dense") == 2
    with pytest.raises(ValueError, match="read-only"):
        shard.dense("dense").values[0] = 0


def test_a_generation_published_before_any_reader_asked() -> None:
    shard = make()
    push(shard, 0, part("dense", [1]))
    assert shard.publish_dense("dense") == 1
    assert shard.dense("dense").values.tobytes() == shard.dense("dense", published=False).values.tobytes()


def test_generations_go_on_after_a_restart() -> None:
    shard, again = make(writer=1), make(writer=2)
    push(shard, 0, part("dense", [1]))
    shard.publish_dense("dense")
    again.restore(decode(encode(shard.state())))
    assert (again.dense("dense").number, again.dense("dense").writer) == (1, 1)
    assert again.dense("dense").values.tobytes() == shard.dense("dense").values.tobytes()
    assert again.publish_dense("dense") == 2


def test_a_spread_table_has_no_generations() -> None:
    with pytest.raises(BadSpec, match="sgd"):
        make().publish_dense("sgd")
    with pytest.raises(BadSpec, match="sgd"):
        make().dense("sgd", published=False)


def test_only_a_new_start_with_the_same_tables_takes_a_snapshot_over() -> None:
    shard = make(writer=1)
    push(shard, 0, part("sgd", [1]))
    state = shard.state()
    with pytest.raises(BadSpec, match="new start"):
        make(writer=1).restore(state)
    with pytest.raises(BadSpec, match="new start"):
        shard.restore(state)
    with pytest.raises(BadSpec, match="tables"):
        Shard(0, SPECS[:2], 2, HybridClock(lambda: 0)).restore(state)


@pytest.mark.parametrize("writer", [-1, 2**32])
def test_a_writer_is_a_positive_32_bit_number(writer: int) -> None:
    with pytest.raises(BadSpec, match="writer"):
        make(writer=writer)


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(BadSpec, match="one name"):
        Shard(0, (SPECS[0], SPECS[0]), 1, HybridClock(lambda: 0))


def test_changes_of_an_unknown_table_or_no_rows_are_refused() -> None:
    with pytest.raises(UnknownTable):
        make().changes(Cursor(), ["other"], 1)
    with pytest.raises(ValueError, match="limit"):
        make().changes(Cursor(), ["sgd"], 0)
