"""Rates, intervals and bounds against closed forms and counting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from federated.attacks.inversion import judge
from federated.attacks.rates import (
    auc_of,
    clopper_pearson,
    curve_of,
    most_advantage,
    most_identified,
    most_true,
    told,
    wilson,
)
from federated.attacks.spread import spread_of, squared_distances


def test_wilson_is_as_published() -> None:
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    found = wilson(81, 263)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    assert (wilson(0, 20).low, round(wilson(0, 20).high, 4)) == (0.0, 0.1611)
    assert wilson(20, 20).high == 1.0
    with pytest.raises(ValueError, match="3 hits among 2"):
        wilson(3, 2)


def test_clopper_and_pearson_are_as_published() -> None:
    found = clopper_pearson(81, 263)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2527, 0.3676)
    for tries in (5, 2_000):  # of none and of all there is a closed form
        assert clopper_pearson(0, tries).high == pytest.approx(1.0 - 0.025 ** (1.0 / tries), rel=1e-9)
        assert clopper_pearson(tries, tries).low == pytest.approx(0.025 ** (1.0 / tries), rel=1e-9)


def test_the_exact_interval_misses_seldom_enough() -> None:
    for rate in (0.001, 0.02, 0.5):
        drawn = np.random.default_rng(1).binomial(120, rate, 200)
        missed = sum(not clopper_pearson(int(hits), 120).holds(rate) for hits in drawn)
        assert missed <= 0.05 * 200 + 3.0 * math.sqrt(200 * 0.05 * 0.95)


def test_area_and_curve_are_those_of_counting() -> None:
    generator = np.random.default_rng(2)
    members, others = generator.integers(0, 6, 40) + 1.0, generator.integers(0, 6, 30) + 0.0
    above = np.mean([(m > o) + 0.5 * (m == o) for m in members for o in others])
    assert auc_of(members, others) == pytest.approx(above)
    false, true = curve_of(members, others)
    assert (false[0], true[0], false[-1], true[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert np.trapezoid(true, false) == pytest.approx(above)
    found = told(members, others, generator)
    assert found.auc.low < found.auc.value < found.auc.high
    assert found.advantage.value == pytest.approx(
        max((members >= t).mean() - (others >= t).mean() for t in range(8))
    )


def test_bounds_meet_their_ends() -> None:
    assert most_true(0.2, 0.0, 0.0) == pytest.approx(0.2)
    assert most_true(0.01, 1.0, 0.001) == pytest.approx(math.e * 0.01 + 0.001)
    assert most_true(0.01, math.inf, 0.0) == most_identified(math.inf, 0.0, 1_000) == 1.0
    assert most_identified(0.0, 0.0, 1_000) == pytest.approx(0.001)
    for epsilon, delta in ((0.1, 0.0), (1.0, 0.05), (5.0, 1e-5)):
        highest = max(most_true(false, epsilon, delta) - false for false in np.linspace(0, 1, 20_001))
        assert highest == pytest.approx(most_advantage(epsilon, delta), abs=1e-4)


def test_whitening_is_the_inverse_covariance() -> None:
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(40, 12)) @ generator.normal(size=(12, 12))
    spread = spread_of([(rows, 3.0)], 0.5, 12)
    covariance = spread.basis @ np.diag(spread.variances) @ spread.basis.T + spread.floor * np.eye(12)
    a, b = generator.normal(size=(2, 5, 12))
    wanted = [[(x - y) @ np.linalg.solve(covariance, x - y) for y in b] for x in a]
    assert np.allclose(squared_distances(spread.whiten(a), spread.whiten(b)), wanted)


def test_equal_scores_are_chance() -> None:
    found = judge(np.zeros((4_000, 50)), np.zeros(4_000, np.int64), np.random.default_rng(4))
    assert found.top_1.holds(0.02)
    assert found.mean_rank.holds(25.5)
