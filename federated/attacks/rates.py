"""How well a guess did: intervals of rates, ROC curves, and the bounds that differential privacy puts on both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE: Final = 0.95
_HALVINGS: Final = 60


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured number and its interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in the interval."""
        return self.low <= value <= self.high


def wilson(hits: int, tries: int, confidence: float = CONFIDENCE) -> Estimate:
    """The rate of ``hits`` among ``tries`` with Wilson's interval (1927), which is sound near 0 and 1. Raises
    ValueError unless 0 <= hits <= tries and tries >= 1."""
    _require_counts(hits, tries)
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    rate = hits / tries
    middle = (rate + z * z / (2 * tries)) / (1.0 + z * z / tries)
    reach = z / (1.0 + z * z / tries) * math.sqrt(rate * (1.0 - rate) / tries + (z / (2 * tries)) ** 2)
    low = 0.0 if hits == 0 else max(0.0, middle - reach)
    return Estimate(rate, low, 1.0 if hits == tries else min(1.0, middle + reach))


def clopper_pearson(hits: int, tries: int, confidence: float = CONFIDENCE) -> Estimate:
    """The same with the exact interval of Clopper and Pearson (1934): each end is missed with a probability of at
    most (1 − confidence) / 2, whatever the rate. Raises ValueError likewise."""
    _require_counts(hits, tries)
    tail = (1.0 - confidence) / 2.0
    choices = _log_choices(tries)
    low = 0.0 if hits == 0 else _rate_where(lambda p: _at_least(hits, tries, p, choices), tail)
    high = (
        1.0 if hits == tries else _rate_where(lambda p: 1.0 - _at_most(hits, tries, p, choices), 1.0 - tail)
    )
    return Estimate(hits / tries, low, high)


def mean_of(values: Floats, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of ``values`` [N] with the normal interval."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    mean, spread = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    return Estimate(mean, mean - z * spread, mean + z * spread)


@dataclass(frozen=True, slots=True)
class Told:
    """How well scores tell members from others: area under the ROC curve, true positives at 1 % false positives, and
    the largest difference of both rates (the advantage)."""

    auc: Estimate
    tpr_at_1: Estimate
    advantage: Estimate


def told(members: Floats, others: Floats, generator: np.random.Generator, resamples: int = 200) -> Told:
    """How well scores of ``members`` [P] and ``others`` [Q] differ, with percentile intervals of the bootstrap: the
    2.5th and 97.5th of ``resamples``, each drawing both anew with repetition."""
    measured = _told(members, others)
    again = np.array(
        [
            _told(generator.choice(members, len(members)), generator.choice(others, len(others)))
            for _ in range(resamples)
        ]
    )
    low, high = np.quantile(again, [0.5 - CONFIDENCE / 2.0, 0.5 + CONFIDENCE / 2.0], axis=0)
    return Told(*(Estimate(*map(float, row)) for row in zip(measured, low, high, strict=True)))


def auc_of(members: Floats, others: Floats) -> float:
    """The probability that a member scores above another; equal scores count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, members, side="left")
    until = np.searchsorted(ordered, members, side="right")
    return float((below + until).mean() / (2.0 * len(others)))


def curve_of(members: Floats, others: Floats) -> tuple[Floats, Floats]:
    """The ROC curve: false and true positive rates of "score >= threshold", from (0, 0) to (1, 1), at every distinct
    score."""
    scores = np.unique(np.concatenate([members, others]))[::-1]
    false = 1.0 - np.searchsorted(np.sort(others), scores, side="left") / len(others)
    true = 1.0 - np.searchsorted(np.sort(members), scores, side="left") / len(members)
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def _told(members: Floats, others: Floats) -> tuple[float, float, float]:
    false, true = curve_of(members, others)
    return auc_of(members, others), float(true[false <= 0.01].max()), float((true - false).max())


def most_true(false: float, epsilon: float, delta: float) -> float:
    """The largest true positive rate that (ε, δ)-privacy leaves at a false positive rate: the lower of e^ε·FPR + δ and
    1 − e^−ε·(1 − δ − FPR) (Kairouz, Oh, Viswanath 2015)."""
    if epsilon > 700.0:
        return 1.0
    near = math.exp(epsilon) * false + delta
    far = 1.0 - math.exp(-epsilon) * max(0.0, 1.0 - delta - false)
    return min(1.0, near, far)


def most_advantage(epsilon: float, delta: float) -> float:
    """The largest TPR − FPR that (ε, δ)-privacy leaves: where the two lines of ``most_true`` meet, (e^ε − 1 + 2δ) /
    (e^ε + 1)."""
    return min(1.0, math.tanh(epsilon / 2.0) + 2.0 * delta / (1.0 + math.exp(min(epsilon, 700.0))))


def most_identified(epsilon: float, delta: float, candidates: int, guesses: int = 1) -> float:
    """The largest chance that the true one of N equally likely ``candidates`` is among ``guesses``: summed over all
    of them, P(c is named | c) <= e^ε·P(c is named | a fixed one) + δ, and the latter add up to the guesses."""
    if epsilon > 700.0:
        return 1.0
    return min(1.0, math.exp(epsilon) * guesses / candidates + delta)


def _require_counts(hits: int, tries: int) -> None:
    if not 0 <= hits <= tries or tries < 1:
        raise ValueError(f"{hits} hits among {tries} tries")


def _log_choices(tries: int) -> Floats:
    """log C(tries, k) for k = 0 … tries."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, tries + 1)))])
    return np.asarray(factorials[-1] - factorials - factorials[::-1])


def _at_least(hits: int, tries: int, rate: float, choices: Floats) -> float:
    k = np.arange(hits, tries + 1)
    return float(np.exp(choices[hits:] + k * math.log(rate) + (tries - k) * math.log1p(-rate)).sum())


def _at_most(hits: int, tries: int, rate: float, choices: Floats) -> float:
    k = np.arange(hits + 1)
    logs = choices[: hits + 1] + k * math.log(rate) + (tries - k) * math.log1p(-rate)
    return float(np.exp(logs).sum())


def _rate_where(rising: Callable[[float], float], level: float) -> float:
    """Where a function that rises over (0, 1) passes ``level``."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if rising(middle) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
