"""Any threshold of shares gives the secret back, fewer are consistent with every secret, bad ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.secagg import PRIME, SHARE_BYTES, Reconstructor, ShareRefused, split, split_many
from federated.secagg.shamir import MOST_POINT, _at_zero, _uniform, _values

SECRETS = st.binary(min_size=32, max_size=32)
EDGES = [bytes(32), b"\xff" * 32]


def seeded(seed: int) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


def horner(coefficients: list[int], point: int) -> int:
    """The clear reference."""
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


def is_probably_prime(number: int) -> bool:
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def test_the_prime_is_the_smallest_above_every_secret() -> None:
    assert is_probably_prime(PRIME)
    assert not any(is_probably_prime(number) for number in range(2**256, PRIME))


@pytest.mark.parametrize(
    "points", [[1], [1, 2, 3, 500], [1, 1023, 1024, 2047], [2**21, MOST_POINT - 1, MOST_POINT]]
)
@pytest.mark.parametrize("degree", [1, 2, 3, 22, 23, 60])
def test_values_are_those_of_the_reference(points: list[int], degree: int) -> None:
    # The largest coefficients and points bring the limbs nearest to their bounds.
    extreme = [[PRIME - 1] * degree, [2**256 - 1] * degree, [2**256] * degree, [0] * degree]
    polynomials = [*extreme, _uniform(degree, seeded(degree))]
    assert _values(polynomials, points) == [
        [horner(polynomial, point) for point in points] for polynomial in polynomials
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), secret=SECRETS | st.sampled_from(EDGES))
def test_any_threshold_of_shares_gives_the_secret(data: st.DataObject, secret: bytes) -> None:
    points = data.draw(st.lists(st.integers(1, MOST_POINT), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    shares = dict(zip(points, split(secret, threshold, points), strict=True))
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    survivors = data.draw(st.permutations(points))[: data.draw(st.integers(threshold, len(points)))]
    assert Reconstructor(survivors).secret([shares[point] for point in survivors]) == secret


@settings(max_examples=40, deadline=None)
@given(secret=SECRETS, other=SECRETS | st.sampled_from(EDGES), threshold=st.integers(2, 8))
def test_one_share_too_few_is_consistent_with_every_secret(
    secret: bytes, other: bytes, threshold: int
) -> None:
    points = list(range(1, threshold + 1))
    shares = split(secret, threshold, points)[:-1]
    # Exactly one last share makes any other secret of the same known shares.
    *known, last = _at_zero(points)
    rest = int.from_bytes(other) - sum(
        k * int.from_bytes(share) for k, share in zip(known, shares, strict=True)
    )
    missing = rest * pow(last, -1, PRIME) % PRIME
    assert Reconstructor(points).secret([*shares, missing.to_bytes(SHARE_BYTES)]) == other


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("secret", EDGES)
def test_a_share_below_the_threshold_looks_the_same_for_every_secret(secret: bytes) -> None:
    draw = seeded(3)
    shares = [split(secret, 2, [7, 9], draw)[0] for _ in range(6_400)]
    counts = np.bincount([int.from_bytes(share) * 64 // PRIME for share in shares], minlength=64)
    assert chi_square(counts) < 110  # 63 degrees of freedom: more once in 5,000 runs, and the seed is fixed


def test_several_secrets_share_their_points_and_nothing_else() -> None:
    secrets = [bytes([number]) * 32 for number in range(3)]
    points = [5, 3, 90]
    shares = split_many(secrets, 2, points)
    reconstructor = Reconstructor([90, 5])
    assert [reconstructor.secret([row[2], row[0]]) for row in shares] == secrets
    assert len({share for row in shares for share in row}) == 9
    assert split_many(secrets, 2, points, seeded(1)) == split_many(secrets, 2, points, seeded(1))


def test_a_wrong_share_gives_another_secret() -> None:
    secret = b"\x5a" * 32
    first, second, _ = split(secret, 2, [1, 2, 3])
    forged = (int.from_bytes(second) ^ 1).to_bytes(SHARE_BYTES)
    assert Reconstructor([1, 2]).secret([first, forged]) != secret


@pytest.mark.parametrize("points", [[], [0, 1], [-1], [1, 1], [MOST_POINT + 1]])
def test_points_are_refused(points: list[int]) -> None:
    with pytest.raises(ShareRefused):
        split(bytes(32), 1, points)
    with pytest.raises(ShareRefused):
        Reconstructor(points)


@pytest.mark.parametrize("threshold", [0, -1, 4])
def test_thresholds_are_refused(threshold: int) -> None:
    with pytest.raises(ShareRefused, match="threshold"):
        split(bytes(32), threshold, [1, 2, 3])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_has_32_bytes(length: int) -> None:
    with pytest.raises(ShareRefused, match="32 bytes"):
        split(bytes(length), 1, [1])


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([bytes(33)], "1 shares for 2"),
        ([bytes(33)] * 3, "3 shares for 2"),
        ([bytes(33), bytes(32)], "below"),
        ([bytes(33), PRIME.to_bytes(33)], "below"),
        ([(2**256).to_bytes(33)] * 2, "no secret"),
    ],
)
def test_shares_are_refused(shares: list[bytes], reason: str) -> None:
    with pytest.raises(ShareRefused, match=reason):
        Reconstructor([1, 2]).secret(shares)


def test_a_broken_source_of_randomness_is_told() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        split(bytes(32), 2, [1, 2], lambda count: b"\xff" * count)


def test_coefficients_are_every_number_below_the_prime_and_no_other() -> None:
    candidates = [PRIME, PRIME - 1, PRIME + 1, 2**256, 2 * 2**256 - 1, 0]
    body = b"".join(number.to_bytes(SHARE_BYTES) for number in candidates)
    assert _uniform(3, lambda count: body[:count].ljust(count, b"\xff")) == [PRIME - 1, 2**256, 0]
