"""The priority of updates, against its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.priority import MEMORY_S, NEW_ROW, UpdatePriority
from tests.support.replicas import Clock, push

LENGTHS = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), min_size=1, max_size=8)


def squares(lengths: list[float]) -> np.ndarray:
    return np.square(np.array(lengths, np.float32))


def old(count: int) -> np.ndarray:
    return np.zeros(count, np.bool_)


@given(st.lists(st.tuples(LENGTHS, st.integers(0, 10**9)), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_it_is_the_length_over_the_running_mean_times_the_share(
    pushes: list[tuple[list[float], int]], share: float
) -> None:
    priority, mean, last_us, now_us = UpdatePriority(share), 0.0, 0, 1
    for lengths, later_us in pushes:
        now_us += later_us
        kept = math.exp(-(now_us - last_us) / 1e6 / MEMORY_S) if last_us else 0.0
        mean = kept * mean + (1.0 - kept) * float(np.mean(np.array(lengths, np.float32)))
        last_us = now_us
        found = priority(squares(lengths), old(len(lengths)), now_us)
        assert found.dtype == np.float32
        expected = np.array(lengths) / (mean if mean > 0.0 else 1.0) * share
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_the_first_update_of_a_row_gains_a_constant() -> None:
    first = np.array([True, False])
    new, usual = UpdatePriority(0.5)(squares([3.0, 3.0]), first, 1)
    assert new - usual == pytest.approx(0.5 * NEW_ROW)
    assert usual == pytest.approx(0.5)


def test_updates_at_one_moment_do_not_outweigh_the_past() -> None:
    priority = UpdatePriority()
    priority(squares([1.0]), old(1), 5)
    assert priority(squares([100.0]), old(1), 5)[0] == pytest.approx(100.0)
    # A minute later the mean has taken two thirds of the way.
    later = priority(squares([100.0]), old(1), 5 + int(MEMORY_S * 1e6))[0]
    assert later == pytest.approx(100.0 / (100.0 - 99.0 / math.e), rel=1e-3)


def test_a_clock_that_goes_back_changes_no_sign() -> None:
    priority = UpdatePriority()
    priority(squares([2.0]), old(1), 10**9)
    assert np.isfinite(priority(squares([2.0]), old(1), 5)).all()


def test_nothing_pushed_moves_nothing() -> None:
    priority = UpdatePriority()
    priority(squares([4.0]), old(1), 1)
    assert len(priority(squares([]), old(0), 10**12)) == 0
    assert priority(squares([4.0]), old(1), 1)[0] == pytest.approx(1.0)


def test_updates_of_zero_have_none() -> None:
    assert UpdatePriority()(squares([0.0, 0.0]), old(2), 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("share", "memory_s", "new"), [(0.0, 1.0, 1.0), (1.1, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, -1.0)]
)
def test_what_cannot_be_is_refused(share: float, memory_s: float, new: float) -> None:
    with pytest.raises(ValueError, match="share"):
        UpdatePriority(share, memory_s, new)


def test_a_shard_takes_any_function_in_its_place() -> None:
    shard = Clock().shard(1)
    asked = []

    def by_hand(norms: np.ndarray, first: np.ndarray, now_us: int) -> np.ndarray:
        asked.append((norms.tolist(), first.tolist(), now_us))
        return np.array([1.0, 7.0, 0.0], np.float32)[: len(norms)]

    shard.priority = by_hand
    push(shard, [1, 2, 3])
    push(shard, [2])
    assert [first for _, first, _ in asked] == [[True] * 3, [False]]
    assert asked[0][2] == 1_000_000
    table = shard.table("rows")
    # The second push of key 2 matters less, and does not take the first its place.
    assert table.keys_at(table.urgent(0, 0.5)[1]).tolist() == [1, 2, 2]
    assert table.keys_at(table.urgent(0, 5.0)[1]).tolist() == [2]
    shard.delete("rows", np.array([2], np.uint64))
    _, slots = table.urgent(0, 0.5)
    assert [part.keys.tolist() for part in table.told(slots)] == [[1], [2]]
