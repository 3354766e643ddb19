"""Masks are AES-256's key stream, cancel in pairs, look uniform, and do not depend on blocks or threads."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.secagg import Ring
from federated.secagg.masks import _BLOCK_BYTES, add_masks, mask

BLOCK = _BLOCK_BYTES // 4  # words of 32 bits


def seed_of(number: int) -> bytes:
    return number.to_bytes(32)


def key_stream(seed: bytes, length: int) -> bytes:
    """Counter mode by hand: the block cipher on 0, 1, 2 ..."""
    counters = b"".join(number.to_bytes(16) for number in range(-(-length // 16)))
    return Cipher(algorithms.AES(seed), modes.ECB()).encryptor().update(counters)[:length]


def test_the_first_words_are_the_published_block_of_the_zero_key() -> None:
    assert mask(bytes(32), 4, Ring(32)).tobytes().hex() == "dc95c078a2408989ad48a21492842087"


@pytest.mark.parametrize("bits", [24, 32, 33, 64])
@pytest.mark.parametrize("length", [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_a_mask_is_the_key_stream_in_little_endian_words(bits: int, length: int) -> None:
    ring = Ring(bits)
    stream = key_stream(seed_of(7), length * ring.dtype.itemsize)
    words = mask(seed_of(7), length, ring)
    assert words.dtype == ring.dtype
    assert words.tolist() == np.frombuffer(stream, ring.dtype.newbyteorder("<")).tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 64), st.lists(st.binary(min_size=32, max_size=32), max_size=5), st.integers(0, 2_000))
def test_masks_cancel_in_pairs_at_every_width(bits: int, seeds: list[bytes], length: int) -> None:
    ring = Ring(bits)
    values = np.random.default_rng(bits).integers(-ring.largest - 1, ring.largest, length, endpoint=True)
    total = ring.of(values)
    add_masks(total, [(seed, 1) for seed in seeds], ring)
    # What arrives at the server was packed, so it is reduced meanwhile.
    total = ring.unpack(ring.pack(total), length)
    add_masks(total, [(seed, -1) for seed in seeds], ring)
    assert ring.signed(total).tolist() == values.tolist()


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_more_seeds_than_a_group_over_any_number_of_threads_add_up(threads: int) -> None:
    ring, length = Ring(33), BLOCK + 11
    seeds = [(seed_of(number), -1 if number % 3 else 1) for number in range(300)]
    expected = ring.zeros(length)
    for seed, sign in seeds:
        stream = np.frombuffer(key_stream(seed, 8 * length), "<u8")
        expected = expected + stream if sign == 1 else expected - stream
    total = ring.zeros(length)
    add_masks(total, iter(seeds), ring, threads)
    assert (total == expected).all()


@pytest.mark.parametrize("bits", [8, 33, 64])
def test_words_of_a_mask_look_uniform_from_the_lowest_bit_to_the_highest(bits: int) -> None:
    ring = Ring(bits)
    words = ring.reduced(mask(seed_of(2024), 64_000, ring)).astype(np.uint64)
    for shift in {0, bits - 6}:
        counts = np.bincount((words >> np.uint64(shift) & np.uint64(63)).astype(np.int64), minlength=64)
        assert ((counts - 1_000) ** 2 / 1_000).sum() < 110  # 63 degrees of freedom; the seed is fixed


def test_a_masked_vector_looks_the_same_whatever_it_hides() -> None:
    ring = Ring(20)
    for value in (0, ring.largest, -ring.largest - 1):
        words = ring.of(np.full(64_000, value))
        add_masks(words, [(seed_of(5), 1)], ring)
        counts = np.bincount(ring.reduced(words) >> np.uint32(14), minlength=64)
        assert ((counts - 1_000) ** 2 / 1_000).sum() < 110


def test_two_seeds_make_unrelated_masks() -> None:
    one, other = (mask(seed_of(number), 32_000, Ring(64)) for number in (1, 2))
    agreeing = np.bitwise_count(~(one ^ other)).sum() / (64 * 32_000)
    assert abs(agreeing - 0.5) < 0.002  # six standard deviations


@pytest.mark.parametrize("wrong", [(bytes(31), 1), (bytes(33), 1), (bytes(32), 0), (bytes(32), 2)])
def test_a_wrong_seed_or_sign_adds_nothing(wrong: tuple[bytes, int]) -> None:
    ring = Ring(32)
    total = ring.zeros(10)
    with pytest.raises(ValueError, match="32 bytes"):
        add_masks(total, [(seed_of(1), 1), wrong], ring)
    assert not total.any()


def test_wrong_vectors_and_threads_are_our_own_mistake() -> None:
    with pytest.raises(TypeError, match="uint64"):
        add_masks(Ring(32).zeros(3), [], Ring(33))
    with pytest.raises(ValueError, match="threads"):
        add_masks(Ring(32).zeros(3), [], Ring(32), threads=0)
