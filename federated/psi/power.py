"""The signer's secret power x^d modulo n: one seam, two ways.

``Openssl`` is taken where there is an OpenSSL 3 (see ``libcrypto``), ``Halves`` elsewhere. Both give the same numbers;
both are pickled to other processes without anything open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import gmpy2

from federated.psi import libcrypto

Power = Callable[[bytes], bytes]
"""x^d of a number x below n; both of as many bytes as n has."""


class SecretPower(Protocol):
    """A key's power, to be opened where it is used."""

    @property
    def checks_itself(self) -> bool:
        """Whether a half that a failing processor made wrong is noticed within."""
        ...

    def opened(self) -> AbstractContextManager[Power]:
        """The power, for one thread and until the end of the block."""
        ...


@dataclass(frozen=True, slots=True)
class Halves:
    """By the Chinese remainder theorem, with exponentiations whose time does not depend on the exponent."""

    p: int = field(repr=False)
    q: int = field(repr=False)
    d_p: int = field(repr=False)
    d_q: int = field(repr=False)
    q_inverse: int = field(repr=False)
    width: int

    @property
    def checks_itself(self) -> bool:
        """See ``SecretPower``."""
        return False

    @contextmanager
    def opened(self) -> Iterator[Power]:
        """See ``SecretPower``."""
        yield self._raised

    def _raised(self, number: bytes) -> bytes:
        x = gmpy2.mpz(int.from_bytes(number))
        half_p = gmpy2.powmod_sec(x % self.p, self.d_p, self.p)
        half_q = gmpy2.powmod_sec(x % self.q, self.d_q, self.q)
        return int(half_q + (half_p - half_q) * self.q_inverse % self.p * self.q).to_bytes(self.width)


@dataclass(frozen=True, slots=True)
class Openssl:
    """By OpenSSL, from the key in DER."""

    key: bytes = field(repr=False)
    width: int

    @property
    def checks_itself(self) -> bool:
        """See ``SecretPower``: each result is raised to e again, and made anew without halves where that is not x."""
        return True

    @contextmanager
    def opened(self) -> Iterator[Power]:
        """See ``SecretPower``. Raises LibcryptoFailed."""
        library = libcrypto.found()
        if library is None:
            raise libcrypto.LibcryptoFailed("this process has no OpenSSL 3, unlike the one that began")
        with library.opened(self.key, self.width) as power:
            yield power


def way() -> str:
    """How signatures are made in this process, for people."""
    library = libcrypto.found()
    if library is None:
        return "gmpy2 (no OpenSSL 3 was found, which takes a third of the time)"
    return library.version
