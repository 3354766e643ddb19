"""The parts of compression, each against a straight computation: packing, streams, rotation, sketch, quantisers."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.compression import BodyRefused, CountSketch, make_scheme
from federated.compression.packing import most_gap_bytes, pack, pack_gaps, packed_length, unpack, unpack_gaps
from federated.compression.quantise import LEVELS, Quantise
from federated.compression.rotation import Rotate, hadamard
from federated.compression.sections import inflate, read_varint, varint
from federated.compression.sparse import largest
from federated.compression.step import Dice
from federated.compression.streams import buckets, signs, support

UNBIASED = [
    "quantise:8",
    "quantise:4",
    "quantise:2",
    "quantise:1:stochastic",
    "quantise:4:stochastic:chunk=7",
    "random_mask:0.25",
    "random_mask:0.25:shared",
    "random_mask:0.4 | quantise:8",
    "rotate | quantise:4",
    "rotate | random_mask:0.5 | quantise:2",
    "sketch:0.5",
    "sketch:0.5:rows=3 | quantise:8",
]


def make_vector(dimension: int, seed: int) -> np.ndarray:
    """Heavy-tailed, as updates are: a few coordinates carry most of the norm."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(dimension) * generator.exponential(size=dimension)
    return values.astype(np.float32)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**32 - 1))
def test_codes_survive_packing_in_the_fewest_bytes(count: int, rows: int, bits: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, packed_length(count, bits)) == (rows, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack(packed, count, bits), codes)


def test_unused_bits_must_be_zero_so_that_a_vector_has_one_body() -> None:
    for bits, count in ((1, 5), (2, 3), (4, 1)):
        packed = pack(np.zeros((1, count), np.uint8), bits)
        packed[0, -1] |= 1
        with pytest.raises(BodyRefused, match="bits after the last code"):
            unpack(packed, count, bits)


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2_999), min_size=4, max_size=4), min_size=1, max_size=6),
)
def test_gaps_name_the_same_indices_within_the_bound(rows: list[set[int]]) -> None:
    indices = np.array([sorted(row) for row in rows])
    body, ends = pack_gaps(indices)
    assert ends[-1] == len(body)
    assert np.diff(ends, prepend=0).max() <= most_gap_bytes(4, 3_000)
    np.testing.assert_array_equal(unpack_gaps(body, len(rows), 4, 3_000), indices)


@pytest.mark.parametrize(
    "body",
    [[], [0], [0, 0, 0], [0, 255], [255, 255], [0, 9], [255, 0, 0]],
    ids=["empty", "too few", "too many", "open end", "escapes alone", "beyond", "far beyond"],
)
def test_gaps_that_do_not_name_two_indices_below_ten_are_refused(body: list[int]) -> None:
    with pytest.raises(BodyRefused):
        unpack_gaps(np.array(body, np.uint8), 1, 2, 10)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_varints(number: int) -> None:
    assert read_varint(varint(number) + b"x", 0) == (number, len(varint(number)))


@pytest.mark.parametrize("body", [b"", b"\x80", b"\x80\x80\x80\x80\x80\x01"])
def test_open_and_endless_varints_are_refused(body: bytes) -> None:
    with pytest.raises(BodyRefused):
        read_varint(body, 0)


def test_a_small_body_that_inflates_to_much_is_refused_at_the_bound() -> None:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = coder.compress(bytes(50_000_000)) + coder.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    with pytest.raises(BodyRefused, match="inflates beyond"):
        inflate(bomb, 1_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_the_largest_are_chosen_and_of_equal_ones_the_first() -> None:
    values = np.array([[3, -5, 5, 0, 5, 1], [0, 0, 0, 0, 0, 0], [1, 1, -1, 2, 1, 1]], np.float32)
    np.testing.assert_array_equal(largest(values, 2), [[1, 2], [0, 1], [0, 3]])
    rows = np.stack([make_vector(500, seed) for seed in range(20)])
    straight = np.sort(np.argsort(-np.abs(rows), axis=1, kind="stable")[:, :50], axis=1)
    np.testing.assert_array_equal(largest(rows, 50), straight)


def test_shared_choices_are_those_of_every_numpy() -> None:
    # Devices and servers with other versions of NumPy must derive the same from a seed: these are fixed for ever.
    np.testing.assert_array_equal(support(7, 20, 5), [11, 12, 15, 16, 17])
    np.testing.assert_array_equal(signs(7, 2, 8), [-1, 1, 1, -1, 1, 1, -1, 1])
    np.testing.assert_array_equal(buckets(7, 16, 8, 100), [38, 20, 10, 24, 2, 94, 8, 28])


def test_a_support_is_even() -> None:
    hits = np.zeros(40)
    for seed in range(2_000):
        chosen = support(seed, 40, 10)
        assert len(np.unique(chosen)) == 10
        hits[chosen] += 1
    # 2,000 draws at 1/4: standard deviation 19.4.
    assert np.abs(hits - 500).max() < 4 * 19.4


def test_the_transform_is_hadamards_orthonormal_matrix() -> None:
    matrix = np.ones((1, 1))
    for size in (1, 2, 4, 8, 16, 32):
        values = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
        np.testing.assert_allclose(hadamard(values), values @ matrix / np.sqrt(size), atol=1e-5)
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])


@pytest.mark.parametrize("dimension", [1, 2, 3, 64, 100, 4_810])
def test_a_rotation_keeps_the_norm_spreads_it_and_is_undone(dimension: int) -> None:
    peak = np.zeros((1, dimension), np.float32)
    peak[0, dimension // 3] = 10.0
    dice = Dice(0, [np.random.default_rng(1)])
    rotated, sections = Rotate().encode(peak, dice, False)
    assert np.linalg.norm(rotated) == pytest.approx(10.0, rel=1e-5)
    if dimension > 50:
        assert np.abs(rotated).max() < 10.0 * 4.0 / np.sqrt(dimension)
    np.testing.assert_allclose(Rotate().decode(rotated, sections, dimension, Dice(0), False), peak, atol=1e-4)


def test_a_rotated_spike_survives_few_bits_that_would_drown_it() -> None:
    vector = np.full(1_000, 0.01, np.float32)
    vector[0] = 5.0

    def error(written: str) -> float:
        scheme = make_scheme(written)
        errors = []
        for seed in range(10):
            body, _ = scheme.encode(vector, np.random.default_rng(seed))
            errors.append(np.linalg.norm(scheme.decode(body, 1_000) - vector))
        return float(np.mean(errors))

    assert error("rotate | quantise:2:stochastic:chunk=1000") < 0.7 * error(
        "quantise:2:stochastic:chunk=1000"
    )


def test_sketches_add_up_and_show_the_heavy_coordinates() -> None:
    sketch = CountSketch(seed=5, dimension=5_000, rows=5, columns=400)
    vectors = np.random.default_rng(1).standard_normal((8, 5_000)).astype(np.float32) * np.float32(0.01)
    heavy = np.array([3, 999, 4_321])
    vectors[:, heavy] += np.float32(1.0)
    tables = sketch.sketch(vectors)
    total = vectors.sum(axis=0, keepdims=True)
    summed = tables.sum(axis=0, keepdims=True)
    np.testing.assert_allclose(summed, sketch.sketch(total), atol=1e-4)
    np.testing.assert_allclose(
        sketch.mean_estimate(summed)[0], sketch.mean_estimate(tables).sum(axis=0), atol=1e-4
    )
    found = sketch.heavy(summed, 3)[0]
    np.testing.assert_array_equal(np.flatnonzero(found), heavy)
    np.testing.assert_allclose(found[heavy], 8.0, rtol=0.1)
    # What the server keeps for the next round no longer holds them.
    left = sketch.median_estimate(summed - sketch.sketch(found[None]))[0]
    assert np.abs(left[heavy]).max() < 0.8


@pytest.mark.parametrize("written", UNBIASED)
def test_the_mean_over_many_draws_is_the_vector(written: str) -> None:
    scheme = make_scheme(written)
    assert not scheme.feedback
    # Where the seed is the round's, every draw is a round of its own.
    rounds = "shared" in written or "sketch" in written
    draws = 1_500 if rounds else 4_000
    vector = make_vector(48, 3)
    generators = [np.random.default_rng([9, draw]) for draw in range(draws)]
    if rounds:
        decoded = np.concatenate(
            [
                scheme.encode_batch(vector[None], [generator], shared=1_000 + draw).decoded
                for draw, generator in enumerate(generators)
            ]
        )
    else:
        decoded = scheme.encode_batch(np.tile(vector, (draws, 1)), generators).decoded
    spread = decoded.std(axis=0, dtype=np.float64) / np.sqrt(draws)
    off = np.abs(decoded.mean(axis=0, dtype=np.float64) - vector)
    # 48 coordinates at 4.5 standard errors: one false alarm in 3,000 seeds; the seed is fixed.
    assert (off < 4.5 * spread + 1e-5).all()
    assert spread.max() > 0.0


def test_drive_has_the_right_mean_over_rotations_where_a_mean_magnitude_shrinks() -> None:
    vector = make_vector(512, 4)
    draws = 600
    generators = [np.random.default_rng([2, draw]) for draw in range(draws)]
    scheme = make_scheme("rotate | quantise:1:drive")
    mean = scheme.encode_batch(np.tile(vector, (draws, 1)), generators).decoded.mean(axis=0, dtype=np.float64)
    # One body errs by about (π/2 − 1) of the squared norm (Vargaftik et al. 2021).
    expected = np.sqrt((np.pi / 2 - 1) / draws) * np.linalg.norm(vector)
    assert np.linalg.norm(mean - vector) < 1.2 * expected
    assert mean @ vector / (vector @ vector) == pytest.approx(1.0, abs=0.01)
    shrunk = make_scheme("rotate | quantise:1").encode_batch(vector[None], generators[:1]).decoded[0]
    assert shrunk @ vector / (vector @ vector) == pytest.approx(2 / np.pi, abs=0.05)


@settings(deadline=None)
@given(st.sampled_from([8, 4, 2]), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_rounding_errs_by_less_than_a_step_and_to_nearest_by_half_of_one(
    bits: int, count: int, seed: int
) -> None:
    vector = make_vector(count, seed)
    for rounding, steps in (("stochastic", 1.0), ("nearest", 0.5)):
        step = Quantise(bits, rounding, 100)
        dice = Dice(0, [np.random.default_rng(seed)])
        values, sections = step.encode(vector[None], dice, False)
        decoded = step.decode(values, sections, count, dice, False)[0]
        for start in range(0, count, 100):
            part = slice(start, start + 100)
            width = np.abs(vector[part]).max() / LEVELS[bits]
            assert np.abs(decoded[part] - vector[part]).max() <= (steps + 1e-3) * width


def test_chunks_below_the_bound_never_add_more_error_than_there_was_signal() -> None:
    for bits in (8, 4, 2):
        levels = LEVELS[bits]

        def excess(count: int, levels: int = levels) -> float:
            """Worst expected squared error of rounding, over the squared norm: one value of 1, the others at t."""
            width = 1.0 / levels
            t = np.linspace(0.0, width, 2_001)
            return float(((count - 1) * t * (width - t) / (1.0 + (count - 1) * t * t)).max())

        assert excess(8 * levels**2 - 1) < 1.0 < excess(8 * levels**2 + 20)
