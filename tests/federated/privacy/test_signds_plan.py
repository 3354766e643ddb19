"""How many coordinates SignDS names: the published numbers, exact arithmetic, and ε by every pair of inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from federated.layout import Field, Layout
from federated.privacy.mechanisms import make_protection
from federated.privacy.randomness import SeededRandomness
from federated.privacy.section import PrivacySection
from federated.privacy.signds.advice import largest_step, step_warning
from federated.privacy.signds.plan import Plan, make_plan, plan_for

# (d, sign_k, ε): (h, ν_th) at ratio .6
PUBLISHED = {
    (66_521, 0.01, 8): (1, 1), (66_521, 0.01, 16): (4, 3), (66_521, 0.01, 50): (19, 12),
    (66_521, 0.01, 100): (43, 26), (66_521, 0.1, 4): (1, 1), (66_521, 0.1, 8): (4, 3),
    (66_521, 0.1, 16): (14, 9), (66_521, 0.1, 50): (56, 34), (66_521, 0.1, 100): (121, 73),
    (66_521, 0.2, 4): (3, 2), (66_521, 0.2, 8): (9, 6), (66_521, 0.2, 16): (27, 17),
    (66_521, 0.2, 50): (111, 67), (66_521, 0.2, 100): (238, 143), (1_000, 0.2, 8): (9, 6),
    (1_000, 0.2, 16): (26, 16),
}  # fmt: skip


@pytest.mark.parametrize(("given", "wanted"), PUBLISHED.items())
def test_h_and_its_threshold_are_the_published_ones(
    given: tuple[int, float, int], wanted: tuple[int, int]
) -> None:
    plan = plan_for(given[0], given[1], float(given[2]), 0.6, 0)
    assert (plan.named, plan.threshold) == wanted
    assert plan.expected >= 0.6 * plan.named


@pytest.mark.parametrize(("epsilon", "expected"), [(1.0, 0.405), (2.0, 0.649)])
def test_one_named_coordinate_is_among_the_largest_as_often_as_published(
    epsilon: float, expected: float
) -> None:
    assert round(plan_for(66_521, 0.2, epsilon, 0.6, 1).expected, 3) == expected


def exact_mean(dimension: int, top: int, named: int, threshold: int, power: Fraction) -> Fraction:
    """E[ν] with e^ε = ``power``."""
    weights = [
        math.comb(top, overlap)
        * math.comb(dimension - top, named - overlap)
        * (power if overlap >= threshold else 1)
        for overlap in range(named + 1)
    ]
    return sum((Fraction(overlap) * weight for overlap, weight in enumerate(weights)), Fraction(0)) / sum(
        weights, Fraction(0)
    )


@pytest.mark.parametrize(("dimension", "top"), [(8, 2), (20, 5), (40, 10)])
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("ratio", [0.5, 0.8])
def test_h_and_its_threshold_are_the_best_of_all(
    dimension: int, top: int, epsilon: float, ratio: float
) -> None:
    power = Fraction(math.exp(epsilon))
    best, found = {}, []
    for named in range(1, dimension + 1):
        means = [exact_mean(dimension, top, named, t, power) for t in range(1, named + 1)]
        best[named] = (means.index(max(means)) + 1, max(means))
        if float(max(means)) >= ratio * named:
            found.append(named)
    plan = make_plan(dimension, top, epsilon, ratio)
    assert plan.named == max(found, default=1)
    assert plan.threshold == best[plan.named][0]
    assert plan.expected == pytest.approx(float(best[plan.named][1]), rel=1e-12)
    for named in (1, 2, 3, 7):
        assert make_plan(dimension, top, epsilon, ratio, named).threshold == best[named][0]


@pytest.mark.parametrize(("dimension", "top", "named"), [(8, 2, 3), (8, 1, 2), (10, 2, 4), (9, 2, 9)])
@pytest.mark.parametrize("epsilon", [0.3, 2.0, 40.0, 700.0])
def test_no_two_inputs_make_any_report_more_different_than_epsilon(
    dimension: int, top: int, named: int, epsilon: float
) -> None:
    """Every pair of top-k sets, every report: what is drawn has the probabilities that ε is proved of. The sign is
    even whatever the input, so it changes no ratio."""
    plan = make_plan(dimension, top, epsilon, named=named)
    inputs = [frozenset(chosen) for chosen in combinations(range(dimension), top)]
    reports = [frozenset(chosen) for chosen in combinations(range(dimension), named)]
    feasible = range(max(0, named - dimension + top), min(named, top) + 1)
    logs = {overlap: plan.log_probability(overlap) for overlap in feasible}
    table = np.array([[logs[len(one & report)] for report in reports] for one in inputs])
    assert np.allclose(np.logaddexp.reduce(table, axis=1), 0.0, atol=1e-12)
    largest = float((table.max(axis=0) - table.min(axis=0)).max())
    assert largest <= epsilon * (1 + 1e-12)
    if plan.threshold in feasible and plan.threshold > feasible[0]:
        assert largest == pytest.approx(epsilon, rel=1e-9)  # ε is what it costs, not more than needed


@pytest.mark.parametrize(
    ("dimension", "share", "epsilon"), [(10**8, 0.01, 1000.0), (10**8, 0.25, 1000.0), (2**31, 0.1, 100.0)]
)
def test_large_models_and_large_epsilon_neither_overflow_nor_lose_digits(
    dimension: int, share: float, epsilon: float
) -> None:
    plan = plan_for(dimension, share, epsilon, 0.6, 0)
    assert np.logaddexp.reduce(plan.log_pmf) == pytest.approx(0.0, abs=1e-9)
    assert plan.expected >= 0.6 * plan.named
    # Against exact integers, to what a ratio of e^ε is proved with.
    for overlap in (0, plan.threshold - 1, plan.threshold, plan.named):
        exact = math.comb(plan.top, overlap) * math.comb(dimension - plan.top, plan.named - overlap)
        log_exact = math.log(exact >> (shift := max(0, exact.bit_length() - 900))) + shift * math.log(2.0)
        log_total = plan.log_probability(plan.threshold - 1)
        wanted = log_exact + log_total + epsilon * (overlap >= plan.threshold)
        assert plan.log_pmf[overlap] == pytest.approx(wanted, abs=1e-8)


def test_the_share_is_taken_in_exact_decimals() -> None:
    assert plan_for(700, 0.07, 8.0, 0.6, 1).top == 49  # .07 · 700 in floats is 49.000000000000007
    assert plan_for(1_000, 0.201, 8.0, 0.6, 1).top == 201
    assert plan_for(100, 0.23, 8.0, 0.6, 1).top == 23  # .23 · 100 is 23.0, .029 · 1,000 below 29
    assert plan_for(1_000, 0.029, 8.0, 0.6, 1).top == 29


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((99, 0, 1.0), "the largest 0 of 99"),
        ((99, 25, 1.0), "a quarter"),
        ((99, 9, 0.0), "epsilon"),
        ((99, 9, 1001.0), "epsilon"),
        ((99, 9, math.nan), "epsilon"),
        ((99, 9, 1.0, 0.4), "ratio"),
        ((99, 9, 1.0, 0.6, 100), "100 coordinates"),
        ((2**32, 9, 1.0), "largest"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments: tuple[float, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(*arguments)  # type: ignore[arg-type]


def test_a_model_too_small_for_its_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of 99 coordinates is none: raise it to 0\.011 at least"):
        plan_for(99, 0.01, 8.0, 0.6, 0)
    assert plan_for(99, 0.011, 8.0, 0.6, 0).top == 1


def test_plans_are_told_apart_by_their_numbers() -> None:
    assert make_plan(100, 10, 8.0) == make_plan(100, 10, 8.0)
    assert isinstance(make_plan(100, 10, 8.0), Plan)
    assert make_plan(100, 10, 8.0) != make_plan(100, 10, 9.0)


def test_steps_of_one_mind_are_as_large_as_is_said() -> None:
    """Devices with the same differences vote in a round, and the step of their largest coordinates is measured."""
    section = PrivacySection(mechanism="signds", sign_k=0.05, sign_eps=40.0, sign_global_lr=1.0)
    dimension, clients = 400, 2000
    row = np.zeros(dimension, np.float32)
    row[:20] = 1.0
    made = make_protection(section)
    layout = Layout((Field("a", (dimension,)),))
    sources = [SeededRandomness(np.random.default_rng(seed)) for seed in range(clients)]
    found = made.report({"difference": np.tile(row, (clients, 1))}, layout, sources, row, 1.0)
    step = section.sign_global_lr * 2.0 * found.vectors["difference"].sum(axis=0)[:20].mean()
    assert step == pytest.approx(largest_step(section, dimension, clients), rel=0.05)
    assert step_warning(section, dimension, clients) is not None
    gentle = replace(section, sign_global_lr=3.0 / largest_step(section, dimension, clients))
    assert largest_step(gentle, dimension, clients) == pytest.approx(3.0)
    assert step_warning(gentle, dimension, clients) is None
