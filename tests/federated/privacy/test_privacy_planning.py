"""Accounting read backwards: the noise that is found keeps ε, and a little less does not."""

from __future__ import annotations

import math

import pytest

from federated.privacy.accounting_statement import BudgetRefused
from federated.privacy.composition import gaussian_epsilon
from federated.privacy.planning import PlanningRefused, Question, noise_for, rounds_within
from federated.privacy.section import Mechanism

CENTRAL = Question("central_gaussian")
DISTRIBUTED = Question("distributed_gaussian", weights=1000, honest=50)
SKELLAM = Question("distributed_skellam", weights=1000, honest=50)


@pytest.mark.parametrize("question", [CENTRAL, DISTRIBUTED, SKELLAM], ids=lambda q: q.mechanism)
@pytest.mark.parametrize("epsilon", [0.3, 2.0, 30.0])
def test_the_least_noise_of_sums_keeps_epsilon(question: Question, epsilon: float) -> None:
    noise = noise_for(question, epsilon, 20)
    assert question.epsilon(noise, 20) <= epsilon
    assert question.epsilon(noise * 0.995, 20) > epsilon


@pytest.mark.parametrize("mechanism", ["local_gaussian", "local_laplace", "signds"])
@pytest.mark.parametrize("epsilon", [0.3, 8.0])
def test_the_largest_epsilon_of_a_report_keeps_that_of_all(mechanism: Mechanism, epsilon: float) -> None:
    question = Question(mechanism)
    report = noise_for(question, epsilon, 10)
    assert question.epsilon(report, 10) <= epsilon
    assert question.epsilon(report * 1.005, 10) > epsilon


def test_without_sampling_noise_is_that_of_the_closed_form() -> None:
    noise = noise_for(CENTRAL, 1.0, 100)
    assert gaussian_epsilon(noise, 100, 1e-5) == pytest.approx(1.0, rel=2e-3)
    # The analytic Gaussian mechanism at (1, 1e-5) has σ = 3.7306; a hundred releases take ten times as much.
    assert noise == pytest.approx(37.31, rel=2e-3)


def test_sampling_takes_less_noise() -> None:
    sampled = Question("central_gaussian", rate=0.01)
    noise = noise_for(sampled, 3.0, 50)
    assert sampled.epsilon(noise, 50) <= 3.0 < sampled.epsilon(noise * 0.99, 50)
    assert noise < 0.3 * noise_for(CENTRAL, 3.0, 50)


@pytest.mark.parametrize(
    ("question", "noise"),
    [(CENTRAL, 2.0), (DISTRIBUTED, 2.0), (Question("local_gaussian"), 0.5), (Question("signds"), 0.5)],
    ids=lambda value: value.mechanism if isinstance(value, Question) else "",
)
def test_rounds_are_as_many_as_epsilon_allows(question: Question, noise: float) -> None:
    rounds = rounds_within(question, noise, 5.0)
    assert question.epsilon(noise, rounds) <= 5.0 < question.epsilon(noise, rounds + 1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BudgetRefused, match="one iteration costs"):
        rounds_within(CENTRAL, 0.1, 1.0)
    with pytest.raises(BudgetRefused, match="one report costs"):
        rounds_within(Question("local_laplace"), 2.0, 1.0)
    with pytest.raises(PlanningRefused, match="earns nothing by sampling"):
        Question("local_gaussian", rate=0.1)
    with pytest.raises(PlanningRefused, match="say both"):
        Question("distributed_gaussian", weights=10)
    with pytest.raises(PlanningRefused, match="no noise up to"):
        noise_for(CENTRAL, 1e-9, 1000)
    for epsilon in (0.0, math.nan, math.inf):
        with pytest.raises(PlanningRefused, match="epsilon must be positive"):
            noise_for(CENTRAL, epsilon, 1)
    with pytest.raises(PlanningRefused, match="rounds must be"):
        noise_for(CENTRAL, 1.0, 0)
