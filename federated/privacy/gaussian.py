"""Gaussian noise: how much a report needs, by the analytic mechanism of Balle and Wang (2018), and drawing it.

What leaves a party is rounded to a grid after the noise is added. Sums of floating-point numbers are full of holes: the
low bits of value + noise tell which values could have been there (Mironov 2012). A cell of the grid is a power of two
about 2**16 times narrower than σ and some 2**36 times wider than the spacing of the noise, so each of its points
collects enough numbers for its probability to be that of the ideal noise, and its low bits carry nothing.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.privacy.randomness import Floats, Randomness, normal

GRID_BITS: Final = 16
"""Cells of the grid in the power of two below a scale. Noisy values of up to 2**7 scales are then exact in float32."""
LARGEST_EPSILON: Final = 1000.0
_STEPS: Final = 200
_SERIES_FROM: Final = -25.0


def delta_of(epsilon: float, sigma: float, sensitivity: float = 1.0) -> float:
    """The smallest δ for which noise N(0, σ²) on a value of L2 sensitivity Δ is (ε, δ)-private: theorem 8 of Balle and
    Wang, Φ(Δ/2σ − εσ/Δ) − e^ε Φ(−Δ/2σ − εσ/Δ), the two terms compared as logarithms."""
    scale = sigma / sensitivity
    near = _log_phi(0.5 / scale - epsilon * scale)
    far = epsilon + _log_phi(-0.5 / scale - epsilon * scale)
    if far >= near:
        return 0.0  # they differ by less than a float can tell
    return math.exp(near) * -math.expm1(far - near)


def sigma_of(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest σ that is (ε, δ)-private, found by halving to the last bits and rounded to the private side. Raises
    ValueError unless 0 < ε <= 1000 and 1e-100 <= δ < 1."""
    if not 0.0 < epsilon <= LARGEST_EPSILON:
        raise ValueError(f"epsilon must be above 0 and at most {LARGEST_EPSILON:g}, not {epsilon}")
    if not 1e-100 <= delta < 1.0:
        raise ValueError(f"delta must be at least 1e-100 and below 1, not {delta}")
    if not 0.0 < sensitivity < math.inf:
        raise ValueError(f"a sensitivity is positive, not {sensitivity}")
    low, high = 0.0, 1.0
    while delta_of(epsilon, high) > delta:
        low, high = high, 2.0 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        if delta_of(epsilon, middle) > delta:
            low = middle
        else:
            high = middle
    return high * sensitivity


def grid_of(scale: float) -> float:
    """The cell of the grid for noise of ``scale``: a power of two."""
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


def to_grid(values: Floats, cell: float) -> npt.NDArray[np.float32]:
    """``values`` at the nearest multiple of ``cell``."""
    return (np.rint(values / cell) * cell).astype(np.float32)


def add_gaussian(
    values: npt.NDArray[np.float32], sigma: float, randomness: Randomness
) -> npt.NDArray[np.float32]:
    """``values`` plus N(0, σ²) each, on the grid."""
    return to_grid(values + sigma * normal(randomness, values.size).reshape(values.shape), grid_of(sigma))


def _log_phi(x: float) -> float:
    """log Φ(x). Where erfc would underflow, the asymptotic series of Mills' ratio, to 1e-16 from −25 down."""
    if x > _SERIES_FROM:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
    inverse = 1.0 / (x * x)
    series = 1.0 - inverse * (1.0 - 3.0 * inverse * (1.0 - 5.0 * inverse * (1.0 - 7.0 * inverse)))
    return -0.5 * x * x - math.log(-x) - 0.5 * math.log(2.0 * math.pi) + math.log(series)
