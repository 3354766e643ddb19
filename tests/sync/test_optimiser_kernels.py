"""Optimisers: the kernels and their NumPy twins pass the same tests, and agree bit for bit."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync import optimisers, reference

Rows = npt.NDArray[np.float32]
INFINITE = np.float32(np.inf)


@pytest.fixture(params=[optimisers, reference], ids=["kernels", "reference"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def step(module: ModuleType, kind: str, values: Rows, state: Rows, slots: list[int], gradients: Rows) -> None:
    squares = np.empty(len(gradients), np.float32)
    assert module.measure(gradients, INFINITE, squares) == -1
    module.APPLY[kind](
        values, state, np.array(slots, np.int32), gradients, squares, np.float32(0.5), np.float32(1e-8)
    )


def test_sgd_moves_only_its_rows(module: ModuleType) -> None:
    values = np.ones((3, 2), np.float32)
    step(module, "sgd", values, np.zeros((3, 0), np.float32), [2], np.array([[2, -4]], np.float32))
    assert values.tolist() == [[1, 1], [1, 1], [0, 3]]


def test_rowwise_adagrad_by_hand(module: ModuleType) -> None:
    values, state = np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)
    step(module, "rowwise_adagrad", values, state, [1], np.array([[3, -5]], np.float32))
    assert state.tolist() == [[0], [17]]
    assert values[1] == pytest.approx([-1.5 / 17**0.5, 2.5 / 17**0.5], rel=1e-6)
    step(module, "rowwise_adagrad", values, state, [1], np.array([[4, 0]], np.float32))
    assert state.tolist() == [[0], [25]]
    assert values[1] == pytest.approx([-1.5 / 17**0.5 - 0.4, 2.5 / 17**0.5], rel=1e-6)


def test_adagrad_by_hand(module: ModuleType) -> None:
    values, state = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)
    step(module, "adagrad", values, state, [0], np.array([[3, 0]], np.float32))
    step(module, "adagrad", values, state, [0], np.array([[4, -2]], np.float32))
    assert state.tolist() == [[25, 4]]
    assert values[0] == pytest.approx([-0.5 - 0.4, 0.5], rel=1e-6)


def test_a_first_gradient_of_zero_changes_nothing(module: ModuleType) -> None:
    for kind, width in (("rowwise_adagrad", 1), ("adagrad", 2)):
        values, state = np.ones((1, 2), np.float32), np.zeros((1, width), np.float32)
        step(module, kind, values, state, [0], np.zeros((1, 2), np.float32))
        assert values.tolist() == [[1, 1]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 11.0])
def test_measure_names_the_first_row_above_the_limit(module: ModuleType, bad: float) -> None:
    gradients = np.zeros((4, 11), np.float32)
    gradients[0] = 3.0  # 11 · 9 = 99
    gradients[2, 10] = gradients[3, 0] = bad
    squares = np.empty(4, np.float32)
    assert module.measure(gradients, np.float32(100), squares) == 2
    assert squares[:2].tolist() == [99, 0]
    assert module.measure(gradients[:2], np.float32(100), squares[:2]) == -1


def test_repeated_keys_are_summed_in_order(module: ModuleType) -> None:
    keys = np.array([7, 2**64 - 1, 7, 0, 7], np.uint64)
    gradients = np.array([[1e8], [1], [1], [-0.0], [-1e8]], np.float32)
    groups = np.empty(5, np.int32)
    assert module.group(keys, groups) == 3
    assert groups.tolist() == [0, 1, 0, 2, 0]
    unique, sums = np.empty(3, np.uint64), np.empty((3, 1), np.float32)
    module.sum_groups(keys, gradients, groups, unique, sums)
    assert unique.tolist() == [7, 2**64 - 1, 0]
    # In float32 1e8 + 1 is 1e8, so another order would give 1.
    assert sums.tolist() == [[0], [1], [0]]
    assert np.signbit(sums[2, 0])


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adagrad"])
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32), dim=st.integers(1, 40), rows=st.integers(0, 12), exponent=st.integers(-20, 12)
)
def test_kernels_equal_their_twins_bit_for_bit(
    kind: str, seed: int, dim: int, rows: int, exponent: int
) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 8, rows).astype(np.uint64)
    gradients = (rng.standard_normal((rows, dim)) * 10.0**exponent).astype(np.float32)
    results = []
    for module in (optimisers, reference):
        groups = np.empty(rows, np.int32)
        distinct = module.group(keys, groups)
        unique, sums = np.empty(distinct, np.uint64), np.empty((distinct, dim), np.float32)
        module.sum_groups(keys, gradients, groups, unique, sums)
        values = np.ones((distinct, dim), np.float32)
        state = np.zeros((distinct, {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim}[kind]), np.float32)
        for _ in range(3):
            step(module, kind, values, state, list(range(distinct))[::-1], sums)
        results.append(
            (groups.tobytes(), unique.tobytes(), sums.tobytes(), values.tobytes(), state.tobytes())
        )
    assert results[0] == results[1]
