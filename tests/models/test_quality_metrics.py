"""Metrics on examples small enough to do by hand, and against slow definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.metrics import auc, best_f1_threshold, capped_recall_at_k, f1, ndcg_at_k, recall_at_k

RANKED = np.array([7, 3, 9, 1, 5])


def test_recall_divides_by_all_relevant_and_its_capped_form_by_at_most_k():
    relevant = np.array([3, 1, 8, 7])
    assert recall_at_k(RANKED, relevant, 2) == 2 / 4
    assert capped_recall_at_k(RANKED, relevant, 2) == 1
    assert recall_at_k(RANKED, relevant, 5) == capped_recall_at_k(RANKED, relevant, 5) == 3 / 4
    assert recall_at_k(RANKED, np.array([5]), 4) == 0


def test_ndcg_by_hand():
    # Hits at places 1 and 4 of 4, three relevant items.
    gained = 1 + 1 / np.log2(5)
    best = 1 + 1 / np.log2(3) + 1 / np.log2(4)
    assert ndcg_at_k(RANKED, np.array([7, 1, 8]), 4) == pytest.approx(gained / best)
    assert ndcg_at_k(RANKED, np.array([7, 3]), 2) == 1
    assert ndcg_at_k(RANKED[:1], np.array([7, 3]), 2) == pytest.approx(1 / (1 + 1 / np.log2(3)))


@pytest.mark.parametrize("metric", [recall_at_k, capped_recall_at_k, ndcg_at_k])
def test_a_user_without_relevant_items_has_no_recall(metric):
    with pytest.raises(ValueError, match="relevant"):
        metric(RANKED, np.array([], np.int64), 3)
    with pytest.raises(ValueError, match="k is"):
        metric(RANKED, np.array([1]), 0)


def test_auc_counts_ties_half():
    assert auc(np.array([1, 0]), np.array([0.5, 0.5])) == 0.5
    assert auc(np.array([1, 1, 0, 0]), np.array([3.0, 1.0, 1.0, 0.0])) == (2 + 1 + 0.5) / 4


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=30).filter(
        lambda rows: 0 < sum(label for label, _ in rows) < len(rows)
    )
)
def test_auc_is_the_share_of_pairs_in_order(rows):
    labels, scores = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    pairs = scores[labels == 1][:, None] - scores[labels == 0]
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert auc(labels, scores) == pytest.approx(expected)


def test_auc_needs_both_classes():
    with pytest.raises(ValueError, match="positive and a negative"):
        auc(np.ones(3), np.arange(3.0))


def test_f1_by_hand():
    labels, scores = np.array([1, 0, 1, 0, 1]), np.array([0.9, 0.8, 0.7, 0.2, 0.1])
    assert f1(labels, scores, 0.7) == 2 * 2 / (2 * 2 + 1 + 1)
    assert f1(labels, scores, 0.95) == 0
    assert f1(np.zeros(2), np.zeros(2), 1.0) == 0


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=20).filter(
        lambda rows: any(label for label, _ in rows)
    )
)
def test_the_chosen_threshold_has_the_best_f1(rows):
    labels, scores = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    values = {float(t): f1(labels, scores, t) for t in scores}
    best = max(values.values())
    assert best_f1_threshold(labels, scores) == max(t for t, v in values.items() if v >= best - 1e-12)


def test_a_threshold_needs_data():
    with pytest.raises(ValueError, match="validation"):
        best_f1_threshold(np.array([]), np.array([]))
