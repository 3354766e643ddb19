"""What k reports cost together, where a formula says it exactly: Gaussian noise, and anything that is purely ε-private.

A device keeps its own budget by these, so they need NumPy alone. ``accounting`` gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from federated.privacy.gaussian import delta_of

MOST_RELEASES: Final = 2**20
"""More is counted as this many: nothing that is released more often has a budget left to speak of."""
LEAST_MULTIPLIER: Final = 1e-6
"""Less Gaussian noise counts as none."""
_STEPS: Final = 200


def gaussian_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """ε at ``delta`` of k releases with Gaussian noise of ``multiplier`` = σ/Δ each: together they are one with
    multiplier/√k (Dong, Roth and Su 2022), whose ε Balle and Wang (2018) give. Rounded to the private side."""
    _require(releases, delta)
    if not 0.0 < multiplier < math.inf:
        raise ValueError(f"a noise multiplier is positive, not {multiplier}")
    if not releases:
        return 0.0
    if multiplier < LEAST_MULTIPLIER:
        return math.inf
    together = multiplier / math.sqrt(releases)
    # ε = 1/2m² + √(2 log(1/δ))/m is enough (zCDP, Bun and Steinke 2016), so the root lies below.
    most = 0.5 / together**2 + math.sqrt(2.0 * math.log(1.0 / delta)) / together
    return _least(lambda epsilon: delta_of(epsilon, together), delta, most)


def pure_epsilon(epsilon: float, releases: int, delta: float) -> float:
    """ε at ``delta`` of k releases that are each (``epsilon``, 0)-private, whatever their mechanism and however each
    depends on those before: the optimal composition theorem of Kairouz, Oh and Viswanath (2015).

    Randomised response is the worst case: with p = e^ε/(1+e^ε), j of k answers against the odds leave a privacy
    loss of (k−2j)ε with probability C(k,j) p^(k−j) (1−p)^j.
    """
    _require(releases, delta)
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive, not {epsilon}")
    if not releases:
        return 0.0
    against = np.arange(releases + 1, dtype=np.float64)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, releases + 1, dtype=np.float64)))])
    log_p, log_q = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    logs = factorials[-1] - factorials - factorials[::-1] + (releases - against) * log_p + against * log_q
    chances, losses = np.exp(logs), (releases - 2.0 * against) * epsilon

    def spent(total: float) -> float:
        above = losses > total
        return float(np.sum(chances[above] * -np.expm1(total - losses[above])))

    return _least(spent, delta, releases * epsilon)


def most_within(cost: Callable[[int], float], budget: float, guess: int = 1) -> int:
    """The most releases whose ``cost`` is within ``budget``, at most MOST_RELEASES. ``cost`` grows with the number;
    ``guess`` is where to look first. The number given was itself asked for, so it is never too large."""
    low, high = 0, MOST_RELEASES + 1
    at, step = max(1, min(guess, MOST_RELEASES)), 1
    # In growing steps from the guess, until it is known on both sides how far the budget goes.
    while low < at < high:
        if cost(at) <= budget:
            low, at = at, min(at + step, high)
        else:
            high, at = at, max(at - step, low)
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if cost(middle) <= budget:
            low = middle
        else:
            high = middle
    return low


def _least(delta_at: Callable[[float], float], delta: float, most: float) -> float:
    """The least ε with ``delta_at``(ε) <= ``delta``, to the last bits, found by halving [0, ``most``]."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        if delta_at(middle) > delta:
            low = middle
        else:
            high = middle
    return high


def _require(releases: int, delta: float) -> None:
    if not 0 <= releases <= MOST_RELEASES:
        raise ValueError(f"releases must be in [0, {MOST_RELEASES}], not {releases}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be above 0 and below 1, not {delta}")
