"""Which shard holds a key: fixed for ever, even, and unrelated to the index's hash."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.errors import BadSpec
from sync.placement import shard_of, single_shard
from sync.reference import mix

KEYS = np.array([0, 1, 2, 3, 0xDEADBEEF, 2**63, 2**64 - 1], np.uint64)


def by_the_formula(key: int, shards: int) -> int:
    mask = 2**64 - 1
    key = (key ^ key >> 33) * 0xFF51AFD7ED558CCD & mask
    key = (key ^ key >> 33) * 0xC4CEB9FE1A85EC53 & mask
    return ((key ^ key >> 33) >> 32) * shards >> 32


def test_golden_values_never_change() -> None:
    assert shard_of(KEYS, 4).tolist() == [0, 2, 0, 0, 3, 2, 1]
    assert shard_of(KEYS, 1000).tolist() == [0, 704, 229, 44, 821, 560, 393]
    assert [single_shard(name, 7) for name in ("dense", "ranking", "a")] == [0, 5, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.integers(1, 65_536))
def test_follows_the_formula(keys: list[int], shards: int) -> None:
    found = shard_of(np.array(keys, np.uint64), shards)
    assert found.dtype == np.int32
    assert found.tolist() == [by_the_formula(key, shards) for key in keys]


def test_leaves_the_keys_alone() -> None:
    keys = KEYS.copy()
    shard_of(keys, 5)
    assert np.array_equal(keys, KEYS)


@pytest.mark.parametrize("shards", [2, 3, 4, 16])
def test_spreads_small_numbers_evenly_and_a_shard_over_its_whole_index(shards: int) -> None:
    keys = np.arange(40_000, dtype=np.uint64)
    homes = shard_of(keys, shards)
    counts = np.bincount(homes, minlength=shards)
    expected = len(keys) / shards
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected))
    # One shard's keys must not share bits of the hash that places them in its index.
    of_first = keys[homes == 0][:4_000]
    buckets = np.bincount([mix(int(key)) & 15 for key in of_first], minlength=16)
    assert np.all(np.abs(buckets - len(of_first) / 16) < 6 * np.sqrt(len(of_first) / 16))


@pytest.mark.parametrize("shards", [0, -1, 65_537])
def test_refuses_a_number_of_shards_that_cannot_be(shards: int) -> None:
    with pytest.raises(BadSpec, match=str(shards)):
        shard_of(KEYS, shards)
    with pytest.raises(BadSpec, match=str(shards)):
        single_shard("dense", shards)
