"""Whole-numbered noise for sums modulo a power of two, and the rounding that comes before it.

The discrete Gaussian is drawn exactly (Canonne, Kamath and Steinke 2020): a proposal from the discrete Laplace
distribution is accepted with probability exp(−γ), and every such coin is exact. It compares a uniform number, of as
many bits as it takes, with exp(−γ): float64 decides whenever its error cannot matter, all but once in 2**39 tosses, and
decimal arithmetic on the exact fraction γ decides the rest.

Skellam noise is the difference of two Poisson numbers, drawn by Hörmann's transformed rejection (PTRS, 1993) with
Loader's (2000) saddle-point probabilities, or below a mean of 10 by inversion. Each probability is right to about
2**-40 of itself, not exactly; the total variation this adds to a vector of D is some D · 2**-40, and to δ as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.privacy.randomness import Floats, Randomness, below, uniform

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LARGEST_GAUSSIAN: Final = 2.0**40
LARGEST_SKELLAM: Final = 2.0**26
"""Largest standard deviations, in steps: numbers stay below 2**53, where float64 is exact."""
BETA: Final = math.exp(-0.5)
"""Most of the share of roundings that are drawn again, as in Kairouz et al. (2021)."""

_MARGIN: Final = 2.0**-40
_MOST_ROUNDINGS: Final = 1000
_DRAWN: Final = 2**19  # proposals at once: what they need beside them stays at some dozens of MiB on a device
_INVERSION_BELOW: Final = 10.0


def discrete_gaussian(randomness: Randomness, sigma: float, count: int) -> Integers:
    """``count`` whole numbers x, each with probability proportional to exp(−x²/2σ²). Raises ValueError unless
    0 < σ <= 2**40."""
    if not 0.0 < sigma <= LARGEST_GAUSSIAN:
        raise ValueError(f"sigma must be above 0 and at most 2**40 steps, not {sigma}")
    scale = math.floor(sigma) + 1
    variance, whole = Fraction(sigma) ** 2, sigma * sigma

    def draw(wanted: int) -> Integers:
        sizes = _discrete_laplace(randomness, scale, wanted)
        off = np.abs(sizes) - whole / scale
        kept = _coins(
            np.square(off) / (2.0 * whole),
            lambda place: (abs(int(sizes[place])) - variance / scale) ** 2 / (2 * variance),
            randomness,
        )
        return sizes[kept]

    return _gathered(draw, count)


def skellam(randomness: Randomness, sigma: float, count: int) -> Integers:
    """``count`` differences of two Poisson numbers of mean σ²/2. Raises ValueError unless 0 < σ <= 2**26."""
    if not 0.0 < sigma <= LARGEST_SKELLAM:
        raise ValueError(f"sigma must be above 0 and at most 2**26 steps, not {sigma}")
    mean = sigma * sigma / 2.0
    found = np.empty(count, np.int64)
    for start in range(0, count, _DRAWN):
        wanted = min(_DRAWN, count - start)
        found[start : start + wanted] = poisson(randomness, mean, wanted) - poisson(randomness, mean, wanted)
    return found


def poisson(randomness: Randomness, mean: float, count: int) -> Integers:
    """``count`` Poisson numbers of a ``mean`` above 0."""
    if mean < _INVERSION_BELOW:
        return _by_inversion(randomness, mean, count)
    return _gathered(lambda wanted: _transformed(randomness, mean, wanted), count)


def rounded_bound(norm: float, size: int, beta: float = BETA) -> float:
    """The L2 norm, in steps, within which a vector [``size``] of L2 ``norm`` steps is kept when it is rounded at random
    (Kairouz et al. 2021, proposition 22): rounding adds to sensitivity, and this is all that it may add."""
    root = math.sqrt(size)
    likely = norm * norm + size / 4.0 + math.sqrt(2.0 * math.log(1.0 / beta)) * (norm + root / 2.0)
    return min(norm + root, math.sqrt(likely))


def round_within(values: Floats, bound: float, randomness: Randomness) -> Integers:
    """``values`` [D], in steps, each rounded up or down at random so that its mean stays, all drawn again while their
    L2 norm is above ``bound``, at least ``rounded_bound`` of theirs. Raises ValueError for a bound below that."""
    floors = np.floor(values)
    rests = values - floors
    for _ in range(_MOST_ROUNDINGS):
        rounded = floors + (uniform(randomness, len(values)) < rests)
        if float(np.square(rounded).sum()) <= bound * bound:
            return rounded.astype(np.int64)
    raise ValueError(f"no rounding of a vector of norm {np.linalg.norm(values):g} steps is within {bound:g}")


def _gathered(draw: Callable[[int], Integers], count: int) -> Integers:
    """``count`` numbers out of batches that come back smaller than asked for."""
    parts: list[Integers] = []
    missing = count
    while missing > 0:
        part = draw(min(2 * missing + 16, _DRAWN))[:missing]
        parts.append(part)
        missing -= len(part)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _discrete_laplace(randomness: Randomness, scale: int, wanted: int) -> Integers:
    """Whole numbers x with probability proportional to exp(−|x| / scale): about half as many as wanted. The rest by
    ``scale`` is even below it and kept with exp(−rest/scale), the multiple counts heads of exp(−1), and zero has one
    sign only."""
    rests = below(randomness, np.full(wanted, scale, np.uint64)).astype(np.int64)
    kept = rests[_coins(rests / scale, lambda place: Fraction(int(rests[place]), scale), randomness)]
    multiples = np.zeros(len(kept), np.int64)
    alive = np.arange(len(kept))
    while len(alive):
        alive = alive[_coins(np.ones(len(alive)), lambda place: Fraction(1), randomness)]
        multiples[alive] += 1
    sizes = kept + scale * multiples
    negative = np.unpackbits(randomness.words(-(-len(sizes) // 64)).view(np.uint8), count=len(sizes)).astype(
        np.bool_
    )
    return np.asarray(np.where(negative, -sizes, sizes)[~(negative & (sizes == 0))])


def _coins(gammas: Floats, exact: Callable[[int], Fraction], randomness: Randomness) -> Flags:
    """Heads [N] with probability exp(−γ) each; ``exact`` gives the γ of a place, of which ``gammas`` are float64 with
    an error that moves exp(−γ) by less than the margin."""
    words = randomness.words(len(gammas))
    drawn, chances = words * 2.0**-64, np.exp(-gammas)
    heads = drawn < chances
    for place in np.flatnonzero(np.abs(drawn - chances) <= _MARGIN).tolist():
        heads[place] = _coin(int(words[place]), exact(place), randomness)
    return heads


def _coin(digits: int, gamma: Fraction, randomness: Randomness) -> bool:
    """Whether a uniform number whose first 64 bits are ``digits`` is below exp(−γ); draws as many more as it takes."""
    if gamma == 0:
        return True
    bits = 64
    while True:
        with localcontext() as context:
            context.prec = bits // 3 + 20
            chance = (Decimal(-gamma.numerator) / Decimal(gamma.denominator)).exp()
            error = Decimal(10) ** (5 - context.prec)
            low = Decimal(digits) / Decimal(2**bits)
            if low > chance + error:
                return False
            if low + Decimal(1) / Decimal(2**bits) < chance - error:
                return True
        digits, bits = digits << 64 | int(randomness.words(1)[0]), bits + 64


def _by_inversion(randomness: Randomness, mean: float, count: int) -> Integers:
    """The number of steps of the distribution function below a uniform number."""
    sizes = np.arange(100)  # beyond it less than 2**-64 is left, at a mean below 10
    return np.searchsorted(np.cumsum(np.exp(_log_poisson(sizes, mean))), uniform(randomness, count)).astype(
        np.int64
    )


def _transformed(randomness: Randomness, mean: float, wanted: int) -> Integers:
    """Hörmann's PTRS: some of ``wanted`` proposals. Counted from the mean's whole part, so that no digits are lost."""
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    sure = 0.9277 - 3.6224 / (b - 2.0)
    whole = math.floor(mean)
    u, v = uniform(randomness, wanted) - 0.5, uniform(randomness, wanted)
    room = 0.5 - np.abs(u)
    found = np.floor((2.0 * a / room + b) * u + (mean - whole) + 0.43) + whole
    possible = (found >= 0) & ~((room < 0.013) & (v > room))
    found = np.where(possible, found, 0.0)
    hat = np.log(v * inverse_alpha / (a / (room * room) + b))
    kept = possible & (((room >= 0.07) & (v <= sure)) | (hat <= _log_poisson(found, mean)))
    return found[kept].astype(np.int64)


def _log_poisson(found: npt.NDArray[np.float64 | np.int64], mean: float) -> Floats:
    """log P(k) = −½ log 2πk − s(k) − D(k, mean), s the error of Stirling's formula, D the deviance (Loader 2000): no
    two large numbers are subtracted."""
    k = np.maximum(np.asarray(found, np.float64), 1.0)
    off = (k - mean) / (k + mean)
    near = np.where(np.abs(off) < 0.1, off, 0.0)
    square, power, series = near * near, 2.0 * k * near, (k - mean) * near
    for odd in range(3, 23, 2):
        power = power * square
        series = series + power / odd
    far = k * np.log(k / mean) + mean - k
    deviance = np.where(np.abs(off) < 0.1, series, far)
    logs = -0.5 * np.log(2.0 * math.pi * k) - _stirling_error(k) - deviance
    return np.where(np.asarray(found) == 0, -mean, logs)


_SMALL_ERRORS: Final = np.array(
    [0.0]
    + [
        math.lgamma(n + 1.0) - ((n + 0.5) * math.log(n) - n + 0.5 * math.log(2.0 * math.pi))
        for n in range(1, 16)
    ]
)


def _stirling_error(k: Floats) -> Floats:
    inverse = 1.0 / np.square(np.maximum(k, 16.0))
    series = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse * (1 / 1680 - inverse / 1188)))) / (
        np.maximum(k, 16.0)
    )
    return np.where(k < 16.0, _SMALL_ERRORS[np.minimum(k, 15.0).astype(np.int64)], series)
