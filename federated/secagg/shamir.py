"""Shamir's secret sharing of 32 bytes modulo the prime 2**256 + 297.

A secret is the constant term of a polynomial of degree below the threshold whose other coefficients are uniform; a
share is its value at a point from 1 on. As many shares as the threshold give the secret, and fewer are independent of
it. The prime is the smallest above every 32-byte secret, so nothing is lost, and a share takes 33 bytes.

Python's integers do not take constant time. Whoever shares runs this on their own machine, on values that are used
once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
MOST_POINT: Final = 2**31 - 1

Draw = Callable[[int], bytes]
"""draw(count) gives ``count`` uniform bytes."""

_BITS_MASK = (1 << PRIME.bit_length()) - 1


class ShareRefused(ValueError):
    """Points, a threshold or shares from which no secret can be made or shared."""


def split(secret: bytes, threshold: int, points: Sequence[int], draw: Draw = os.urandom) -> list[bytes]:
    """The share of 33 bytes of a 32-byte secret for each point. Raises ShareRefused for points that are not distinct
    numbers from 1 to 2**31 - 1, or a threshold that is not 1 to their number."""
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
    shares = []
    for secret in secrets:
        # From the highest coefficient to the secret, as Horner takes them.
        coefficients = [*_uniform(threshold - 1, draw), int.from_bytes(secret)]
        shares.append([_value(coefficients, point).to_bytes(SHARE_BYTES) for point in points])
    return shares


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
        value = sum(map(int.__mul__, self._coefficients, numbers)) % PRIME
        if value >> (8 * SECRET_BYTES):
            raise ShareRefused("the shares belong to no secret")
        return value.to_bytes(SECRET_BYTES)


def _check_points(points: Sequence[int]) -> None:
    if len(set(points)) != len(points) or not all(1 <= point <= MOST_POINT for point in points):
        raise ShareRefused(f"points are distinct numbers from 1 to {MOST_POINT}")


def _uniform(count: int, draw: Draw) -> list[int]:
    """Uniform numbers below PRIME by rejection: exactly uniform, since fewer shares than the threshold must say
    nothing at all."""
    raise NotImplementedError


def _value(coefficients: Sequence[int], point: int) -> int:
    raise NotImplementedError


def _at_zero(points: Sequence[int]) -> list[int]:
    raise NotImplementedError
