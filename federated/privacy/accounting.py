"""What releases cost together: ε at a given δ, by ``dp-accounting`` or, where a formula is exact, by ``composition``.

    AccountingRefused (ValueError)     the accountant has no rule for the mechanism; the message says which has

Neighbours. Local reports: any two values that a client could report (σ is relative to Δ = 2C). Sums: one client's
vectors, of norm at most C, or zeros in their place. The numbers are those of add-or-remove, but that somebody took part
is not hidden: how many do decides whether an iteration is valid, so with one client less it might not have been, which
shows. Fixed-size cohorts: one client replaced by another, which moves a sum by 2C.

``dp-accounting`` takes over a second to import: it is, when first needed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from federated.privacy.composition import (
    LEAST_MULTIPLIER,
    MOST_RELEASES,
    gaussian_epsilon,
    most_within,
    pure_epsilon,
)
from federated.privacy.gaussian import sigma_of

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Kind = Literal["pld", "rdp"]
Column = npt.NDArray[np.float64]

INTERVAL: Final = 1e-4
"""Of privacy losses, in a privacy loss distribution; coarser where that would take more than _MOST_CELLS."""
COARSE: Final = 1e-3
_MOST_CELLS: Final = 2.0**20
_WHOLE_ORDERS: Final = (*range(2, 257), *(2**power for power in range(9, 21)))
_LARGEST_ANSWER: Final = 30.0  # ε beyond which randomised response is the truth but for 1e-13
_HOPELESS: Final = 1e3  # a privacy loss
_TAIL: Final = 10.0  # standard deviations, in the estimate of how far losses of a Gaussian reach


class AccountingRefused(ValueError):
    """An accountant that cannot count a mechanism, or numbers that are no mechanism."""


@dataclass(frozen=True, slots=True)
class GaussianRelease:
    """A sum of clipped vectors with noise of standard deviation ``noise_multiplier`` · C, over clients that take part
    by independent coins of probability ``rate`` (1: all who come)."""

    noise_multiplier: float
    rate: float = 1.0

    def __post_init__(self) -> None:
        _positive("noise_multiplier", self.noise_multiplier)
        if not 0.0 < self.rate <= 1.0:
            raise AccountingRefused(f"a sampling rate is above 0 and at most 1, not {self.rate}")


@dataclass(frozen=True, slots=True)
class FixedSizeRelease:
    """As GaussianRelease, over exactly ``cohort`` of ``population`` clients, every such set equally likely."""

    noise_multiplier: float
    cohort: int
    population: int

    def __post_init__(self) -> None:
        _positive("noise_multiplier", self.noise_multiplier)
        if not 1 <= self.cohort <= self.population:
            raise AccountingRefused(f"a cohort of {self.cohort} out of {self.population} clients")


@dataclass(frozen=True, slots=True)
class GaussianReport:
    """One client's report, (``epsilon``, ``delta``)-private by the analytic Gaussian mechanism."""

    epsilon: float
    delta: float

    @property
    def multiplier(self) -> float:
        """σ/Δ."""
        return sigma_of(self.epsilon, self.delta)


@dataclass(frozen=True, slots=True)
class LaplaceReport:
    """One client's report, ``epsilon``-private by Laplace noise. The worst case of L1 neighbours is one coordinate."""

    epsilon: float

    def __post_init__(self) -> None:
        _positive("epsilon", self.epsilon)


@dataclass(frozen=True, slots=True)
class PureReport:
    """One client's report, ``epsilon``-private by whatever mechanism (SignDS: selection and magnitude together)."""

    epsilon: float

    def __post_init__(self) -> None:
        _positive("epsilon", self.epsilon)


@dataclass(frozen=True, slots=True)
class ConcentratedRelease:
    """A sum whose Rényi divergence of every order α > 1 is at most ξ + ρα, for each (ρ, ξ) of ``bounds``: zCDP (Bun
    and Steinke 2016). Noise of many devices has such bounds (``calibration``), some for ``whole`` orders alone."""

    bounds: tuple[tuple[float, float], ...]
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.bounds or any(
            not (rho > 0.0 and xi >= 0.0 and math.isfinite(rho + xi)) for rho, xi in self.bounds
        ):
            raise AccountingRefused(f"no bounds of a concentrated release: {self.bounds}")


Release = (
    GaussianRelease | FixedSizeRelease | GaussianReport | LaplaceReport | PureReport | ConcentratedRelease
)


def accountants(release: Release) -> tuple[Kind, ...]:
    """Those that can count ``release``, the tighter first."""
    return ("rdp",) if isinstance(release, (FixedSizeRelease, ConcentratedRelease)) else ("pld", "rdp")


@dataclass(frozen=True, slots=True)
class Accountant:
    """Counts releases of one mechanism at ``delta``. Results are cached: asking again costs nothing.

    ``pld``: privacy loss distributions, with losses in steps of 1e-4, rounded up. ``rdp``: Rényi differential
    privacy. Raises AccountingRefused where the accountant has no rule.
    """

    release: Release
    kind: Kind
    delta: float

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise AccountingRefused(f"delta must be above 0 and below 1, not {self.delta}")
        if self.kind not in accountants(self.release):
            what = (
                "fixed-size cohorts" if isinstance(self.release, FixedSizeRelease) else "this bound on noise"
            )
            raise AccountingRefused(
                f'no privacy loss distribution is known for {what}: set accountant = "rdp"'
            )

    def epsilon(self, releases: int) -> float:
        """ε of so many releases together: 0 for none, infinite where the accountant finds no bound. Raises ValueError
        beyond MOST_RELEASES."""
        if not 0 <= releases <= MOST_RELEASES:
            raise ValueError(f"releases must be in [0, {MOST_RELEASES}], not {releases}")
        return _epsilon(self.release, self.kind, self.delta, releases, INTERVAL) if releases else 0.0

    def running(self, releases: int, last: int) -> float:
        """As ``epsilon``, for each line of a job's log of at most ``last`` releases: never less, ten times faster,
        since losses are counted in steps of 1e-3; never more than ε of ``last``."""
        if not 0 <= releases <= last:
            raise ValueError(f"releases must be in [0, {last}], not {releases}")
        if not 0 < releases < last:
            return self.epsilon(releases)
        return min(self.coarsely(releases), self.epsilon(last))

    def curve(self, most: int) -> Column:
        """``running`` of 0, 1, … ``most`` releases, ``[most + 1]``."""
        return np.array([self.running(releases, most) for releases in range(most + 1)])

    def affordable(self, budget: float) -> int:
        """The most releases whose ε is at most ``budget``; MOST_RELEASES stands for any number."""
        if self.kind == "rdp":
            return most_within(self.epsilon, budget)
        # Distributions in fine steps take tenths of a second each: begin where faster ways end.
        guess = most_within(replace(self, kind="rdp").epsilon, budget)
        guess = most_within(self.coarsely, budget, guess)
        return most_within(self.epsilon, budget, guess)

    def coarsely(self, releases: int) -> float:
        """As ``epsilon``, with losses in steps of 1e-3: never less, by about 1e-4 more, ten times faster."""
        return _epsilon(self.release, self.kind, self.delta, releases, COARSE) if releases else 0.0


@lru_cache(maxsize=2**16)
def _epsilon(release: Release, kind: Kind, delta: float, releases: int, interval: float) -> float:
    if (
        isinstance(release, (GaussianRelease, FixedSizeRelease))
        and release.noise_multiplier < LEAST_MULTIPLIER
    ):
        return math.inf
    by_losses = kind == "pld"
    found = (
        _by_losses(release, delta, releases, interval) if by_losses else _by_renyi(release, delta, releases)
    )
    if isinstance(release, (LaplaceReport, PureReport)):
        return min(found, releases * release.epsilon)
    return found


# Rényi differential privacy.


def _by_renyi(release: Release, delta: float, releases: int) -> float:
    from dp_accounting import rdp

    best = math.inf
    for orders, one in _divergences(release):
        # At orders where one release has no bound, none of more has.
        usable = np.isfinite(one)
        if usable.any():
            found, _ = rdp.compute_epsilon(orders[usable], releases * one[usable], delta)
            best = min(best, float(found))
    return best


@lru_cache(maxsize=64)
def _divergences(release: Release) -> Sequence[tuple[Column, Column]]:
    """Pairs of orders and what one release costs at them: each is a bound of its own."""
    import dp_accounting as dp

    # Adding it again changes nothing.
    logging.getLogger("absl").addFilter(_worth_telling)
    if isinstance(release, ConcentratedRelease):
        events = [dp.ZCDpEvent(rho, xi) for rho, xi in release.bounds]
        orders = _WHOLE_ORDERS if release.whole else None
        counted = [dp.rdp.RdpAccountant(orders).compose(event) for event in events]
    elif isinstance(release, FixedSizeRelease):
        # To replace a client moves the sum by 2C, and the event wants noise over what a neighbour moves.
        moved = dp.GaussianDpEvent(release.noise_multiplier / 2.0)
        event = dp.SampledWithoutReplacementDpEvent(release.population, release.cohort, moved)
        counted = [
            dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE).compose(event)
        ]
    elif isinstance(release, PureReport):
        # Randomised response is the worst of all mechanisms with this ε (Kairouz, Oh and Viswanath 2015).
        either = 2.0 / (1.0 + math.exp(release.epsilon)) if release.epsilon < _LARGEST_ANSWER else 0.0
        if not either:
            return ()  # k·ε is as good
        accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        counted = [accountant.compose(dp.RandomizedResponseDpEvent(either, 2))]
    elif isinstance(release, LaplaceReport):
        counted = [dp.rdp.RdpAccountant().compose(dp.LaplaceDpEvent(1.0 / release.epsilon))]
    elif isinstance(release, GaussianReport):
        counted = [dp.rdp.RdpAccountant().compose(dp.GaussianDpEvent(release.multiplier))]
    else:
        gaussian: dp.DpEvent = dp.GaussianDpEvent(release.noise_multiplier)
        if release.rate < 1.0:
            gaussian = dp.PoissonSampledDpEvent(release.rate, gaussian)
        counted = [dp.rdp.RdpAccountant().compose(gaussian)]
    return [(accountant.orders, accountant.rdp) for accountant in counted]


def _worth_telling(record: logging.LogRecord) -> bool:
    """Whether to pass on what the library logs. An order whose sum does not converge is left out, which costs a little
    and is no news to whoever started a job."""
    return "Excluding this order" not in str(record.msg)


# Privacy loss distributions.


def _by_losses(release: Release, delta: float, releases: int, interval: float) -> float:
    if isinstance(release, GaussianReport):
        return gaussian_epsilon(release.multiplier, releases, delta)
    if isinstance(release, PureReport):
        return pure_epsilon(release.epsilon, releases, delta)
    if isinstance(release, GaussianRelease):
        if release.rate == 1.0:
            return gaussian_epsilon(release.noise_multiplier, releases, delta)
        one = 0.5 / release.noise_multiplier**2 + _TAIL / release.noise_multiplier
        furthest = max(one, 2.0 * _by_renyi(release, delta, releases))
    else:
        assert isinstance(release, LaplaceReport)
        # Its losses pile up at both ends, so coarser steps are as good, and large ε would take seconds.
        furthest = 8.0 * releases * release.epsilon
    if furthest > _HOPELESS:
        furthest *= 32.0  # whatever it is exactly, it protects nobody: do not spend seconds on it
    composed = _distribution(release, _interval(furthest, interval)).self_compose(releases)
    return float(composed.get_epsilon_for_delta(delta))


def _interval(furthest: float, finest: float) -> float:
    """The finest of ``finest`` · 2**m in which losses up to ``furthest`` take a bounded number of cells."""
    doublings = math.ceil(math.log2(furthest / (finest * _MOST_CELLS))) if math.isfinite(furthest) else 0
    return finest * 2.0 ** max(0, doublings)


@lru_cache(maxsize=16)
def _distribution(release: GaussianRelease | LaplaceReport, interval: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution as losses

    if isinstance(release, LaplaceReport):
        return losses.from_laplace_mechanism(1.0 / release.epsilon, value_discretization_interval=interval)
    return losses.from_gaussian_mechanism(
        release.noise_multiplier, sampling_prob=release.rate, value_discretization_interval=interval
    )


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise AccountingRefused(f"{name} must be positive, not {value}")
