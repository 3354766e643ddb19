"""How many coordinates a SignDS report names, and with which probabilities they are among the largest.

A device whose signed difference has its k largest of d coordinates in the set S names h coordinates J. With ν = |J ∩ S|
the exponential mechanism of utility [ν ≥ ν_th] gives

    Pr(J | S) = exp(ε · [ν ≥ ν_th]) / Z,     Pr(ν) = C(k, ν) · C(d − k, h − ν) · exp(ε · [ν ≥ ν_th]) / Z,

where Z is the same for every S: two devices' chances of one report differ by a factor of at most e^ε. The sign is even,
whatever the data are, and changes nothing. ν_th maximises E[ν]; the automatic h is the largest with E[ν] / h at least
``ratio``, 1 where there is none.

All in log space: ε is up to 1,000, d up to 10^8. Logarithms of binomials are sums of h logarithms: differences of
log-gammas near 10^9 would lose the seven digits that ε is proved with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LARGEST_EPSILON: Final = 1000.0
LARGEST_DIMENSION: Final = 2**31
MOST_NAMED: Final = 65_536
LARGEST_SHARE: Final = 0.25
SMALLEST_RATIO: Final = 0.5
_SAME: Final = 1e-12  # E[ν] this near are a tie: what rounding leaves of equal ones


@dataclass(frozen=True)
class Plan:
    """``named`` = h of ``dimension`` = d coordinates; those with at least ``threshold`` = ν_th of the ``top`` = k
    largest are e^``epsilon`` times as likely as others. ``log_pmf`` [h + 1] is log Pr(ν), −inf where impossible."""

    dimension: int
    top: int
    named: int
    threshold: int
    epsilon: float
    log_pmf: Floats = field(repr=False, compare=False)

    @property
    def expected(self) -> float:
        """E[ν]."""
        return float(np.exp(self.log_pmf) @ np.arange(self.named + 1))

    def log_probability(self, overlap: int) -> float:
        """log Pr(J | S) of a given J with ν = ``overlap`` in S, out of the probabilities that ν is drawn by."""
        ways = _log_ways(self.dimension, self.top, self.named)
        return float(self.log_pmf[overlap] - ways[overlap])


def make_plan(dimension: int, top: int, epsilon: float, ratio: float = 0.6, named: int = 0) -> Plan:
    """The plan for d = ``dimension``, k = ``top`` and ε; h = ``named``, 0 for the automatic one by ``ratio``. Raises
    ValueError for numbers out of range."""
    if not (1 <= top <= dimension <= LARGEST_DIMENSION and top <= LARGEST_SHARE * dimension):
        raise ValueError(
            f"the largest {top} of {dimension} coordinates: need at least 1 and at most a quarter"
        )
    if not 0.0 < epsilon <= LARGEST_EPSILON:
        raise ValueError(f"epsilon must be above 0 and at most {LARGEST_EPSILON:g}, not {epsilon}")
    if not SMALLEST_RATIO <= ratio <= 1.0:
        raise ValueError(f"the ratio must be from {SMALLEST_RATIO:g} to 1, not {ratio}")
    if not 0 <= named <= min(dimension, MOST_NAMED):
        raise ValueError(f"{named} coordinates of {dimension} to name: at most {min(dimension, MOST_NAMED)}")
    h = named or _automatic(dimension, top, epsilon, ratio)
    ways = _log_ways(dimension, top, h)
    threshold, _ = _best_threshold(ways, epsilon)
    tilted = ways + epsilon * (np.arange(h + 1) >= threshold)
    return Plan(dimension, top, h, threshold, epsilon, tilted - np.logaddexp.reduce(tilted))


@lru_cache(maxsize=64)
def plan_for(dimension: int, sign_k: float, epsilon: float, ratio: float, named: int) -> Plan:
    """The plan with k = floor(``sign_k`` · d), in exact decimals. Raises ValueError as ``make_plan``."""
    top = int(Decimal(repr(sign_k)) * dimension)
    if top < 1:
        least = Context(prec=2, rounding=ROUND_CEILING).divide(Decimal(1), Decimal(dimension))
        raise ValueError(
            f"sign_k {sign_k:g} of {dimension} coordinates is none: raise it to {least} at least "
            f"(it may be {LARGEST_SHARE:g} at most), or take a larger model"
        )
    return make_plan(dimension, top, epsilon, ratio, named)


def _automatic(dimension: int, top: int, epsilon: float, ratio: float) -> int:
    """The largest h with E[ν] / h ≥ ``ratio``, else 1.

    None is above ε / kl(ratio ‖ k/d): the tilted distribution Q has KL(Q ‖ P) ≤ ε against the hypergeometric P, whose
    moments are at most the binomial's (Hoeffding 1963), so by Donsker and Varadhan h · kl(E[ν]/h ‖ k/d) ≤ ε. And
    E[ν] ≤ k.
    """
    share = top / dimension
    divergence = ratio * math.log(ratio / share)
    if ratio < 1.0:
        divergence += (1.0 - ratio) * math.log((1.0 - ratio) / (1.0 - share))
    for h in range(max(1, int(min(epsilon / divergence, top / ratio)) + 1), 1, -1):
        if _best_threshold(_log_ways(dimension, top, h), epsilon)[1] >= ratio * h:
            return h
    return 1


def _best_threshold(ways: Floats, epsilon: float) -> tuple[int, float]:
    """ν_th and E[ν] under it, for ``ways`` [h + 1] = log C(k, ν) C(d − k, h − ν)."""
    with np.errstate(divide="ignore"):
        counted = ways + np.log(np.arange(len(ways)))
    below, from_here = _sums(ways)
    below_counted, from_here_counted = _sums(counted)
    mass = np.logaddexp(below, from_here + epsilon)
    means = np.exp(np.logaddexp(below_counted, from_here_counted + epsilon) - mass)
    best = int(np.flatnonzero(means >= means.max() * (1.0 - _SAME))[0])
    return best + 1, float(means[best])


def _sums(logs: Floats) -> tuple[Floats, Floats]:
    """For t = 1 … h: log Σ_{ν < t} exp logs and log Σ_{ν ≥ t} exp logs, [h] each."""
    return np.logaddexp.accumulate(logs)[:-1], np.logaddexp.accumulate(logs[::-1])[::-1][1:]


@lru_cache(maxsize=8)
def _log_ways(dimension: int, top: int, named: int) -> Floats:
    """log C(k, ν) + log C(d − k, h − ν) for ν = 0 … h."""
    ways: Floats = _log_choose(top, named) + _log_choose(dimension - top, named)[::-1]
    ways.flags.writeable = False
    return ways


def _log_choose(n: int, most: int) -> Floats:
    """log C(n, j) for j = 0 … ``most``; −inf above n."""
    factors = np.arange(most)
    with np.errstate(divide="ignore"):
        steps = np.log(np.maximum(n - factors, 0)) - np.log1p(factors)
    return np.concatenate([[0.0], np.cumsum(steps)])
