"""The signer's secret power, one contract for both ways; what OpenSSL refuses, and what it mends by itself."""

from __future__ import annotations

import math
import pickle
import ssl
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from federated.psi import libcrypto, power
from federated.psi.libcrypto import Libcrypto, LibcryptoFailed
from federated.psi.power import Halves, Openssl, SecretPower
from federated.psi.rsa import (
    FaultySignature,
    PrivateKey,
    blind,
    full_domain_hash,
    generate,
    proof,
    sign,
    sign_own,
    unblind,
)
from federated.vertical.parties import Alone
from tests.support.psi import drawing

needs_openssl = pytest.mark.skipif(libcrypto.found() is None, reason="Python is not linked to an OpenSSL 3")
VALUES = [b"x%d" % at for at in range(5)]
WAYS = ["halves", pytest.param("openssl", marks=needs_openssl)]


@cache
def key() -> PrivateKey:
    return generate()


@cache
def exponent() -> int:
    return pow(key().public.e, -1, math.lcm(key().p - 1, key().q - 1))


def secret(way: str) -> SecretPower:
    return key().halves() if way == "halves" else Openssl(key().to_bytes(), key().public.width)


def library() -> Libcrypto:
    found = libcrypto.found()
    assert found is not None
    return found


def der(**changed: int) -> bytes:
    """The key, with parts that do not belong to it."""
    good = key()
    parts = {
        "p": good.p,
        "q": good.q,
        "d": exponent(),
        "dmp1": good.d_p,
        "dmq1": good.d_q,
        "iqmp": good.q_inverse,
    }
    public = rsa.RSAPublicNumbers(good.public.e, good.public.n)
    made = rsa.RSAPrivateNumbers(**{**parts, **changed}, public_numbers=public)
    unchecked = made.private_key(unsafe_skip_rsa_key_validation=True)
    return unchecked.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize("way", WAYS)
class TestContract:
    def test_is_the_power(self, way: str) -> None:
        n, width = key().public.n, key().public.width
        numbers = [0, 1, 2, n - 1, n // 3, key().p, 5 * key().q]
        with secret(way).opened() as raised:
            found = [int.from_bytes(raised(number.to_bytes(width))) for number in numbers]
        assert found == [pow(number, exponent(), n) for number in numbers]

    def test_travels_to_another_process(self, way: str) -> None:
        again = pickle.loads(pickle.dumps(secret(way)))
        number = (12_345).to_bytes(key().public.width)
        with again.opened() as one, secret(way).opened() as other:
            assert one(number) == other(number)

    def test_does_not_show_the_key(self, way: str) -> None:
        shown = repr(secret(way))
        assert str(key().p) not in shown
        assert repr(key().to_bytes())[2:-1] not in shown

    @pytest.mark.parametrize("half", ["d_p", "d_q"])
    def test_a_wrong_signature_never_leaves(
        self, way: str, half: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One wrong half reveals a factor to who sees the result (Boneh, DeMillo and Lipton): hence our check."""
        good = key()
        n, width, number = good.public.n, good.public.width, 12_345
        wrong: SecretPower
        if way == "halves":
            wrong = replace(good.halves(), **{half: getattr(good, half) + 2})
            with wrong.opened() as raised:
                seen = int.from_bytes(raised(number.to_bytes(width)))
            assert math.gcd(pow(seen, good.public.e, n) - number, n) in (good.p, good.q)
        else:
            # OpenSSL notices the half and goes by d, which is wrong here, too.
            name = {"d_p": "dmp1", "d_q": "dmq1"}[half]
            wrong = Openssl(der(**{name: getattr(good, half) + 2, "d": exponent() + 2}), width)
        monkeypatch.setattr(PrivateKey, "power", lambda self: wrong)
        for signed in (
            lambda: sign(good, number.to_bytes(width), Alone()),
            lambda: proof(good),
        ):
            with pytest.raises(FaultySignature):
                signed()

    def test_own_signatures_are_right_or_none(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        good = key()
        right = sign_own(good, VALUES, Alone())
        wrong: SecretPower = replace(good.halves(), d_p=good.d_p + 2)
        if way == "openssl":
            wrong = Openssl(der(dmp1=good.d_p + 2), good.public.width)
        monkeypatch.setattr(PrivateKey, "power", lambda self: wrong)
        assert wrong.checks_itself == (way == "openssl")
        if wrong.checks_itself:
            assert sign_own(good, VALUES, Alone()) == right  # mended within
        else:
            with pytest.raises(FaultySignature):
                sign_own(good, VALUES, Alone())

    def test_signatures_are_the_same_in_both_ways(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        public = key().public
        blinded, kept = blind(public, VALUES, drawing(1), Alone())
        monkeypatch.setattr(PrivateKey, "power", lambda self: secret(way))
        signatures = unblind(public, sign(key(), blinded, Alone()), kept, Alone())
        hashes = [full_domain_hash(public, value) for value in VALUES]
        assert [int.from_bytes(one) for one in signatures] == [
            pow(one, exponent(), public.n) for one in hashes
        ]
        assert sign_own(key(), VALUES, Alone()) == signatures


def test_without_openssl_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Openssl(key().to_bytes(), key().public.width)
    monkeypatch.setattr(libcrypto, "found", lambda: None)
    assert isinstance(key().power(), Halves)
    assert power.way().startswith("gmpy2 (no OpenSSL 3")
    with pytest.raises(LibcryptoFailed, match="no OpenSSL 3"), held.opened():
        pass


@needs_openssl
class TestOpenssl:
    def test_it_is_the_one_of_python_and_is_taken(self) -> None:
        assert library().version == ssl.OPENSSL_VERSION == power.way()
        assert isinstance(key().power(), Openssl)

    def test_a_number_beyond_the_modulus(self) -> None:
        width = key().public.width
        with library().opened(key().to_bytes(), width) as raised:
            assert library()._reasons() == "OpenSSL gives no reason"
            with pytest.raises(LibcryptoFailed, match="data too large for modulus"):
                raised(key().public.n.to_bytes(width))
            # Nothing is left for who asks next, and the context goes on.
            assert library()._reasons() == "OpenSSL gives no reason"
            assert int.from_bytes(raised((1).to_bytes(width))) == 1
            for wrong in (b"", bytes(width - 1), bytes(width + 1)):
                with pytest.raises(LibcryptoFailed, match="a number of"):
                    raised(wrong)

    @pytest.mark.parametrize(
        ("what", "why"),
        [
            ("garbage", "reading the key: error:"),
            ("empty", "reading the key"),
            ("curve", "beginning: error:.*not supported"),
            ("width", "256"),
        ],
    )
    def test_keys_that_are_none(self, what: str, why: str) -> None:
        width = 257 if what == "width" else 256
        made = {"garbage": b"\x30\x03\x02\x01\x07", "empty": b"", "width": key().to_bytes()}.get(what)
        if made is None:
            curve = ec.generate_private_key(ec.SECP256R1())
            made = curve.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
            width = 72  # what OpenSSL calls its size: the longest signature
        with pytest.raises(LibcryptoFailed, match=why), library().opened(made, width):
            pass

    def test_what_is_made_is_freed(self) -> None:
        counted = Libcrypto(library().name)
        counting = Counting(counted._library)
        counted._library = counting
        width = key().public.width
        with counted.opened(key().to_bytes(), width) as raised, pytest.raises(LibcryptoFailed):
            raised(b"\xff" * width)
        for wrong in (key().to_bytes(), b"\x30\x03\x02\x01\x07"):
            with pytest.raises(LibcryptoFailed), counted.opened(wrong, 1):
                pass
        calls = counting.calls
        assert calls["d2i_AutoPrivateKey"] == 3  # of which one found no key
        assert calls["EVP_PKEY_free"] == 2
        assert calls["EVP_PKEY_CTX_new"] == calls["EVP_PKEY_CTX_free"] == 1

    def test_other_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(OSError, match="no-such-library"):
            Libcrypto("no-such-library.so.3")
        monkeypatch.setattr(libcrypto, "_LEAST_VERSION", 0x7000_0000)
        with pytest.raises(LibcryptoFailed, match="OpenSSL 3 is needed"):
            Libcrypto(library().name)
        libcrypto.found.cache_clear()
        try:
            assert libcrypto.found() is None
        finally:
            libcrypto.found.cache_clear()


class Counting:
    """A library whose calls are counted."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._library, name)
