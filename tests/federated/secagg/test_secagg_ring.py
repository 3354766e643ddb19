"""Sums in the ring are exact up to the proved bound and no further; packing loses nothing and takes nothing wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.secagg import Ring, RingRefused, Words

WIDTHS = range(1, 65)


def random_words(ring: Ring, length: int, seed: int = 0) -> Words:
    generator = np.random.default_rng([ring.bits, seed])
    return np.frombuffer(generator.bytes(length * ring.dtype.itemsize), ring.dtype).copy()


def packed_slowly(words: Words, bits: int) -> bytes:
    """The format as its description says it, on Python's integers."""
    body, low = b"", 0
    for width in (64, 32, 16, 8, 4, 2, 1):
        if not bits & width:
            continue
        values = [int(word) >> low & ((1 << width) - 1) for word in words]
        low += width
        if width >= 8:
            body += b"".join(value.to_bytes(width // 8, "little") for value in values)
            continue
        size = -(-len(values) * width // 8)
        packed = [0] * size
        for place, value in enumerate(values):
            packed[place % size] |= value << (place // size * width)
        body += bytes(packed)
    return body


def test_the_published_example_needs_33_bits_and_with_32_its_extremes_coincide() -> None:
    clients, weight, bound = 1024, 64, 8 * 2**12
    assert Ring.holding(clients, weight, bound) == Ring(33)
    for bits, apart in ((32, False), (33, True)):
        ring = Ring(bits)
        most = ring.of(np.array([weight * bound, -weight * bound]))
        total = ring.zeros(2)
        for _ in range(clients):
            ring.add_into(total, most)
        high, low = ring.reduced(total)
        assert (int(high) != int(low)) is apart
        assert (ring.signed(total).tolist() == [2**31, -(2**31)]) is apart


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**20), st.integers(1, 2**12), st.integers(1, 2**30))
def test_the_ring_is_the_smallest_that_holds_both_extremes(clients: int, weight: int, bound: int) -> None:
    most = clients * weight * bound
    ring = Ring.holding(clients, weight, bound)
    assert 2**ring.bits >= 2 * most + 1 > 2 ** (ring.bits - 1)
    assert ring.signed(ring.of(np.array([most, -most, 0]))).tolist() == [most, -most, 0]


def test_sums_beyond_64_bits_are_refused() -> None:
    assert Ring.holding(2**20, 2**20, 2**22) == Ring(64)
    with pytest.raises(RingRefused, match="65 bits"):
        Ring.holding(2**20, 2**20, 2**23 + 1)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, -1, 1)])
def test_bounds_below_one_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(RingRefused, match="at least 1"):
        Ring.holding(*numbers)


@pytest.mark.parametrize("bits", [0, -1, 65])
def test_widths_are_refused(bits: int) -> None:
    with pytest.raises(RingRefused):
        Ring(bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_signed_undoes_of_and_a_value_too_many_is_refused(bits: int) -> None:
    ring = Ring(bits)
    values = np.array([ring.largest, -ring.largest - 1, 0, -1])
    assert ring.of(values).dtype == ring.dtype
    assert ring.signed(ring.of(values)).tolist() == values.tolist()
    assert ring.signed(ring.reduced(ring.of(values))).tolist() == values.tolist()
    if bits < 64:
        for value in (ring.largest + 1, -ring.largest - 2):
            with pytest.raises(RingRefused, match="do not fit"):
                ring.of(np.array([value]))


@pytest.mark.parametrize("bits", WIDTHS)
def test_reducing_at_the_end_is_reducing_at_every_step(bits: int) -> None:
    ring = Ring(bits)
    vectors = [random_words(ring, 9, seed) for seed in range(50)]
    total, slowly = ring.zeros(9), [0] * 9
    for vector in vectors:
        ring.add_into(total, vector)
        slowly = [(one + int(other)) % 2**bits for one, other in zip(slowly, vector, strict=True)]
    assert ring.reduced(total).tolist() == slowly


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_keeps_every_word_in_no_more_bytes_than_told(bits: int) -> None:
    ring = Ring(bits)
    for length in (0, 1, 2, 3, 7, 8, 9, 16, 1_001):
        words = random_words(ring, length)
        body = ring.pack(words)
        assert body == packed_slowly(words, bits)
        assert len(body) == ring.packed_bytes(length) <= -(-bits * length // 8) + 5
        assert ring.unpack(body, length).tolist() == ring.reduced(words).tolist()
        assert ring.unpack(memoryview(body), length).dtype == ring.dtype


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 64), st.integers(0, 40), st.binary(max_size=120))
def test_bytes_are_refused_or_are_what_packing_makes(bits: int, length: int, body: bytes) -> None:
    ring = Ring(bits)
    try:
        words = ring.unpack(body, length)
    except RingRefused:
        return
    assert ring.pack(words) == body


@pytest.mark.parametrize("bits", [1, 7, 24, 33, 64])
def test_bodies_of_another_length_are_refused(bits: int) -> None:
    ring = Ring(bits)
    body = ring.pack(random_words(ring, 10))
    for wrong, length in ((body[:-1], 10), (body + b"\0", 10), (body, -1), (b"", 2**62)):
        with pytest.raises(RingRefused, match="bytes where"):
            ring.unpack(wrong, length)


def test_bits_behind_the_last_word_are_refused() -> None:
    ring = Ring(33)
    body = bytearray(ring.pack(ring.zeros(3)))
    body[-1] |= 8
    with pytest.raises(RingRefused, match="behind the last"):
        ring.unpack(bytes(body), 3)


def test_words_of_another_ring_are_our_own_mistake() -> None:
    ring, wide = Ring(32), Ring(33)
    for call in (ring.signed, ring.pack, ring.reduced, lambda words: ring.add_into(ring.zeros(4), words)):
        with pytest.raises(TypeError, match="uint32"):
            call(wide.zeros(4))
