"""The figures of the literature, both accountants against each other, and what neither may claim."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.privacy.accounting import (
    Accountant,
    AccountingRefused,
    ConcentratedRelease,
    FixedSizeRelease,
    GaussianRelease,
    GaussianReport,
    Kind,
    LaplaceReport,
    PureReport,
    Release,
    accountants,
)
from federated.privacy.composition import MOST_RELEASES, gaussian_epsilon, most_within, pure_epsilon

TABLE = [
    (0.01, 1.0, 1000, 1e-5, 2.1014, 1.8282),
    (0.05, 1.0, 1500, 1e-6, 16.572, 15.359),
    (0.001, 0.8, 3000, 1e-6, 1.538, 0.627),
    (1.0, 10.0, 100, 1e-5, 4.7285, 4.3772),
]
REPORTS: list[Release] = [GaussianReport(1.0, 1e-5), LaplaceReport(0.5), PureReport(0.5)]
SUMS: list[Release] = [
    GaussianRelease(4.0),
    GaussianRelease(1.0, 0.05),
    FixedSizeRelease(4.0, 10, 1000),
    ConcentratedRelease(((0.02, 0.0),)),
]


@pytest.mark.parametrize(("rate", "sigma", "releases", "delta", "renyi", "losses"), TABLE)
def test_the_known_figures_of_gaussian_sums(
    rate: float, sigma: float, releases: int, delta: float, renyi: float, losses: float
) -> None:
    release = GaussianRelease(sigma, rate)
    assert Accountant(release, "rdp", delta).epsilon(releases) == pytest.approx(renyi, abs=6e-4)
    assert Accountant(release, "pld", delta).epsilon(releases) == pytest.approx(losses, abs=6e-4)


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"),
    [(1.0, 1e-5, 3.730632), (0.5, 1e-5, 7.031827), (2.0, 1e-6, 2.230476), (8.0, 1e-5, 0.600229)],
)
def test_one_gaussian_report_costs_what_it_was_calibrated_to(
    epsilon: float, delta: float, sigma: float
) -> None:
    report = GaussianReport(epsilon, delta)
    assert report.multiplier == pytest.approx(sigma, abs=1e-6)
    assert Accountant(report, "pld", delta).epsilon(1) == pytest.approx(epsilon, abs=1e-9)


@pytest.mark.parametrize(("multiplier", "releases"), [(10.0, 100), (0.6, 50), (3.73, 20), (1e-2, 3)])
def test_gaussians_compose_exactly(multiplier: float, releases: int) -> None:
    """The closed form is what distributions of losses approach from above."""
    exact = gaussian_epsilon(multiplier, releases, 1e-5)
    library = dp_accounting.get_epsilon_gaussian(multiplier / math.sqrt(releases), 1e-5)
    assert exact == pytest.approx(library, rel=1e-9)
    if multiplier > 1.0:
        counted = dp_accounting.pld.PLDAccountant().compose(
            dp_accounting.GaussianDpEvent(multiplier), releases
        )
        assert exact <= counted.get_epsilon(1e-5) <= exact + 1e-4


@pytest.mark.parametrize(("epsilon", "releases"), [(1.0, 1), (1.0, 20), (8.0, 20), (0.25, 400)])
def test_pure_reports_compose_optimally(epsilon: float, releases: int) -> None:
    one = privacy_loss_distribution.from_privacy_parameters(
        common.DifferentialPrivacyParameters(epsilon, 0.0)
    )
    counted = one.self_compose(releases).get_epsilon_for_delta(1e-5)
    assert pure_epsilon(epsilon, releases, 1e-5) == pytest.approx(counted, rel=1e-8)
    assert pure_epsilon(epsilon, releases, 1e-5) <= releases * epsilon


def test_pure_composition_by_hand() -> None:
    """Two answers of randomised response at ε = log 3: (3/4)² of losses 2ε, and δ = 9/16 (1 − e^(ε' − 2ε)) above ε."""
    epsilon, above = math.log(3.0), math.log(6.0)
    delta = 9.0 / 16.0 * (1.0 - math.exp(above - 2.0 * epsilon))
    assert pure_epsilon(epsilon, 2, delta) == pytest.approx(above, rel=1e-12)


@pytest.mark.parametrize("release", [*REPORTS, *SUMS], ids=lambda release: type(release).__name__)
def test_more_releases_cost_more_and_no_accountant_undercuts_the_tighter(release: Release) -> None:
    kinds = accountants(release)
    curves = [
        np.array([Accountant(release, kind, 1e-5).epsilon(k) for k in (0, 1, 2, 5, 40)]) for kind in kinds
    ]
    for curve in curves:
        assert curve[0] == 0.0
        assert np.all(np.diff(curve) > 0.0)
    if len(curves) == 2:
        assert np.all(curves[0][1:] <= curves[1][1:])


def test_basic_composition_is_never_beaten_by_the_accountant() -> None:
    """k·ε holds for pure reports whatever an accountant finds, SignDS at its default ε of 100 included."""
    for kind in ("pld", "rdp"):
        for release in (PureReport(101.0), LaplaceReport(101.0)):
            for count in (1, 3):
                found = Accountant(release, kind, 1e-5).epsilon(count)
                assert 0.9 * count * 101.0 < found <= count * 101.0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_the_worst_neighbour_of_laplace_noise_is_one_coordinate(share: float, budget: float) -> None:
    """Laplace reports are counted by one coordinate that takes all of Δ. Split over two it tells no more: δ at each ε
    from losses on a grid, against the exact 1 − e^((ε'−ε)/2) of one."""
    step, parts = 1e-3, [share * budget, (1.0 - share) * budget]
    losses = np.array([1.0])
    for shift in parts:
        x = np.linspace(-12.0, 12.0 + shift, 40_001)
        chances = np.exp(-np.abs(x - shift)) / 2.0 * (x[1] - x[0])
        cells = np.rint((np.abs(x) - np.abs(x - shift)) / step).astype(int) + round(shift / step)
        losses = np.convolve(losses, np.bincount(cells, chances, 2 * round(shift / step) + 1))
    values = (np.arange(len(losses)) - (len(losses) - 1) / 2) * step
    for epsilon in (0.0, 0.3 * budget, 0.8 * budget):
        split = np.sum(losses * np.maximum(0.0, -np.expm1(epsilon - values)))
        assert split <= -math.expm1((epsilon - budget) / 2.0) + 2e-3


def test_a_fixed_size_cohort_is_counted_by_renyi_alone_and_a_replaced_client_moves_twice_the_clip() -> None:
    release = FixedSizeRelease(4.0, 100, 1000)
    with pytest.raises(AccountingRefused, match='accountant = "rdp"'):
        Accountant(release, "pld", 1e-5)
    whole = Accountant(FixedSizeRelease(4.0, 1000, 1000), "rdp", 1e-5).epsilon(10)
    assert whole == Accountant(GaussianRelease(2.0), "rdp", 1e-5).epsilon(10)
    assert Accountant(release, "rdp", 1e-5).epsilon(10) < whole


def test_a_bound_on_renyi_divergence_has_no_loss_distribution() -> None:
    release = ConcentratedRelease(((0.5 / 10.0**2, 0.0),))
    with pytest.raises(AccountingRefused, match="rdp"):
        Accountant(release, "pld", 1e-5)
    # A Gaussian's own bound costs what the Gaussian does; at whole orders alone a little more.
    gaussian = Accountant(GaussianRelease(10.0), "rdp", 1e-5).epsilon(100)
    assert Accountant(release, "rdp", 1e-5).epsilon(100) == pytest.approx(gaussian, rel=1e-9)
    whole = Accountant(ConcentratedRelease(release.bounds, whole=True), "rdp", 1e-5).epsilon(100)
    assert gaussian <= whole <= 1.05 * gaussian
    # Of several bounds the best one counts.
    loose = ConcentratedRelease((*release.bounds, (1.0, 5.0)))
    assert Accountant(loose, "rdp", 1e-5).epsilon(100) == Accountant(release, "rdp", 1e-5).epsilon(100)


@pytest.mark.parametrize(
    ("release", "kind", "budget"),
    [
        (GaussianRelease(10.0), "pld", 4.3773),
        (GaussianRelease(1.0, 0.01), "rdp", 1.5),
        (GaussianRelease(1.0, 0.01), "pld", 0.5),
        (GaussianReport(1.0, 1e-5), "pld", 8.0),
        (LaplaceReport(2.0), "pld", 11.0),
        (PureReport(101.0), "pld", 500.0),
    ],
)
def test_a_budget_affords_the_most_that_it_holds(release: Release, kind: Kind, budget: float) -> None:
    accountant = Accountant(release, kind, 1e-5)
    most = accountant.affordable(budget)
    assert most > 0
    assert accountant.epsilon(most) <= budget < accountant.epsilon(most + 1)


def test_a_budget_may_be_too_small_for_one_or_large_enough_for_all() -> None:
    assert Accountant(GaussianRelease(0.5), "pld", 1e-5).affordable(1.0) == 0
    assert Accountant(GaussianRelease(1e6), "rdp", 1e-5).affordable(20.0) == MOST_RELEASES
    assert Accountant(PureReport(2.0), "pld", 1e-5).affordable(1.9) == 0


def test_the_running_cost_of_a_job_ends_at_its_exact_cost() -> None:
    accountant = Accountant(GaussianRelease(1.0, 0.02), "pld", 1e-5)
    curve = accountant.curve(20)
    exact = np.array([accountant.epsilon(count) for count in (0, 1, 10, 20)])
    assert np.all(np.diff(curve) > 0.0)
    assert curve[[0, 20]].tolist() == exact[[0, 3]].tolist()
    assert np.all(exact <= curve[[0, 1, 10, 20]])
    assert np.all(curve[[1, 10]] <= exact[1:3] + 1e-3)
    with pytest.raises(ValueError, match="in \\[0, 20\\]"):
        accountant.running(21, 20)


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(0, 3000), guess=st.integers(1, 5000))
def test_the_most_within_a_budget_is_found_from_any_guess(budget: int, guess: int) -> None:
    assert most_within(float, budget + 0.5, guess) == budget


def test_noise_near_nothing_stays_within_bounds_of_memory_and_says_what_it_costs() -> None:
    found = Accountant(GaussianRelease(0.02, 0.5), "pld", 1e-5).epsilon(50)
    assert 1000.0 < found < math.inf
    assert Accountant(LaplaceReport(100.0), "pld", 1e-5).epsilon(1000) > 9e4


def test_what_is_no_mechanism_is_refused() -> None:
    refused: list[tuple[type, tuple[object, ...]]] = [
        (GaussianRelease, (0.0,)),
        (GaussianRelease, (1.0, 0.0)),
        (GaussianRelease, (1.0, 1.5)),
        (FixedSizeRelease, (1.0, 11, 10)),
        (LaplaceReport, (-1.0,)),
        (PureReport, (math.inf,)),
        (ConcentratedRelease, ((),)),
        (ConcentratedRelease, (((1.0, -1.0),),)),
        (Accountant, (PureReport(1.0), "pld", 0.0)),
    ]
    for kind, values in refused:
        with pytest.raises(AccountingRefused):
            kind(*values)
    accountant = Accountant(PureReport(1.0), "pld", 1e-5)
    with pytest.raises(ValueError, match="releases"):
        accountant.epsilon(MOST_RELEASES + 1)
    with pytest.raises(ValueError, match="releases"):
        accountant.epsilon(-1)


def test_orders_that_do_not_converge_are_left_out_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """At q = .3 and σ = 2 the sums of orders 1.1 to 1.7 do not, which the library would tell every user."""
    renyi = Accountant(GaussianRelease(2.0, 0.3), "rdp", 1e-5).epsilon(10)
    assert Accountant(GaussianRelease(2.0, 0.3), "pld", 1e-5).epsilon(10) <= renyi < 3.0
    assert caplog.text == ""
