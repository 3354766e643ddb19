"""When a process that ended is started again: at once the first time, then later and later, bounded. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays before a restart, in seconds: 0, then ``base_s``, doubled each time, up to ``most_s``.

    A process that ran for ``steady_s`` counts as healthy again, so its next end is its first.
    """

    base_s: float = 0.5
    most_s: float = 30.0
    steady_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """Ends in a row, and all restarts there were."""

    in_a_row: int = 0
    total: int = 0


def after_end(
    policy: RestartPolicy, history: RestartHistory, ran_for_s: float
) -> tuple[float, RestartHistory]:
    """The delay (s) before the restart of a process that ended after ``ran_for_s``, and its new history."""
    in_a_row = 1 if ran_for_s >= policy.steady_s else history.in_a_row + 1
    # The exponent is bounded because 2.0 ** 1100 is not a float.
    delay_s = 0.0 if in_a_row == 1 else min(policy.base_s * 2.0 ** min(in_a_row - 2, 60), policy.most_s)
    return delay_s, RestartHistory(in_a_row, history.total + 1)
