"""Tags are as long as their bound says, and comparisons are those of sets."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.psi.hashing import as_rows, matches, repeats, secret_order, tag_bytes, tags
from federated.psi.members import MemoryFolder
from federated.psi.pool import TagPool, common

SMALL_SETS = st.sets(st.binary(min_size=2, max_size=2), max_size=40)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(0, 0), (1, 1), (1_000, 7), (3, 2**24), (10**5, 10**5), (10**6, 10**6), (2**31, 2**31)],
)
def test_tags_are_just_long_enough(mine: int, theirs: int) -> None:
    length = tag_bytes(mine, theirs)
    # Pairs within the larger set too: tags that happen to be equal there would be taken for a repeat.
    pairs = max(1, mine, theirs) ** 2
    assert Fraction(pairs, 256**length) <= Fraction(1, 2**40) < Fraction(pairs, 256 ** (length - 1))


@given(SMALL_SETS, SMALL_SETS)
@settings(max_examples=60)
def test_matches_are_those_of_sets(one: set[bytes], other: set[bytes]) -> None:
    mine, theirs = list(one), list(other)
    found = matches(as_rows(b"".join(mine), 2), as_rows(b"".join(theirs), 2))
    assert found.tolist() == [at for at, value in enumerate(mine) if value in other]


@given(SMALL_SETS, SMALL_SETS, st.integers(1, 7))
@settings(max_examples=30)
def test_buckets_give_what_one_pool_gives(one: set[bytes], other: set[bytes], chunk: int) -> None:
    def pool(values: set[bytes], name: str, expected: int) -> TagPool:
        made = TagPool(folder, name, 2, expected)
        rows = as_rows(b"".join(values), 2)
        for at in range(0, len(rows), chunk):
            made.add(rows[at : at + chunk], at)
        return made

    folder = MemoryFolder()
    results = []
    for expected in (1, 10**9):
        mine, theirs = pool(one, f"mine{expected}", expected), pool(other, f"theirs{expected}", expected)
        results.append((common(mine, theirs).tolist(), b"".join(mine.sorted_chunks(chunk)), mine.repeats()))
    assert results[0] == results[1]
    assert results[0][1] == b"".join(sorted(one))
    assert results[0][2] == 0


def test_repeats_are_counted() -> None:
    assert repeats(as_rows(b"aabbaaaa", 2)) == 2
    folder = MemoryFolder()
    pool = TagPool(folder, "x", 2, 10**9)
    pool.add(as_rows(b"aabb", 2), 0)
    pool.add(as_rows(b"bbcc", 2), 2)
    assert pool.repeats() == 1


def test_order_is_the_key_s_alone() -> None:
    ids = [b"%d" % number for number in range(50)]
    first = secret_order(ids, bytes(32))
    assert sorted(first.tolist()) == list(range(50))
    backwards = secret_order(ids[::-1], bytes(32))
    assert [ids[::-1][at] for at in backwards] == [ids[at] for at in first]  # the file's order does not enter
    assert (secret_order(ids, b"\1" * 32) != first).any()


def test_tags_are_bound_to_purpose_and_session() -> None:
    found = {
        tags(purpose, session, [b"x"], 16).tobytes() for purpose in ("a", "b") for session in (b"s", b"t")
    }
    assert len(found) == 4


def test_rows_must_divide() -> None:
    with pytest.raises(ValueError, match="not rows"):
        as_rows(b"abc", 2)
    assert as_rows(b"", 2).shape == (0, 2)
    assert np.array_equal(matches(as_rows(b"", 2), as_rows(b"aa", 2)), [])
