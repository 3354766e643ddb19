"""The pipeline stage by stage, and taste."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featurestore.encoded import Ragged
from models.recommend import (
    FRESH,
    POPULAR,
    TWO_TOWER,
    Channel,
    Choice,
    Liked,
    Pool,
    Reason,
    Signals,
    Weights,
    blend,
    merge,
    recommend,
    rerank,
)
from models.taste import Taste


def channel(*items: int) -> Channel:
    return Channel(np.array(items, np.int64), -np.arange(len(items), dtype=np.float32))


def pool(count: int, fresh: tuple[int, ...] = ()) -> Pool:
    source = np.zeros(count, np.int8)
    source[list(fresh)] = 1
    return Pool(np.arange(100, 100 + count), source, (TWO_TOWER, FRESH))


def signals(count: int, **given_: list[float]) -> Signals:
    zeros = np.zeros(count, np.float32)
    one = Signals(zeros, zeros, zeros, zeros)
    return replace(one, **{name: np.array(values, np.float32) for name, values in given_.items()})


def scores(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_channels_give_their_best_in_turn():
    merged = merge({TWO_TOWER: channel(5, 6, 7, 8), POPULAR: channel(1, 6, 2)}, np.ones(10, bool), limit=5)
    # Item 6 is second in both and counts for the first; 2 is third like 7, which comes first by channel.
    np.testing.assert_array_equal(merged.items, [5, 1, 6, 7, 2])
    assert [merged.sources[s] for s in merged.source] == [TWO_TOWER, POPULAR, TWO_TOWER, TWO_TOWER, POPULAR]


@given(
    lists=st.lists(st.lists(st.integers(-2, 14), max_size=12, unique=True), min_size=1, max_size=4),
    limit=st.integers(1, 20),
    seed=st.integers(0, 50),
)
def test_a_pool_is_distinct_allowed_and_bounded(lists, limit, seed):
    allowed = np.random.default_rng(seed).random(10) < 0.7
    merged = merge({f"c{n}": channel(*items) for n, items in enumerate(lists)}, allowed, limit)
    found = merged.items.tolist()
    every = {item for items in lists for item in items if 0 <= item < 10 and allowed[item]}
    assert len(set(found)) == len(found)
    assert set(found) <= every
    assert len(found) == min(limit, len(every))
    for item, source in zip(found, merged.source.tolist(), strict=True):
        assert source == next(n for n, items in enumerate(lists) if item in items)


def test_nothing_allowed_gives_an_empty_list_through_all_stages():
    merged = merge({TWO_TOWER: channel(1, 2)}, np.zeros(5, bool), 10)
    assert len(merged) == 0
    assert recommend(merged, signals(0), Weights(), Choice(5, diversity=0.5, explore=2)) == []


def test_blend_is_the_weighted_sum_and_ranking_is_centred():
    found = blend(
        signals(2, retrieval=[1, 2], ranking=[-9, -5], popularity=[0, 9.7], taste=[0, 0.5]),
        Weights(retrieval=2, ranking=0.5, popularity=1, taste=4),
    )
    np.testing.assert_allclose(found, [2 - 1 + np.log(0.3), 4 + 1 + np.log(10) + 2], rtol=1e-5)


def test_blend_does_without_ranking():
    without = replace(signals(2, retrieval=[1, 2]), ranking=None)
    np.testing.assert_allclose(
        blend(without, Weights(popularity=0)), blend(signals(2, retrieval=[1, 2]), Weights(popularity=0))
    )


def test_rerank_sorts_cuts_and_respects_the_least_score():
    ordered = rerank(pool(4), scores(1, 4, 3, 2), None, Choice(3))
    np.testing.assert_array_equal(ordered, [1, 2, 3])
    np.testing.assert_array_equal(rerank(pool(4), scores(1, 4, 3, 2), None, Choice(3, min_score=3)), [1, 2])


def test_diversity_passes_over_a_near_copy():
    vectors = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    close = scores(3, 2.9, 2.5)
    np.testing.assert_array_equal(rerank(pool(3), close, vectors, Choice(2)), [0, 1])
    np.testing.assert_array_equal(rerank(pool(3), close, vectors, Choice(2, diversity=0.5)), [0, 2])


@given(diversity=st.floats(0, 1), n=st.integers(1, 12), seed=st.integers(0, 50))
def test_diversity_lists_each_item_once_and_the_best_first(diversity, n, seed):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=8).astype(np.float32)
    vectors = generator.normal(size=(8, 3)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    listed = rerank(pool(8), values, vectors, Choice(n, diversity=diversity))
    assert len(set(listed.tolist())) == len(listed) == min(n, 8)
    if diversity < 1:
        assert listed[0] == values.argmax()


def test_exploration_gives_the_last_place_to_the_best_fresh_item():
    listed = rerank(pool(5, fresh=(3, 4)), scores(5, 4, 3, 1, 2), None, Choice(3, explore=1))
    np.testing.assert_array_equal(listed, [0, 1, 4])


def test_exploration_takes_nothing_where_a_fresh_item_is_listed_by_score():
    listed = rerank(pool(5, fresh=(0, 4)), scores(5, 4, 3, 1, 2), None, Choice(3, explore=1))
    np.testing.assert_array_equal(listed, [0, 1, 2])
    np.testing.assert_array_equal(rerank(pool(3), scores(1, 2, 3), None, Choice(2, explore=1)), [2, 1])


def test_reasons_name_the_liked_item_taste_novelty_and_popularity():
    vectors = np.array([[1, 0], [0, 1], [0, -1], [0, -1]], np.float32)
    liked = Liked(np.array([40, 41]), np.array([[-1, 0], [0.9, 0.1]], np.float32))
    listed = recommend(
        pool(4, fresh=(2,)),
        signals(4, retrieval=[4, 3, 2, 1], popularity=[0, 50, 0, 0], taste=[0.4, 0, 0, 0]),
        Weights(popularity=0),
        Choice(4),
        vectors,
        liked,
    )
    assert [one.item for one in listed] == [100, 101, 102, 103]
    assert [one.reasons for one in listed] == [
        (Reason("similar_to", 41), Reason("fits_taste")),
        (Reason("popular"),),
        (Reason("new"),),
        (Reason("for_you"),),
    ]
    assert listed[2].source == FRESH
    assert listed[0].stages == pytest.approx({"retrieval": 4, "ranking": 0, "popularity": 0, "taste": 0.4})


def lists(*rows: list[int]) -> Ragged:
    offsets = np.cumsum([0, *map(len, rows)])
    return Ragged(np.array([value for row in rows for value in row], np.uint64), offsets)


CATALOGUE = lists([1], [1], [1, 2], [2], [3], [3, 1], [])


def test_taste_prefers_what_was_liked():
    affinity = Taste.of(CATALOGUE).affinity(lists([2], [2]), CATALOGUE)
    assert affinity.argmax() == 3
    assert affinity[3] > affinity[2] > 0
    assert affinity[[0, 1, 4, 5]].max() < 0
    assert affinity[6] == 0


def test_taste_grows_with_the_number_of_likes():
    taste = Taste.of(CATALOGUE)
    one, five = (taste.affinity(lists(*[[2]] * n), CATALOGUE)[3] for n in (1, 5))
    assert one * 2 == pytest.approx(five * 6 / 5, rel=1e-6)


def test_taste_without_likes_says_nothing():
    assert not Taste.of(CATALOGUE).affinity(lists(), CATALOGUE).any()


def test_taste_is_neutral_over_the_catalogue_for_its_mean_user():
    affinity = Taste.of(CATALOGUE).affinity(CATALOGUE, CATALOGUE)
    np.testing.assert_allclose(affinity, 0, atol=1e-6)


def test_unknown_categories_and_empty_catalogues_do_no_harm():
    assert not Taste.of(CATALOGUE).affinity(lists([77]), lists([88])).any()
    assert not Taste.of(lists()).affinity(lists([1]), lists([1], [2])).any()
