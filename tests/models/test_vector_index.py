"""Exact search against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.index import VectorIndex, top_k


@given(
    scores=st.lists(st.integers(-3, 3), max_size=30),
    k=st.integers(0, 35),
    masked=st.booleans(),
    seed=st.integers(0, 100),
)
def test_top_k_is_the_head_of_a_stable_sort(scores, k, masked, seed):
    values = np.array(scores, np.float32)
    allowed = np.random.default_rng(seed).random(len(values)) < 0.6 if masked else None
    rows = np.flatnonzero(allowed) if allowed is not None else np.arange(len(values))
    expected = rows[np.argsort(-values[rows], kind="stable")][:k]
    hits = top_k(values, k, allowed)
    np.testing.assert_array_equal(hits.rows, expected)
    np.testing.assert_array_equal(hits.scores, values[expected])


def filled(rows: int = 50, dim: int = 5, seed: int = 0) -> tuple[VectorIndex, np.ndarray]:
    vectors = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    index = VectorIndex(dim)
    index.update(np.arange(rows), vectors)
    return index, vectors


def test_search_finds_the_largest_inner_products():
    index, vectors = filled()
    queries = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    for query, hits in zip(queries, index.search(queries, 7), strict=True):
        np.testing.assert_array_equal(hits.rows, np.argsort(-(vectors @ query), kind="stable")[:7])
        np.testing.assert_allclose(hits.scores, np.sort(vectors @ query)[::-1][:7], rtol=1e-5)


def test_masked_rows_are_never_found():
    index, _ = filled()
    allowed = np.zeros(50, bool)
    allowed[[3, 8]] = True
    assert set(index.search(np.ones((1, 5), np.float32), 10, allowed)[0].rows.tolist()) == {3, 8}


def test_rows_can_change_and_be_added():
    index, _ = filled(10)
    index.update(np.array([4, 5_000]), np.full((2, 5), 99, np.float32))
    assert len(index) == 5_001
    assert set(index.search(np.ones((1, 5), np.float32), 2)[0].rows.tolist()) == {4, 5_000}
    assert not index.vectors[20].any()


def test_similar_is_by_cosine_without_the_bias():
    index = VectorIndex(3)
    vectors = np.array([[1, 0, 0], [5, 1, -100], [0.1, 0, 50], [0, 1, 100], [0, 0, 7]], np.float32)
    index.update(np.arange(5), vectors)
    hits = index.similar(np.array([0]), 10)
    np.testing.assert_array_equal(hits.rows, [2, 1, 3, 4])
    np.testing.assert_allclose(hits.scores, [1, 5 / np.sqrt(26), 0, 0], atol=1e-6)
    np.testing.assert_array_equal(index.directions(np.array([4])), [[0, 0]])


def test_similar_to_several_leaves_all_of_them_out_and_respects_the_mask():
    index, vectors = filled(20)
    allowed = np.ones(20, bool)
    allowed[7] = False
    hits = index.similar(np.array([1, 2]), 30, allowed)
    assert set(hits.rows.tolist()) == set(range(20)) - {1, 2, 7}
    assert allowed[1]
    unit = vectors[:, :4] / np.linalg.norm(vectors[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(hits.scores[0], (unit @ (unit[1] + unit[2]) / 2)[hits.rows[0]], rtol=1e-4)


def test_what_does_not_fit_is_refused():
    index = VectorIndex(3)
    with pytest.raises(ValueError, match="shape"):
        index.update(np.array([0]), np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="finite"):
        index.update(np.array([0]), np.full((1, 3), np.nan, np.float32))
    with pytest.raises(ValueError, match="at least 0"):
        index.update(np.array([-1]), np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="bias"):
        VectorIndex(1)
    assert len(index) == 0
