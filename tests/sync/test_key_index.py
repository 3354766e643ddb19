"""The index against its slow twin, with segments so small that batches of twenty keys split, double and crowd
them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sync import index as index_module
from sync.errors import TableFull
from sync.index import KeyIndex
from sync.probing import MISSING
from sync.reference import ReferenceIndex, mix

Keys = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Index = KeyIndex | ReferenceIndex


def uint64(keys: list[int]) -> Keys:
    return np.array(keys, np.uint64)


def unmix(hashed: int) -> int:
    """The key whose hash under salt 0 is ``hashed``."""

    def unshift(z: int, by: int) -> int:
        restored = z
        for _ in range(64 // by):
            restored = z ^ restored >> by
        return restored

    z = unshift(hashed, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return unshift(z, 30)


CROWDED = [unmix(line | i << 32) for i in range(24) for line in (0, 0xFF0)]
"""Keys that want the first or the last line of one segment, more than a line holds."""
KEY = st.sampled_from([*CROWDED, 0, 2**64 - 1, 2**63]) | st.integers(0, 2**64 - 1)
BATCH = st.lists(KEY, max_size=20)


def test_unmix_inverts_the_hash() -> None:
    assert [mix(unmix(hashed)) for hashed in (0, 1, 2**64 - 1, 12345 << 40)] == [0, 1, 2**64 - 1, 12345 << 40]


class IndexAgainstTwin(RuleBasedStateMachine):
    """The kernels and the twin give every key the same slot at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = ReferenceIndex()
        self.known: set[int] = set()

    @initialize(
        salt=st.integers(0, 2**64 - 1), slot_bits=st.integers(1, 24), segment_bits=st.sampled_from([4, 5, 12])
    )
    def start(self, salt: int, slot_bits: int, segment_bits: int) -> None:
        self.index = KeyIndex(salt=salt, slot_bits=slot_bits, segment_bits=segment_bits)

    @rule(keys=BATCH)
    def insert(self, keys: list[int]) -> None:
        assert self.index.insert(uint64(keys)).tolist() == self.twin.insert(uint64(keys)).tolist()
        self.known.update(keys)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 300))
    def insert_many(self, seed: int, count: int) -> None:
        keys = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)
        assert np.array_equal(self.index.insert(keys), self.twin.insert(keys))
        self.known.update(keys.tolist())

    @rule(keys=BATCH)
    def delete(self, keys: list[int]) -> None:
        assert self.index.delete(uint64(keys)).tolist() == self.twin.delete(uint64(keys)).tolist()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def delete_known(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=60))
        assert self.index.delete(uint64(keys)).tolist() == self.twin.delete(uint64(keys)).tolist()

    @rule(count=st.integers(0, 400))
    def reserve(self, count: int) -> None:
        self.index.reserve(count)

    @rule(first=st.integers(0, 300), count=st.integers(0, 300))
    def live(self, first: int, count: int) -> None:
        assert self.index.live(first, count).tolist() == self.twin.live(first, count).tolist()

    @invariant()
    def agree(self) -> None:
        keys = uint64([*self.known, *CROWDED])
        (slots, missing), (expected, unknown) = self.index.find(keys), self.twin.find(keys)
        assert slots.tolist() == expected.tolist()
        assert missing == unknown
        assert (len(self.index), self.index.slots) == (len(self.twin), self.twin.slots)
        taken = self.index.live(0, self.index.slots)
        assert len(taken) == len(self.index)
        assert np.array_equal(self.index.keys[taken], self.twin.keys[taken])


IndexAgainstTwin.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestIndexAgainstTwin = IndexAgainstTwin.TestCase


@pytest.mark.parametrize("segment_bits", [5, 12])
def test_deletion_shifts_back_exactly_what_may_move(segment_bits: int) -> None:
    rng = np.random.default_rng(5)
    crowd = uint64(CROWDED)
    index, present = KeyIndex(salt=0, segment_bits=segment_bits), np.zeros(len(crowd), bool)
    for step in range(3_000):
        chosen = rng.integers(0, len(crowd), 3)
        # Waves, so that lines are full at times and nearly empty at others.
        insert = bool(rng.random() < (0.8 if step // 50 % 2 else 0.2))
        if insert:
            index.insert(crowd[chosen])
        else:
            index.delete(crowd[chosen])
        present[chosen] = insert
        assert np.array_equal(index.find(crowd)[0] >= 0, present)
        assert len(index) == present.sum()


@pytest.fixture(params=[KeyIndex, ReferenceIndex])
def index(request: pytest.FixtureRequest) -> Index:
    make: Callable[[], Index] = request.param
    return make()


def test_slots_follow_first_occurrence(index: Index) -> None:
    assert index.insert(uint64([9, 4, 9, 0, 4, 2**64 - 1])).tolist() == [0, 1, 0, 2, 1, 3]
    assert index.find(uint64([2**64 - 1, 0, 7]))[0].tolist() == [3, 2, MISSING]


def test_slots_freed_last_are_given_out_first(index: Index) -> None:
    index.insert(uint64([1, 2, 3]))
    assert index.delete(uint64([2, 7, 1, 2])).tolist() == [1, MISSING, 0, MISSING]
    assert index.insert(uint64([10, 11, 12])).tolist() == [0, 1, 3]
    assert index.slots == 4
    assert index.keys.tolist() == [10, 11, 3, 12]


def test_tells_live_slots_from_free_ones(index: Index) -> None:
    index.insert(np.arange(200, dtype=np.uint64))
    index.delete(np.arange(60, 131, dtype=np.uint64))
    assert index.live(0, 1_000).tolist() == [*range(60), *range(131, 200)]
    assert index.live(50, 100).tolist() == [*range(50, 60), *range(131, 150)]
    assert index.live(200, 5).tolist() == []


@pytest.mark.parametrize("dim", [0, 1, 15, 16, 17, 32, 200])
def test_gather_copies_the_rows_of_known_keys_alone(index: Index, dim: int) -> None:
    keys = np.random.default_rng(dim).permutation(100).astype(np.uint64)
    index.insert(keys[:60])
    values = np.arange(60 * dim, dtype=np.float32).reshape(60, dim)
    rows = np.full((100, dim), -1.0, np.float32)
    slots, missing = index.gather(keys, values, rows)
    assert slots.tolist() == [*range(60), *[MISSING] * 40]
    assert missing == 40
    assert np.array_equal(rows[:60], values)
    assert (rows[60:] == -1.0).all()


def test_gather_refuses_arrays_that_do_not_fit() -> None:
    index = KeyIndex()
    keys = uint64([1, 2, 3])
    index.insert(keys)
    values = np.zeros((3, 4), np.float32)
    for wrong_values, wrong_rows in (
        (values[:2], np.zeros((3, 4), np.float32)),
        (values, np.zeros((2, 4), np.float32)),
        (values, np.zeros((3, 5), np.float32)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            index.gather(keys, wrong_values, wrong_rows)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 60_000), st.sampled_from([4, 8, 12]), st.integers(1, 24))
def test_grows_over_many_splits_and_keeps_every_key(
    seed: int, count: int, segment_bits: int, slot_bits: int
) -> None:
    keys = np.unique(np.random.default_rng(seed).integers(0, 2**64, count, np.uint64))
    index = KeyIndex(salt=seed, segment_bits=segment_bits, slot_bits=slot_bits)
    for start in range(0, len(keys), 7_000):
        part = keys[start : start + 7_000]
        assert np.array_equal(index.insert(part), np.arange(start, start + len(part)))
    assert np.array_equal(index.find(keys)[0], np.arange(len(keys)))
    assert np.array_equal(index.keys, keys)
    assert index.find(~keys)[1] == len(np.setdiff1d(~keys, keys))


def test_slots_take_over_bits_of_the_tag() -> None:
    index = KeyIndex(slot_bits=4)
    keys = np.random.default_rng(3).integers(0, 2**64, 5_000, np.uint64)
    for part in np.array_split(keys, 50):
        index.insert(part)
    assert np.array_equal(index.find(keys)[0], np.arange(5_000))
    assert index.find(~keys)[1] == 5_000


def test_the_salt_changes_nothing_that_shows() -> None:
    keys = np.random.default_rng(4).integers(0, 2**64, 20_000, np.uint64)
    one, other = KeyIndex(), KeyIndex()
    for index in (one, other):
        index.insert(keys)
        index.delete(keys[::3].copy())
    assert np.array_equal(one.insert(keys), other.insert(keys))
    assert np.array_equal(one.keys, other.keys)


def test_keys_that_share_their_hashs_top_bits_are_held_up_to_a_bound() -> None:
    keys = uint64([unmix(0xABCDE << 44 | i * 0x9E3779B97F4A7C15 % 2**44) for i in range(60_000)])
    index = KeyIndex(salt=0)
    index.insert(keys[:20_000])
    bytes_before, slots_before = index.nbytes, index.find(keys[:20_000])[0]
    with pytest.raises(TableFull, match=r"24\d{3} keys share the first \d+ bits"):
        index.insert(keys[20_000:])
    assert len(index) == 20_000
    assert index.find(keys[20_000:])[1] == 40_000
    assert np.array_equal(index.find(keys[:20_000])[0], slots_before)
    assert index.nbytes < bytes_before + 2**21
    # Other keys still find room, and slots that the refused ones had are given out in order.
    assert np.array_equal(index.insert(np.arange(5, dtype=np.uint64)), np.arange(20_000, 20_005))


def test_keys_that_all_want_one_place_are_refused_soon() -> None:
    keys = uint64([unmix(i << 24) for i in range(60_000)])
    index = KeyIndex(salt=0)
    started = time.perf_counter()
    with pytest.raises(TableFull, match="share the first"):
        index.insert(keys)
    assert time.perf_counter() - started < 20.0
    assert len(index) == 0
    # Who does not know the salt cannot choose such keys.
    assert np.array_equal(KeyIndex().insert(keys), np.arange(60_000))


def test_crowded_keys_among_others_cost_little_memory() -> None:
    crowds = [unmix(prefix << 58 | i << 24) for prefix in range(64) for i in range(1_000)]
    index = KeyIndex(salt=0, segment_bits=8)
    index.insert(uint64(crowds))
    assert np.array_equal(index.find(uint64(crowds))[0], np.arange(len(crowds)))
    assert index.nbytes < len(crowds) * 80


def test_finds_through_read_only_keys() -> None:
    index = KeyIndex()
    keys = np.frombuffer(uint64([5, 6]).tobytes(), np.uint64)
    assert not keys.flags.writeable
    assert index.insert(keys).tolist() == index.find(keys)[0].tolist() == [0, 1]


def test_refuses_more_keys_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_ROWS", 3)
    index = KeyIndex()
    index.insert(uint64([1, 2]))
    with pytest.raises(TableFull, match="4 keys"):
        index.reserve(2)
    assert index.find(uint64([1, 2, 3]))[0].tolist() == [0, 1, MISSING]


def test_counts_its_bytes() -> None:
    index = KeyIndex()
    before = index.nbytes
    index.insert(np.random.default_rng(6).integers(0, 2**64, 300_000, np.uint64))
    # 300,000 keys of 8 bytes, entries of 4 at a load of at least 3/8, and less than a slab each to spare.
    assert 300_000 * (8 + 4 / 0.75) < index.nbytes - before < 300_000 * (8 + 4 / 0.37) + 2**19 + 2**20
