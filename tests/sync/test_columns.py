"""Arrays and columns that grow in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.columns import Columns
from sync.errors import TableFull
from sync.memory import GrowingArray, grown

COLUMNS = ("values", "state", "version_time", "version_writer", "changed_at")


@given(st.lists(st.integers(0, 3_000), max_size=8), st.sampled_from([(), (0,), (1,), (3, 5)]))
def test_growing_keeps_what_was_written_and_adds_zeros(steps: list[int], row_shape: tuple[int, ...]) -> None:
    growing = GrowingArray(np.uint32, row_shape)
    expected = np.zeros((0, *row_shape), np.uint32)
    for number, more in enumerate(steps, 1):
        growing.grow(len(expected) + more)
        expected = np.concatenate([expected, np.zeros((more, *row_shape), np.uint32)])
        assert np.array_equal(growing.array, expected)
        assert growing.nbytes >= expected.nbytes
        growing.array[len(expected) // 2 :] = number
        expected[len(expected) // 2 :] = number
        assert growing.array.flags.writeable


def test_a_view_that_outlives_growth_is_stale_and_harmless() -> None:
    growing = GrowingArray(np.int64)
    growing.grow(1_000)
    growing.array[:] = 7
    view = growing.array[10:20]
    growing.grow(100_000)
    growing.array[:1_000] = 8
    assert view.tolist() == [7] * 10
    assert growing.array[:1_000].tolist() == [8] * 1_000
    assert not growing.array[1_000:].any()


def test_rows_lie_on_cache_lines() -> None:
    growing = GrowingArray(np.float32, (16,))
    for rows in (1, 5_000, 70_000):
        growing.grow(rows)
        assert growing.array.ctypes.data % 64 == 0


def test_failing_to_grow_changes_nothing() -> None:
    growing = GrowingArray(np.uint8)
    growing.grow(10)
    growing.array[:] = 3
    with pytest.raises(MemoryError, match="bytes are not to be had"):
        growing.grow(2**52)
    with pytest.raises(MemoryError, match="bytes are not to be had"):
        GrowingArray(np.uint8).grow(2**52)
    assert growing.array.tolist() == [3] * 10


def test_capacity_doubles_up_to_a_slab_and_then_grows_by_slabs() -> None:
    capacities, capacity = [], 0
    while capacity < 5_000:
        capacity = grown(capacity, capacity + 1, 1_024)
        capacities.append(capacity)
    assert capacities == [256, 512, 1_024, 2_048, 3_072, 4_096, 5_120]
    assert grown(0, 5_000, 1_024) == 5_120
    assert grown(0, 1, 100) == 100


@pytest.mark.parametrize(("dim", "state_dim"), [(0, 0), (1, 0), (32, 1), (4_096, 4_096)])
def test_columns_grow_together(dim: int, state_dim: int) -> None:
    columns = Columns(dim, state_dim)
    for rows in (1, 300, 300, 2_000, 70_000 if dim < 4_096 else 4_000):
        before = columns.capacity
        columns.reserve(rows)
        assert columns.capacity >= max(rows, before)
        assert {len(getattr(columns, name)) for name in COLUMNS} == {columns.capacity}
        columns.values[rows - 1] = columns.version_time[rows - 1] = rows
        assert columns.version_time[rows - 1] == rows
        assert (columns.values[rows - 1] == rows).all()
    assert columns.values.shape[1] == dim
    assert columns.state.shape[1] == state_dim
    held = columns.capacity * 4 * (dim + state_dim)
    assert columns.nbytes >= held + columns.overhead_nbytes >= held + columns.capacity * 20


@pytest.mark.parametrize("dim", [1, 32, 4_096])
def test_columns_hold_at_most_a_slab_more_than_they_need(dim: int) -> None:
    columns = Columns(dim, 1)
    slab = min(65_536, 8 * 2**20 // (4 * dim))
    rows = 3 * slab + 1
    columns.reserve(rows)
    assert rows <= columns.capacity < rows + slab
    columns.reserve(columns.capacity + 1)
    assert columns.capacity == 5 * slab


def test_a_small_table_stays_small() -> None:
    columns = Columns(32, 1)
    assert columns.nbytes == 0
    columns.reserve(1)
    assert columns.nbytes <= 64 * 1_024


def test_columns_refuse_more_rows_than_allowed() -> None:
    columns = Columns(2, 1, max_rows=300)
    columns.reserve(10)
    with pytest.raises(TableFull, match="301 rows"):
        columns.reserve(301)
    assert columns.capacity == 256
    columns.reserve(257)
    assert columns.capacity == 300
