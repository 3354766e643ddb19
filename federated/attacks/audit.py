"""An audit of our own noise: the worst two inputs that a mechanism must not tell apart, many reports of each, and from
how well they are told apart a lower bound on ε, which must not lie above the ε that is claimed.

The test is the likelihood ratio under the noise that the mechanism claims to have. Its threshold is chosen on one half
of the reports; on the other the rates of true and false positives get exact intervals (Clopper and Pearson), so a sound
mechanism passes with a probability of at least the ``confidence``, whatever is chosen on the first half.

From rates to ε: of any mechanism, log((TPR − δ) / FPR) and log((TNR − δ) / FNR). With Gaussian noise those are
far below ε at any small δ unless one draws 1/δ reports; there Φ⁻¹(TPR) − Φ⁻¹(FPR) bounds μ = Δ/σ from below,
whichever threshold is taken, and the ε of μ at δ follows (Nasr et al. 2023): a bound that holds for Gaussian noise of
whatever size, and a forgotten or halved σ shows after a few hundred reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

import numpy as np

from federated.attacks.rates import Estimate, Floats, clopper_pearson, wilson
from federated.privacy.composition import gaussian_epsilon

Shape = Literal["any", "gaussian"]

CONFIDENCE: Final = 0.999
"""Of the whole bound: one sound mechanism in a thousand looks broken."""
_THRESHOLDS: Final = 200

Interval = Callable[[int, int, float], Estimate]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a mechanism claims of one report or release: (``epsilon``, ``delta``)-privacy. ``shape`` "gaussian": by
    normal noise, so that δ tells its size."""

    epsilon: float
    delta: float
    shape: Shape


@dataclass(frozen=True, slots=True)
class Audit:
    """The ``claim`` and the lower bound on ε that ``reports`` of each input gave."""

    claim: Claim
    least_epsilon: float
    reports: int

    @property
    def passed(self) -> bool:
        """Whether what was measured is within the claim."""
        return self.least_epsilon <= self.claim.epsilon


def audit(first: Floats, second: Floats, claim: Claim, confidence: float = CONFIDENCE) -> Audit:
    """Log-likelihood ratios of N reports of the ``first`` input and of the ``second``, larger where the first is
    likelier. Raises ValueError for fewer than 4 of either."""
    if min(len(first), len(second)) < 4:
        raise ValueError("an audit needs at least 4 reports of each input")
    scores = np.sort(np.concatenate([first[::2], second[::2]]))
    places = np.unique(np.linspace(0, len(scores) - 1, _THRESHOLDS).astype(np.int64))
    chosen = max(
        np.unique(scores[places]).tolist(),
        key=lambda level: _apart(*_rates(wilson, first[::2], second[::2], level, confidence), claim),
    )
    apart = _apart(*_rates(clopper_pearson, first[1::2], second[1::2], chosen, confidence), claim)
    return Audit(claim, _epsilon(apart, claim), min(len(first), len(second)))


def _rates(
    interval: Interval, first: Floats, second: Floats, level: float, confidence: float
) -> tuple[float, float]:
    """The least true and the largest false positive rate at a threshold."""
    true = interval(int((first >= level).sum()), len(first), confidence)
    false = interval(int((second >= level).sum()), len(second), confidence)
    return true.low, false.high


def _apart(true: float, false: float, claim: Claim) -> float:
    """How far apart rates show two inputs to be: ε, or μ of Gaussian noise."""
    if claim.shape == "any":
        delta = claim.delta
        return max(_log_ratio(true - delta, false), _log_ratio(1.0 - false - delta, 1.0 - true))
    return _quantile(true) - _quantile(false)


def _epsilon(apart: float, claim: Claim) -> float:
    if apart <= 0.0 or claim.shape == "any" or math.isinf(apart):
        return max(0.0, apart)
    return gaussian_epsilon(1.0 / apart, 1, claim.delta)


def _log_ratio(above: float, below: float) -> float:
    if above <= 0.0:
        return -math.inf
    return math.inf if below <= 0.0 else math.log(above / below)


def _quantile(rate: float) -> float:
    if not 0.0 < rate < 1.0:
        return -math.inf if rate <= 0.0 else math.inf
    return NormalDist().inv_cdf(rate)
