"""CKKS as the protocols here need it, over Microsoft SEAL as TenSEAL ships it.

A *level* counts the primes that a ciphertext still has: ``parameters.top`` when fresh, one fewer after each rescaling.
Everything ends at level 2, the *floor*, whose two primes leave room for wide masks (``masks``). Ciphertexts of a peer
are bounded, must be valid for our own parameters, and have the level and the scale that the protocol says. Whether
somebody changed a valid ciphertext into another valid one cannot be told from it; the opener's range check is for that
(``Masks.check``).

Error (Cheon, Kim, Kim, Song 2017, lemma 1): a fresh encryption is off by at most B = 8*sqrt(2)*s*N + 6*s*sqrt(N) +
16*s*sqrt(h*N) over the scale, with s = 3.2 and h about 2N/3 for SEAL's ternary keys.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.parties import PeerFault

FLOOR: Final = 2
"""Primes of a ciphertext that goes to a key holder."""
KEY_ERROR: Final = 3.2
"""Standard deviation of SEAL's error polynomials."""
_HEADER: Final = 4_096
"""Bytes that a stored object may have beyond its coefficients."""

Values = npt.NDArray[np.float64]


class Storable(Protocol):
    """What SEAL saves to and loads from a path."""

    def save(self, path: str) -> None: ...

    def load(self, context: sealapi.SEALContext, path: str) -> None: ...


Stored = TypeVar("Stored", bound=Storable)


@contextmanager
def _memory_file() -> Iterator[tuple[int, str]]:
    # SEAL's binding knows paths only; an anonymous file in memory keeps keys and ciphertexts off the disk.
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("ciphertext")
        path = f"/proc/self/fd/{handle}"
        try:
            yield handle, path
        finally:
            os.close(handle)
    else:
        with tempfile.NamedTemporaryFile() as file:
            yield file.fileno(), file.name


def stored(one: Storable) -> bytes:
    """A ciphertext or key as SEAL's bytes."""
    with _memory_file() as (handle, path):
        one.save(path)
        size = os.lseek(handle, 0, os.SEEK_END)
        return os.pread(handle, size, 0)


def restored(
    make: Callable[[], Stored], context: sealapi.SEALContext, body: bytes, sender: str, most: int
) -> Stored:
    """The object in ``body``, valid for ``context``. Raises PeerFault (``ciphertext``) for anything else."""
    if len(body) > most:
        raise PeerFault(sender, "ciphertext", f"{len(body)} bytes, at most {most}")
    found = make()
    with _memory_file() as (handle, path):
        view = memoryview(body)
        while view:
            view = view[os.write(handle, view) :]
        try:
            found.load(context, path)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            raise PeerFault(sender, "ciphertext", str(error)[:200]) from None
    return found


@dataclass(frozen=True, slots=True)
class Parameters:
    """``bits``: the primes, the first two the floor's, then one for each multiplication, the last for keys.

    Raises ValueError (in ``Scheme``) for less than 128 bits of security by SEAL's tables.
    """

    degree: int
    bits: tuple[int, ...]
    scale_bits: int = 40

    def __str__(self) -> str:
        return f"CKKS, ring of degree {self.degree}, modulus of {sum(self.bits)} bits: 128 bits of security"

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def top(self) -> int:
        """The level of a fresh ciphertext."""
        return len(self.bits) - 1

    @property
    def scale(self) -> float:
        return 2.0**self.scale_bits

    @property
    def floor_bits(self) -> int:
        """Bits of the modulus at the floor, less one that primes may lack."""
        return sum(self.bits[:FLOOR]) - 1

    @property
    def fresh_error(self) -> float:
        """Bound on the error of a slot of a fresh encryption."""
        degree, weight = self.degree, 2 * self.degree / 3
        bound = 8 * math.sqrt(2) * degree + 6 * math.sqrt(degree) + 16 * math.sqrt(weight * degree)
        return KEY_ERROR * bound / self.scale

    def most_bytes(self, primes: int) -> int:
        """Bytes of a ciphertext of two polynomials at ``primes`` primes, at most."""
        return 2 * primes * self.degree * 8 + _HEADER


SHALLOW: Final = Parameters(8_192, (58, 58, 40, 58))
"""One multiplication of ciphertexts; 214 bits of 218."""
DEEP: Final = Parameters(16_384, (60, 60, 40, 40, 40, 60))
"""Three multiplications, one after another; 300 bits of 438."""


class Scheme:
    """What needs no key: encoding, arithmetic, and reading what a peer sent. Nothing here changes its arguments."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        chosen = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.CKKS)
        chosen.set_poly_modulus_degree(parameters.degree)
        primes = sealapi.CoeffModulus.Create(parameters.degree, list(parameters.bits))
        chosen.set_coeff_modulus(primes)
        self.context = sealapi.SEALContext(chosen, True, sealapi.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise ValueError(f"{parameters}: {self.context.parameters_error_message()}")
        self.primes = tuple(prime.value() for prime in primes)
        self._encoder = sealapi.CKKSEncoder(self.context)
        self._evaluator = sealapi.Evaluator(self.context)
        self._ids: dict[int, list[int]] = {}
        data: sealapi.ContextData | None = self.context.first_context_data()
        level = parameters.top
        while data is not None and level:
            self._ids[level] = data.parms_id()
            data, level = data.next_context_data(), level - 1

    def id_of(self, level: int) -> list[int]:
        """SEAL's name of a level."""
        return self._ids[level]

    def level(self, cipher: sealapi.Ciphertext) -> int:
        return cipher.coeff_modulus_size()

    def element(self, step: int) -> int:
        """The Galois element of a rotation by ``step`` slots: x -> x^(3^step)."""
        return pow(3, step, 2 * self.parameters.degree)

    def encode(self, values: Values | float, level: int, scale: float) -> sealapi.Plaintext:
        """``values`` [slots], or the same number in every slot."""
        plain = sealapi.Plaintext()
        given: Sequence[float] | float = values.tolist() if isinstance(values, np.ndarray) else float(values)
        self._encoder.encode(given, self.id_of(level), scale, plain)
        return plain

    def decode(self, plain: sealapi.Plaintext) -> Values:
        """The slots, float64 [slots]."""
        return np.array(self._encoder.decode_double(plain))

    def plus(self, cipher: sealapi.Ciphertext, values: Values | float) -> sealapi.Ciphertext:
        """``cipher`` and ``values`` [slots], added."""
        return self.plus_plain(cipher, self.encode(values, self.level(cipher), cipher.scale))

    def plus_plain(self, cipher: sealapi.Ciphertext, plain: sealapi.Plaintext) -> sealapi.Ciphertext:
        """``cipher`` and a plaintext of its level and scale, added."""
        found = sealapi.Ciphertext()
        self._evaluator.add_plain(cipher, plain, found)
        return found

    def add(self, one: sealapi.Ciphertext, other: sealapi.Ciphertext) -> sealapi.Ciphertext:
        """Both added; ``other`` is taken at the level of ``one`` and must have its scale up to rounding."""
        moved = self.lower(other, self.level(one))
        if not math.isclose(moved.scale, one.scale, rel_tol=1e-9):
            raise ValueError(f"scales {one.scale} and {other.scale} do not add")
        moved.scale = one.scale
        found = sealapi.Ciphertext()
        self._evaluator.add(one, moved, found)
        return found

    def minus(self, one: sealapi.Ciphertext, other: sealapi.Ciphertext) -> sealapi.Ciphertext:
        """``one`` less ``other``, as ``add`` adds them."""
        turned = self.lower(other, self.level(other))
        self._evaluator.negate_inplace(turned)
        return self.add(one, turned)

    def lower(self, cipher: sealapi.Ciphertext, level: int) -> sealapi.Ciphertext:
        """A copy at ``level``."""
        found = sealapi.Ciphertext()
        self._evaluator.mod_switch_to(cipher, self.id_of(level), found)
        return found

    def times(
        self, one: sealapi.Ciphertext, other: sealapi.Ciphertext, keys: sealapi.RelinKeys
    ) -> sealapi.Ciphertext:
        """The product, one level below the lower of both."""
        level = min(self.level(one), self.level(other))
        found = sealapi.Ciphertext()
        if one is other:
            self._evaluator.square(one, found)
        else:
            self._evaluator.multiply(self.lower(one, level), self.lower(other, level), found)
        self._evaluator.relinearize_inplace(found, keys)
        self._evaluator.rescale_to_next_inplace(found)
        return found

    def weighted(self, cipher: sealapi.Ciphertext, plain: sealapi.Plaintext) -> sealapi.Ciphertext:
        """The product with a plaintext that is not zero throughout, at the same level; scales multiply."""
        found = sealapi.Ciphertext()
        self._evaluator.multiply_plain(cipher, plain, found)
        return found

    def rescaled(self, cipher: sealapi.Ciphertext) -> sealapi.Ciphertext:
        """A copy one level lower, its scale divided by the prime that is dropped."""
        found = self.lower(cipher, self.level(cipher))
        self._evaluator.rescale_to_next_inplace(found)
        return found

    def rotated(self, cipher: sealapi.Ciphertext, step: int, keys: sealapi.GaloisKeys) -> sealapi.Ciphertext:
        """``cipher`` with every slot moved to the place ``step`` before it. ``keys``: for this step."""
        found = sealapi.Ciphertext()
        self._evaluator.rotate_vector(cipher, step, keys, found)
        return found

    def total(self, cipher: sealapi.Ciphertext, period: int, keys: sealapi.GaloisKeys) -> sealapi.Ciphertext:
        """In every slot the sum of one period, where slots repeat with ``period``, a power of two. ``keys``: for all
        smaller powers of two."""
        found = cipher
        for step in (2**power for power in range(period.bit_length() - 1)):
            found = self.add(found, self.rotated(found, step, keys))
        return found

    def read(self, body: bytes, sender: str, level: int, scale: float) -> sealapi.Ciphertext:
        """A peer's ciphertext. Raises PeerFault where it is not one of this level and scale."""
        found = restored(
            sealapi.Ciphertext, self.context, body, sender, self.parameters.most_bytes(self.parameters.top)
        )
        if found.size() != 2 or not found.is_ntt_form() or self.level(found) != level:
            raise PeerFault(sender, "ciphertext", f"{found.size()} polynomials at level {self.level(found)}")
        if not math.isclose(found.scale, scale, rel_tol=1e-9):
            raise PeerFault(sender, "ciphertext", f"a scale of {found.scale}, expected {scale}")
        if found.is_transparent():
            raise PeerFault(sender, "ciphertext", "it is not encrypted")
        found.scale = scale
        return found


class Sealer:
    """Encryption under somebody's public key."""

    def __init__(self, scheme: Scheme, public: sealapi.PublicKey) -> None:
        self.scheme = scheme
        self._encryptor = sealapi.Encryptor(scheme.context, public)

    @classmethod
    def of(cls, scheme: Scheme, body: bytes, sender: str) -> Sealer:
        """From the key that ``sender`` sent. Raises PeerFault."""
        most = scheme.parameters.most_bytes(len(scheme.parameters.bits))
        return cls(scheme, restored(sealapi.PublicKey, scheme.context, body, sender, most))

    def seal(self, values: Values, level: int, scale: float) -> sealapi.Ciphertext:
        """``values`` [slots], encrypted at ``level``."""
        found = sealapi.Ciphertext()
        self._encryptor.encrypt(self.scheme.encode(values, level, scale), found)
        return found

    def zero(self, level: int, scale: float) -> sealapi.Ciphertext:
        """A fresh encryption of nothing."""
        found = sealapi.Ciphertext()
        self._encryptor.encrypt_zero(self.scheme.id_of(level), found)
        found.scale = scale
        return found

    def hide(self, cipher: sealapi.Ciphertext, masks: Iterable[Values]) -> sealapi.Ciphertext:
        """``cipher`` as it may go to the key's holder: plus each of ``masks`` [slots], re-randomised.

        The masks fill every slot, so what the holder decrypts, the errors included, is covered by them; the fresh
        encryption of zero covers the second polynomial, from which a holder who remembers what it sent could otherwise
        divide out what it was multiplied by.
        """
        scheme = self.scheme
        fresh = scheme.add(cipher, self.zero(scheme.level(cipher), cipher.scale))
        for part in masks:
            fresh = scheme.plus(fresh, part)
        return fresh


class Opener:
    """A new secret key, which never leaves this object, and what it opens."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        generator = sealapi.KeyGenerator(scheme.context)
        self._generator = generator
        self._decryptor = sealapi.Decryptor(scheme.context, generator.secret_key())
        self._sealer = sealapi.Encryptor(scheme.context, generator.secret_key())

    def __repr__(self) -> str:
        return f"Opener({self.scheme.parameters})"

    def public(self) -> sealapi.PublicKey:
        found = sealapi.PublicKey()
        self._generator.create_public_key(found)
        return found

    def relinearisation(self) -> sealapi.RelinKeys:
        """What multiplying ciphertexts under this key needs."""
        found = sealapi.RelinKeys()
        self._generator.create_relin_keys(found)
        return found

    def rotations(self, steps: Sequence[int]) -> sealapi.GaloisKeys:
        """What rotating slots by ``steps`` needs."""
        found = sealapi.GaloisKeys()
        # The binding takes Galois elements: a rotation by s slots is x -> x^(3^s).
        self._generator.create_galois_keys([self.scheme.element(step) for step in steps], found)
        return found

    def seal(self, values: Values, level: int, scale: float) -> sealapi.Ciphertext:
        """``values`` [slots], encrypted with the secret key: in half the time of the public one, with less error."""
        found = sealapi.Ciphertext()
        self._sealer.encrypt_symmetric(self.scheme.encode(values, level, scale), found)
        return found

    def plain(self, cipher: sealapi.Ciphertext) -> sealapi.Plaintext:
        """What ``cipher`` holds, not decoded."""
        found = sealapi.Plaintext()
        self._decryptor.decrypt(cipher, found)
        return found

    def open(self, cipher: sealapi.Ciphertext) -> Values:
        """The slots, float64 [slots]."""
        return self.scheme.decode(self.plain(cipher))


def read_rotations(scheme: Scheme, body: bytes, sender: str, steps: Sequence[int]) -> sealapi.GaloisKeys:
    """The keys for rotations by ``steps`` that ``sender`` sent. Raises PeerFault, also where one is missing."""
    most = most_rotations(scheme.parameters, len(steps))
    found = restored(sealapi.GaloisKeys, scheme.context, body, sender, most)
    missing = [step for step in steps if not found.has_key(scheme.element(step))]
    if missing:
        raise PeerFault(sender, "ciphertext", f"no key for a rotation by {missing[0]} slots")
    return found


def most_rotations(parameters: Parameters, steps: int) -> int:
    """Bytes of the keys for so many rotations, at most."""
    primes = len(parameters.bits)
    # The list has a place for each element, and 8 bytes where there is no key.
    return steps * primes * parameters.most_bytes(primes) + 8 * parameters.degree + _HEADER


def read_relinearisation(scheme: Scheme, body: bytes, sender: str) -> sealapi.RelinKeys:
    """The keys that ``sender`` sent. Raises PeerFault."""
    primes = len(scheme.parameters.bits)
    most = primes * scheme.parameters.most_bytes(primes)
    return restored(sealapi.RelinKeys, scheme.context, body, sender, most)
