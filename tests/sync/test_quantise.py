"""Values in fewer bytes: how far off they are at most, and what is not taken for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from sync.errors import RecordDamaged
from sync.quantise import PARTS, Precision, quantise, restore

Values = npt.NDArray[np.float32]
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "int8")
ANY: st.SearchStrategy[float] = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE: st.SearchStrategy[float] = st.floats(-100.0, 100.0, width=32)


def shaped(elements: st.SearchStrategy[float]) -> st.SearchStrategy[Values]:
    return arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=elements)


def travelled(values: Values, precision: Precision) -> Values:
    parts = quantise(values, precision)
    assert len(parts) == PARTS[precision]
    found = restore(parts, precision, (values.shape[0], values.shape[1]))
    assert found.dtype == np.float32
    assert found.shape == values.shape
    assert np.isfinite(found).all()
    return found


def exactly(values: Values) -> npt.NDArray[np.longdouble]:
    return values.astype(np.longdouble)


@given(shaped(ANY))
def test_float32_is_exact(values: Values) -> None:
    assert travelled(values, "float32").tobytes() == values.tobytes()


@settings(max_examples=300)
@given(shaped(ANY) | shaped(MODERATE))
def test_float16_is_the_nearest_half_or_the_largest_one(values: Values) -> None:
    found = exactly(travelled(values, "float16"))
    within = np.clip(exactly(values), -65_504, 65_504)
    assert (np.abs(found - within) <= np.maximum(np.abs(within) / 2_048, 2.0**-25)).all()


@settings(max_examples=500)
@given(shaped(ANY) | shaped(MODERATE))
def test_int8_is_off_by_half_a_step_of_the_row(values: Values) -> None:
    found, wanted = exactly(travelled(values, "int8")), exactly(values)
    span = wanted.max(axis=1, keepdims=True) - wanted.min(axis=1, keepdims=True)
    rounding = np.abs(wanted).max(axis=1, keepdims=True) * 2.0**-22 + np.longdouble(2.0) ** -141
    assert (np.abs(found - wanted) <= span / 510 + rounding).all()


@given(shaped(MODERATE), st.sampled_from(PRECISIONS))
def test_what_travelled_travels_again_unchanged_but_for_a_step(values: Values, precision: Precision) -> None:
    once = travelled(values, precision)
    if precision == "int8":
        step = (once.max(axis=1) - once.min(axis=1)) / 510 + np.abs(once).max(axis=1) * 2.0**-22
        assert (np.abs(travelled(once, precision) - once) <= step[:, None] + 1e-30).all()
    else:
        assert travelled(once, precision).tobytes() == once.tobytes()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1)])
def test_small_shapes(precision: Precision, shape: tuple[int, int]) -> None:
    assert travelled(np.ones(shape, np.float32), precision).tolist() == np.ones(shape).tolist()


def test_the_extremes_of_a_row_are_exact_in_int8() -> None:
    row = np.linspace(-3.0, 5.0, 256, dtype=np.float32)[None, :]
    found = travelled(row, "int8")
    assert found[0, 0] == -3.0
    assert abs(found[0, -1] - 5.0) < 1e-6
    assert quantise(row, "int8")[0].tolist() == [list(range(256))]


@pytest.mark.parametrize(
    ("precision", "parts"),
    [
        ("float32", (np.zeros((2, 3), np.float64),)),
        ("float32", (np.zeros((3, 2), np.float32),)),
        ("float32", ()),
        ("float16", (np.zeros((2, 3), np.float16),)),
        ("float16", (np.zeros((2, 3), np.uint16),) * 2),
        ("int8", (np.zeros((2, 3), np.uint8),)),
        ("int8", (np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.float32))),
        ("int8", (np.zeros((2, 3), np.int8), np.zeros((2, 2), np.float32))),
        ("int8", (np.zeros((2, 3), np.uint8), np.full((2, 2), np.nan, np.float32))),
        ("int8", (np.zeros((2, 3), np.uint8), np.full((2, 2), np.inf, np.float32))),
    ],
)
def test_what_cannot_be_values_is_refused(
    precision: Precision, parts: tuple[npt.NDArray[np.generic], ...]
) -> None:
    with pytest.raises(RecordDamaged):
        restore(parts, precision, (2, 3))
