"""Secrets come back from shares of which some are wrong, and whose are wrong is said."""

from __future__ import annotations

import random

import pytest

from federated.secagg.decoding import decode
from federated.secagg.shamir import PRIME, SHARE_BYTES, split

SECRET = bytes(range(32))


def dealt(holders: int, threshold: int, wrong: int, seed: int) -> tuple[dict[int, bytes], set[int]]:
    draws = random.Random(seed)
    points = draws.sample(range(1, 1000), holders)
    shares = dict(zip(points, split(SECRET, threshold, points, draws.randbytes), strict=True))
    liars = set(draws.sample(points, wrong))
    for liar in liars:
        shares[liar] = draws.randrange(PRIME).to_bytes(SHARE_BYTES)
    return shares, liars


@pytest.mark.parametrize(("holders", "threshold"), [(3, 2), (9, 5), (10, 3), (30, 29), (40, 12), (5, 5)])
def test_as_many_wrong_shares_as_the_code_corrects(holders: int, threshold: int) -> None:
    for wrong in range((holders - threshold) // 2 + 1):
        shares, liars = dealt(holders, threshold, wrong, wrong)
        assert decode(shares, threshold) == (SECRET, liars)


@pytest.mark.parametrize(("holders", "threshold"), [(3, 2), (9, 5), (10, 3)])
def test_more_wrong_shares_give_no_secret(holders: int, threshold: int) -> None:
    for wrong in range((holders - threshold) // 2 + 1, holders + 1):
        shares, _ = dealt(holders, threshold, wrong, wrong)
        assert decode(shares, threshold) is None


def test_liars_who_agree_on_another_polynomial_do_not_replace_the_right_one() -> None:
    shares, _ = dealt(11, 5, 0, 0)
    other = split(bytes(32), 5, list(shares), random.Random(1).randbytes)
    liars = dict(list(zip(shares, other, strict=True))[:3])
    assert decode({**shares, **liars}, 5) == (SECRET, set(liars))


def test_too_few_shares_give_nothing() -> None:
    shares, _ = dealt(4, 4, 0, 0)
    assert decode(dict(list(shares.items())[:3]), 4) is None
    assert decode({}, 2) is None


def test_shares_of_zero_and_of_a_number_that_is_no_secret() -> None:
    nothing = dict.fromkeys(range(1, 8), bytes(SHARE_BYTES))
    assert decode(nothing, 3) == (bytes(32), set())
    too_large = dict.fromkeys(range(1, 8), (2**256 + 1).to_bytes(SHARE_BYTES))
    assert decode(too_large, 3) is None
