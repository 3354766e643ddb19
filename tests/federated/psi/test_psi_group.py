"""ristretto255: published vectors, and encodings that no honest peer sends."""

from __future__ import annotations

import pytest

from federated.psi.group import (
    ElementRefused,
    base_raised,
    check_scalar,
    hash_and_raise,
    hashed,
    inverse,
    product,
    quotient,
    raise_all,
    raised,
    scalar,
)
from federated.psi.hashing import split
from federated.vertical.parties import Alone
from tests.support.psi import drawing

IDENTITY = bytes(32)
# RFC 9496, appendix A.2 and A.3: not canonical, negative, not square, negative product, y = 0.
BAD = [
    "00ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "f3ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "01ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
    "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    # Points of small order on edwards25519, as compressed there: none is an encoding here but the identity.
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
]
# RFC 9496, appendix A.1: multiples 1 to 3 of the generator.
MULTIPLES = [
    "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76",
    "6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919",
    "94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259",
]


def test_multiples_of_the_generator() -> None:
    for number, multiple in enumerate(MULTIPLES, 1):
        assert base_raised(number.to_bytes(32, "little")).hex() == multiple
    one, two, three = (bytes.fromhex(multiple) for multiple in MULTIPLES)
    assert product(one, two) == three
    assert quotient(three, one) == two


@pytest.mark.parametrize("encoding", BAD)
def test_encodings_that_are_none(encoding: str) -> None:
    for use in (
        lambda: raised(bytes.fromhex(encoding), bytes((5,)) + bytes(31)),
        lambda: product(bytes.fromhex(MULTIPLES[0]), bytes.fromhex(encoding)),
        lambda: quotient(bytes.fromhex(encoding), bytes.fromhex(MULTIPLES[0])),
    ):
        with pytest.raises(ElementRefused):
            use()


def test_identity_and_wrong_lengths() -> None:
    secret = scalar(drawing(1))
    for element in (IDENTITY, b"", bytes(31), bytes(33)):
        with pytest.raises(ElementRefused):
            raised(element, secret)
    with pytest.raises(ElementRefused, match="33 bytes"):
        raise_all(bytes(33), secret, Alone())


@pytest.mark.parametrize("secret", [bytes(32), b"\1", b"\xff" * 32])
def test_secrets_that_are_none(secret: bytes) -> None:
    with pytest.raises(ValueError, match="secret exponent"):
        check_scalar(secret)


def test_masks_commute_and_come_off() -> None:
    draw = drawing(2)
    one, other = scalar(draw), scalar(draw)
    values = [b"x%d" % number for number in range(5)]
    masked = hash_and_raise(values, b"t", one, Alone())
    assert raise_all(masked, other, Alone()) == raise_all(
        hash_and_raise(values, b"t", other, Alone()), one, Alone()
    )
    assert split(raise_all(masked, inverse(one), Alone()), 32) == [hashed(b"t", value) for value in values]


def test_purposes_are_apart() -> None:
    assert hashed(b"a", b"bc") != hashed(b"ab", b"c")
