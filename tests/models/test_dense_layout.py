"""Dense tensors in chunks: every float has one place, and initial values follow their segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.parameters import DenseLayout, DenseTensor, Segment

LAYOUT = DenseLayout(
    (DenseTensor("a", (3, 2), scale=0.5), DenseTensor("b", (4,), constant=2.0), DenseTensor("c", (5,))), 4
)


def test_tensors_start_at_chunk_boundaries():
    assert LAYOUT.first_keys == {"a": 0, "b": 2, "c": 3}
    assert LAYOUT.chunks == 5
    np.testing.assert_array_equal(LAYOUT.keys, np.arange(5, dtype=np.uint64))
    assert LAYOUT.segments == (Segment(0, 0.5, 0.0), Segment(2, 0.0, 2.0), Segment(3, 0.0, 0.0))


@given(
    shapes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5),
    chunk=st.integers(1, 9),
)
def test_packing_and_unpacking_are_inverse(shapes, chunk):
    layout = DenseLayout(tuple(DenseTensor(f"t{n}", tuple(s)) for n, s in enumerate(shapes)), chunk)
    generator = np.random.default_rng(0)
    tensors = {t.name: generator.normal(size=t.shape).astype(np.float32) for t in layout.tensors}
    packed = layout.pack(tensors)
    assert packed.shape == (layout.chunks, chunk)
    for name, view in layout.unpack(packed).items():
        np.testing.assert_array_equal(view, tensors[name])
    assert np.count_nonzero(packed) == sum(t.size for t in layout.tensors)


def test_unpacked_tensors_are_views():
    values = np.zeros((5, 4), np.float32)
    LAYOUT.unpack(values)["c"][4] = 7
    assert values[4, 0] == 7


def test_initial_values_stay_in_their_range():
    views = LAYOUT.unpack(LAYOUT.initial(np.random.default_rng(0)))
    assert 0 < np.abs(views["a"]).max() <= 0.5
    np.testing.assert_array_equal(views["b"], 2)
    np.testing.assert_array_equal(views["c"], 0)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="shape"):
        LAYOUT.unpack(np.zeros((4, 4), np.float32))
    tensors = {t.name: np.zeros(t.shape, np.float32) for t in LAYOUT.tensors}
    with pytest.raises(ValueError, match="dense tensor b"):
        LAYOUT.pack({**tensors, "b": np.zeros(5, np.float32)})
    with pytest.raises(KeyError):
        LAYOUT.pack({"a": tensors["a"]})


def test_contradictory_layouts_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        DenseLayout((DenseTensor("a", (1,)), DenseTensor("a", (2,))))
    with pytest.raises(ValueError, match="at least one float"):
        DenseLayout((DenseTensor("a", (1,)),), 0)
