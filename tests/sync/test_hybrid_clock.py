"""Version times grow, whatever the physical clock does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.clock import HybridClock


@given(st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)), max_size=30))
def test_every_time_exceeds_all_before_it(steps: list[tuple[int, int]]) -> None:
    now = 0
    clock = HybridClock(lambda: now)
    highest = 0
    for physical, observed in steps:
        now = physical
        clock.observe(observed)
        highest = max(highest, observed)
        issued = clock.tick()
        assert issued == 1 + max(physical, highest)
        highest = issued
        assert clock.last == highest


def test_goes_on_from_a_restored_time_when_the_physical_clock_went_back() -> None:
    clock = HybridClock(lambda: 5)
    clock.observe(1_000)
    assert [clock.tick(), clock.tick()] == [1_001, 1_002]


@pytest.mark.parametrize("time", [-1, 2**63])
def test_refuses_a_time_that_no_clock_issues(time: int) -> None:
    with pytest.raises(ValueError, match=str(time)):
        HybridClock(lambda: 0).observe(time)
