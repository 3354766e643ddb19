"""The admission sketch: the kernel and its slow twin pass the same tests, and agree counter for counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.admission import MAX_WIDTH, CountSketch, SketchState
from sync.errors import BadSpec, SnapshotDamaged
from sync.reference import ReferenceSketch

Keys = npt.NDArray[np.uint64]


class Sketch(Protocol):
    def count(self, keys: Keys) -> object: ...


Make = Callable[[int], Sketch]
PUSHES = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=12), max_size=20)


@pytest.fixture(params=[CountSketch, ReferenceSketch], ids=["kernel", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def uint64(keys: list[int]) -> Keys:
    return np.array(keys, np.uint64)


def counted(sketch: Sketch, keys: list[int]) -> list[int]:
    return [int(estimate) for estimate in np.asarray(sketch.count(uint64(keys))).tolist()]


def test_counts_the_pushes_of_each_key(make: Make) -> None:
    sketch = make(1024)
    assert counted(sketch, [7, 2**64 - 1, 0]) == [1, 1, 1]
    assert counted(sketch, [0, 9, 7]) == [2, 1, 2]
    assert counted(sketch, []) == []
    assert counted(sketch, [7]) == [3]


@settings(deadline=None, max_examples=60)
@given(pushes=PUSHES)
def test_never_under_estimates_between_agings(pushes: list[list[int]]) -> None:
    for make in (CountSketch, ReferenceSketch):
        # 240 keys at most, so that nothing ages; 41 keys in 256 places collide now and then.
        sketch, true = make(256), Counter[int]()
        for keys in pushes:
            true.update(keys)
            for key, estimate in zip(keys, counted(sketch, keys), strict=True):
                assert true[key] <= estimate <= true.total()


@settings(deadline=None, max_examples=80)
@given(pushes=PUSHES, width=st.sampled_from([1, 2, 8, 64]))
def test_the_kernel_equals_its_twin_over_agings_and_restarts(pushes: list[list[int]], width: int) -> None:
    sketch, twin = CountSketch(width), ReferenceSketch(width)
    for keys in pushes:
        restored = CountSketch(width)
        restored.load(sketch.state())
        sketch = restored
        assert counted(sketch, keys) == twin.count(uint64(keys))
        assert sketch.state().counters.tolist() == twin.counters
        assert sketch.state().counted == twin.counted


@settings(deadline=None, max_examples=30)
@given(pushes=PUSHES)
def test_a_push_counts_as_its_keys_one_by_one(pushes: list[list[int]]) -> None:
    whole, single = CountSketch(8), CountSketch(8)
    for keys in pushes:
        assert counted(whole, keys) == [counted(single, [key])[0] for key in keys]


def test_counters_stop_at_what_a_byte_holds(make: Make) -> None:
    sketch = make(1024)
    estimates = [counted(sketch, [5])[0] for _ in range(300)]
    assert estimates == [min(number, 255) for number in range(1, 301)]


def test_all_counters_halve_after_as_many_keys_as_the_width(make: Make) -> None:
    sketch = make(64)
    assert [counted(sketch, [5])[0] for _ in range(64)][-1] == 64
    assert counted(sketch, [5]) == [33]


def test_yesterdays_keys_make_room(make: Make) -> None:
    sketch = make(256)
    assert counted(sketch, [5]) == [1]
    for first in range(1_000, 1_256, 16):
        counted(sketch, list(range(first, first + 16)))
    assert counted(sketch, [5]) == [1]


def test_keys_that_come_once_are_seldom_admitted() -> None:
    """Ten widths of keys that never come back: how many look as if they had come before."""
    width = 1 << 14
    sketch, rng = CountSketch(width), np.random.default_rng(4)
    shares = [
        np.mean(sketch.count(rng.integers(0, 2**64, width // 16, np.uint64)) >= admission)
        for admission in (2, 3)
        for _ in range(160)
    ]
    assert 0.03 < np.mean(shares[:160]) < 0.07  # 16 % just before an aging, 0 just after it
    assert np.mean(shares[160:]) < 0.001


@pytest.mark.parametrize("new_width", [1, 8, 16, 32, 256])
def test_no_estimate_falls_where_the_width_changed(new_width: int) -> None:
    rng = np.random.default_rng(2)
    old = CountSketch(16)
    for _ in range(5):
        old.count(rng.integers(0, 100, 3, np.uint64))
    keys = np.arange(100, dtype=np.uint64)
    new = CountSketch(new_width)
    new.load(old.state())
    assert new.width == new_width
    before, after = ReferenceSketch(16), ReferenceSketch(new_width)
    before.counters, after.counters = old.state().counters.tolist(), new.state().counters.tolist()
    estimates = [(before.estimate(key), after.estimate(key)) for key in keys.tolist()]
    assert all(later >= earlier for earlier, later in estimates)
    assert any(earlier for earlier, _ in estimates)
    if new_width >= 16:
        assert all(later == earlier for earlier, later in estimates)
    assert 0 <= new.state().counted < new_width


def test_a_state_is_not_changed_by_later_keys() -> None:
    sketch = CountSketch(64)
    state = sketch.state()
    sketch.count(uint64([1, 2, 3]))
    assert not state.counters.any()
    assert sketch.state().counters.sum() == 12


def test_memory_is_what_its_width_says() -> None:
    assert CountSketch(1 << 16).nbytes == 4 << 16


@pytest.mark.parametrize("width", [0, -4, 3, 96, 2 * MAX_WIDTH])
def test_refuses_other_widths(width: int) -> None:
    with pytest.raises(BadSpec, match=str(width)):
        CountSketch(width)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (SketchState(np.zeros((3, 8), np.uint8), 0), "counters"),
        (SketchState(np.zeros(8, np.uint8), 0), "counters"),
        (SketchState(np.zeros((4, 8), np.uint16), 0), "counters"),
        (SketchState(np.zeros((4, 0), np.uint8), 0), "width 0"),
        (SketchState(np.zeros((4, 6), np.uint8), 0), "width 6"),
        (SketchState(np.zeros((4, 8), np.uint8), 8), "8 keys counted"),
        (SketchState(np.zeros((4, 8), np.uint8), -1), "-1 keys counted"),
    ],
)
def test_refuses_damaged_states(state: SketchState, named: str) -> None:
    sketch = CountSketch(8)
    with pytest.raises(SnapshotDamaged, match=named):
        sketch.load(state)


def test_tells_about_how_many_keys_wait() -> None:
    rng = np.random.default_rng(7)
    sketch = CountSketch(2**18)
    assert sketch.waiting(3) == 0
    keys = np.unique(rng.integers(0, 2**64, 60_000, np.uint64))
    admitted, waiting = keys[:10_000], keys[10_000:]
    for _ in range(3):
        sketch.count(admitted)
    sketch.count(waiting)
    sketch.count(waiting[:20_000])
    assert sketch.waiting(3) == pytest.approx(len(waiting), rel=0.05)
    # Of those that were counted once or twice, the first alone wait for a second push.
    assert sketch.waiting(2) == pytest.approx(len(waiting) - 20_000, rel=0.05)


def test_the_number_of_keys_that_wait_is_finite_however_full_it_is() -> None:
    sketch = CountSketch(16)
    sketch.count(np.arange(15, dtype=np.uint64))
    assert 0 <= sketch.waiting(255) <= 16 * np.log(16)
    sketch.count(np.zeros(0, np.uint64))
    assert sketch.waiting(1) == 0
