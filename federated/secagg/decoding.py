"""Secrets from shares of which some are wrong, without trying sets of them: Reed and Solomon's code, decoded by Gao.

The shares of a secret are values of a polynomial of degree t - 1. Of m shares any (m - t) / 2 may be wrong: the right
polynomial is the only one that agrees with all the others. Gao (2003), "A new algorithm for decoding Reed-Solomon
codes": the polynomial through all shares and the one that vanishes at all points go through Euclid's algorithm until
their remainder is the right polynomial times one that vanishes at the wrong shares' points. m**2 multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping

from federated.secagg.shamir import PRIME, SECRET_BYTES, inverses

Polynomial = list[int]  # coefficients modulo the prime, the lowest first, without zeros at the end


def decode(shares: Mapping[int, bytes], threshold: int) -> tuple[bytes, set[int]] | None:
    """The secret of ``shares`` (by point; numbers below the prime) and the points whose shares are wrong; None where
    more than (m - t) / 2 of the m are, or what they give is no secret."""
    points, values = list(shares), [int.from_bytes(share) for share in shares.values()]
    if len(points) < threshold:
        return None
    vanishing = _vanishing(points)
    before, after = vanishing, _through(points, values, vanishing)
    locator_before, locator = Polynomial(), [1]
    while 2 * (len(after) - 1) >= len(points) + threshold:
        quotient, rest = _divided(before, after)
        before, after = after, rest
        locator_before, locator = locator, _less(locator_before, _times(quotient, locator))
    found, rest = _divided(after, locator)
    if rest or len(found) > threshold:
        return None
    secret = found[0] if found else 0
    if secret >> (8 * SECRET_BYTES):
        return None
    wrong = {point for point, value in zip(points, values, strict=True) if _at(found, point) != value}
    return (secret.to_bytes(SECRET_BYTES), wrong) if 2 * len(wrong) <= len(points) - threshold else None


def _vanishing(points: list[int]) -> Polynomial:
    product = [1]
    for point in points:
        product = [
            (low - point * high) % PRIME for low, high in zip([0, *product], [*product, 0], strict=True)
        ]
    return product


def _through(points: list[int], values: list[int], vanishing: Polynomial) -> Polynomial:
    """The polynomial with these values, by Lagrange's formula."""
    slope = [power * coefficient % PRIME for power, coefficient in enumerate(vanishing)][1:]
    weights = inverses([_at(slope, point) for point in points])
    total = [0] * len(points)
    for point, value, weight in zip(points, values, weights, strict=True):
        factor, carried = value * weight % PRIME, 0
        for power in range(len(points), 0, -1):  # the vanishing one without this point, by Horner's division
            carried = (vanishing[power] + point * carried) % PRIME
            total[power - 1] += factor * carried
    return _trimmed([number % PRIME for number in total])


def _divided(one: Polynomial, other: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Quotient and rest. ``other`` is not zero."""
    rest, inverse = list(one), pow(other[-1], -1, PRIME)
    quotient = [0] * max(len(one) - len(other) + 1, 0)
    for place in range(len(quotient) - 1, -1, -1):
        factor = quotient[place] = rest[place + len(other) - 1] * inverse % PRIME
        for power, coefficient in enumerate(other, place):
            rest[power] = (rest[power] - factor * coefficient) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _times(one: Polynomial, other: Polynomial) -> Polynomial:
    product = [0] * max(len(one) + len(other) - 1, 0)
    for place, factor in enumerate(one):
        for power, coefficient in enumerate(other, place):
            product[power] += factor * coefficient
    return _trimmed([number % PRIME for number in product])


def _less(one: Polynomial, other: Polynomial) -> Polynomial:
    length = max(len(one), len(other))
    padded = ([*one, *[0] * (length - len(one))], [*other, *[0] * (length - len(other))])
    return _trimmed([(a - b) % PRIME for a, b in zip(*padded, strict=True)])


def _trimmed(numbers: Polynomial) -> Polynomial:
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _at(polynomial: Polynomial, point: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * point + coefficient) % PRIME
    return value
