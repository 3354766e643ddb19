"""Noise of single reports: the analytic Gaussian mechanism, Laplace, the grid, and where the randomness comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from federated.privacy.gaussian import add_gaussian, delta_of, grid_of, sigma_of
from federated.privacy.laplace import add_laplace, scale_of
from federated.privacy.randomness import (
    SYSTEM,
    Randomness,
    SeededRandomness,
    Words,
    below,
    laplace,
    normal,
    uniform,
)


def seeded(seed: int) -> SeededRandomness:
    return SeededRandomness(np.random.default_rng(seed))


class Told:
    """Gives the words it was told, then those of a seed."""

    def __init__(self, *words: int) -> None:
        self._told, self._rest = list(words), seeded(1)

    def words(self, count: int) -> Words:
        told, self._told = self._told[:count], self._told[count:]
        return np.concatenate([np.array(told, np.uint64), self._rest.words(count - len(told))])


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"),
    [(1.0, 1e-5, 3.730632), (0.5, 1e-5, 7.031827), (2.0, 1e-6, 2.230476), (8.0, 1e-5, 0.600229)],
)
def test_sigma_of_the_analytic_mechanism(epsilon: float, delta: float, sigma: float) -> None:
    assert sigma_of(epsilon, delta) == pytest.approx(sigma, abs=5e-7)
    assert sigma_of(epsilon, delta, 2.5) == pytest.approx(2.5 * sigma, abs=2e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-15, 1e-60, 1e-100])
def test_sigma_is_the_smallest_that_is_private(epsilon: float, delta: float) -> None:
    sigma = sigma_of(epsilon, delta)
    assert delta_of(epsilon, sigma) <= delta
    if delta > 1e-9:  # below, at small ε, the difference of two numbers that near is coarser
        assert delta_of(epsilon, sigma * (1.0 - 1e-5)) > delta


def test_delta_is_that_of_the_definition() -> None:
    """Theorem 8 against the integral of (p − e^ε q)⁺."""
    for epsilon, sigma in ((0.5, 2.0), (1.0, 1.0), (3.0, 0.4)):
        x = np.linspace(-40 * sigma, 40 * sigma, 2_000_001)
        excess = stats.norm.pdf(x, 1.0, sigma) - math.exp(epsilon) * stats.norm.pdf(x, 0.0, sigma)
        assert delta_of(epsilon, sigma) == pytest.approx(
            float(np.trapezoid(np.maximum(excess, 0.0), x)), rel=1e-6
        )


@pytest.mark.parametrize(
    ("epsilon", "delta", "sensitivity"),
    [
        (0.0, 1e-5, 1.0),
        (1001.0, 1e-5, 1.0),
        (math.nan, 1e-5, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, 1.0, 1.0),
        (1.0, 1e-5, 0.0),
    ],
)
def test_senseless_budgets_are_refused(epsilon: float, delta: float, sensitivity: float) -> None:
    with pytest.raises(ValueError, match=r"must be|is positive"):
        sigma_of(epsilon, delta, sensitivity)


def test_laplace_scale_is_sensitivity_over_epsilon() -> None:
    assert scale_of(0.5, 6.0) == 12.0
    with pytest.raises(ValueError, match="positive"):
        scale_of(0.0, 1.0)


@pytest.mark.parametrize("source", [SYSTEM, seeded(5)])
def test_numbers_have_their_distributions(source: Randomness) -> None:
    # A chance of 1e-9 each that a sound source fails.
    for drawn, law in (
        (uniform(source, 40_000), stats.uniform()),
        (normal(source, 40_001), stats.norm()),
        (laplace(source, 40_000), stats.laplace()),
    ):
        assert stats.kstest(drawn, law.cdf).pvalue > 1e-9
    pairs = normal(source, 40_000).reshape(2, -1)
    assert abs(np.corrcoef(pairs)[0, 1]) < 0.05
    assert abs(np.corrcoef(np.square(pairs))[0, 1]) < 0.05


def test_uniform_is_never_0_nor_1_and_small_numbers_are_fine() -> None:
    largest, smallest = uniform(Told(2**64 - 1, 0), 2)
    assert 0.0 < smallest < 2.0**-52
    assert 1.0 - 2.0**-52 < largest < 1.0
    # The cell next to 0 is not one number: it is drawn on.
    again = [float(uniform(Told(0, rest), 1)[0]) for rest in (2**63, 2**62)]
    assert again[0] == pytest.approx(2.0**-53)
    assert again[1] == pytest.approx(2.0**-54)
    assert np.isfinite(normal(Told(0, 0, 0, 0, 2**64 - 1), 2)).all()


def test_numbers_below_a_limit_are_even_and_what_would_skew_them_is_drawn_again() -> None:
    counts = np.bincount(below(seeded(3), np.full(60_000, 6, np.uint64)).astype(np.int64))
    assert stats.chisquare(counts).pvalue > 1e-9
    # 2**64 is 4 modulo 6: of the words the last four are spare.
    assert below(Told(2**64 - 5), np.array([6], np.uint64))[0] == 5
    assert below(Told(2**64 - 4, 2), np.array([6], np.uint64))[0] == 2
    assert below(Told(2**64 - 1), np.array([2**63], np.uint64))[0] == 2**63 - 1


@pytest.mark.parametrize("scale", [1e-3, 0.7, 1.0, 1234.5])
def test_reports_lie_on_a_grid_that_is_coarse_for_floats_and_fine_for_the_noise(scale: float) -> None:
    cell = grid_of(scale)
    assert math.frexp(cell)[0] == 0.5
    assert 2.0**-17 < cell / scale <= 2.0**-16
    values = (scale * np.random.default_rng(2).normal(size=4_000)).astype(np.float32)
    for noised in (add_gaussian(values, scale, seeded(8)), add_laplace(values, scale, seeded(9))):
        multiples = noised.astype(np.float64) / cell
        assert (multiples == np.rint(multiples)).all()
        assert noised.dtype == np.float32
        # Nothing of the value is left in the low bits: cells are odd as often as even.
        assert 1_700 < np.count_nonzero(multiples % 2) < 2_300


def test_the_noise_of_a_report_is_what_its_scale_says() -> None:
    zeros = np.zeros(60_000, np.float32)
    assert stats.kstest(add_gaussian(zeros, 2.5, seeded(4)), stats.norm(scale=2.5).cdf).pvalue > 1e-9
    assert stats.kstest(add_laplace(zeros, 2.5, seeded(5)), stats.laplace(scale=2.5).cdf).pvalue > 1e-9


def test_the_system_never_repeats_itself_and_a_seed_does() -> None:
    assert (SYSTEM.words(8) != SYSTEM.words(8)).any()
    assert (seeded(7).words(8) == seeded(7).words(8)).all()
