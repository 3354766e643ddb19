"""The push guard's running norm: a plain mean first, an exponential one later, the same however it is fed."""

from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.guard import ARMED_AFTER, HALF_LIFE, LEAST, NormState, RunningNorm
from sync.reference import follow

LONGEST = math.ceil(HALF_LIFE / math.log(2))


def squares(norms: list[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return np.square(np.array(norms, np.float64)).astype(np.float32)


def armed(mean: float, factor: float = 1_000.0) -> RunningNorm:
    guard = RunningNorm(factor)
    guard.update(squares([mean] * ARMED_AFTER))
    return guard


def test_is_not_armed_before_enough_rows() -> None:
    guard = RunningNorm(10.0)
    guard.update(squares([2.0] * (ARMED_AFTER - 1)))
    assert guard.limit() == math.inf
    guard.update(squares([2.0]))
    assert guard.limit() == pytest.approx(20.0**2)


def test_a_factor_of_zero_never_limits() -> None:
    assert armed(2.0, factor=0.0).limit() == math.inf


def test_forgets_half_in_a_half_life() -> None:
    guard = RunningNorm(10.0)
    guard.update(squares([1.0] * 2 * LONGEST))
    assert guard.mean == pytest.approx(1.0)
    guard.update(squares([3.0] * HALF_LIFE))
    assert guard.mean == pytest.approx(2.0, rel=1e-4)


def test_begins_as_a_plain_mean() -> None:
    guard = RunningNorm(10.0)
    guard.update(squares([5.0, 1.0, 3.0]))
    assert guard.mean == pytest.approx(3.0)


def test_rows_without_a_gradient_are_not_counted() -> None:
    guard = armed(2.0)
    before = guard.state()
    guard.update(squares([0.0, LEAST / 2] * 10 * HALF_LIFE))
    assert guard.state() == before
    only_zeros = RunningNorm(1_000.0)
    only_zeros.update(squares([0.0] * 2 * ARMED_AFTER))
    assert only_zeros.limit() == math.inf


def test_follows_a_model_whose_gradients_grow_within_the_factor() -> None:
    guard, norm = armed(1.0), 1.0
    for _ in range(60):
        norm *= 2.0
        row = squares([norm] * 256)
        assert row[0] <= guard.limit()
        guard.update(row)
    assert norm > 1e18
    assert guard.limit() == math.inf


def test_a_jump_beyond_the_factor_is_over_the_limit_and_stays_so() -> None:
    guard = armed(1.0)
    assert squares([999.0])[0] <= guard.limit() < squares([1_001.0])[0]
    # A refused push is not counted, so what is usual does not change by it.
    guard.update(squares([1.0] * 100))
    assert guard.limit() < squares([1_001.0])[0]


def test_one_row_at_the_limit_moves_the_mean_by_little() -> None:
    guard = RunningNorm(1_000.0)
    guard.update(squares([1.0] * LONGEST))
    guard.update(squares([1_000.0]))
    assert guard.mean == pytest.approx(1 + 999 / LONGEST)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(0, 400),
    half_life=st.integers(1, 300),
    cuts=st.lists(st.integers(0, 400), max_size=5),
)
def test_any_batches_and_a_restart_between_them_give_the_twins_bits(
    seed: int, rows: int, half_life: int, cuts: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    pushed = squares(rng.exponential(size=rows) * (rng.random(rows) < 0.8))
    guard = RunningNorm(2.0, half_life, armed_after=10)
    for part in np.split(pushed, sorted(min(cut, rows) for cut in cuts)):
        restarted = RunningNorm(2.0, half_life, armed_after=10)
        restarted.load(guard.state())
        guard = restarted
        guard.update(part)
    longest = max(math.ceil(half_life / math.log(2)), 10)
    mean, count = follow(pushed, 0.0, 0, longest, LEAST)
    assert guard.state() == NormState(mean, count)
    assert guard.limit() == (float(np.float32((2.0 * mean) ** 2)) if count >= 10 else math.inf)


def test_is_exact_over_json() -> None:
    guard = RunningNorm(3.0)
    guard.update(squares(np.random.default_rng(1).random(2_000)))
    stored = json.loads(json.dumps([guard.state().mean, guard.state().count]))
    again = RunningNorm(3.0)
    again.load(NormState(*stored))
    assert (again.state(), again.limit()) == (guard.state(), guard.limit())


@pytest.mark.parametrize(
    "state", [NormState(-1.0, 5), NormState(math.nan, 5), NormState(math.inf, 5), NormState(1, -1)]
)
def test_refuses_impossible_states(state: NormState) -> None:
    with pytest.raises(ValueError, match="no running norm"):
        RunningNorm(2.0).load(state)


def test_refuses_an_empty_memory() -> None:
    with pytest.raises(ValueError, match="half_life 0"):
        RunningNorm(2.0, half_life=0)
