"""The parts that lists are made of: row store, freshness, cursors, what is popular and new."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import LOG, NOW_MS

from featurestore import counters
from featurestore.encoder import Encoder
from featurestore.online import Cell
from featurestore.schema import default_schema
from models.index import top_k
from models.parameters import RETRIEVAL
from services.api.cursors import MAX_SHOWN, Cursors
from services.api.problems import Problem
from services.api.serving.freshness import Freshness
from services.api.serving.items import ItemState
from services.api.serving.popular import FRESH_MS, KEEP_MS, LOADING_MS, Popular
from services.api.serving.rows import KeyIndex, RowStore
from services.catalogue import FIRST_SEEN, Catalogue
from services.modelling import build_model
from services.parameter_server.types import DenseSnapshot, Mark
from services.settings.model import ModelSettings
from services.tokens import token_of

keys64 = st.integers(0, 2**64 - 1)


@given(st.lists(st.lists(keys64, max_size=20), max_size=6), st.lists(keys64, max_size=20))
def test_a_key_index_is_a_dictionary(batches: list[list[int]], asked: list[int]) -> None:
    index, reference = KeyIndex(), dict[int, int]()
    for batch in batches:
        new = [key for key in dict.fromkeys(batch) if key not in reference]
        numbers = range(len(reference), len(reference) + len(new))
        reference.update(zip(new, numbers, strict=True))
        index.add(np.array(new, np.uint64), np.array(numbers, np.int64))
    asked += [key for batch in batches for key in batch]
    found = index.find(np.array(asked, np.uint64)).tolist()
    assert found == [reference.get(key, -1) for key in asked]
    assert len(index) == len(reference)


def keys(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def rows(*values: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.array(values, np.float32)[:, None]


def test_rows_are_unknown_until_each_table_has_them() -> None:
    store = RowStore({"a": 1, "b": 1})
    store.watch(keys(3, 1, 3))
    assert sorted(store.unknown().tolist()) == [1, 3]
    store.update("a", keys(1), rows(5))
    assert sorted(store.unknown().tolist()) == [1, 3], "b has not come"
    store.update("b", keys(1), rows(6))
    assert store.unknown().tolist() == [3]
    store.watch(keys(1, 9))
    assert sorted(store.unknown().tolist()) == [3, 9]


def test_what_the_stream_brought_is_not_undone_by_a_late_fill() -> None:
    store = RowStore({"a": 1, "b": 1})
    store.watch(keys(1, 2))
    assert store.update("a", keys(2, 7), rows(50, 70)).tolist() == [2]
    store.fill(keys(1, 2), {"a": rows(1, 2), "b": rows(10, 20)})
    assert store.gather("a", keys(1, 2, 7))[0].ravel().tolist() == [1, 50, 0]
    assert store.gather("b", keys(2, 1))[0].ravel().tolist() == [20, 10]
    assert store.gather("a", keys(1, 2, 7))[1].tolist() == [True, True, False]
    assert len(store.unknown()) == 0
    assert len(store) == 2


def state(ids: list[str]) -> ItemState:
    items = ItemState(Catalogue(Encoder(default_schema())), build_model(default_schema(), ModelSettings()))
    items.apply_cells(ids, [{"categories": Cell(["x"], 1)} for _ in ids], NOW_MS)
    return items


def dense(items: ItemState, generation: int, scale: float = 1.0) -> DenseSnapshot:
    values = items.model.needs.dense.initial(np.random.default_rng(1)) * np.float32(scale)
    return DenseSnapshot(generation, values, {})


def drain(items: ItemState, slice_: int = 2) -> int:
    steps = 0
    while items.encode_served(slice_, NOW_MS):
        steps += 1
    while items.build_next(slice_, NOW_MS):
        steps += 1
    return steps


def test_items_are_encoded_in_slices_and_then_no_more() -> None:
    items = state(["a", "b", "c", "d", "e"])
    assert drain(items) == 0, "no dense weights yet"
    items.begin(dense(items, 1))
    assert drain(items) == 3
    assert drain(items) == 0
    assert items.current is not None
    assert items.current.encoded.all()


def test_only_the_item_whose_own_row_changed_is_encoded_anew() -> None:
    items = state(["a", "b"])
    items.begin(dense(items, 1))
    drain(items)
    assert items.current is not None
    before = items.current.index.vectors.copy()
    own = items.catalogue.keys[[1]]
    items.apply_rows(RETRIEVAL, own, np.full((1, 32), 0.5, np.float32))
    shared = items.model.item_keys(items.catalogue.encoded(np.array([0]), NOW_MS))[RETRIEVAL]
    items.apply_rows(RETRIEVAL, shared[shared != items.catalogue.keys[0]][:1], np.ones((1, 32), np.float32))
    assert drain(items) == 1
    after = items.current.index.vectors
    assert np.array_equal(before[0], after[0])
    assert not np.array_equal(before[1], after[1])


def test_a_change_during_the_building_of_a_generation_reaches_both() -> None:
    items = state(["a", "b", "c", "d"])
    items.begin(dense(items, 1))
    drain(items)
    served = items.current
    items.begin(dense(items, 2, scale=1.2))
    assert items.build_next(3, NOW_MS)
    assert items.current is served, "not before it is whole"
    assert items.newest_generation == 2
    own = items.catalogue.keys[[0]]
    row = np.full((1, 32), 0.5, np.float32)
    items.apply_rows(RETRIEVAL, own, row)
    items.apply_cells(["e"], [{}], NOW_MS)
    assert items.encode_served(5, NOW_MS), "the served generation has the change first"
    assert items.current is served
    drain(items)
    assert items.current is not served
    assert items.current is not None
    reference = state(["a", "b", "c", "d"])
    reference.apply_cells(["e"], [{}], NOW_MS)
    reference.apply_rows(RETRIEVAL, own, row)
    reference.begin(dense(items, 2, scale=1.2))
    drain(reference, 100)
    assert reference.current is not None
    assert np.allclose(items.current.index.vectors, reference.current.index.vectors, atol=1e-6)
    assert len(items.current.index) == 5


def test_the_index_is_as_fresh_as_its_stalest_shard() -> None:
    async def check() -> None:
        fresh = Freshness(LOG, 2)
        assert fresh.marks == {}
        fresh.advance(0, 2, {(LOG, 0): Mark(5, 50), (LOG, 1): Mark(9, 90)})
        assert fresh.marks == {}, "the other shard has not spoken"
        fresh.advance(1, 2, {(LOG, 0): Mark(7, 70), ("old log", 1): Mark(99, 99)})
        assert fresh.marks == {0: Mark(5, 50), 1: Mark(-1, 0)}
        assert fresh.covers(token_of(LOG, [(0, 5)]))
        assert not fresh.covers(token_of(LOG, [(0, 6)]))
        assert not fresh.covers(token_of(LOG, [(0, 5), (1, 0)]))
        assert fresh.with_pulled({(LOG, 0): Mark(4, 40)}) == {0: Mark(4, 40), 1: Mark(-1, 0)}

    asyncio.run(check())


def test_waiting_for_freshness_ends_with_the_shard_that_was_missing() -> None:
    async def check() -> tuple[bool, bool]:
        fresh = Freshness(LOG, 1)
        token = token_of(LOG, [(0, 3)])
        early = await fresh.reached(token, 0.01)
        waiting = asyncio.create_task(fresh.reached(token, 5))
        for shard, offset in ((0, 3), (1, 2), (1, 3)):
            await asyncio.sleep(0)
            assert not waiting.done()
            fresh.advance(shard, 2, {(LOG, 0): Mark(offset, offset)})
        return early, await waiting

    assert asyncio.run(check()) == (False, True)


def test_too_many_waiting_for_freshness_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.api.serving.freshness.MAX_WAITING", 2)

    async def check() -> None:
        fresh = Freshness(LOG, 1)
        token = token_of(LOG, [(0, 3)])
        waiting = [asyncio.create_task(fresh.reached(token, 5)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="overloaded"):
            await fresh.reached(token, 5)
        fresh.advance(0, 1, {(LOG, 0): Mark(3, 3)})
        assert await asyncio.gather(*waiting) == [True, True]
        assert not await fresh.reached(token_of(LOG, [(0, 4)]), 0.001), "there is room again"

    asyncio.run(check())


def test_a_smaller_number_of_shards_forgets_the_others() -> None:
    async def check() -> None:
        fresh = Freshness(LOG, 1)
        for shard in range(3):
            fresh.advance(shard, 3, {(LOG, 0): Mark(shard, 1)})
        assert fresh.marks[0].offset == 0
        fresh.advance(0, 1, {(LOG, 0): Mark(7, 1)})
        assert fresh.marks[0].offset == 7

    asyncio.run(check())


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_cursors_expire_and_tell_that_from_junk() -> None:
    clock = Clock()
    cursors: Cursors[str] = Cursors(1_800, 10, clock, len)
    cursor = cursors.open("wish", ["a", "b"], None)
    assert cursor is not None
    clock.now_s = 1_799
    assert list(cursors.find(cursor).items()) == ["a", "b"]
    clock.now_s = 1_801
    with pytest.raises(Problem, match="expired_cursor"):
        cursors.find(cursor)
    for junk in ("", "junk", cursor + "A", cursor[:-1], "A" * 22, "é" * 22, cursor * 50):
        with pytest.raises(Problem, match="invalid_cursor"):
            cursors.find(junk)


def test_cursors_are_bounded_and_the_oldest_go_first() -> None:
    cursors: Cursors[int] = Cursors(1_800, 3, Clock(), lambda _: 0)
    opened = [cursors.open(n, [str(n)], None) or "" for n in range(5)]
    assert len(cursors) == 3
    assert [cursors.find(cursor).request for cursor in opened[2:]] == [2, 3, 4]
    with pytest.raises(Problem, match="expired_cursor"):
        cursors.find(opened[0])


def test_a_list_remembers_all_its_pages_even_when_earlier_cursors_went() -> None:
    cursors: Cursors[int] = Cursors(1_800, 2, Clock(), lambda _: 0)
    first = cursors.find(cursors.open(0, ["a"], None) or "")
    second = cursors.find(cursors.open(0, ["b"], first) or "")
    third = cursors.find(cursors.open(0, ["c"], second) or "")
    assert sorted(third.items()) == ["a", "b", "c"]
    assert cursors.open(0, ["x"] * MAX_SHOWN, third) is None


def test_cursors_of_large_requests_leave_earlier() -> None:
    cursors: Cursors[int] = Cursors(1_800, 10, Clock(), lambda size: size)
    opened = [cursors.open(150, ["a"], None) or "" for _ in range(3)]
    assert len(cursors) == 1, "10 cursors may hold 200 ids together"
    assert cursors.find(opened[2]).request == 150
    small = [cursors.open(0, ["a"], None) or "" for _ in range(9)]
    assert len(cursors) == 10
    assert cursors.find(small[0]).count == 1
    cursors.open(0, ["a"], None)
    assert len(cursors) == 10
    assert cursors.open(10_000, ["a"], None) is not None
    assert len(cursors) == 1


def catalogue_of(first_seen_ms: list[int]) -> Catalogue:
    catalogue = Catalogue(Encoder(default_schema()))
    cells = [{FIRST_SEEN: Cell(time_ms, 1)} for time_ms in first_seen_ms]
    catalogue.apply([f"i{n}" for n in range(len(cells))], cells, NOW_MS)
    return catalogue


def liked(count: float) -> dict[str, Cell]:
    counted = counters.Counts(
        np.zeros(1, np.uint64),
        np.zeros(1, np.int64),
        counters.Decayed(np.array([NOW_MS]), np.full((1, 4), count)),
    )
    half_lives = default_schema().half_lives("item")
    return {f"{counters.PREFIX}0": Cell(counters.encode(counted, half_lives)[0], NOW_MS)}


def test_popularity_follows_what_is_touched_and_decays() -> None:
    catalogue = Catalogue(Encoder(default_schema()))
    popular = Popular(catalogue)
    everything = np.ones(3, bool)
    popular.touch(catalogue.apply(["a", "b"], [liked(2), liked(5)], NOW_MS))
    assert popular.liked(9, everything[:2], NOW_MS).tolist() == [1, 0]
    popular.touch(catalogue.apply(["a", "c"], [liked(7), liked(6)], NOW_MS))
    assert popular.liked(9, everything, NOW_MS).tolist() == [0, 2, 1], "it grew, so it looks at once"
    popular.touch(catalogue.apply(["b"], [liked(9)], NOW_MS))
    assert popular.liked(9, everything, NOW_MS + KEEP_MS - 1).tolist() == [0, 2, 1]
    assert popular.liked(9, everything, NOW_MS + KEEP_MS).tolist() == [1, 0, 2]
    assert popular.scores(NOW_MS + KEEP_MS).tolist() == pytest.approx([7, 9, 6], rel=1e-4)
    week = NOW_MS + 7 * 86_400_000
    assert popular.scores(week).tolist() == pytest.approx([3.5, 4.5, 3], rel=1e-4)


def test_nothing_is_new_in_a_catalogue_that_was_loaded_as_a_whole() -> None:
    catalogue = catalogue_of([NOW_MS - 1_000 + n for n in range(100)])
    everything = np.ones(100, bool)
    assert len(Popular(catalogue).newest(10, everything, NOW_MS)) == 0


def test_what_came_after_the_load_is_new_for_a_day() -> None:
    loaded = NOW_MS - 10**7
    catalogue = catalogue_of([loaded] * 98 + [loaded + LOADING_MS + 2, loaded + LOADING_MS + 1])
    popular = Popular(catalogue)
    everything = np.ones(100, bool)
    assert popular.newest(10, everything, NOW_MS).tolist() == [98, 99]
    assert popular.newest(1, everything, NOW_MS).tolist() == [98]
    everything[98] = False
    assert popular.newest(10, everything, NOW_MS).tolist() == [99]
    assert len(popular.newest(10, everything, NOW_MS + FRESH_MS)) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=50), st.integers(1, 60))
def test_popular_items_are_always_allowed_ones(allowed: list[bool], most: int) -> None:
    catalogue = catalogue_of([1] * len(allowed))
    mask = np.array(allowed)
    found = Popular(catalogue).liked(most, mask, NOW_MS)
    assert mask[found].all()
    assert len(found) == min(most, int(mask.sum()))
    assert len(set(found.tolist())) == len(found)


def test_a_narrow_filter_looks_beyond_the_shortlist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.api.serving.popular.SHORTLIST", 3)
    catalogue = catalogue_of([1] * 20)
    mask = np.zeros(20, bool)
    mask[[15, 19]] = True
    assert Popular(catalogue).liked(5, mask, NOW_MS).tolist() == [15, 19]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3_000),
    st.integers(0, 40),
    st.sampled_from([2, 30, 10**6]),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_the_best_of_many_are_the_head_of_a_stable_sort(
    count: int, most: int, distinct: int, hidden_tenths: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    scores = chance.integers(-distinct, distinct, count).astype(np.float32)
    allowed = chance.random(count) >= hidden_tenths / 10
    rows = np.flatnonzero(allowed)
    expected = rows[np.argsort(-scores[rows], kind="stable")][:most]
    hits = top_k(scores, most, allowed)
    assert hits.rows.tolist() == expected.tolist()
    assert hits.scores.tolist() == scores[expected].tolist()
