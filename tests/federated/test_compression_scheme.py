"""Whole schemes: what the server decodes, error feedback, batches, sizes, unsound chains, and bytes from anyone."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.compression import BodyRefused, Scheme, UnsoundScheme, make_scheme

PLAIN = [
    "quantise:8",
    "quantise:8:stochastic:chunk=37 | deflate",
    "quantise:4 | deflate",
    "quantise:2",
    "quantise:1:stochastic",
    "random_mask:0.4 | quantise:8",
    "random_mask:0.4:shared:unscaled | quantise:8 | deflate",
    "random_mask:0.1",
    "rotate | quantise:4 | deflate",
    "rotate | quantise:1:drive",
    "rotate | random_mask:0.5 | quantise:2",
    "sketch:0.3:rows=3",
    "sketch:0.2 | quantise:8 | deflate",
]
REMEMBERING = [
    "top_k:0.05 | quantise:1 | deflate",
    "top_k:0.05,quantise:1:sign:chunk=16",
    "top_k:0.1 | quantise:4:nearest | deflate",
    "top_k:0.1 | quantise:8",
    "top_k:0.03",
    "top_k:0.03 | deflate",
    "quantise:1",
    "quantise:2:nearest | deflate",
    "rotate | quantise:1",
    "feedback | random_mask:0.2 | quantise:8",
    "feedback | random_mask:0.2:shared | quantise:4",
    "feedback | rotate | quantise:4 | deflate",
]
SHARED = 77


def make_vector(dimension: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(dimension) * generator.exponential(size=dimension)
    return (values * 0.01).astype(np.float32)


@pytest.mark.parametrize("written", PLAIN + REMEMBERING)
def test_the_server_decodes_what_the_client_expects_and_a_batch_has_the_bits_of_single_bodies(
    written: str,
) -> None:
    scheme = make_scheme(written)
    assert scheme.feedback == (written in REMEMBERING)
    for dimension in (1, 2, 7, 300, 4_810):
        vectors = np.stack([make_vector(dimension, seed) for seed in range(5)])
        vectors[3] = 0.0
        residuals = vectors[::-1] * np.float32(0.5) if scheme.feedback else None
        batch = scheme.encode_batch(vectors, [np.random.default_rng(i) for i in range(5)], residuals, SHARED)
        assert batch.decoded.dtype == np.float32
        for row, body in enumerate(batch.bodies):
            known = None if residuals is None else residuals[row]
            alone, left = scheme.encode(vectors[row], np.random.default_rng(row), known, SHARED)
            assert alone == body
            assert len(body) <= scheme.most_bytes(dimension)
            np.testing.assert_array_equal(scheme.decode(body, dimension, SHARED), batch.decoded[row])
            if batch.residuals is None:
                assert left is None
            else:
                assert left is not None
                np.testing.assert_array_equal(left, batch.residuals[row])


@pytest.mark.parametrize("written", REMEMBERING)
def test_error_feedback_loses_nothing_even_when_bodies_are_refused(written: str) -> None:
    scheme, dimension, refused = make_scheme(written), 400, 3
    residual = np.zeros(dimension, np.float32)
    made, accepted = np.zeros(dimension), np.zeros(dimension)
    lost = np.zeros(dimension)
    for iteration in range(30):
        update = make_vector(dimension, 100 + iteration)
        body, left = scheme.encode(update, np.random.default_rng(iteration), residual, iteration)
        made += update
        if iteration % refused == 0:
            # The server did not take it: the update is gone, the memory stays as it was.
            lost += update
            continue
        accepted += scheme.decode(body, dimension, iteration)
        assert left is not None
        residual = left
    np.testing.assert_allclose(accepted + residual + lost, made, atol=1e-5)
    assert np.linalg.norm(residual) > 0.0


def remembered_norms(scheme: Scheme, update: np.ndarray, iterations: int) -> list[float]:
    """Norm of the residual over that of the same ``update`` sent again and again."""
    residual, norms = np.zeros_like(update), []
    for iteration in range(iterations):
        _, left = scheme.encode(update, np.random.default_rng(iteration), residual, iteration)
        assert left is not None
        residual = left
        norms.append(float(np.linalg.norm(residual) / np.linalg.norm(update)))
    return norms


@pytest.mark.parametrize("written", REMEMBERING)
def test_what_is_remembered_stays_bounded(written: str) -> None:
    norms = remembered_norms(make_scheme(written), make_vector(200, 5), 600)
    # Choosing 3 % of the coordinates delays the average one by 33 updates.
    assert max(norms) < 60.0
    assert max(norms[300:]) < 1.6 * max(norms[:300])


@pytest.mark.parametrize("written", ["feedback | quantise:1:stochastic", "feedback | sketch:0.3"])
def test_what_is_refused_under_error_feedback_would_grow_without_bound(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsoundScheme):
        make_scheme(written)
    monkeypatch.setattr("federated.compression.scheme.require_sound", lambda *_: None)
    assert remembered_norms(make_scheme(written), make_vector(200, 5), 50)[-1] > 1e6


DETERMINISTIC = [
    "top_k:0.05 | quantise:1",
    "top_k:0.1 | quantise:4:nearest",
    "top_k:0.03",
    "quantise:1",
    "quantise:2:nearest",
    "rotate | quantise:1",
    "feedback | random_mask:0.2",
]


@settings(deadline=None)
@given(st.sampled_from(DETERMINISTIC), st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60))
def test_under_error_feedback_a_body_never_errs_by_more_than_the_signal(
    written: str, values: list[float]
) -> None:
    vector = np.array(values, np.float32)
    _, left = make_scheme(written).encode(vector, np.random.default_rng(1))
    assert left is not None
    assert np.linalg.norm(left.astype(float)) <= (1.0 + 1e-5) * np.linalg.norm(vector.astype(float)) + 1e-30


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "no step"),
        ("zip", "no step 'zip'"),
        ("deflate", "bits of float32 are noise"),
        ("deflate | quantise:8", "deflate comes last"),
        ("quantise:8 | deflate | deflate", "deflate comes last"),
        ("rotate | deflate", "bits of float32 are noise"),
        ("quantise:8 | quantise:4", "two quantisers"),
        ("top_k:0.1 | top_k:0.5", "smaller share"),
        ("top_k:0.1 | random_mask:0.5", "smaller share"),
        ("top_k:0.1 | rotate | quantise:4", "spread the few chosen values"),
        ("random_mask:0.1 | rotate | quantise:4", "spread the few chosen values"),
        ("rotate | top_k:0.1 | quantise:1", "no coordinate stands out"),
        ("quantise:4 | rotate", "put it before quantise"),
        ("quantise:4 | top_k:0.1", "put it before quantise"),
        ("rotate", "rotation alone saves nothing"),
        ("rotate | random_mask:0.1", "rotation alone saves nothing"),
        ("sketch:0.1 | sketch:0.1", "smaller share"),
        ("sketch:0.1 | top_k:0.1", "sums of coordinates"),
        ("feedback | sketch:0.1", "belongs to the server"),
        ("sketch:0.1 | quantise:1", "belongs to the server"),
        ("quantise:1:drive", "without rotate"),
        ("feedback | rotate | quantise:1:drive", "take quantise:1:sign"),
        ("top_k:0.1 | quantise:2", "take quantise:2:nearest, or chunks below 8"),
        ("top_k:0.1 | quantise:1:stochastic", "take quantise:1:sign"),
        ("top_k:0.1 | quantise:4:chunk=392", "chunks below 392"),
        ("quantise:8 | feedback", "feedback comes first"),
        ("quantise:3", "8, 4, 2 or 1 bit"),
        ("quantise:4:sign", "stochastic, nearest"),
        ("quantise:8:chunk=0", "a chunk holds 1 to"),
        ("quantise", "write it like"),
        ("quantise:eight", "write it like"),
        ("top_k", "write it like"),
        ("top_k:0.1:0.2", "write it like"),
        ("top_k:0", "above 0 and at most at 1"),
        ("top_k:nan", "above 0 and at most at 1"),
        ("random_mask:1.5", "above 0 and at most at 1"),
        ("random_mask:0.5:odd", "write it like"),
        ("sketch:0.5:rows=99", "1 to 16 rows"),
        ("rotate:2", "write it like"),
    ],
)
def test_chains_that_make_no_sense_are_refused_at_start_with_the_reason(written: str, reason: str) -> None:
    with pytest.raises(UnsoundScheme, match=reason):
        make_scheme(written)


def test_a_body_is_what_the_description_says() -> None:
    scheme = make_scheme("top_k:0.5 | quantise:1")
    body, left = scheme.encode(np.array([0, 3, -1, 0, 0, 0, -5, 7], np.float32), np.random.default_rng(0))
    # Mark, flags, length of the gaps, gaps to 1, 2, 6, 7, the mean magnitude 4, signs + − − +.
    assert body == bytes([scheme.mark, 0, 4, 1, 0, 3, 0]) + np.float32(4.0).tobytes() + bytes([0b10010000])
    np.testing.assert_array_equal(left, np.array([0, -1, 3, 0, 0, 0, -1, 3], np.float32))


def test_five_percent_by_sign_of_a_small_network_take_less_than_a_fiftieth() -> None:
    scheme = make_scheme("top_k:0.05 | quantise:1 | deflate")
    vectors = np.stack([make_vector(4_810, seed) for seed in range(40)])
    bodies = scheme.encode_batch(vectors, [np.random.default_rng(i) for i in range(40)]).bodies
    frame = 40
    assert 4 * 4_810 / (max(len(body) for body in bodies) + frame) > 50
    # Within a fifth of the entropy of 240 places of 4,810, and a bit for each.
    share = 240 / 4_810
    entropy = 4_810 * (-share * np.log2(share) - (1 - share) * np.log2(1 - share)) / 8 + 240 / 8
    assert np.mean([len(body) for body in bodies]) < 1.22 * entropy


def test_deflate_never_makes_a_body_longer_by_more_than_its_lengths() -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, 5_000).astype(np.float32)
    for written in ("quantise:8", "top_k:0.9 | quantise:8", "random_mask:0.5 | quantise:4"):
        plain, _ = make_scheme(written).encode(noise, np.random.default_rng(1))
        coded, _ = make_scheme(f"{written} | deflate").encode(noise, np.random.default_rng(1))
        assert len(coded) <= len(plain)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_finite_is_refused_at_the_client(bad: float) -> None:
    vector = make_vector(50, 1)
    vector[7] = bad
    scheme = make_scheme("top_k:0.1 | quantise:1")
    with pytest.raises(ValueError, match="NaN or beyond"):
        scheme.encode(vector, np.random.default_rng(0))
    with pytest.raises(ValueError, match="NaN or beyond"):
        scheme.encode(make_vector(50, 1), np.random.default_rng(0), vector)


def test_shapes_that_do_not_fit_are_refused() -> None:
    vectors, generator = np.zeros((2, 5), np.float32), np.random.default_rng(0)
    with pytest.raises(ValueError, match="generators"):
        make_scheme("quantise:8").encode_batch(vectors, [generator])
    with pytest.raises(ValueError, match="residuals"):
        make_scheme("quantise:8").encode_batch(vectors, [generator] * 2, vectors)
    with pytest.raises(ValueError, match="residuals"):
        make_scheme("quantise:1").encode_batch(vectors, [generator] * 2, vectors[:1])
    with pytest.raises(ValueError, match="a vector of 1 to"):
        make_scheme("quantise:1").decode(b"", 0)


def make_body(scheme: Scheme, *sections: bytes, flags: int = 0) -> bytes:
    return bytes([scheme.mark, flags]) + b"".join(sections)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_scales_that_no_client_sends_are_refused(scale: float) -> None:
    scheme = make_scheme("quantise:8")
    body = make_body(scheme, np.float32(scale).tobytes(), bytes([127, 0, 254]))
    with pytest.raises(BodyRefused, match="scale"):
        scheme.decode(body, 3)
    fine = make_body(scheme, np.float32(127.0).tobytes(), bytes([127, 0, 254]))
    np.testing.assert_array_equal(scheme.decode(fine, 3), [0, -127, 127])


def test_values_and_codes_that_no_client_sends_are_refused() -> None:
    scheme = make_scheme("random_mask:1:shared")
    for bad in (np.nan, np.inf):
        with pytest.raises(BodyRefused, match="not finite"):
            scheme.decode(make_body(scheme, np.array([1.0, bad], "<f4").tobytes()), 2)
    scheme = make_scheme("random_mask:0.5")
    with pytest.raises(BodyRefused, match="not finite"):
        scheme.decode(make_body(scheme, bytes(4), np.full(1, 3e38, "<f4").tobytes()), 2)
    for written, code in (("quantise:8", 0xFF), ("quantise:4", 0xF7), ("quantise:2", 0b11010101)):
        scheme = make_scheme(written)
        with pytest.raises(BodyRefused, match="code exceeds"):
            scheme.decode(make_body(scheme, np.float32(1.0).tobytes(), bytes([code])), 8 // int(written[-1]))


def test_a_body_of_another_scheme_or_vector_is_refused() -> None:
    scheme, other = (
        make_scheme("top_k:0.1 | quantise:1 | deflate"),
        make_scheme("top_k:0.2 | quantise:1 | deflate"),
    )
    assert scheme.mark != other.mark
    body, _ = scheme.encode(make_vector(300, 1), np.random.default_rng(0))
    with pytest.raises(BodyRefused, match="not of this scheme"):
        other.decode(body, 300)
    for dimension in (10, 3_000):
        with pytest.raises(BodyRefused):
            scheme.decode(body, dimension)


def test_a_section_that_claims_much_gets_nothing() -> None:
    scheme = make_scheme("top_k:0.1 | quantise:1 | deflate")
    claims = b"\xff\xff\xff\xff\x7f"
    for flags in (0, 1, 4, 0x80):
        with pytest.raises(BodyRefused):
            scheme.decode(make_body(scheme, claims, bytes(20), flags=flags), 100)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = coder.compress(bytes(1_000_000)) + coder.flush()
    with pytest.raises(BodyRefused):
        scheme.decode(make_body(scheme, bytes([10]), bomb, flags=1), 100)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PLAIN + REMEMBERING),
    st.integers(1, 200),
    st.data(),
)
def test_any_bytes_are_refused_or_give_a_finite_vector(
    written: str, dimension: int, data: st.DataObject
) -> None:
    scheme = make_scheme(written)
    body, _ = scheme.encode(make_vector(dimension, 1), np.random.default_rng(0), shared=SHARED)
    kind = data.draw(st.sampled_from(["cut", "longer", "changed", "foreign"]))
    if kind == "cut":
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    elif kind == "longer":
        body += data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "changed":
        changed = bytearray(body)
        for _ in range(data.draw(st.integers(1, 5))):
            changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        body = bytes(changed)
    else:
        body = bytes([scheme.mark]) + data.draw(st.binary(max_size=300))
    try:
        vector = scheme.decode(body, dimension, SHARED)
    except BodyRefused:
        return
    assert kind not in ("cut", "longer")
    assert vector.shape == (dimension,)
    assert vector.dtype == np.float32
    assert np.isfinite(vector).all()


def test_with_memory_clients_of_different_aims_meet_at_the_mean_and_without_it_they_do_not() -> None:
    """Ten clients, each pulling towards its own point by half of the distance: the mean of the points is the answer."""
    points = np.stack([make_vector(120, seed) for seed in range(10)]) * np.float32(100.0)
    aim = points.mean(axis=0)
    scheme = make_scheme("top_k:0.05 | quantise:1 | deflate")

    def distance(remember: bool) -> float:
        weights = np.zeros(120, np.float32)
        residuals = np.zeros_like(points)
        generators = [np.random.default_rng(i) for i in range(10)]
        for iteration in range(1_500):
            rate = np.float32(0.02 if iteration < 1_000 else 0.004)
            encoded = scheme.encode_batch((points - weights) * rate, generators, residuals)
            weights = weights + encoded.decoded.mean(axis=0)
            if remember:
                assert encoded.residuals is not None
                residuals = encoded.residuals
        return float(np.linalg.norm(weights - aim) / np.linalg.norm(aim))

    assert distance(remember=True) < 0.1 < 0.3 < distance(remember=False)


def test_a_schemes_mark_is_the_same_in_every_process() -> None:
    """Sets have another order where strings have other hashes."""
    program = "from federated.compression import make_scheme; print(make_scheme('top_k:0.2,quantise:1,deflate').mark)"
    marks = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(marks) == 1


def test_what_all_clients_of_a_round_send_is_known_without_a_body() -> None:
    scheme = make_scheme("random_mask:0.25:shared")
    vector = np.arange(1.0, 41.0, dtype=np.float32)
    places = scheme.shared_places(40, 7)
    body, _ = scheme.encode(vector, np.random.default_rng(0), shared=7)
    np.testing.assert_array_equal(np.flatnonzero(scheme.decode(body, 40, 7)), places)
    assert len(places) == 10
    with pytest.raises(UnsoundScheme):
        make_scheme("random_mask:0.5").shared_places(40, 7)
