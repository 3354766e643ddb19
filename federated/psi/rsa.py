"""RSA blind signatures as a pseudo-random function: keys and their checks, blinding, signing, unblinding.

    client: a = H(x)·r^e      server: b = a^d, and b^e = a is checked      client: s = b·r⁻¹, and s^e = H(x) is checked

H is a full-domain hash into Z_n*, r uniform in Z_n* and used once. The server signs by the Chinese remainder theorem
(``power``); one faulty half would give gcd(b^e − a, n), a factor of n, to whoever sees b: hence the check before any
reply. Of the server's own signatures only hashes leave: they are checked where ``power`` does not do so itself, since a
wrong one would lose a match.

Many numbers share one gcd and one inversion modulo n: a product is prime to n where every factor is.

Assumption: one-more RSA inversion (Bellare, Namprempre, Pointcheval and Semanko 2003), random oracles.

    RsaRefused        a key or number of a peer that is not what it has to be
    FaultySignature   our own signing went wrong: nothing of it may leave
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import gmpy2
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)

from federated.psi import libcrypto
from federated.psi.hashing import split
from federated.psi.power import Halves, Openssl, SecretPower
from federated.vertical.parties import Draw, Workers

LEAST_BITS: Final = 2048
MOST_BITS: Final = 4096
EXPONENT: Final = 65_537
MOST_EXPONENT: Final = 2**32
_SMALL: Final = 2**16
_PROOF_BITS: Final = 128
_HASH: Final = b"headwater-psi-rsa-1"
_SHARE: Final = (
    256  # Numbers that a worker takes at once: about 70 ms of signing, of which it opens the key in one.
)


class RsaRefused(ValueError):
    """A key or number of a peer that is not what it has to be."""


class FaultySignature(ArithmeticError):
    """A signature that does not verify under our own key: nothing of it may leave."""


def _primes(limit: int) -> tuple[int, ...]:
    composite = bytearray(limit)
    for number in range(2, math.isqrt(limit) + 1):
        if not composite[number]:
            composite[number * number :: number] = b"\1" * len(range(number * number, limit, number))
    return tuple(number for number in range(2, limit) if not composite[number])


_PRODUCT: Final = math.prod(_primes(_SMALL))


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Modulus and exponent, checked: see ``check_public``."""

    n: int
    e: int

    def __post_init__(self) -> None:
        check_public(self.n, self.e)

    @property
    def width(self) -> int:
        """Bytes of a number modulo n."""
        return (self.n.bit_length() + 7) // 8

    def fingerprint(self) -> bytes:
        """32 bytes that name the key."""
        return hashlib.sha256(_HASH + self.n.to_bytes(self.width) + self.e.to_bytes(8)).digest()


def check_public(n: int, e: int) -> None:
    """Raise RsaRefused for a key that could not be honest, as far as that shows without its factors.

    Size; exponent (a prime, so odd, between 65537 and 2**32); modulus odd, composite, no power, without a factor below
    2**16. Whether e is prime to φ(n), without which blinding would hide only a part, shows from ``check_proof``.
    """
    if not LEAST_BITS <= n.bit_length() <= MOST_BITS:
        raise RsaRefused(f"a modulus has {LEAST_BITS} to {MOST_BITS} bits, not {n.bit_length()}")
    if not EXPONENT <= e < MOST_EXPONENT or not e & 1 or not gmpy2.is_prime(e):
        raise RsaRefused(f"the exponent is a prime from {EXPONENT} to {MOST_EXPONENT}, not {e}")
    if gmpy2.gcd(n, _PRODUCT) != 1:
        raise RsaRefused("the modulus has a small factor")
    if gmpy2.is_prime(n) or gmpy2.is_power(n):
        raise RsaRefused("the modulus is a prime or a power")


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A server's key. Raises ValueError unless its parts belong together."""

    public: PublicKey
    p: int = field(repr=False)
    q: int = field(repr=False)
    d_p: int = field(repr=False)
    d_q: int = field(repr=False)
    q_inverse: int = field(repr=False)

    def __post_init__(self) -> None:
        p, q, e = self.p, self.q, self.public.e
        half = self.public.n.bit_length() // 2
        if p * q != self.public.n or not (gmpy2.is_prime(p, 40) and gmpy2.is_prime(q, 40)):
            raise ValueError("the factors are not two primes of the modulus")
        if abs(p - q).bit_length() < half - 100 or min(p, q).bit_length() < half - 1:
            raise ValueError("the factors are too close or too different")
        if gmpy2.gcd(e, (p - 1) * (q - 1)) != 1:
            raise ValueError("the exponent is not prime to φ(n)")
        if (self.d_p * e - 1) % (p - 1) or (self.d_q * e - 1) % (q - 1) or (self.q_inverse * q - 1) % p:
            raise ValueError("the parts for the Chinese remainder theorem are wrong")

    def to_bytes(self) -> bytes:
        """The key in PKCS #8 and DER, unencrypted: as secret as the ids."""
        p, q = self.p, self.q
        d = pow(self.public.e, -1, math.lcm(p - 1, q - 1))
        numbers = rsa.RSAPrivateNumbers(
            p, q, d, self.d_p, self.d_q, self.q_inverse, rsa.RSAPublicNumbers(self.public.e, self.public.n)
        )
        # All that would be checked again was when this was made.
        made = numbers.private_key(unsafe_skip_rsa_key_validation=True)
        return made.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())

    def power(self) -> SecretPower:
        """The secret power, in the best way that this machine has."""
        if libcrypto.found() is not None:
            return Openssl(self.to_bytes(), self.public.width)
        return self.halves()

    def halves(self) -> Halves:
        """The secret power without OpenSSL."""
        return Halves(self.p, self.q, self.d_p, self.d_q, self.q_inverse, self.public.width)


def generate(bits: int = LEAST_BITS) -> PrivateKey:
    """A new key of ``bits`` (2048 to 4096). Raises ValueError."""
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"a key has {LEAST_BITS} to {MOST_BITS} bits, not {bits}")
    return _of(rsa.generate_private_key(EXPONENT, bits).private_numbers())


def private_key(data: bytes) -> PrivateKey:
    """The key that ``to_bytes`` wrote. Raises ValueError."""
    key = load_der_private_key(data, None)
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ValueError("no RSA key")
    return _of(key.private_numbers())


def _of(numbers: rsa.RSAPrivateNumbers) -> PrivateKey:
    public = numbers.public_numbers
    return PrivateKey(
        PublicKey(public.n, public.e), numbers.p, numbers.q, numbers.dmp1, numbers.dmq1, numbers.iqmp
    )


def full_domain_hash(key: PublicKey, value: bytes, purpose: bytes = b"id") -> int:
    """H: ``value`` into Z_n*, within 2**-128 of uniform, by SHAKE-256; bound to the key and ``purpose``."""
    return int(_hashes(key, [value], purpose)[0])


def _hashes(key: PublicKey, values: Sequence[bytes], purpose: bytes = b"id") -> list[int]:
    """H of each [N]."""
    base = hashlib.shake_256(_HASH + key.fingerprint() + len(purpose).to_bytes(1) + purpose)
    n, length = gmpy2.mpz(key.n), key.width + 16

    def drawn(value: bytes, turn: int) -> int:
        shake = base.copy()
        shake.update(value)
        return int.from_bytes(shake.digest((turn + 1) * length)[turn * length :]) % n

    numbers = [drawn(value, 0) for value in values]
    if _prime_to(n, numbers):
        return numbers
    # As likely as guessing a factor, but for a dishonest modulus: it may have one little above 2**16 that divides the
    # hash of an id it looks for. Neither a failure here nor a number that the factor divides may tell that we have it.
    return [
        next(number for turn in count() if gmpy2.gcd(number := drawn(value, turn), n) == 1)
        for value in values
    ]


def _prime_to(n: int, numbers: Iterable[int]) -> bool:
    """Whether all of ``numbers`` are in Z_n*, or have a representative there."""
    product = gmpy2.mpz(1)
    for number in numbers:
        product = product * number % n
    return bool(gmpy2.gcd(product, n) == 1)


def _checked(key: PublicKey, number: int, signature: bytes) -> bytes:
    """``signature``. Raises FaultySignature unless it is of ``number``."""
    if gmpy2.powmod(int.from_bytes(signature), key.e, key.n) != number:
        raise FaultySignature("a signature that does not verify: memory or processor failed")
    return signature


def proof(key: PrivateKey) -> bytes:
    """e-th roots of hashes of the key: only where e is prime to φ(n) does every number have one.

    Goldberg, Reyzin, Sagga and Baldimtsi (2018): otherwise at most 1 of e numbers has a root, so that all of them have
    with probability 2**-128.
    """
    public = key.public
    hashes = [full_domain_hash(public, bytes((at,)), b"proof") for at in range(proof_roots(public))]
    with key.power().opened() as power:
        return b"".join(_checked(public, number, power(number.to_bytes(public.width))) for number in hashes)


def check_proof(key: PublicKey, roots: bytes) -> None:
    """Raise RsaRefused unless ``roots`` is the proof that raising to e permutes Z_n*."""
    if len(roots) != key.width * proof_roots(key):
        raise RsaRefused(f"a proof of {len(roots)} bytes, not {key.width * proof_roots(key)}")
    for at, root in enumerate(split(roots, key.width)):
        if gmpy2.powmod(int.from_bytes(root), key.e, key.n) != full_domain_hash(key, bytes((at,)), b"proof"):
            raise RsaRefused("the exponent is not shown to be prime to φ(n)")


def proof_roots(key: PublicKey) -> int:
    """How many roots a proof has: e**-roots is at most 2**-128."""
    return -(-_PROOF_BITS // (key.e.bit_length() - 1))


def blind(
    key: PublicKey, values: Sequence[bytes], draw: Draw, workers: Workers
) -> tuple[bytes, list[tuple[int, int]]]:
    """What is sent for ``values`` (width·N bytes), and what ``unblind`` needs: (H(x), r⁻¹) of each."""
    shares = [
        (key, list(part), units(key, len(part), draw))
        for part in (values[at : at + _SHARE] for at in range(0, len(values), _SHARE))
    ]
    done = workers.map(_blind, shares)
    return b"".join(part for part, _ in done), [one for _, kept in done for one in kept]


def units(key: PublicKey, count: int, draw: Draw) -> list[int]:
    """``count`` uniform members of Z_n*."""
    n = gmpy2.mpz(key.n)
    shift, width = -n.bit_length() % 8, key.width
    while True:
        found: list[int] = []
        while len(found) < count:
            number = int.from_bytes(draw(width)) >> shift
            if 0 < number < n:
                found.append(number)
        # One that shares a factor with n is as likely as guessing it; then all are drawn anew.
        if _prime_to(n, found):
            return found


def _blind(share: tuple[PublicKey, list[bytes], list[int]]) -> tuple[bytes, list[tuple[int, int]]]:
    key, values, factors = share
    width, n = key.width, gmpy2.mpz(key.n)
    hashes = _hashes(key, values)
    # r is secret, e is not: nothing here depends on r but the numbers that are multiplied.
    blinded = [
        int(number * gmpy2.powmod(factor, key.e, n) % n).to_bytes(width)
        for number, factor in zip(hashes, factors, strict=True)
    ]
    undone = _inverses(n, factors)
    return b"".join(blinded), [(int(one), int(undo)) for one, undo in zip(hashes, undone, strict=True)]


def _inverses(n: int, numbers: Sequence[int]) -> list[int]:
    """The inverse of each by one inversion (Montgomery): of the product of all, from which the others are taken."""
    before = [gmpy2.mpz(1)]
    for number in numbers:
        before.append(before[-1] * number % n)
    rest = gmpy2.invert(before[-1], n)
    found: list[int] = []
    for number, product in zip(reversed(numbers), reversed(before[:-1]), strict=True):
        found.append(rest * product % n)
        rest = rest * number % n
    return found[::-1]


def sign(key: PrivateKey, blinded: bytes, workers: Workers) -> bytes:
    """Checked signatures of width·N bytes. Raises RsaRefused for what is not in Z_n*, FaultySignature."""
    size, power = _SHARE * key.public.width, key.power()
    shares = [(key.public, power, blinded[at : at + size]) for at in range(0, len(blinded), size)]
    return b"".join(workers.map(_sign, shares))


def _sign(share: tuple[PublicKey, SecretPower, bytes]) -> bytes:
    key, secret, blinded = share
    n, parts = gmpy2.mpz(key.n), split(blinded, key.width)
    numbers = [int.from_bytes(part) for part in parts]
    if not all(1 < number < n - 1 for number in numbers) or not _prime_to(n, numbers):
        raise RsaRefused("no number that a blinding gives")
    with secret.opened() as power:
        return b"".join(
            [_checked(key, number, power(part)) for number, part in zip(numbers, parts, strict=True)]
        )


def unblind(key: PublicKey, signed: bytes, kept: Sequence[tuple[int, int]], workers: Workers) -> list[bytes]:
    """The signatures of the hashes [N]. Raises RsaRefused for one that does not verify."""
    size = _SHARE * key.width
    shares = [
        (key, signed[at * key.width : at * key.width + size], list(kept[at : at + _SHARE]))
        for at in range(0, len(kept), _SHARE)
    ]
    return [one for part in workers.map(_unblind, shares) for one in part]


def _unblind(share: tuple[PublicKey, bytes, list[tuple[int, int]]]) -> list[bytes]:
    key, signed, kept = share
    n = gmpy2.mpz(key.n)
    found: list[bytes] = []
    for part, (number, undo) in zip(split(signed, key.width), kept, strict=True):
        reply = int.from_bytes(part)
        signature = gmpy2.mpz(reply) * undo % n
        if reply >= n or gmpy2.powmod(signature, key.e, n) != number:
            raise RsaRefused("a reply that is no signature of what was asked")
        found.append(int(signature).to_bytes(key.width))
    return found


def sign_own(key: PrivateKey, values: Sequence[bytes], workers: Workers) -> list[bytes]:
    """The signatures of H(value) of the server's own ids [N]. Raises FaultySignature."""
    power = key.power()
    shares = [(key.public, power, list(values[at : at + _SHARE])) for at in range(0, len(values), _SHARE)]
    return [one for part in workers.map(_sign_own, shares) for one in part]


def _sign_own(share: tuple[PublicKey, SecretPower, list[bytes]]) -> list[bytes]:
    key, secret, values = share
    hashes = _hashes(key, values)
    with secret.opened() as power:
        signed = [power(int(number).to_bytes(key.width)) for number in hashes]
    if not secret.checks_itself:
        for number, signature in zip(hashes, signed, strict=True):
            _checked(key, number, signature)
    return signed
