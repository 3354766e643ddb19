"""How much integer noise each device adds so that the noise of the fewest honest survivors is enough.

    CalibrationRefused (ValueError)     no such noise under these settings; the message says what to change

All lengths here are in steps of the ring, 2**-step_bits each. A device clips to L2 norm C, rounds every coordinate up
or down at random and draws again while the rounded vector is longer than ``norm``; then it adds discrete noise
(``discrete``). Under masks the servers see the sum alone. Noise of devices that work with the servers, or that drop
out, does not count: the bounds are those of the sum over ``honest`` devices. Sources: Kairouz, Liu and Steinke 2021
(discrete Gaussian), Agarwal, Kairouz and Liu 2021 (Skellam), Canonne, Kamath and Steinke 2020 (both one by one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from federated.privacy.discrete import rounded_bound
from federated.privacy.section import PrivacySection

Kind = Literal["gaussian", "skellam"]

WRAP_BITS: Final = 40
"""The sum of all noise leaves ``noise_bound`` with a probability of at most 2**-40."""
_LEAST_SIGMA: Final = 0.5  # of one device, in steps: below, sums of discrete Gaussians are not close to one
_HALVINGS: Final = 200
_TAU_TERMS: Final = 1000


class CalibrationRefused(ValueError):
    """Noise that cannot be calibrated; the message says what to change."""


@dataclass(frozen=True, slots=True)
class DistributedNoise:
    """Noise that ``honest`` devices add together. ``clip`` is C in steps, ``local_sigma`` the standard deviation of one
    device's noise per coordinate in steps (Skellam: its variance is ``local_sigma``²), ``dimension`` D."""

    kind: Kind
    clip: float
    local_sigma: float
    dimension: int
    honest: int

    def __post_init__(self) -> None:
        if not (0.0 < self.clip < math.inf and 0.0 < self.local_sigma < math.inf):
            raise CalibrationRefused(f"clip and noise must be positive, not {self.clip}, {self.local_sigma}")
        if self.dimension < 1 or self.honest < 1:
            raise CalibrationRefused(
                f"dimension and honest must be at least 1, not {self.dimension}, {self.honest}"
            )
        if self.kind == "gaussian" and self.local_sigma < _LEAST_SIGMA:
            raise CalibrationRefused(
                f"a device's noise of {self.local_sigma:.3g} steps is below half a step, where sums of discrete "
                "Gaussians are no Gaussians: raise secure_aggregation.step_bits or noise_multiplier"
            )

    @classmethod
    def of(cls, section: PrivacySection, *, dimension: int, step_bits: int, honest: int) -> DistributedNoise:
        """The noise of a job: the ``honest`` devices' sum has a standard deviation of ``noise_multiplier`` times
        ``norm``, by which one device may move it. Raises CalibrationRefused."""
        kinds: dict[str, Kind] = {"distributed_gaussian": "gaussian", "distributed_skellam": "skellam"}
        if section.mechanism not in kinds:
            raise CalibrationRefused(f"mechanism {section.mechanism} adds no noise inside the ring")
        if honest < 1:
            raise CalibrationRefused(f"{honest} honest survivors cannot add any noise")
        clip = section.clip * 2.0**step_bits
        sigma = section.noise_multiplier * rounded_bound(clip, dimension) / math.sqrt(honest)
        return cls(kinds[section.mechanism], clip, sigma, dimension, honest)

    @property
    def norm(self) -> float:
        """What the rounded vector's L2 norm may be at most: what a device's part in the sum can be."""
        return rounded_bound(self.clip, self.dimension)

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Pairs (ρ, ξ): the Rényi divergence of order α between sums with and without one device's vector is at most
        ξ + ρα, for every α > 1; for Skellam noise, for whole ones (``whole_orders``)."""
        find = _gaussian_bounds if self.kind == "gaussian" else _skellam_bounds
        return find(self.norm, self.local_sigma, self.honest, self.dimension)

    @property
    def whole_orders(self) -> bool:
        """Whether ``bounds`` were proved for whole orders alone."""
        return self.kind == "skellam"


def fewest_honest(survivors: int, cohort: int, colluding: float) -> int:
    """Honest devices among the fewest ``survivors`` that the servers can unmask, when at most a share of ``colluding``
    of the ``cohort`` that started works with them. Raises CalibrationRefused when none is left."""
    # Of all who started: whoever colludes may choose who survives. A whole number may fall short by a float's error.
    honest = survivors - math.floor(colluding * cohort + 1e-9)
    if honest < 1:
        raise CalibrationRefused(
            f"{survivors} survivors, and {colluding:.0%} of {cohort} may work with the servers: no honest device's "
            "noise is left; raise rounds.update_model_ratio or secure_aggregation.threshold"
        )
    return honest


def _sum_norm(norm: float, dimension: int) -> float:
    """The L1 norm of whole numbers of L2 ``norm``: at most √D · L2, and L2², since |n| <= n²."""
    return norm * min(math.sqrt(dimension), norm)


def _gaussian_bounds(
    norm: float, sigma: float, devices: int, dimension: int
) -> tuple[tuple[float, float], ...]:
    """Proposition 14 of Kairouz et al.: a sum of discrete Gaussians is within τ of one, in the max divergence of each
    coordinate. τ = 10 Σ exp(−2π²σ² k/(k+1)) over k < n."""
    scale = norm / (math.sqrt(devices) * sigma)
    tau = _tau(sigma, devices)
    rho = scale**2 / 2.0
    flat = _sum_norm(norm, dimension) / (math.sqrt(devices) * sigma)
    spread = (scale**2 + 2.0 * flat * tau + tau**2 * dimension) / 2.0
    return (rho, tau * dimension), (spread, 0.0)


def _tau(sigma: float, devices: int) -> float:
    exact = min(devices - 1, _TAU_TERMS)
    terms = sum(math.exp(-2.0 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, exact + 1))
    # Terms fall with k: the first left out bounds all that follow.
    left = devices - 1 - exact
    if left > 0:
        terms += left * math.exp(-2.0 * (math.pi * sigma) ** 2 * (exact + 1) / (exact + 2))
    return 10.0 * terms


def _skellam_bounds(
    norm: float, sigma: float, devices: int, dimension: int
) -> tuple[tuple[float, float], ...]:
    """Corollary 4.1 of Agarwal et al. at scale 1: sums of Skellam noise are Skellam noise, of variance μ = nσ²."""
    variance = devices * sigma**2
    flat = _sum_norm(norm, dimension)
    gaussian = norm**2 / (2.0 * variance)
    # ((2α−1)Δ₂² + 6Δ₁)/4μ², as ρα + ξ; where −Δ₂² would make ξ negative it is left out.
    fine = (gaussian + norm**2 / (2.0 * variance**2), max(0.0, 6.0 * flat - norm**2) / (4.0 * variance**2))
    coarse = (gaussian, 3.0 * flat / (2.0 * variance))
    return fine, coarse


def noise_bound(noise: DistributedNoise, clients: int, length: int) -> int:
    """B in steps: the sum of ``clients``' noise leaves [−B, B] in any of ``length`` coordinates with a probability of
    at most 2**-40. A ring that holds the values' sum plus B does not wrap but for that.

    Both are bounds of Chernoff: of a discrete Gaussian E e^{tX} <= e^{t²σ²/2}, as of a Gaussian (Canonne et al.
    2020); of Skellam noise it is exp(μ(cosh t − 1)).
    """
    if clients < 1 or length < 1:
        raise CalibrationRefused(f"clients and length must be at least 1, not {clients}, {length}")
    wanted = math.log(2.0 * length) + WRAP_BITS * math.log(2.0)
    variance = clients * noise.local_sigma**2
    if noise.kind == "gaussian":
        return math.ceil(math.sqrt(2.0 * variance * wanted))

    def exponent(bound: float) -> float:
        # sup over t of t·b − μ(cosh t − 1), at t = asinh(b/μ).
        return bound * math.asinh(bound / variance) - math.sqrt(bound**2 + variance**2) + variance

    return math.ceil(_first(exponent, wanted))


def _first(rising: Callable[[float], float], wanted: float) -> float:
    """Where the function ``rising`` from 0 reaches ``wanted``, from above."""
    low, high = 0.0, 1.0
    while rising(high) < wanted:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return high
