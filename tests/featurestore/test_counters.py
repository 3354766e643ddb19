"""Laws of decayed counts: merging, decay, redelivery, and the plain sum that they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featurestore import counters
from featurestore.counters import Counts, Decayed

HALF_LIVES = (86_400.0, 7 * 86_400.0, 0.0)
DAY_MS = 86_400_000
LOG = counters.log_tag("log-1")

times = st.integers(0, 100 * DAY_MS)
amounts = st.floats(-4, 4).map(lambda x: round(x, 3))
events = st.lists(st.tuples(st.integers(0, 2), times, amounts), max_size=30)
decayeds = st.builds(
    lambda time, values: Decayed(np.array([time]), np.array([values])),
    times,
    st.lists(st.floats(0, 1_000), min_size=4, max_size=4),
)


def naive(of: list[tuple[int, float]], now_ms: int, half_life_s: float) -> float:
    """The definition: each event's amount, halved once per half-life since it happened."""
    if not half_life_s:
        return math.fsum(amount for _, amount in of)
    return math.fsum(amount * 2.0 ** (-(now_ms - time_ms) / (1_000 * half_life_s)) for time_ms, amount in of)


def add(counts: Counts, batch: list[tuple[int, int, int, float]], log: int = LOG) -> Counts:
    """Add (row, time, offset, amount) events."""
    rows, time_ms, offset, amount = zip(*batch, strict=True) if batch else ((), (), (), ())
    return counters.add(
        counts,
        np.array(rows, np.int64),
        np.array(time_ms, np.int64),
        np.array(offset, np.int64),
        np.array(amount, np.float64),
        log=log,
        half_lives=HALF_LIVES,
    )


def numbered(found: list[tuple[int, int, float]]) -> list[tuple[int, int, int, float]]:
    return [(row, time_ms, offset, amount) for offset, (row, time_ms, amount) in enumerate(found)]


def close(a: Decayed, b: Decayed) -> bool:
    return bool((a.time_ms == b.time_ms).all() and np.allclose(a.values, b.values, rtol=1e-9, atol=1e-9))


@given(events, st.integers(0, 50 * DAY_MS))
def test_the_vectorised_count_is_the_definition(found: list[tuple[int, int, float]], later_ms: int) -> None:
    counts = add(counters.empty(3, HALF_LIVES), numbered(found))
    now_ms = max((time_ms for _, time_ms, _ in found), default=0) + later_ms
    values = counters.at(counts.decayed, now_ms, HALF_LIVES)
    for row in range(3):
        of = [(time_ms, amount) for where, time_ms, amount in found if where == row]
        expected = [naive(of, now_ms, half_life) for half_life in (*HALF_LIVES, 0.0)]
        np.testing.assert_allclose(values[row], expected, rtol=1e-9, atol=1e-9)


@given(events, st.integers(0, 30))
def test_batches_of_any_size_count_the_same(found: list[tuple[int, int, float]], cut: int) -> None:
    at_once = add(counters.empty(3, HALF_LIVES), numbered(found))
    in_two = add(add(counters.empty(3, HALF_LIVES), numbered(found)[:cut]), numbered(found)[cut:])
    assert close(at_once.decayed, in_two.decayed)
    assert (at_once.offset == in_two.offset).all()


@given(events, st.integers(0, 30))
def test_redelivered_events_change_nothing(found: list[tuple[int, int, float]], again_from: int) -> None:
    once = add(counters.empty(3, HALF_LIVES), numbered(found))
    twice = add(once, numbered(found)[again_from:])
    assert counters.encode(once, HALF_LIVES) == counters.encode(twice, HALF_LIVES)


def test_events_that_share_an_offset_all_count() -> None:
    counts = add(counters.empty(1, HALF_LIVES), [(0, DAY_MS, 5, 1.0), (0, DAY_MS, 5, 1.0)])
    assert counts.decayed.values.tolist() == [[2.0] * 4]
    assert counts.offset.tolist() == [5]


def test_a_new_log_starts_its_offsets_again_and_keeps_the_counts() -> None:
    old = add(counters.empty(2, HALF_LIVES), [(0, DAY_MS, 900, 1.0), (1, DAY_MS, 901, 1.0)])
    new = add(old, [(0, DAY_MS, 3, 1.0)], log=counters.log_tag("log-2"))
    assert new.decayed.values[:, -1].tolist() == [2.0, 1.0]
    assert new.offset.tolist() == [3, 901]
    assert new.log.tolist() == [counters.log_tag("log-2"), LOG]
    again = add(new, [(0, DAY_MS, 3, 1.0)], log=counters.log_tag("log-2"))
    assert again.decayed.values[0, -1] == 2.0


@given(decayeds, decayeds)
def test_merging_commutes(a: Decayed, b: Decayed) -> None:
    assert close(counters.merge(a, b, HALF_LIVES), counters.merge(b, a, HALF_LIVES))


@given(decayeds, decayeds, decayeds)
def test_merging_associates(a: Decayed, b: Decayed, c: Decayed) -> None:
    left = counters.merge(counters.merge(a, b, HALF_LIVES), c, HALF_LIVES)
    right = counters.merge(a, counters.merge(b, c, HALF_LIVES), HALF_LIVES)
    assert close(left, right)


@given(events, events)
def test_merging_is_counting_together(
    one: list[tuple[int, int, float]], two: list[tuple[int, int, float]]
) -> None:
    empty = counters.empty(3, HALF_LIVES)
    apart = counters.merge(add(empty, numbered(one)).decayed, add(empty, numbered(two)).decayed, HALF_LIVES)
    assert close(apart, add(empty, numbered(one + two)).decayed)


@given(st.integers(0, 50 * DAY_MS), st.integers(0, 50 * DAY_MS))
def test_decay_composes(first_ms: int, second_ms: int) -> None:
    apart = counters.decay(np.array([first_ms]), HALF_LIVES) * counters.decay(
        np.array([second_ms]), HALF_LIVES
    )
    np.testing.assert_allclose(
        apart, counters.decay(np.array([first_ms + second_ms]), HALF_LIVES), rtol=1e-12
    )


def test_half_is_left_after_a_half_life() -> None:
    left = counters.decay(np.array([0, DAY_MS, 7 * DAY_MS]), HALF_LIVES)
    assert left[:, 0].tolist() == [1.0, 0.5, 2.0**-7]
    assert left[2].tolist() == [2.0**-7, 0.5, 1.0, 1.0]


def test_reading_in_the_past_does_not_grow_a_count() -> None:
    counts = add(counters.empty(1, HALF_LIVES), [(0, 10 * DAY_MS, 0, 1.0)])
    assert counters.at(counts.decayed, 0, HALF_LIVES).tolist() == [[1.0] * 4]


@given(events)
def test_cells_decode_to_what_was_encoded(found: list[tuple[int, int, float]]) -> None:
    counts = add(counters.empty(3, HALF_LIVES), numbered(found))
    cells = counters.encode(counts, HALF_LIVES)
    read = counters.decode(cells, HALF_LIVES)
    for wrote, got in (
        (counts.log, read.log),
        (counts.offset, read.offset),
        (counts.decayed.time_ms, read.decayed.time_ms),
        (counts.decayed.values, read.decayed.values),
    ):
        np.testing.assert_array_equal(wrote, got)


def test_missing_cells_are_empty() -> None:
    cell = counters.encode(add(counters.empty(1, HALF_LIVES), [(0, 7, 8, 1.5)]), HALF_LIVES)[0]
    read = counters.decode([None, cell, None], HALF_LIVES)
    assert read.offset.tolist() == [-1, 8, -1]
    assert read.decayed.values[:, 0].tolist() == [0.0, 1.5, 0.0]


def test_cells_kept_for_other_half_lives_give_what_they_have() -> None:
    counts = add(counters.empty(1, HALF_LIVES), [(0, DAY_MS, 0, 1.0), (0, 2 * DAY_MS, 1, 1.0)])
    old = counters.encode(counts, HALF_LIVES)[0]
    wanted = (7 * 86_400.0, 3_600.0, 86_400.0)
    mixed = counters.decode([old, counters.encode(counters.empty(1, wanted), wanted)[0]], wanted)
    week, day = counts.decayed.values[0, 1], counts.decayed.values[0, 0]
    assert mixed.decayed.values.tolist() == [[week, 0.0, day, 2.0], [0.0] * 4]


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-1], lambda c: c[:8], lambda c: b"\x07" + c[1:], lambda c: b"x"]
)
def test_a_damaged_cell_is_named(damage: object) -> None:
    assert callable(damage)
    cell = counters.encode(counters.empty(1, HALF_LIVES), HALF_LIVES)[0]
    with pytest.raises(counters.CounterFormatError):
        counters.decode([damage(cell)], HALF_LIVES)


def test_the_format_is_fixed() -> None:
    half_lives = (86_400.0,)
    counts = Counts(
        np.array([LOG], np.uint64), np.array([258]), Decayed(np.array([772]), np.array([[0.5, 2.0]]))
    )
    expected = (
        "01000000" "01000000"  # format, number of half-lives
        "5facb88bf0ac2151" "0201000000000000" "0403000000000000"  # log, offset, time
        "000000000018f540" "000000000000e03f" "0000000000000040"  # half-lives, values
    )  # fmt: skip
    assert counters.encode(counts, half_lives)[0].hex() == expected
