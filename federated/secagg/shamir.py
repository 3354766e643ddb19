"""Shamir's secret sharing of 32 bytes modulo the prime 2**256 + 297.

A secret is the constant term of a polynomial of degree below the threshold whose other coefficients are uniform; a
share is its value at a point from 1 on. As many shares as the threshold give the secret, and fewer are independent of
it. The prime is the smallest above every 32-byte secret, so nothing is lost, and a share takes 33 bytes.

The time taken may depend on the numbers. Whoever shares runs this on their own machine, on values that are used once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from math import prod
from operator import mul
from typing import Final

import numpy as np
import numpy.typing as npt

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
MOST_POINT: Final = 2**22 - 1

Draw = Callable[[int], bytes]
"""draw(count) gives ``count`` uniform bytes."""

Limbs = npt.NDArray[np.int64]

_EXCESS = PRIME - 2**256
_LOW_32, _LOW_256 = 2**32 - 1, 2**256 - 1
_BITS_MASK = (1 << PRIME.bit_length()) - 1
_MOST_DRAWS = 128  # Each leaves half of what is missing: more than these happen once in 2**100 times.


class ShareRefused(ValueError):
    """Points, a threshold or shares from which no secret can be made or shared."""


def split(secret: bytes, threshold: int, points: Sequence[int], draw: Draw = os.urandom) -> list[bytes]:
    """The share of 33 bytes of a 32-byte secret for each point. Raises ShareRefused for points that are not distinct
    numbers from 1 to 2**22 - 1, or a threshold that is not 1 to their number."""
    return split_many([secret], threshold, points, draw)[0]


def split_many(
    secrets: Sequence[bytes], threshold: int, points: Sequence[int], draw: Draw = os.urandom
) -> list[list[bytes]]:
    """``split`` of several secrets over the same points, faster than one by one: shares[secret][point]."""
    _check_points(points)
    if not 1 <= threshold <= len(points):
        raise ShareRefused(f"a threshold of {threshold} among {len(points)} shares")
    if any(len(secret) != SECRET_BYTES for secret in secrets):
        raise ShareRefused(f"a secret has {SECRET_BYTES} bytes")
    # From the highest coefficient to the secret, as Horner's rule takes them.
    coefficients = [[*_uniform(threshold - 1, draw), int.from_bytes(secret)] for secret in secrets]
    return [[value.to_bytes(SHARE_BYTES) for value in values] for values in _values(coefficients, points)]


class Reconstructor:
    """Secrets from shares at given points; the coefficients are computed once for any number of secrets.

    Raises ShareRefused for no points or points that ``split`` would refuse.
    """

    def __init__(self, points: Sequence[int]) -> None:
        if not points:
            raise ShareRefused("no shares")
        _check_points(points)
        self._coefficients = _at_zero(points)

    def secret(self, shares: Sequence[bytes]) -> bytes:
        """The 32-byte secret of one share per point, in the order of the points.

        Raises ShareRefused for another number of shares, for bytes that are no share, and when what they give is no
        secret. Wrong shares mostly give a wrong secret: nothing here can tell.
        """
        if len(shares) != len(self._coefficients):
            raise ShareRefused(f"{len(shares)} shares for {len(self._coefficients)} points")
        numbers = [int.from_bytes(share) for share in shares]
        if any(len(share) != SHARE_BYTES for share in shares) or max(numbers) >= PRIME:
            raise ShareRefused(f"a share is a number below 2**256 + 297 in {SHARE_BYTES} bytes")
        value: int = sum(map(mul, self._coefficients, numbers)) % PRIME
        if value >> (8 * SECRET_BYTES):
            raise ShareRefused("the shares belong to no secret")
        return value.to_bytes(SECRET_BYTES)


def _check_points(points: Sequence[int]) -> None:
    if len(set(points)) != len(points) or not all(1 <= point <= MOST_POINT for point in points):
        raise ShareRefused(f"points are distinct numbers from 1 to {MOST_POINT}")


def _uniform(count: int, draw: Draw) -> list[int]:
    """Uniform numbers below PRIME by rejection: exactly uniform, since fewer shares than the threshold must say
    nothing at all. Half of the candidates are dropped."""
    numbers: list[int] = []
    for _ in range(_MOST_DRAWS):
        missing = count - len(numbers)
        if not missing:
            return numbers
        drawn = draw(2 * SHARE_BYTES * missing)
        candidates = (
            int.from_bytes(drawn[at : at + SHARE_BYTES]) & _BITS_MASK
            for at in range(0, len(drawn), SHARE_BYTES)
        )
        numbers += list(islice((number for number in candidates if number < PRIME), missing))
    raise RuntimeError("the source of randomness gives no numbers below the prime")


def _limbs(numbers: Sequence[int]) -> Limbs:
    """Numbers below PRIME as int64 [8, len(numbers)], the lowest 32 bits first; the first limb may be negative."""
    body = b"".join((number & _LOW_256).to_bytes(SECRET_BYTES, "little") for number in numbers)
    limbs = np.frombuffer(body, "<u4").reshape(len(numbers), 8).T.astype(np.int64)
    limbs[0] -= [_EXCESS * (number >> 256) for number in numbers]
    return limbs


def _carry(limbs: Limbs, high: Limbs) -> None:
    """Bring every limb but the lowest to below 2**32 plus a carry; 2**256 is -297 modulo the prime."""
    np.right_shift(limbs, 32, out=high)
    limbs &= _LOW_32
    limbs[1:] += high[:-1]
    limbs[0] -= _EXCESS * high[-1]


def _values(coefficients: Sequence[Sequence[int]], points: Sequence[int]) -> list[list[int]]:
    """The polynomials' values at the points, modulo the prime: values[polynomial][point].

    Horner's rule over all polynomials and points at once, in limbs of 32 bits. A carry of limbs below 2**62 leaves
    limbs below 2**39 in magnitude (297 * 2**30 is the most that enters the lowest), and ``steps`` multiplications by
    points, 22 bits together, keep them below 2**62.
    """
    x = np.array(points, np.int64)
    steps = MOST_POINT.bit_length() // int(max(points)).bit_length()
    by_degree = [_limbs(column)[..., np.newaxis] for column in zip(*coefficients, strict=True)]
    total = np.zeros((8, len(coefficients), len(points)), np.int64)
    high = np.empty_like(total)
    for degree, limbs in enumerate(by_degree):
        total *= x
        total += limbs
        if degree % steps == steps - 1:
            _carry(total, high)
    return [[_number(limbs) for limbs in polynomial.T.tolist()] for polynomial in np.moveaxis(total, 0, 1)]


def _number(limbs: Sequence[int]) -> int:
    return sum(limb << (32 * place) for place, limb in enumerate(limbs)) % PRIME


def _at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's coefficients at zero: the product of x_j / (x_j - x_i) over all j but i."""
    x = np.array(points, np.int64)
    denominators = []
    for place, point in enumerate(points):
        row = x - point
        row[place] = point
        denominators.append(prod(row.tolist()) % PRIME)
    product = prod(points) % PRIME
    return [product * inverse % PRIME for inverse in inverses(denominators)]


def inverses(numbers: Sequence[int]) -> list[int]:
    """The inverses modulo the prime of numbers other than 0, at the price of one (Montgomery's trick)."""
    before = list(accumulate(numbers, lambda one, other: one * other % PRIME, initial=1))
    inverse = pow(before[-1], -1, PRIME)
    inverses = []
    for number, product in zip(reversed(numbers), reversed(before[:-1]), strict=True):
        inverses.append(inverse * product % PRIME)
        inverse = inverse * number % PRIME
    return inverses[::-1]
