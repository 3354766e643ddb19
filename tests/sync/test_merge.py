"""Merging what other replicas tell: the newest version wins, all or nothing, and followers end with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.changes import Cursor
from sync.errors import BadShape, BadSpec, ClockAhead, SyncError, TableFull, UnknownTable
from sync.knowledge import Horizon
from sync.pushes import Progress, Source, Watermark
from sync.records import Delta, Generation, Learned, Rows, Update
from sync.shard import Shard
from sync.snapshot import decode, encode, encode_record, records
from tests.support.replicas import SPECS, Clock, bits, graves, learned, push, rows, update
from tests.support.twins import Twin, told_by

WRITERS = (7, 8, 9)
EPOCHS = {7: 1, 8: 1, 9: 2}
BASE = 1_000_000
KEYS = st.lists(st.integers(0, 8), max_size=7, unique=True)
TIMES = st.integers(1, 9)


@st.composite
def updates(draw: Callable[[Any], Any]) -> Update:
    """Rows and graves of random versions, which of the two and of what value is a function of version and key."""
    parts = []
    for table in ("rows", "other"):
        told = [(key, draw(TIMES) + BASE, draw(st.sampled_from(WRITERS))) for key in draw(KEYS)]
        dead = [(key + time + writer) % 4 == 0 for key, time, writer in told]
        parts.append(graves((one for one, gone in zip(told, dead, strict=True) if gone), table))
        parts.append(
            rows(
                (
                    (k, t, w, float(t - BASE + w * k))
                    for (k, t, w), gone in zip(told, dead, strict=True)
                    if not gone
                ),
                table,
            )
        )
    known = None
    if draw(st.booleans()):
        vector = draw(st.dictionaries(st.sampled_from(WRITERS), TIMES, max_size=2))
        known = Learned({writer: BASE + time for writer, time in vector.items()})
    return update(*parts, epochs=EPOCHS, known=known)


def through_bytes(delta: Delta) -> Delta:
    (record, _), *rest = records(b"".join(encode_record(delta)))
    assert not rest
    assert isinstance(record, Delta)
    return record


def told_and_known(shard: Shard) -> tuple[object, object]:
    return told_by(shard), shard.knowledge


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(updates(), st.booleans()), max_size=8))
def test_the_newest_version_wins_in_any_order(steps: list[tuple[Update, bool]]) -> None:
    clock = Clock()
    shard, twin = clock.shard(1), Twin()
    follower, deltas = clock.shard(2), list[Delta]()
    shard.on_delta = deltas.append
    merged = 0
    for one, is_whole in steps:
        before, token = bits(shard), shard.token
        whole = None
        if is_whole and one.learned is not None:
            whole = {
                table: np.concatenate(
                    [np.zeros(0, np.uint64), *(p.keys for p in one.versioned if p.table == table)]
                )
                for table in ("rows", "other")
            }
        delta = shard.merge(one, whole)
        merged += twin.merge(one, whole and {table: keys.tolist() for table, keys in whole.items()})
        assert told_and_known(shard) == (twin.told, twin.knowledge)
        assert shard.counts.merged_rows_total == merged
        # What changed nothing is no step, and what is a step is told and moves the token.
        assert (delta is None) == (bits(shard) == before) == (shard.token == token)
        assert delta is None or deltas[-1] is delta
        for _ in range(2):
            assert shard.merge(one, whole) is None
    seen = shard.counts
    assert seen.merged_rows_total + seen.covered_rows_total + seen.lost_rows_total == 3 * sum(
        len(part.keys) for one, _ in steps for part in one.versioned
    )
    for step in deltas:
        follower.apply(through_bytes(step))
    assert bits(follower) == bits(shard)
    assert [step.position for step in deltas] == list(range(1, shard.position + 1))


@settings(deadline=None, max_examples=100)
@given(st.lists(updates(), max_size=6), st.randoms(use_true_random=False))
def test_all_orders_of_uncovered_updates_end_alike(some: list[Update], random: Any) -> None:
    clock, ends = Clock(), []
    parts = [replace(one, learned=None) for one in some]
    for writer in (1, 2):
        shard = clock.shard(writer)
        random.shuffle(parts)
        for one in parts:
            shard.merge(one)
        ends.append(told_by(shard))
    assert ends[0] == ends[1]


def test_a_later_fencing_epoch_beats_a_later_clock() -> None:
    shard = Clock().shard(1)
    shard.merge(update(rows([(1, BASE + 900, 8, 1.0)]), epochs={8: 1}))
    assert shard.merge(update(rows([(1, BASE + 5, 9, 2.0)]), epochs={9: 2})) is not None
    assert shard.pull("rows", np.array([1], np.uint64))[0, 0] == 2.0
    # What the deposed owner wrote loses, however late its clock is; and nobody renames its epoch.
    assert shard.merge(update(rows([(1, BASE + 999, 8, 3.0)]), epochs={8: 5})) is None
    assert shard.epochs[8] == 1
    assert shard.counts.lost_rows_total == 1


def test_a_partial_update_moves_no_knowledge_and_the_last_one_does() -> None:
    shard = Clock().shard(1)
    shard.merge(update(rows([(1, BASE + 1, 8, 1.0)])))
    assert shard.knowledge == {}
    shard.merge(update(rows([(2, BASE + 2, 8, 1.0)]), known=learned({8: BASE + 2})))
    assert shard.knowledge == {8: BASE + 2}
    # Known now: a delayed copy is passed over, whether its row is here or gone.
    assert shard.merge(update(rows([(3, BASE + 2, 8, 1.0)]))) is None
    assert shard.counts.covered_rows_total == 1


def test_own_writes_follow_everything_that_was_merged() -> None:
    clock = Clock()
    shard = clock.shard(1)
    shard.merge(update(rows([(1, BASE + 10_000, 8, 1.0)])))
    push(shard, [1])
    time, writer = shard.table("rows").versions(np.array([1], np.uint64))
    assert (int(time[0]), int(writer[0])) == (BASE + 10_001, 1)


def test_a_row_that_is_older_than_its_grave_stays_dead_and_a_newer_one_lives() -> None:
    shard = Clock().shard(1)
    shard.merge(update(graves([(1, BASE + 5, 8)])))
    assert shard.merge(update(rows([(1, BASE + 4, 8, 1.0)]))) is None
    assert len(shard.table("rows")) == 0
    assert shard.merge(update(rows([(1, BASE + 6, 8, 1.0)]))) is not None
    assert (len(shard.table("rows")), len(shard.table("rows").graves)) == (1, 0)


FAULTS: list[tuple[type[SyncError], Update]] = [
    (ClockAhead, update(rows([(1, BASE + 700_000_000, 8, 1.0)]))),
    (ClockAhead, update(graves([(1, BASE + 700_000_000, 8)]))),
    (ClockAhead, update(known=learned({8: BASE + 700_000_000}))),
    (ClockAhead, update(known=Learned({}, Horizon({8: BASE + 700_000_000})))),
    (ClockAhead, update(known=Learned({}, Horizon({}, 2, 1, {8: BASE + 700_000_000})))),
    (BadShape, update(known=learned(dict.fromkeys(range(10, 65_546), BASE)))),
    (ClockAhead, Update(generations=(Generation("dense", 1, np.zeros((4, 3), np.float32), 2**62, 8),))),
    (BadShape, update(rows([(1, BASE, 8, 1.0), (1, BASE, 8, 1.0)]))),
    (BadShape, update(rows([(1, BASE, 8, 1.0)]), rows([(1, BASE + 1, 8, 1.0)]))),
    (BadShape, update(rows([(1, BASE, 8, 1.0)]), graves([(1, BASE + 1, 8)]))),
    (BadShape, update(rows([(1, 0, 8, 1.0)]))),
    (BadShape, update(rows([(1, BASE, 8, np.nan)]))),
    (BadShape, update(rows([(1, BASE, 8, np.inf)]))),
    (BadShape, update(rows([(1, BASE, 8, 1.0)], state=0))),
    (BadShape, update(rows([(1, BASE, 8, 1.0)], "other", state=1))),
    (BadShape, update(replace(rows([(1, BASE, 8, 1.0)], state=1), table="dense"))),
    (BadShape, update(graves([(1, BASE, 8)], "dense"))),
    (BadShape, Update(generations=(Generation("dense", 1, np.zeros((3, 3), np.float32), BASE, 8),))),
    (BadShape, Update(generations=(Generation("dense", 1, np.full((4, 3), np.nan, np.float32), BASE, 8),))),
    (BadShape, Update(generations=(Generation("rows", 1, np.zeros((4, 3), np.float32), BASE, 8),))),
    (UnknownTable, update(graves([(1, BASE, 8)], "nothing"))),
    (TableFull, update(rows((key, BASE, 8, 1.0) for key in range(300)))),
    (TableFull, update(*(rows((k, BASE, 8, 1.0) for k in range(n, n + 200)) for n in (0, 200)))),
]


@pytest.mark.parametrize(("error", "told"), FAULTS)
def test_what_is_refused_changed_nothing(error: type[SyncError], told: Update) -> None:
    clock = Clock()
    shard, deltas = clock.shard(1, max_rows=256), list[Delta]()
    push(shard, [1, 2])
    shard.publish_dense("dense")
    shard.on_delta = deltas.append
    before, token, counts = bits(shard), shard.token, replace(shard.counts)
    # Good rows before and behind the bad ones are not taken, either.
    good = rows((key, BASE + 5, 9, 1.0) for key in (1_060, 1_061))
    mixed = replace(told, rows=(*told.rows, good), learned=told.learned or learned({9: BASE + 5}))
    with pytest.raises(error):
        shard.merge(mixed)
    assert bits(shard) == before
    assert (shard.token, shard.counts, deltas) == (token, counts, [])
    assert shard.merge(update(good)) is not None


def test_who_does_not_lead_merges_nothing() -> None:
    shard = Clock().shard(1)
    shard.resign()
    with pytest.raises(BadSpec, match="led by another"):
        shard.merge(update(rows([(1, BASE, 8, 1.0)])))


def test_a_replacement_drops_what_the_other_knew_and_did_not_name() -> None:
    shard, deltas = Clock().shard(1), list[Delta]()
    shard.on_delta = deltas.append
    shard.merge(update(rows((key, BASE + key, 8, 1.0) for key in range(1, 7)), graves([(7, BASE + 3, 8)])))
    shard.merge(update(rows([(8, BASE + 1, 9, 1.0)], "other")))
    push(shard, [20])
    known = learned({8: BASE + 5}, floor={8: BASE + 4})
    delta = shard.merge(
        update(rows([(2, BASE + 2, 8, 1.0)]), known=known), {"rows": np.array([2], np.uint64)}
    )
    assert delta is not None
    # 1 and 3 to 5 are gone there; 6 and the own row 20 are news to it; the grave of 7 went with the rest.
    assert {name: keys.tolist() for name, keys in delta.dropped} == {"rows": [1, 3, 4, 5, 7]}
    assert set(told_by(shard)) == {("rows", 2), ("rows", 6), ("rows", 20), ("other", 8)}
    assert shard.counts.dropped_rows_total == 5
    assert shard.horizon.graves == {8: BASE + 4}
    follower = Clock().shard(2)
    for step in deltas:
        follower.apply(through_bytes(step))
    assert bits(follower) == bits(shard)


def test_forgotten_graves_of_another_are_forgotten_here() -> None:
    shard = Clock().shard(1)
    shard.merge(update(graves([(1, BASE + 1, 8), (2, BASE + 9, 8)])))
    shard.merge(update(known=learned({8: BASE + 4}, floor={8: BASE + 4})))
    assert set(told_by(shard)) == {("rows", 2)}
    assert shard.horizon == Horizon({8: BASE + 4})
    assert shard.counts.graves_collected_total == 1


def test_rows_without_state_are_merged_where_none_is_kept() -> None:
    clock = Clock()
    home, region = clock.shard(1), clock.shard(2, stateless=True)
    push(home, range(5))
    (told,) = home.state().rows
    assert told.state.shape == (5, 1)
    with pytest.raises(BadShape, match="1 of state, not 2 and 0"):
        region.merge(update(told))
    assert region.merge(update(replace(told, state=told.state[:, :0]))) is not None
    keys = np.arange(5, dtype=np.uint64)
    np.testing.assert_array_equal(region.pull("rows", keys), home.pull("rows", keys))
    with pytest.raises(BadSpec, match="no optimiser state"):
        push(region, [1])


def test_sources_and_generations_travel_with_knowledge() -> None:
    clock, deltas = Clock(), list[Delta]()
    home, region = clock.shard(1), clock.shard(2)
    push(home, range(3))
    push(home, range(4), table="dense")
    home.publish_dense("dense")
    region.on_delta = deltas.append
    progress = tuple(home.pushes.progress().items())
    told = Update(
        generations=home.generations(), epochs=home.epochs, learned=Learned(home.knowledge, progress=progress)
    )
    assert region.merge(told) is not None
    assert region.watermarks() == home.watermarks()
    assert region.dense("dense").values.tobytes() == home.dense("dense").values.tobytes()
    assert region.dense("dense").number == 1
    assert region.merge(told) is None
    # An older offset does not come back, and a source that stands alone is no step less.
    older = tuple((source, Progress(one.applied - 1)) for source, one in progress)
    assert region.merge(Update(learned=Learned({}, progress=older))) is None
    more = ((Source("log", 1), Progress(4, Watermark("events", 1, 4, 5))),)
    assert region.merge(Update(learned=Learned({}, progress=more))) is not None
    assert ("events", 1) in region.watermarks()
    follower = clock.shard(3)
    for step in deltas:
        follower.apply(through_bytes(step))
    assert bits(follower) == bits(region)


def generation(number: int, time: int, writer: int) -> Generation:
    values = np.full((4, 3), time - BASE, np.float32)
    values.flags.writeable = False
    return Generation("dense", number, values, time, writer)


def test_the_generation_of_the_newer_version_wins_whatever_its_number() -> None:
    shard = Clock().shard(1)
    for number, time, writer, wins in (
        (5, 5, 8, True),
        (9, 4, 8, False),
        (5, 5, 8, False),
        (3, 1, 9, True),
        (3, 9, 8, False),
        (4, 2, 9, True),
    ):
        before = shard.dense("dense")
        told = generation(number, BASE + time, writer)
        assert (shard.merge(Update(generations=(told,), epochs={8: 1, 9: 2})) is not None) == wins
        assert shard.dense("dense") is (told if wins else before)


def test_readers_of_changes_hear_of_all_that_was_merged() -> None:
    shard = Clock().shard(1)
    tables = ["rows", "other"]
    push(shard, [1, 2, 3])
    cursor = shard.changes(Cursor(), tables, 100).cursor
    shard.merge(update(rows([(1, BASE + 9, 8, 5.0), (9, BASE + 9, 8, 6.0)]), graves([(2, BASE + 9, 8)])))
    changes = shard.changes(cursor, tables, 100)
    keys, values = changes.parts["rows"]
    assert not changes.reset
    assert dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True)) == {
        1: 5.0, 9: 6.0, 2: shard.table("rows").initial(np.array([2], np.uint64))[0, 0],
    }  # fmt: skip
    # Nothing tells of a row that was dropped but to start over.
    shard.merge(update(known=learned({8: BASE + 9})), {"rows": np.array([9], np.uint64)})
    changes = shard.changes(changes.cursor, tables, 100)
    assert changes.reset
    assert sorted(changes.parts["rows"][0].tolist()) == [3, 9]


@settings(deadline=None, max_examples=50)
@given(st.lists(updates(), max_size=6), st.integers(0, 6))
def test_a_snapshot_of_a_merged_replica_goes_on_as_it_would(some: list[Update], at: int) -> None:
    clock = Clock()
    shard = clock.shard(1)
    for one in some[:at]:
        shard.merge(one)
    shard.merge(Update(generations=(generation(2, BASE + 3, 8),), epochs=EPOCHS))
    again = clock.shard(2)
    again.restore(decode(encode(shard.state())))
    assert (again.knowledge, again.horizon, again.position) == (
        shard.knowledge,
        shard.horizon,
        shard.position,
    )
    assert again.dense("dense").values.tobytes() == shard.dense("dense").values.tobytes()
    for one in some[at:]:
        shard.merge(one)
        again.merge(one)
    assert told_and_known(again) == told_and_known(shard)


def test_a_snapshot_keeps_horizon_retirement_and_generations() -> None:
    clock = Clock()
    shard = clock.shard(1)
    shard.lead(5, 1)
    push(shard, [1, 2])
    shard.delete("rows", np.array([1], np.uint64))
    shard.publish_dense("dense", again=True)
    shard.collect(shard.knowledge)
    shard.lead(6, 2)
    push(shard, [3])
    assert shard.retire(2, shard.knowledge)
    again = clock.shard(9)
    again.restore(decode(encode(shard.state())))
    assert again.horizon == shard.horizon
    assert (again.horizon.retired, set(again.horizon.last)) == (2, {5})
    assert again.knowledge == shard.knowledge
    assert set(again.knowledge) == {6}
    # A delayed row of a retired writer counts as covered, after the restart as before.
    assert again.merge(update(rows([(50, clock.now_us, 5, 1.0)]))) is None
    assert again.dense("dense") == replace(shard.dense("dense"), values=again.dense("dense").values)


def test_a_replica_needs_distinct_tables() -> None:
    with pytest.raises(BadSpec):
        Shard(0, (*SPECS, SPECS[0]), 1, Clock().hybrid())


def test_urgent_rows_are_urgent_for_the_next_hop() -> None:
    shard = Clock().shard(1)
    shard.merge(update(rows((key, BASE + 1, 8, 1.0) for key in range(20))))
    shard.merge(replace(update(rows([(99, BASE + 1, 8, 1.0)])), urgent=True))
    table = shard.table("rows")
    sequences, slots = table.urgent(0, table.ring.quantile(0.1))
    assert (len(sequences), table.keys_at(slots).tolist()) == (1, [99])


def test_parts_of_rows_are_not_copied_where_all_of_them_win() -> None:
    shard = Clock().shard(1)
    told = rows((key, BASE + 1, 8, 1.0) for key in range(4))
    delta = shard.merge(update(told))
    assert delta is not None
    assert isinstance(delta.rows[0], Rows)
    assert delta.rows[0] is told
