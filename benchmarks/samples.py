"""How long a short piece of work takes, by the same rule for us and for peers in environments of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

BUDGET_S: Final = 0.1


def best_s(work: Callable[[], object], budget_s: float = BUDGET_S) -> float:
    """Seconds of the fastest call among as many as the budget allows, at least one."""
    best, spent = float("inf"), 0.0
    while spent < budget_s:
        since = time.perf_counter()
        work()
        took = time.perf_counter() - since
        best, spent = min(best, took), spent + took
    return best
