"""What a way of synchronising came to: how long after it was written a row was held, and what crossed the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.scale import Floats, Plan, Scale
from sync.simulator.network import Network


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from written to held, of every simulated row at every replica that was watched. ``unfinished``: the share
    that was not held when the run ended, and counts with the time until then."""

    mean_s: float
    p50_s: float
    p99_s: float
    most_s: float
    unfinished: float = 0.0

    @staticmethod
    def of(latencies: Floats, unfinished: float = 0.0) -> Times:
        if not len(latencies):
            return Times(0.0, 0.0, 0.0, 0.0, 1.0)
        p50, p99 = np.percentile(latencies, [50, 99]).tolist()
        return Times(float(latencies.mean()), p50, p99, float(latencies.max()), unfinished)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way came to. ``between``: at replicas of other regions; ``inside``: of the region that writes; ``high``,
    ``low``: between, of the rows of most priority and the others; ``by_region_s``: the means. Bytes between regions and
    messages are those of this column."""

    name: str
    between: Times
    inside: Times
    high: Times
    low: Times
    by_region_s: tuple[float, ...]
    wide_bytes_a_second: float
    messages_a_second: float
    bytes_an_update: float
    """Between regions, of one real row written, all its replicas together."""
    events: int = 0


def traffic(network: Network) -> tuple[int, int]:
    """Bytes between regions and messages so far."""
    return network.counts.crossing_bytes_total, network.counts.messages_total


def summed(
    name: str,
    scale: Scale,
    plan: Plan,
    held: Sequence[Sequence[Floats]],
    span: tuple[float, float, float],
    wide: int,
    messages: int,
    events: int,
) -> Outcome:
    """An outcome from when observers of each region (the first is the one that writes) had each row of ``plan``."""
    first_s, last_s, until_s = span
    counted = (plan.written_s >= first_s) & (plan.written_s < last_s)
    written_s, high = plan.written_s[counted], plan.high[counted]
    waits = [[np.minimum(one[counted], until_s) - written_s for one in region] for region in held]
    missing = [[np.isinf(one[counted]).astype(np.float64) for one in region] for region in held]
    tagged = np.concatenate([high for region in waits[1:] for _ in region] or [high[:0]])
    between = _all(waits[1:])
    if not len(written_s):
        raise ValueError(f"nothing is written between {first_s} and {last_s} s")
    late, late_inside = (_all(some) for some in (missing[1:], missing[:1]))
    tenth, others = (
        Times.of(between[which], float(late[which].mean()) if which.any() else 0.0)
        for which in (tagged, ~tagged)
    )
    seconds = last_s - first_s
    return Outcome(
        name,
        Times.of(between, float(late.mean())),
        Times.of(_all(waits[:1]), float(late_inside.mean())),
        tenth,
        others,
        tuple(float(_all([region]).mean()) for region in waits),
        wide / seconds,
        messages / seconds,
        wide / max(1, len(written_s) * scale.each),
        events,
    )


def _all(regions: Sequence[Sequence[Floats]]) -> Floats:
    parts = [one for region in regions for one in region]
    return np.concatenate(parts) if parts else np.zeros(0)
