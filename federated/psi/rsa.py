"""RSA blind signatures as a pseudo-random function: keys and their checks, blinding, signing, unblinding.

    client: a = H(x)·r^e      server: b = a^d, and b^e = a is checked      client: s = b·r⁻¹, and s^e = H(x) is checked

H is a full-domain hash into Z_n*, r uniform in Z_n* and used once. The server signs by the Chinese remainder theorem;
one faulty half would give gcd(b^e − a, n), a factor of n, to whoever sees b: hence the check before any reply.
Exponents that are secret go through ``powmod_sec``, whose time does not depend on them.

Assumption: one-more RSA inversion (Bellare, Namprempre, Pointcheval and Semanko 2003), random oracles.

    RsaRefused        a key or number of a peer that is not what it has to be
    FaultySignature   our own signing went wrong: nothing of it may leave
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import gmpy2
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)

from federated.psi.hashing import split
from federated.vertical.parties import Draw, Workers

LEAST_BITS: Final = 2048
MOST_BITS: Final = 4096
EXPONENT: Final = 65_537
MOST_EXPONENT: Final = 2**32
_SMALL: Final = 2**16
_PROOF_BITS: Final = 128
_HASH: Final = b"headwater-psi-rsa-1"
_SHARE: Final = 64  # Numbers that a worker takes at once: about 50 ms of signing.


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
        """The key in PKCS #8, unencrypted: as secret as the ids."""
        p, q = self.p, self.q
        d = pow(self.public.e, -1, math.lcm(p - 1, q - 1))
        numbers = rsa.RSAPrivateNumbers(
            p, q, d, self.d_p, self.d_q, self.q_inverse, rsa.RSAPublicNumbers(self.public.e, self.public.n)
        )
        return numbers.private_key().private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


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
    shake = hashlib.shake_256(_HASH + key.fingerprint() + len(purpose).to_bytes(1) + purpose + value)
    number = int.from_bytes(shake.digest(key.width + 16)) % key.n
    if gmpy2.gcd(number, key.n) != 1:
        raise FaultySignature(
            "a hash that shares a factor with the modulus"
        )  # as likely as guessing the factor
    return number


def sign_one(key: PrivateKey, number: int) -> int:
    """``number``^d modulo n, checked. Raises FaultySignature."""
    signature = _by_halves(key, number)
    if gmpy2.powmod(signature, key.public.e, key.public.n) != number % key.public.n:
        raise FaultySignature("a signature that does not verify: memory or processor failed")
    return signature


def _by_halves(key: PrivateKey, number: int) -> int:
    half_p = gmpy2.powmod_sec(number % key.p, key.d_p, key.p)
    half_q = gmpy2.powmod_sec(number % key.q, key.d_q, key.q)
    return int(half_q + (half_p - half_q) * key.q_inverse % key.p * key.q)


def proof(key: PrivateKey) -> bytes:
    """e-th roots of hashes of the key: only where e is prime to φ(n) does every number have one.

    Goldberg, Reyzin, Sagga and Baldimtsi (2018): otherwise at most 1 of e numbers has a root, so that all of them have
    with probability 2**-128.
    """
    return b"".join(
        sign_one(key, full_domain_hash(key.public, bytes((at,)), b"proof")).to_bytes(key.public.width)
        for at in range(proof_roots(key.public))
    )


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
        (key, list(values[at : at + _SHARE]), [unit(key, draw) for _ in values[at : at + _SHARE]])
        for at in range(0, len(values), _SHARE)
    ]
    done = workers.map(_blind, shares)
    return b"".join(part for part, _ in done), [one for _, kept in done for one in kept]


def unit(key: PublicKey, draw: Draw) -> int:
    """A uniform member of Z_n*."""
    bits = key.n.bit_length()
    while True:
        number = int.from_bytes(draw(key.width)) >> (8 * key.width - bits)
        if 0 < number < key.n and gmpy2.gcd(number, key.n) == 1:
            return number


def _blind(share: tuple[PublicKey, list[bytes], list[int]]) -> tuple[bytes, list[tuple[int, int]]]:
    key, values, factors = share
    blinded: list[bytes] = []
    kept: list[tuple[int, int]] = []
    for value, factor in zip(values, factors, strict=True):
        number = full_domain_hash(key, value)
        # r is secret, e is not: nothing here depends on r but the numbers that are multiplied.
        product = number * gmpy2.powmod(factor, key.e, key.n) % key.n
        blinded.append(int(product).to_bytes(key.width))
        kept.append((number, int(gmpy2.invert(factor, key.n))))
    return b"".join(blinded), kept


def sign(key: PrivateKey, blinded: bytes, workers: Workers) -> bytes:
    """Checked signatures of width·N bytes. Raises RsaRefused for what is not in Z_n*, FaultySignature."""
    size = _SHARE * key.public.width
    shares = [(key, blinded[at : at + size]) for at in range(0, len(blinded), size)]
    return b"".join(workers.map(_sign, shares))


def _sign(share: tuple[PrivateKey, bytes]) -> bytes:
    key, blinded = share
    width, n = key.public.width, key.public.n
    signed: list[bytes] = []
    for part in split(blinded, width):
        number = int.from_bytes(part)
        if not 1 < number < n - 1 or gmpy2.gcd(number, n) != 1:
            raise RsaRefused("no number that a blinding gives")
        signed.append(sign_one(key, number).to_bytes(width))
    return b"".join(signed)


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
    found: list[bytes] = []
    for part, (number, undo) in zip(split(signed, key.width), kept, strict=True):
        reply = int.from_bytes(part)
        signature = reply * undo % key.n
        if reply >= key.n or gmpy2.powmod(signature, key.e, key.n) != number:
            raise RsaRefused("a reply that is no signature of what was asked")
        found.append(int(signature).to_bytes(key.width))
    return found


def sign_own(key: PrivateKey, values: Sequence[bytes], workers: Workers) -> list[bytes]:
    """The signatures of H(value) of the server's own ids [N]."""
    shares = [(key, list(values[at : at + _SHARE])) for at in range(0, len(values), _SHARE)]
    return [one for part in workers.map(_sign_own, shares) for one in part]


def _sign_own(share: tuple[PrivateKey, Iterable[bytes]]) -> list[bytes]:
    key, values = share
    width = key.public.width
    return [sign_one(key, full_domain_hash(key.public, value)).to_bytes(width) for value in values]
