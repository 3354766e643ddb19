"""Bins, losses, whole numbers, and boosting in the clear against scikit-learn's and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier

from federated.vertical.boosting.candidates import candidates_of
from federated.vertical.boosting.model import GuestModel, HostModel, load
from federated.vertical.boosting.objective import Objective, Rule, fit_objective, gains, whole
from federated.vertical.boosting.options import BoostingOptions
from federated.vertical.boosting.plain import boost
from federated.vertical.boosting.trees import Splits, Tree
from federated.vertical.evaluation import measures
from federated.vertical.histograms.bins import encode, fit_edges
from federated.vertical.histograms.lanes import HALF
from federated.vertical.parties import PeerFault

Array = npt.NDArray[Any]


def columns(rows: int = 300) -> Array:
    generator = np.random.default_rng(3)
    found = generator.normal(size=(rows, 5))
    found[:, 1] = generator.integers(0, 3, rows)
    found[generator.random(rows) < 0.2, 2] = np.nan
    found[:, 3] = 7.0
    found[:, 4] = np.nan
    return found


def test_codes_say_exactly_what_edges_say() -> None:
    features = columns()
    edges = fit_edges(features, 8)
    codes = encode(features, edges)
    assert [len(own) for own in edges] == [7, 2, 7, 0, 0]
    for place, own in enumerate(edges):
        there = ~np.isnan(features[:, place])
        for number, edge in enumerate(own):
            left = codes[there, place] <= number
            assert np.array_equal(left, features[there, place] <= edge)
            assert 0 < left.sum() < there.sum()
    assert (codes[np.isnan(features)] == -1).all()
    # Quantiles: no bin of a continuous column has more than twice its share.
    assert np.bincount(codes[:, 0]).max() <= 2 * 300 / 8


def test_bins_and_missing_values_of_few_rows_are_joined() -> None:
    features = np.repeat([0.0, 1.0, 2.0, 3.0, 4.0], [50, 3, 2, 40, 4])[:, None]
    (edges,) = fit_edges(features, 8, 5)
    # 1 and 2 are joined, 4 goes with 3.
    assert edges.tolist() == [0.5, 2.5]
    features = np.concatenate([features, np.full((4, 1), np.nan)])
    codes = encode(features, (edges,))
    assert not candidates_of(codes, (edges,), 5).missing_left.any()
    assert candidates_of(codes, (edges,), 4).missing_left.sum() == 3


def test_huge_values_have_finite_edges() -> None:
    (edges,) = fit_edges(np.array([[1.5e308], [1.7e308]]), 4)
    assert np.isfinite(edges).all()
    assert len(edges) == 1


def test_candidates_sums_are_those_of_their_rows() -> None:
    features = columns()
    edges = fit_edges(features, 8)
    codes = encode(features, edges)
    candidates = candidates_of(codes, edges)
    # 7 + 2, then 7 with and without what is missing, and what is missing alone.
    assert len(candidates) == 7 + 2 + 15
    values = np.random.default_rng(4).integers(-(2**38), 2**38, (300, 3))
    some = np.arange(0, 300, 3)
    left = candidates.left(codes[some])
    assert np.array_equal(
        candidates.sum_left(codes[some], values[some]), left.astype(np.int64) @ values[some]
    )
    assert np.array_equal(candidates.count_left(codes[some]), left.sum(axis=1))
    alone = int(np.flatnonzero(candidates.edge == -1)[0])
    assert np.array_equal(left[alone], np.isnan(features[some, 2]))


@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared"])
def test_derivatives_are_those_of_the_loss(loss: str) -> None:
    generator = np.random.default_rng(5)
    labels = generator.integers(0, 2 if loss == "logistic" else 3, 50).astype(np.float64)
    objective, targets = fit_objective(labels, loss)
    scores = generator.normal(size=(50, objective.outputs))

    def loss_of(at: Array) -> Array:
        if loss == "squared":
            found: Array = ((at - targets) ** 2 / 2).sum(axis=1)
            return found
        if loss == "logistic":
            return np.asarray(np.log1p(np.exp(at)) - targets * at)[:, 0]
        return np.asarray(np.log(np.exp(at).sum(axis=1)) - (targets * at).sum(axis=1))

    found = objective.derivatives(scores, targets)
    for output in range(objective.outputs):
        step = np.zeros(objective.outputs)
        step[output] = 1e-4
        up, here, down = loss_of(scores + step), loss_of(scores), loss_of(scores - step)
        assert found[:, output] == pytest.approx((up - down) / 2e-4, abs=1e-6)
        assert found[:, objective.outputs + output] == pytest.approx((up - 2 * here + down) / 1e-8, abs=1e-5)


def test_scores_far_out_neither_overflow_nor_vanish() -> None:
    objective = Objective("logistic", np.zeros(1))
    found = objective.derivatives(np.array([[-1e4], [1e4]]), np.array([[0.0], [1.0]]))
    assert np.array_equal(found, [[0.0, 1e-6], [0.0, 1e-6]])
    with pytest.raises(ValueError, match="two values"):
        fit_objective(np.array([0.0, 1.0, 2.0]), "logistic")
    with pytest.raises(ValueError, match="2 to 20"):
        fit_objective(np.arange(30.0), "softmax")


@pytest.mark.parametrize("power", [-900, -20, 0, 30, 900])
def test_numbers_in_another_unit_grow_the_same_trees(power: int) -> None:
    generator = np.random.default_rng(9)
    features = generator.normal(size=(120, 3))
    labels = 50 + 7 * features[:, 0] - features[:, 1]
    one, other = (
        boost(features, numbers, trees=3, depth=2, bins=8, rule=Rule(), loss="squared")
        for numbers in (labels, np.ldexp(labels, power))
    )
    assert len(one.splits) > 3
    assert other.splits == one.splits
    assert np.array_equal(other.answer(features), np.ldexp(one.answer(features), power))
    assert np.abs(one.answer(features) - labels).std() < labels.std() / 2


def test_a_units_size_never_comes_from_rounding() -> None:
    objective, targets = fit_objective(np.full(3, 0.1), "squared")
    assert objective.answer(np.tile(objective.base, (3, 1))) == pytest.approx(0.1)
    assert np.ptp(targets) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=40),
    st.integers(1_000, HALF),
    st.integers(0, 2**32),
)
def test_no_subset_of_rows_overflows(numbers: list[float], half: int, seed: int) -> None:
    found = whole(np.array(numbers)[:, None], half)
    values = [int(one) for one in found.values[:, 0]]
    # The extreme subsets, and one at random.
    assert sum(one for one in values if one > 0) <= half
    assert -sum(one for one in values if one < 0) <= half
    assert abs(sum(np.random.default_rng(seed).permutation(values)[: len(values) // 2])) <= half
    # As fine as a power of two can be: four times finer would not fit, unless at the ends of what is sensible.
    total = sum(abs(one) for one in numbers)
    if total > 1e-3 and half > 100 * len(numbers):
        assert total * found.scale[0] * 4.2 > half
    assert found.values[:, 0] / found.scale[0] == pytest.approx(numbers, abs=0.5001 / float(found.scale[0]))


def test_rows_that_cannot_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        whole(np.ones((100, 1)), 120)


def test_a_split_is_the_best_of_all() -> None:
    """Every threshold of every column tried by hand, with the formulas written out."""
    generator = np.random.default_rng(6)
    features = generator.integers(0, 6, (80, 3)).astype(np.float64)
    labels = ((features[:, 1] > 2) ^ (generator.random(80) < 0.2)).astype(np.float64)
    rule = Rule(l2=0.5, least_rows=3)
    model = boost(features, labels, trees=1, depth=1, bins=16, rule=rule, loss="logistic")
    share = labels.mean()
    first, second = share - labels, np.full(80, share * (1 - share))
    best = (-np.inf, 0, 0.0)
    for column in range(3):
        for threshold in np.arange(6) + 0.5:
            left = features[:, column] <= threshold
            if min(left.sum(), (~left).sum()) < 3:
                continue
            gain = sum(first[side].sum() ** 2 / (second[side].sum() + 0.5) for side in (left, ~left))
            gain -= first.sum() ** 2 / (second.sum() + 0.5)
            best = max(best, (float(gain), column, float(threshold)))
    assert (model.splits.feature[0], model.splits.threshold[0]) == best[1:]
    assert model.trees[0].gain[0] == pytest.approx(best[0], rel=1e-6)
    left = features[:, best[1]] <= best[2]
    expected = [-0.3 * first[side].sum() / (second[side].sum() + 0.5) for side in (left, ~left)]
    assert [one[0] for one in model.trees[0].value[1:]] == pytest.approx(expected, rel=1e-6)


def test_boosting_in_the_clear_is_as_good_as_scikit_learn() -> None:
    found_set = load_breast_cancer()
    features, labels = found_set.data, found_set.target.astype(np.float64)
    train, test = np.arange(0, 400), np.arange(400, len(labels))
    ours = boost(features[train], labels[train], trees=20, depth=3, bins=32, rule=Rule(), loss="logistic")
    theirs = HistGradientBoostingClassifier(
        max_iter=20, max_depth=3, max_bins=32, learning_rate=0.3, l2_regularization=1.0, early_stopping=False
    ).fit(features[train], labels[train])
    found = measures(labels[test], ours.answer(features[test]))["auc"]
    assert found > measures(labels[test], theirs.predict_proba(features[test])[:, 1])["auc"] - 0.005
    assert found > 0.98


def test_equal_gains_are_equal_however_sums_are_laid_out() -> None:
    sums = np.random.default_rng(7).integers(-(2**38), 2**38, (50, 24))
    sums[:, 12:] = np.abs(sums[:, 12:])
    total, scale = np.abs(sums).sum(axis=0), np.exp2(np.arange(24.0))
    whole_array = gains(sums, total, scale, 1.0)
    assert np.array_equal(whole_array, gains(np.asfortranarray(sums), total, scale, 1.0))
    assert np.array_equal(whole_array[7:8], gains(sums[7:8].copy(), total, scale, 1.0))


def test_missing_values_go_where_the_split_says() -> None:
    splits = Splits()
    splits.add(0, 1.0, True)
    splits.add(0, 1.0, False)
    splits.add(0, -np.inf, True)
    rows = np.array([[np.nan], [1.0], [2.0]])
    assert splits.left(rows).tolist() == [[True, False, True], [True, True, False], [False, False, False]]


def guest_model() -> GuestModel:
    tree = Tree(1)
    left, right = tree.divide(tree.add(), 1, 0, 2.5)
    tree.value[left], tree.value[right] = np.array([1.0]), np.array([-1.0])
    return GuestModel(Objective("squared", np.array([10.0])), ("a",), ("h",), Splits(), ([4],), [tree])


def test_models_are_read_back_and_shares_are_checked() -> None:
    model = load(guest_model().dump())
    assert isinstance(model, GuestModel)
    rows = np.zeros((2, 1))
    assert model.combine(rows, {"h": np.array([[True], [False]])}).tolist() == [11.0, 9.0]
    assert model.importance() == {"h column 4": (2.5, 1)}
    assert model.importance_by_party() == {"guest": (0.0, 0), "h": (2.5, 1)}
    for share in (np.zeros((2, 2), np.bool_), np.zeros((2, 1))):
        with pytest.raises(PeerFault, match="malformed"):
            model.combine(rows, {"h": share})
    with pytest.raises(ValueError, match="training is not over"):
        model.alone(rows)
    with pytest.raises(ValueError, match="1 columns"):
        model.alone(np.zeros((2, 3)))
    splits = Splits()
    splits.add(1, 0.5, False)
    part = load(HostModel(splits, np.array([1, 0]), ("a", "host"), 1).dump())
    assert isinstance(part, HostModel)
    assert part.names == ("a", "host")
    assert part.partial(np.array([[9.0, 0.0], [0.0, 9.0]])).tolist() == [[True], [False]]
    with pytest.raises(PeerFault, match="malformed"):
        load(b"")


@pytest.mark.parametrize(
    "wrong", [{"trees": 0}, {"depth": 9}, {"bins": 1}, {"rate": 0.0}, {"l2": 0.0}, {"loss": "hinge"}]
)
def test_options_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BoostingOptions(**wrong)  # type: ignore[arg-type]
