"""Whether this server's clock is right, as far as those of other regions tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

ENOUGH: int = 2
"""With one other clock nobody can tell which of the two is wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ahead_s``: of this clock before the median of the others, None where there are none. ``off``: it is beyond
    what is allowed; ``certain``: enough others say so."""

    ahead_s: float | None = None
    off: bool = False
    certain: bool = False


def by_region(ahead_s: Iterable[tuple[str, float]]) -> list[float]:
    """The median of each region's clocks, of (region, ahead). Servers of one region may share one machine, whose wrong
    clock must not outvote a right one."""
    found: dict[str, list[float]] = {}
    for region, one in ahead_s:
        found.setdefault(region, []).append(one)
    return [median(clocks) for clocks in found.values()]


def judge(others_ahead_s: Sequence[float], allowed_s: float) -> Verdict:
    """What to think of this clock where others, one of each region, are ahead of it by so much."""
    if not others_ahead_s:
        return Verdict()
    middle = median(others_ahead_s)
    off = abs(middle) > allowed_s
    return Verdict(-middle, off, off and len(others_ahead_s) >= ENOUGH)
