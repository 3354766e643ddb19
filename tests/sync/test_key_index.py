"""The index against a dict, with keys that crowd into few homes at the end of the array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sync import index as index_module
from sync.errors import TableFull
from sync.index import MISSING, KeyIndex
from sync.reference import mix

# The first array has 256 entries: these keys all want the last two or the first one.
CROWDED = [key for key in range(20_000) if mix(key) & 255 in (0, 254, 255)][:14]
KEY = st.sampled_from([*CROWDED, 2**64 - 1, 2**63]) | st.integers(0, 2**64 - 1)
BATCH = st.lists(KEY, max_size=20)


def uint64(keys: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(keys, np.uint64)


class IndexAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex()
        self.model: dict[int, int] = {}
        self.known: set[int] = set()

    @rule(keys=BATCH)
    def insert(self, keys: list[int]) -> None:
        before = dict(self.model)
        for key, slot in zip(keys, self.index.insert(uint64(keys)).tolist(), strict=True):
            assert self.model.setdefault(key, slot) == slot
        fresh = [slot for key, slot in self.model.items() if key not in before]
        assert not set(fresh) & set(before.values())
        self.known.update(keys)

    @rule(keys=BATCH)
    def delete(self, keys: list[int]) -> None:
        expected = [self.model.pop(key, MISSING) for key in keys]
        assert self.index.delete(uint64(keys)).tolist() == expected

    @rule(count=st.integers(0, 400))
    def reserve(self, count: int) -> None:
        self.index.reserve(count)

    @invariant()
    def finds_what_the_dict_holds(self) -> None:
        keys = [*self.known, *CROWDED]
        slots, missing = self.index.find(uint64(keys))
        assert slots.tolist() == [self.model.get(key, MISSING) for key in keys]
        assert missing == sum(key not in self.model for key in keys)
        assert len(self.index) == len(self.model)
        assert len(set(self.model.values())) == len(self.model)
        assert all(0 <= slot < self.index.slots for slot in self.model.values())


IndexAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestIndexAgainstDict = IndexAgainstDict.TestCase


def test_deletion_shifts_back_exactly_what_may_move() -> None:
    rng = np.random.default_rng(5)
    crowd = uint64(CROWDED)
    index, present = KeyIndex(), np.zeros(len(crowd), bool)
    for _ in range(2_000):
        chosen = rng.integers(0, len(crowd), 3)
        insert = bool(rng.random() < 0.5)
        if insert:
            index.insert(crowd[chosen])
        else:
            index.delete(crowd[chosen])
        present[chosen] = insert
        assert np.array_equal(index.find(crowd)[0] >= 0, present)
        assert len(index) == present.sum()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 20_000))
def test_grows_and_keeps_every_key(seed: int, count: int) -> None:
    keys = np.unique(np.random.default_rng(seed).integers(0, 2**64, count, np.uint64))
    index = KeyIndex()
    assert index.insert(keys).tolist() == list(range(len(keys)))
    assert index.find(keys)[0].tolist() == list(range(len(keys)))
    assert index.find(~keys)[1] == len(np.setdiff1d(~keys, keys))


def test_slots_follow_first_occurrence() -> None:
    assert KeyIndex().insert(uint64([9, 4, 9, 0, 4])).tolist() == [0, 1, 0, 2, 1]


def test_freed_slots_are_given_out_again_before_new_ones() -> None:
    index = KeyIndex()
    index.insert(uint64([1, 2, 3]))
    index.delete(uint64([2, 7, 1, 2]))
    assert sorted(index.insert(uint64([10, 11, 12])).tolist()) == [0, 1, 3]
    assert index.slots == 4


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
