"""Whether this server's clock is right, as far as those of other regions tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH: int = 2
"""With one other clock nobody can tell which of the two is wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ahead_s``: of this clock before the median of the others, None where there are none. ``off``: it is beyond
    what is allowed; ``certain``: enough others say so."""

    ahead_s: float | None = None
    off: bool = False
    certain: bool = False


def judge(others_ahead_s: Sequence[float], allowed_s: float) -> Verdict:
    """What to think of this clock where others are ahead of it by so much."""
    if not others_ahead_s:
        return Verdict()
    ordered = sorted(others_ahead_s)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    off = abs(median) > allowed_s
    return Verdict(-median, off, off and len(ordered) >= ENOUGH)
