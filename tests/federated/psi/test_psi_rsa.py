"""RSA: weak keys are refused, a faulty half never leaves, replies are checked."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from functools import cache

import gmpy2
import numpy as np
import pytest

import federated.psi.rsa as rsa
from federated.psi.hashing import split
from federated.psi.rsa import (
    PrivateKey,
    PublicKey,
    RsaRefused,
    blind,
    check_proof,
    check_public,
    full_domain_hash,
    generate,
    private_key,
    proof,
    sign,
    sign_own,
    unblind,
    units,
)
from federated.vertical.parties import Alone
from tests.support.psi import drawing

VALUES = [b"x%d" % at for at in range(5)]


@cache
def key() -> PrivateKey:
    return generate()


def test_blind_signatures_are_the_signer_s_own() -> None:
    public = key().public
    blinded, kept = blind(public, VALUES, drawing(1), Alone())
    signatures = unblind(public, sign(key(), blinded, Alone()), kept, Alone())
    assert signatures == sign_own(key(), VALUES, Alone())
    d = pow(public.e, -1, math.lcm(key().p - 1, key().q - 1))
    for value, signature in zip(VALUES, signatures, strict=True):
        assert int.from_bytes(signature) == pow(full_domain_hash(public, value), d, public.n)


def test_blinding_is_new_each_time_and_uniform() -> None:
    public = key().public
    one, _ = blind(public, VALUES, drawing(1), Alone())
    other, _ = blind(public, VALUES, drawing(2), Alone())
    assert not set(split(one, public.width)) & set(split(other, public.width))
    drawn = [number / public.n for number in units(public, 400, drawing(3))]
    assert all(0 < share < 1 for share in drawn)
    # Kolmogorov and Smirnov: above 2.2/sqrt(n) with probability 1e-4 for uniform ones; the seed is fixed.
    away = np.abs(np.sort(drawn) - (np.arange(400) + 0.5) / 400).max()
    assert away < 2.2 / np.sqrt(400)


def test_blinding_factors_that_share_a_factor_are_drawn_anew() -> None:
    public, width = key().public, key().public.width
    given = iter([key().p, 3, 2**2048 - 1, 5, 7])  # the third is beyond the modulus
    assert units(public, 2, lambda count: next(given).to_bytes(count)) == [5, 7]
    assert width == 256


def test_hash_is_full_domain_and_bound_to_key_and_purpose() -> None:
    public, other = key().public, generate().public
    hashes = [full_domain_hash(public, b"%d" % at) for at in range(200)]
    assert max(hashes) * 100 > public.n * 95
    assert all(math.gcd(number, public.n) == 1 for number in hashes)
    assert full_domain_hash(public, b"x") % other.n != full_domain_hash(other, b"x")
    # Bound to the key, not only reduced by it.
    assert full_domain_hash(PublicKey(public.n, 65_539), b"x") != full_domain_hash(public, b"x")
    assert full_domain_hash(public, b"\0", b"proof") != full_domain_hash(public, b"\0")


def test_keys_are_kept() -> None:
    assert private_key(key().to_bytes()) == key()
    assert str(key().p) not in repr(key())


# Mersenne's primes, 2**k - 1.
M521, M607, M1279, M2203 = (2**power - 1 for power in (521, 607, 1279, 2203))


WEAK = [
    "small",
    "large",
    "even",
    "small factor",
    "prime",
    "square",
    "e is 1",
    "e is 3",
    "e is even",
    "e is composite",
    "e is huge",
]


@cache
def weak() -> dict[str, tuple[int, int]]:
    n = key().public.n
    return {
        "small": (M521 * M607, 65_537),
        "large": (n * n * n, 65_537),
        "even": (n - 1, 65_537),
        "small factor": (M2203 * 65_521, 65_537),
        "prime": (M2203, 65_537),
        "square": (M1279**2, 65_537),
        "e is 1": (n, 1),
        "e is 3": (n, 3),
        "e is even": (n, 65_538),
        "e is composite": (n, 65_537 * 3),
        "e is huge": (n, 2**61 - 1),
    }


@pytest.mark.parametrize("why", WEAK)
def test_weak_public_keys(why: str) -> None:
    n, e = weak()[why]
    with pytest.raises(RsaRefused):
        check_public(n, e)


def test_exponent_that_divides_phi_is_shown() -> None:
    """With e | p − 1 blinding hides x only up to e-th powers; the proof's roots do not exist then."""
    e = 65_537
    p = next(
        candidate for step in range(1 << 20) if gmpy2.is_prime(candidate := (3 * 2**1005 + step) * 2 * e + 1)
    )
    public = PublicKey(p * M1279, e)
    with pytest.raises(RsaRefused, match="not shown"):
        check_proof(public, bytes(public.width * rsa.proof_roots(public)))
    # The best that the owner can do: e-th roots of those hashes that have one. A hash has one where its power of
    # (p − 1)/e is 1 modulo p.
    have = [
        pow(full_domain_hash(public, bytes((at,)), b"proof"), (p - 1) // e, p) == 1
        for at in range(rsa.proof_roots(public))
    ]
    assert not all(have)


def test_proof_of_an_honest_key() -> None:
    public = key().public
    roots = proof(key())
    check_proof(public, roots)
    assert rsa.proof_roots(public) * (public.e.bit_length() - 1) >= 128
    for wrong in (roots[:-1], roots[public.width :] + roots[: public.width], b""):
        with pytest.raises(RsaRefused):
            check_proof(public, wrong)


def test_private_keys_whose_parts_do_not_belong_together() -> None:
    good = key()
    for change in (
        {"d_p": good.d_p + 1},
        {"d_q": good.d_q + 2},
        {"q_inverse": good.q_inverse + 1},
        {"p": good.q},
        {"p": good.public.n, "q": 1},
    ):
        with pytest.raises(ValueError, match=r"factors|parts"):
            dataclasses.replace(good, **change)
    close = 3 * 2**1022 + 1
    while not gmpy2.is_prime(close):
        close += 2
    near = close + 2
    while not gmpy2.is_prime(near):
        near += 2
    with pytest.raises(ValueError, match="too close"):
        PrivateKey(PublicKey(close * near, 65_537), close, near, 1, 1, 1)


def test_many_are_prime_to_the_modulus_where_each_is() -> None:
    n = key().public.n
    assert rsa._prime_to(n, [])
    assert rsa._prime_to(n, [1, 2, n - 1, n + 5])
    for wrong in (0, n, key().p, 7 * key().q):
        assert not rsa._prime_to(n, [3, wrong, 5])


def test_a_modulus_made_for_an_id_does_not_show_that_it_is_here() -> None:
    """A factor little above 2**16 divides the hash of one id: whoever has the id would fail, or send a multiple."""
    p, value = 65_539, b"99279"
    public = PublicKey(p * int(gmpy2.next_prime(2**2040)), 65_537)
    base = hashlib.shake_256(rsa._HASH + public.fingerprint() + b"\2id" + value)
    assert int.from_bytes(base.digest(public.width + 16)) % p == 0
    numbers = [full_domain_hash(public, one) for one in (value, b"other")]
    assert rsa._prime_to(public.n, numbers)
    assert rsa._hashes(public, [value, b"other"]) == numbers
    blinded, _ = blind(public, [value], drawing(1), Alone())
    assert int.from_bytes(blinded) % p


def test_many_inverses_are_those_of_each() -> None:
    n = key().public.n
    numbers = [2, n - 1, 1, 12_345, 2]
    assert rsa._inverses(n, numbers) == [pow(number, -1, n) for number in numbers]
    assert rsa._inverses(n, []) == []


def test_numbers_that_no_blinding_gives() -> None:
    public = key().public
    for number in (0, 1, public.n - 1, public.n, public.n + 5, key().p, 3 * key().q):
        with pytest.raises(RsaRefused):
            sign(key(), number.to_bytes(public.width), Alone())


def test_replies_that_are_no_signatures() -> None:
    public = key().public
    blinded, kept = blind(public, VALUES[:2], drawing(1), Alone())
    signed = sign(key(), blinded, Alone())
    first, second = split(signed, public.width)
    for wrong in (second + first, first + bytes(public.width), first + b"\xff" * public.width):
        with pytest.raises(RsaRefused, match="no signature"):
            unblind(public, wrong, kept, Alone())


def test_a_reply_has_one_form() -> None:
    odd = generate(2050)  # of 257 bytes, in which there is room for more than the modulus
    blinded, kept = blind(odd.public, VALUES[:1], drawing(1), Alone())
    signed = sign(odd, blinded, Alone())
    other = (int.from_bytes(signed) + odd.public.n).to_bytes(odd.public.width)
    assert unblind(odd.public, signed, kept, Alone()) == sign_own(odd, VALUES[:1], Alone())
    with pytest.raises(RsaRefused, match="no signature"):
        unblind(odd.public, other, kept, Alone())


@pytest.mark.parametrize("bits", [1024, 2047, 8192])
def test_sizes_that_are_not_made(bits: int) -> None:
    with pytest.raises(ValueError, match="2048 to 4096"):
        generate(bits)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3072, 4096])
def test_larger_keys(bits: int) -> None:
    large = generate(bits)
    blinded, kept = blind(large.public, VALUES, drawing(1), Alone())
    assert unblind(large.public, sign(large, blinded, Alone()), kept, Alone()) == sign_own(
        large, VALUES, Alone()
    )
