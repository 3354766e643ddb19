"""What samples of a latency come to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Quantiles(msgspec.Struct, frozen=True):
    """Percentiles of ``n`` samples in ms (interpolated linearly between the two nearest)."""

    n: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def quantiles(samples_ms: Sequence[float]) -> Quantiles | None:
    """The percentiles of some samples; None where there are none."""
    if not samples_ms:
        return None
    found = np.percentile(np.asarray(samples_ms, np.float64), (50, 95, 99, 100)).tolist()
    return Quantiles(len(samples_ms), *(round(value, 3) for value in found))
