"""What is known and which versions win: kernels against loops over one version at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.knowledge import NO_HORIZON, Horizon, Known, covers, joined, met, newer, vector_of
from tests.support.twins import Version, arrays, is_above, is_newer

WRITERS = st.sampled_from([1, 2, 3, 2**24, 2**32 - 1])
TIMES = st.one_of(st.integers(1, 6), st.integers(2**63 - 3, 2**63 - 1))
VECTORS = st.dictionaries(WRITERS, TIMES)
VERSIONS = st.lists(st.tuples(TIMES, WRITERS), max_size=30)
EPOCHS = st.dictionaries(WRITERS, st.integers(0, 4))


@settings(deadline=None)
@given(VERSIONS, VECTORS)
def test_above_and_scan_find_what_is_not_covered(versions: list[Version], vector: dict[int, int]) -> None:
    known = Known.of(vector)
    expected = [is_above(version, vector) for version in versions]
    assert known.above(*arrays(versions)).tolist() == expected
    holes = [(0, 1), *versions, (0, 2**32 - 1)]
    places = known.scan(*arrays(holes)).tolist()
    assert places == [i for i, version in enumerate(holes) if version[0] and is_above(version, vector)]


@settings(deadline=None)
@given(VERSIONS, VECTORS, EPOCHS, st.integers(0, 4))
def test_writers_of_retired_epochs_are_covered_whatever_the_vector_says(
    versions: list[Version], vector: dict[int, int], epochs: dict[int, int], retired: int
) -> None:
    known = Known.of(vector, retired, epochs)
    expected = [
        is_above((time, writer), vector) and not epochs.get(writer, retired) < retired
        for time, writer in versions
    ]
    assert known.above(*arrays(versions)).tolist() == expected
    assert known.covers({writer: 2**63 - 1 for writer, epoch in epochs.items() if epoch < retired})


@settings(deadline=None)
@given(VERSIONS)
def test_the_vector_of_versions_is_the_least_that_covers_them(versions: list[Version]) -> None:
    vector = vector_of(*arrays(versions))
    assert not any(is_above(version, vector) for version in versions)
    assert vector == {w: max(t for t, other in versions if other == w) for _, w in versions}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.tuples(TIMES, WRITERS), st.one_of(st.none(), st.tuples(TIMES, WRITERS)))), EPOCHS
)
def test_the_newer_version_leads_by_epoch_then_time_then_writer(
    pairs: list[tuple[Version, Version | None]], epochs: dict[int, int]
) -> None:
    ours = arrays(version for version, _ in pairs)
    theirs = arrays(other or (0, 0) for _, other in pairs)
    assert newer(ours, theirs, epochs).tolist() == [is_newer(*pair, epochs) for pair in pairs]


@given(st.lists(st.tuples(TIMES, WRITERS), min_size=1, max_size=6, unique=True), EPOCHS)
def test_every_two_versions_have_one_winner(versions: list[Version], epochs: dict[int, int]) -> None:
    pairs = [(one, other) for one in versions for other in versions if one != other]
    if pairs:
        wins = newer(arrays(one for one, _ in pairs), arrays(other for _, other in pairs), epochs)
        loses = newer(arrays(other for _, other in pairs), arrays(one for one, _ in pairs), epochs)
        assert (wins != loses).all()


@given(VECTORS, VECTORS, VECTORS)
def test_vectors_are_a_lattice(a: dict[int, int], b: dict[int, int], c: dict[int, int]) -> None:
    assert joined(a, b) == joined(b, a)
    assert joined(a, joined(b, c)) == joined(a, b, c)
    assert joined(a, a) == a == met([a, a])
    assert met([a]) == a
    assert covers(joined(a, b), a)
    assert covers(a, met([a, b, c]))
    assert met([a, b, c]) == met([c, b, a])
    assert covers(a, b) == (joined(a, b) == a) == (met([a, b]) == b)


def test_nobody_knows_nothing_together() -> None:
    assert met([]) == {} == met([{1: 5}, {}]) == joined()
    assert covers({}, {})
    assert not covers({}, {1: 1})


@pytest.mark.parametrize(
    ("knowledge", "retired", "passes"),
    [
        ({1: 9, 2: 7}, 0, True),
        ({1: 9, 2: 6}, 0, False),
        ({1: 9}, 0, False),
        # Who heard of the retirement before, and holds what its writers wrote since, has it all.
        ({1: 9, 2: 7}, 3, True),
        ({2: 7}, 5, True),
        ({2: 7}, 3, False),
        ({2: 7}, 2, False),
        ({1: 9, 2: 6}, 5, False),
    ],
)
def test_who_lacks_what_was_forgotten_needs_a_replacement(
    knowledge: dict[int, int], retired: int, passes: bool
) -> None:
    graves = {2: 7}
    horizon = Horizon(graves) if retired == 0 else Horizon(graves, 5, 3, {1: 9})
    assert horizon.passed_by(knowledge, retired, {1: 4, 2: 6}) == passes


def test_horizons_join_to_the_later_retirement_and_all_graves() -> None:
    one, other = Horizon({1: 5}, 3, 0, {8: 2}), Horizon({1: 4, 2: 2}, 6, 3, {9: 1})
    assert one.joined(other) == Horizon({1: 5, 2: 2}, 6, 3, {9: 1}) == other.joined(one)
    assert one.joined(NO_HORIZON) == one == NO_HORIZON.joined(one)


def test_a_large_scan_gives_the_same_as_a_mask() -> None:
    rng = np.random.default_rng(0)
    time = rng.integers(0, 1_000, 100_000).astype(np.uint64)
    writer = rng.choice(np.array([3, 5, 7], np.uint32), 100_000)
    known = Known.of({3: 500, 5: 0, 7: 999})
    limit = np.array([500, 0, 999])[(writer.astype(np.int64) - 3) // 2]
    assert known.scan(time, writer).tolist() == np.flatnonzero(time.astype(np.int64) > limit).tolist()
