"""Rows that were never pushed: the same bits on every platform and in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.clock import HybridClock
from sync.initial import InitialValues
from sync.pushes import Push, Source
from sync.reference import initial_rows
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, Segment, TableSpec

EDGES = [0, 1, 99, 100, 2**63, 2**64 - 1]


def spec(initialiser: Initialiser, dim: int = 3, name: str = "ranking") -> TableSpec:
    return TableSpec(name, dim, initialiser)


def rows(of: TableSpec, keys: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return InitialValues(of).rows(np.array(keys, np.uint64))


def test_golden_bits_never_change() -> None:
    found = rows(spec(Initialiser.uniform(0.05, seed=7)), [0, 1, 2**64 - 1])
    assert found.view(np.uint32).tolist() == [
        [0x3D25197D, 0x3C1EEF7A, 0x3D24528F],
        [0xBCAD26ED, 0x3D37C062, 0xBCA39F07],
        [0x3B8CC7F3, 0x3CF9D7D0, 0x3D3A2DDB],
    ]
    segments = Initialiser((Segment(0, 0.5, 1.0), Segment(100, 0.0, -2.0)), seed=3)
    assert rows(spec(segments, 2), [99, 100]).view(np.uint32).tolist() == [
        [0x3F952748, 0x3F66822D],
        [0xC0000000, 0xC0000000],
    ]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**64 - 1) | st.sampled_from(EDGES), max_size=20),
    st.integers(1, 40),
    st.floats(0, 1e3, width=32),
    st.floats(-1e3, 1e3, width=32),
    st.integers(0, 2**63 - 1),
)
def test_equals_the_formula_bit_for_bit(
    keys: list[int], dim: int, scale: float, constant: float, seed: int
) -> None:
    segments = (Segment(0, scale), Segment(100, 2 * scale, constant), Segment(2**63, 0.0, constant))
    table = spec(Initialiser(segments, seed), dim)
    found = rows(table, keys)
    assert found.tobytes() == initial_rows(table, keys).tobytes()
    assert np.all(np.abs(found) <= 2 * scale + abs(constant) * (1 + 1e-6))


def test_is_uniform_and_differs_by_table_key_column_and_seed() -> None:
    table = spec(Initialiser.uniform(1.0), 16)
    found = rows(table, list(range(4_000)))
    assert -1.0 <= found.min() < -0.999
    assert 0.999 < found.max() < 1.0
    assert abs(found.mean()) < 0.01
    assert abs(found.var() - 1 / 3) < 0.01
    counts = np.histogram(found, 20, (-1, 1))[0]
    assert np.all(np.abs(counts - 3_200) < 6 * np.sqrt(3_200))
    correlation = np.corrcoef(found.T)
    assert np.abs(correlation - np.eye(16)).max() < 0.1
    assert len(np.unique(found, axis=0)) == 4_000
    assert not np.array_equal(
        found[:5], rows(spec(Initialiser.uniform(1.0), 16, "retrieval"), list(range(5)))
    )
    assert not np.array_equal(found[:5], rows(spec(Initialiser.uniform(1.0, seed=1), 16), list(range(5))))


def test_a_wider_table_begins_with_the_narrower_ones_columns() -> None:
    narrow = rows(spec(Initialiser.uniform(0.1), 4), EDGES)
    assert np.array_equal(rows(spec(Initialiser.uniform(0.1), 9), EDGES)[:, :4], narrow)


def test_writes_only_the_missing_rows() -> None:
    table = InitialValues(spec(Initialiser.uniform(1.0)))
    keys = np.array([5, 6], np.uint64)
    filled = np.full((2, 3), 9.0, np.float32)
    table.fill_missing(keys, np.array([0, -1], np.int32), filled)
    assert filled[0].tolist() == [9.0] * 3
    assert np.array_equal(filled[1], table.rows(keys)[1])


@pytest.mark.parametrize("count", [0, 1])
def test_takes_few_keys(count: int) -> None:
    assert rows(spec(Initialiser.uniform(1.0)), EDGES[:count]).shape == (count, 3)


@pytest.mark.parametrize(
    "freed",
    [
        [],
        [3, 5, 1],
        [3],
        [2, 3],
        [3, 2],
        [8, 1, 5],
        [0, 9, 4, 1, 7, 2],
        list(range(10)),
        list(range(9, -1, -1)),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_new_rows_begin_alike_wherever_their_slots_are(freed: list[int], count: int) -> None:
    """In slots that follow each other, in freed ones in any order, and in some of both."""
    table = TableSpec("t", 3, Initialiser.uniform(0.1), Optimiser("adagrad", 0.5))
    gradients = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    fresh = np.arange(100, 100 + count, dtype=np.uint64)

    def pushed(*batches: np.ndarray, deleted: list[int]) -> Shard:
        shard = Shard(0, (table,), 1, HybridClock(lambda: 1_000))
        for offset, keys in enumerate(batches):
            parts = (("t", keys, gradients[: len(keys)]),)
            assert shard.push(Push(Source("log", 0), offset, offset - 1, None, parts)).status == "applied"
            # One by one: what was freed last is given out first. 3, 5, 1 end where slots in a row would.
            for key in deleted if offset == 0 else []:
                assert shard.delete("t", np.array([key], np.uint64)) == 1
        return shard

    reused = pushed(np.arange(10, dtype=np.uint64), fresh, fresh, deleted=freed)
    clean = pushed(fresh, fresh, deleted=[])
    # Twice: the second step depends on the state that the rows began with.
    np.testing.assert_array_equal(reused.pull("t", fresh), clean.pull("t", fresh))
