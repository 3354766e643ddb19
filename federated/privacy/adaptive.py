"""A clip that follows a quantile of the clients' norms (Andrew et al. 2021), which costs a little of the budget.

Each client says by one bit, ½ or −½, whether its update was within the clip; the sum of bits gets noise of its own.
Shifting the bit to ±½ halves its sensitivity.
"""

from __future__ import annotations

import math
from typing import Final

SMALLEST, LARGEST = 1e-4, 1e6
"""Where a clip stays, whatever clients do: far above what rounding adds to a norm, far below what sums can hold."""
_FURTHEST: Final = 50.0


def next_clip(clip: float, within: float, quantile: float, rate: float) -> float:
    """C · exp(−rate · (``within`` − quantile)): ``within`` is the noised share of clients at or below C."""
    step = min(max(-rate * (within - quantile), -_FURTHEST), _FURTHEST)
    return min(max(clip * math.exp(step), SMALLEST), LARGEST)


def noise_left(noise_multiplier: float, count_noise: float) -> float:
    """z_Δ, the multiple of C that updates need so that they, and noise of ``count_noise`` deviations σ_b on the sum of
    bits, cost together what ``noise_multiplier`` z alone would: (z⁻² − (2σ_b)⁻²)^(−½), theorem 1 of the paper. Raises
    ValueError where the bits alone would cost as much."""
    left = noise_multiplier**-2 - (2.0 * count_noise) ** -2
    if left <= 0.0:
        raise ValueError(
            f"clip_count_noise {count_noise:g} must be above noise_multiplier / 2 = {noise_multiplier / 2:g}: "
            "else counting alone spends the budget"
        )
    return float(left**-0.5)
