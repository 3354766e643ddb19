"""Clipping: the bound holds for what leaves, rows do not depend on their neighbours, layers keep the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest

from federated.layout import Field, Layout
from federated.privacy.clipping import Norm, NotFinite, clip_rows, parts_of

LAYOUT = Layout((Field("a", (30, 7)), Field("b", (11,)), Field("c", (1,))))


def some_rows(count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scales = np.exp(generator.normal(0.0, 4.0, (count, 1)))
    return (generator.normal(size=(count, LAYOUT.size)) * scales).astype(np.float32)


def exact_norm(row: np.ndarray, norm: Norm) -> float:
    return math.fsum(map(abs, row.tolist())) if norm == "l1" else math.hypot(*row.tolist())


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_no_row_that_leaves_is_longer_than_the_clip(norm: Norm, per_layer: bool) -> None:
    rows = some_rows(300, 1)
    clipped, beyond = clip_rows(rows, parts_of(LAYOUT, 0.7, norm, per_layer), norm)
    assert max(exact_norm(row, norm) for row in clipped) <= 0.7
    assert 50 < beyond.sum() < 300
    for row, kept, was in zip(rows, clipped, beyond, strict=True):
        assert was or (row == kept).all()


def test_a_longer_row_keeps_its_direction_and_all_of_the_clip() -> None:
    rows = some_rows(40, 2) * np.float32(1e6)
    clipped, beyond = clip_rows(rows, parts_of(LAYOUT, 3.0, "l2", False), "l2")
    assert beyond.all()
    for row, kept in zip(rows, clipped, strict=True):
        assert exact_norm(kept, "l2") == pytest.approx(3.0, rel=1e-6)
        np.testing.assert_allclose(kept / exact_norm(kept, "l2"), row / exact_norm(row, "l2"), rtol=1e-5)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_each_layer_has_its_share_and_the_shares_make_the_whole(norm: Norm) -> None:
    parts = parts_of(LAYOUT, 6.0, norm, True)
    shares = [part.bound for part in parts]
    assert exact_norm(np.array(shares), norm) == pytest.approx(6.0)
    clipped, _ = clip_rows(np.full((1, LAYOUT.size), 100.0, np.float32), parts, norm)
    for part in parts:
        assert exact_norm(clipped[0, part.places], norm) == pytest.approx(part.bound, rel=1e-6)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_row_comes_out_as_if_it_were_alone_bit_for_bit(norm: Norm, per_layer: bool) -> None:
    rows, parts = some_rows(1500, 3), parts_of(LAYOUT, 0.5, norm, per_layer)
    together, beyond = clip_rows(rows, parts, norm)
    for place in range(0, len(rows), 7):
        alone, was = clip_rows(rows[place : place + 1], parts, norm)
        assert alone.tobytes() == together[place].tobytes()
        assert was[0] == beyond[place]


def test_zero_stays_zero_and_the_input_is_not_changed() -> None:
    rows = np.zeros((2, LAYOUT.size), np.float32)
    rows[1] = 9.0
    before = rows.copy()
    clipped, beyond = clip_rows(rows, parts_of(LAYOUT, 1.0, "l2", False), "l2")
    assert not clipped[0].any()
    assert beyond.tolist() == [False, True]
    assert (rows == before).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_has_no_norm_is_refused(bad: float) -> None:
    rows = some_rows(3, 4)
    rows[1, 5] = bad
    with pytest.raises(NotFinite):
        clip_rows(rows, parts_of(LAYOUT, 1.0, "l2", True), "l2")


def test_the_largest_floats_have_a_norm() -> None:
    rows = np.full((1, LAYOUT.size), np.finfo(np.float32).max, np.float32)
    clipped, _ = clip_rows(rows, parts_of(LAYOUT, 1.0, "l2", False), "l2")
    assert exact_norm(clipped[0], "l2") == pytest.approx(1.0, rel=1e-6)
