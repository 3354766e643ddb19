"""Bounds on noise of many devices against exact sums of distributions."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from federated.privacy.accounting import Accountant, ConcentratedRelease, GaussianRelease
from federated.privacy.calibration import (
    CalibrationRefused,
    DistributedNoise,
    Kind,
    fewest_honest,
    noise_bound,
)
from federated.privacy.discrete import BETA, rounded_bound
from federated.privacy.section import Mechanism, PrivacySection

Chances = npt.NDArray[np.float64]
REACH = 200  # of one device's noise, in steps
ORDERS = (2, 3, 4, 8, 16)
BETWEEN = (1.1, 1.7, 2.5)  # orders for which the discrete Gaussian's bounds hold besides


def of_one(kind: Kind, sigma: float) -> Chances:
    """The probabilities [2·REACH + 1] of one device's noise on −REACH … REACH."""
    x = np.arange(-REACH, REACH + 1, dtype=np.float64)
    if kind == "gaussian":
        chances = np.exp(-(x**2) / (2.0 * sigma**2))
    else:
        # The difference of two Poissons of mean μ/2 each, as a sum over the second's value.
        counts = np.arange(2 * REACH)
        logs = counts * math.log(sigma**2 / 2.0) - np.array([math.lgamma(n + 1.0) for n in counts])
        poisson = np.exp(logs - sigma**2 / 2.0)
        chances = np.convolve(poisson, poisson[::-1])[len(counts) - 1 - REACH : len(counts) + REACH]
    return np.asarray(chances / chances.sum())


def of_sum(kind: Kind, sigma: float, devices: int) -> Chances:
    total = one = of_one(kind, sigma)
    for _ in range(devices - 1):
        total = np.convolve(total, one)
    return total


def renyi(chances: Chances, shift: int, order: float) -> float:
    """The exact Rényi divergence between the noise and itself moved by ``shift``. Terms too small for floats are left
    out."""
    there, moved = chances[shift:], chances[:-shift]
    seen = (there > 1e-300) & (moved > 1e-300)
    logs = order * np.log(there[seen]) - (order - 1) * np.log(moved[seen])
    return float((np.log(np.sum(np.exp(logs - logs.max()))) + logs.max()) / (order - 1))


def noise(
    kind: Kind, sigma: float, devices: int, *, clip: float = 3.0, dimension: int = 1
) -> DistributedNoise:
    return DistributedNoise(kind, clip, sigma, dimension, devices)


@pytest.mark.parametrize("kind", ["gaussian", "skellam"])
@pytest.mark.parametrize(("sigma", "devices"), [(0.5, 2), (0.5, 7), (0.8, 3), (1.5, 5), (3.0, 2)])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_bounds_hold_against_the_exact_divergence(kind: Kind, sigma: float, devices: int, shift: int) -> None:
    """One coordinate moved by a whole number of steps, which the norm after rounding allows."""
    made = noise(kind, sigma, devices, clip=shift - 0.5)
    assert made.norm >= shift
    chances = of_sum(kind, sigma, devices)
    for order in ORDERS if made.whole_orders else (*ORDERS, *BETWEEN):
        exact = renyi(chances, shift, order)
        for rho, xi in made.bounds:
            assert exact <= (xi + rho * order) * (1.0 + 1e-12)
        assert exact > 0.0


@pytest.mark.parametrize("kind", ["gaussian", "skellam"])
def test_coordinates_add_up(kind: Kind) -> None:
    """Four coordinates moved by one step each: divergences add, and so must the bound, whose norm is 2."""
    sigma, devices = 0.6, 4
    exact = 4 * np.array([renyi(of_sum(kind, sigma, devices), 1, order) for order in ORDERS])
    made = noise(kind, sigma, devices, clip=1.0, dimension=4)
    assert made.norm == pytest.approx(2.0)
    for rho, xi in made.bounds:
        assert np.all(exact <= xi + rho * np.array(ORDERS))


@pytest.mark.parametrize("kind", ["gaussian", "skellam"])
def test_epsilon_is_above_the_exact_hockey_stick(kind: Kind) -> None:
    """At the ε that the bounds give, the exact δ of one release is below the one asked for."""
    made = noise(kind, 1.0, 6, clip=2.0)
    shift, delta = math.floor(made.norm), 1e-4
    release = ConcentratedRelease(made.bounds, made.whole_orders)
    epsilon = Accountant(release, "rdp", delta).epsilon(1)
    chances = of_sum(kind, 1.0, 6)
    moved = np.concatenate([np.zeros(shift), chances[:-shift]])
    assert np.sum(np.maximum(chances - math.exp(epsilon) * moved, 0.0)) < delta


def cost(made: DistributedNoise) -> float:
    release = ConcentratedRelease(made.bounds, made.whole_orders)
    return Accountant(release, "rdp", 1e-5).epsilon(10)


@pytest.mark.parametrize("multiplier", [1.0, 6.0])
@pytest.mark.parametrize("mechanism", ["distributed_gaussian", "distributed_skellam"])
def test_with_fine_steps_distributed_noise_costs_what_gaussian_noise_does(
    mechanism: Mechanism, multiplier: float
) -> None:
    gaussian = Accountant(GaussianRelease(multiplier), "rdp", 1e-5).epsilon(10)
    section = PrivacySection(mechanism=mechanism, noise_multiplier=multiplier, clip=0.5)
    fine = DistributedNoise.of(section, dimension=10_000, step_bits=20, honest=70)
    assert gaussian <= cost(fine) <= 1.05 * gaussian
    assert fine.local_sigma * math.sqrt(70) == pytest.approx(multiplier * 0.5 * 2**20, rel=1e-3)
    # With coarse steps rounding moves the sum by more, and noise grows with it.
    coarse = DistributedNoise.of(section, dimension=10_000, step_bits=5, honest=70)
    assert coarse.local_sigma * 2**15 > 1.5 * fine.local_sigma


def test_the_dimension_enters() -> None:
    small, large = (noise("gaussian", 0.6, 10, clip=20.0, dimension=d) for d in (10, 100_000))
    assert cost(large) > 2.0 * cost(small)


def test_noise_counts_for_the_fewest_honest_survivors_alone() -> None:
    assert fewest_honest(80, 100, 0.1) == 70
    assert fewest_honest(80, 100, 0.0) == 80
    assert fewest_honest(67, 100, 1 / 3) == 34
    assert fewest_honest(50, 100, 0.29) == 21  # 29, where floats say 28.99…
    with pytest.raises(CalibrationRefused, match="no honest device"):
        fewest_honest(10, 100, 0.1)
    section = PrivacySection(mechanism="distributed_skellam")
    few, many = (DistributedNoise.of(section, dimension=9, step_bits=16, honest=n) for n in (10, 40))
    assert few.local_sigma == pytest.approx(2.0 * many.local_sigma)


def test_rounding_keeps_the_norm_as_often_as_it_is_said_to() -> None:
    """Random rounding of the vector in question stays within the bound at least with 1 − β."""
    generator = np.random.default_rng(3)
    for dimension, norm in ((50, 3.0), (2_000, 40.0)):
        vector = generator.normal(size=dimension)
        vector *= norm / np.linalg.norm(vector)
        lengths = np.linalg.norm(np.floor(vector + generator.random((4000, dimension))), axis=1)
        assert np.mean(lengths <= rounded_bound(norm, dimension)) >= 1.0 - BETA
        assert lengths.max() <= norm + math.sqrt(dimension)
        assert rounded_bound(norm, dimension) < norm + math.sqrt(dimension)


@pytest.mark.parametrize("kind", ["gaussian", "skellam"])
@pytest.mark.parametrize(("sigma", "devices"), [(0.5, 3), (2.0, 8)])
def test_noise_wraps_no_ring_that_holds_its_bound(kind: Kind, sigma: float, devices: int) -> None:
    """The exact probability that the sum leaves the bound, in any of 1,000 coordinates, against 2**-40."""
    made = noise(kind, sigma, devices)
    bound = noise_bound(made, devices, 1000)
    chances = of_sum(kind, sigma, devices)
    middle = len(chances) // 2
    beyond = 2.0 * np.sum(chances[middle + bound + 1 :])
    assert 1000 * beyond <= 2.0**-40
    # And it is not much wider than it must be.
    assert 1000 * 2.0 * np.sum(chances[middle + bound // 2 :]) > 2.0**-40
    assert noise_bound(made, 4 * devices, 1000) > 1.4 * bound


def test_what_cannot_be_calibrated_is_refused() -> None:
    section = PrivacySection(mechanism="distributed_gaussian", noise_multiplier=0.01, clip=1.0)
    with pytest.raises(CalibrationRefused, match="half a step"):
        DistributedNoise.of(section, dimension=10, step_bits=4, honest=100)
    with pytest.raises(CalibrationRefused, match="no noise inside the ring"):
        DistributedNoise.of(PrivacySection(), dimension=10, step_bits=16, honest=100)
    with pytest.raises(CalibrationRefused, match="honest"):
        DistributedNoise.of(section, dimension=10, step_bits=20, honest=0)
    with pytest.raises(CalibrationRefused, match="dimension"):
        noise("skellam", 1.0, 2, dimension=0)
    with pytest.raises(CalibrationRefused, match="positive"):
        noise("skellam", 0.0, 2)
    with pytest.raises(CalibrationRefused, match="at least 1"):
        noise_bound(noise("skellam", 1.0, 2), 0, 1)
