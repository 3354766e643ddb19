"""Whole-numbered noise against exact probabilities, its exact coins, and rounding within a norm."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from federated.privacy import discrete
from federated.privacy.discrete import (
    discrete_gaussian,
    poisson,
    round_within,
    rounded_bound,
    skellam,
)
from federated.privacy.randomness import SYSTEM, SeededRandomness

DRAWN = 60_000


def seeded(seed: int) -> SeededRandomness:
    return SeededRandomness(np.random.default_rng(seed))


def gaussian_pmf(sigma: float) -> Callable[[np.ndarray], np.ndarray]:
    support = np.arange(-2000, 2001)
    whole = math.fsum(np.exp(-(support**2) / (2 * sigma**2)).tolist())
    return lambda k: np.exp(-(k**2) / (2 * sigma**2)) / whole


def fits(drawn: np.ndarray, pmf: Callable[[np.ndarray], np.ndarray]) -> float:
    """The p-value of chi-square over all numbers expected at least ten times, the rest as one."""
    sizes = np.arange(drawn.min(), drawn.max() + 1)
    expected = len(drawn) * pmf(sizes)
    often = expected >= 10.0
    seen = np.array([np.count_nonzero(drawn == size) for size in sizes[often]])
    wanted = expected[often]
    return float(
        stats.chisquare(
            np.append(seen, len(drawn) - seen.sum()), np.append(wanted, len(drawn) - wanted.sum())
        ).pvalue
    )


@pytest.mark.parametrize("sigma", [0.2, 1.0, 2.5, 9.0])
def test_the_discrete_gaussian_has_its_probabilities(sigma: float) -> None:
    assert fits(discrete_gaussian(seeded(1), sigma, DRAWN), gaussian_pmf(sigma)) > 1e-6
    assert fits(discrete_gaussian(SYSTEM, sigma, DRAWN), gaussian_pmf(sigma)) > 1e-9


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.4, 9.0])
def test_skellam_has_its_probabilities(sigma: float) -> None:
    pmf = stats.skellam(sigma**2 / 2, sigma**2 / 2).pmf
    assert fits(skellam(seeded(2), sigma, DRAWN), pmf) > 1e-6


@pytest.mark.parametrize("mean", [0.1, 9.99, 10.0, 25.0, 300.0])
def test_poisson_has_its_probabilities_by_either_way(mean: float) -> None:
    assert fits(poisson(seeded(3), mean, DRAWN), stats.poisson(mean).pmf) > 1e-6


@pytest.mark.parametrize("mean", [0.3, 12.0, 321.5])
def test_log_probabilities_of_poisson(mean: float) -> None:
    sizes = np.unique(np.clip(np.rint(mean + math.sqrt(mean) * np.linspace(-6, 30, 60)), 0, None))
    found = discrete._log_poisson(sizes, mean)
    exact = [
        float(k * Decimal(mean).ln() - Decimal(mean) - _log_factorial(int(k)))
        for k in map(Decimal, sizes.tolist())
    ]
    np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-12)


def _log_factorial(k: int) -> Decimal:
    return sum((Decimal(n).ln() for n in range(2, k + 1)), Decimal(0))


@pytest.mark.parametrize("sigma", [1e4, 2.0**26])
def test_wide_noise_has_its_moments_and_every_residue(sigma: float) -> None:
    for draw in (discrete_gaussian, skellam):
        drawn = draw(seeded(4), sigma, 20_000)
        assert drawn.dtype == np.int64
        assert abs(drawn.mean()) < 6 * sigma / math.sqrt(20_000)
        assert drawn.std() == pytest.approx(sigma, rel=0.03)
        assert stats.chisquare(np.bincount(drawn % 16, minlength=16)).pvalue > 1e-9


def test_coins_that_floats_cannot_decide_are_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin of everything the exact arithmetic decides each toss, and decides as floats did."""
    floats = discrete_gaussian(seeded(6), 2.5, 300)
    monkeypatch.setattr(discrete, "_MARGIN", 2.0)
    assert (discrete_gaussian(seeded(6), 2.5, 300) == floats).all()


def test_an_exact_coin_draws_digits_until_it_is_decided() -> None:
    gamma = Fraction(1, 3)
    with_digits = int(Decimal(2**64) * (Decimal(-1) / Decimal(3)).exp())  # the 64 bits of e^(−1/3) itself
    # Told nothing but those, the next bits decide: heads as often as e^(−1/3) lies above.
    heads = [discrete._coin(with_digits, gamma, seeded(seed)) for seed in range(400)]
    with_more = (Decimal(2**64) * (Decimal(-1) / Decimal(3)).exp()) % 1
    assert sum(heads) / 400 == pytest.approx(float(with_more), abs=0.1)
    assert discrete._coin(0, gamma, seeded(1))
    assert not discrete._coin(2**64 - 1, gamma, seeded(1))
    assert discrete._coin(2**64 - 1, Fraction(0), seeded(1))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, 2.0**41])
def test_noise_that_cannot_be_drawn_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match="sigma"):
        discrete_gaussian(seeded(1), sigma, 1)
    with pytest.raises(ValueError, match="sigma"):
        skellam(seeded(1), sigma, 1)


def test_rounding_keeps_means_and_the_norm() -> None:
    values = np.array([0.25, -1.75, 3.0, 0.0, 0.5] * 40)
    norm = float(np.linalg.norm(values))
    bound = rounded_bound(norm, len(values))
    randomness = seeded(9)
    rounds = np.array([round_within(values, bound, randomness) for _ in range(2_000)])
    assert (np.abs(rounds - values) < 1.0).all()
    assert np.linalg.norm(rounds, axis=1).max() <= bound
    np.testing.assert_allclose(rounds.mean(axis=0), values, atol=0.08)
    tight = float(np.sort(np.linalg.norm(rounds, axis=1))[200])
    assert np.linalg.norm([round_within(values, tight, randomness) for _ in range(50)], axis=1).max() <= tight
    with pytest.raises(ValueError, match="no rounding"):
        round_within(values, norm / 2.0, randomness)


def test_the_bound_of_rounding_is_that_of_the_paper() -> None:
    assert rounded_bound(0.0, 4) == pytest.approx(2.0**0.5)  # √(0 + 1 + 1·1) below 0 + √4
    assert rounded_bound(100.0, 10_000, math.exp(-2.0)) == pytest.approx(math.sqrt(1e4 + 2500 + 2 * 150))
    assert rounded_bound(3.0, 1, 1e-300) == 4.0


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
def test_noise_of_a_large_model_takes_little_memory_beside_itself(
    draw: Callable[[SeededRandomness, float, int], np.ndarray],
) -> None:
    count = 2**20
    tracemalloc.start()
    try:
        assert len(draw(SeededRandomness(np.random.default_rng(1)), 300.0, count)) == count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 8 * count + 2**26
