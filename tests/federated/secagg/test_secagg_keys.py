"""Published vectors; and nothing of another round, pair, direction or job opens, agrees or verifies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.secagg.keys import (
    MOST_CONTEXT_BYTES,
    SEAL_BYTES,
    AgreementKey,
    CertificateRefused,
    KeyRefused,
    Registrar,
    SealRefused,
    SignatureRefused,
    SigningKey,
    context,
    derive,
    open_sealed,
    pair_context,
    seal,
    verify,
)

NAMES = st.text(st.characters(codec="utf-8"), max_size=6)
CONTEXTS = st.tuples(NAMES, NAMES, st.integers(0, 2**64 - 1), NAMES, NAMES)
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
# Points of order 1, 2, 4 and 8 on Curve25519 and its twist, also in their other encodings.
SMALL_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


class TestDerivation:
    """RFC 5869, appendix A, cases 1 to 3."""

    def test_basic(self) -> None:
        key = derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
        assert key.hex() == (
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
        )

    def test_long(self) -> None:
        key = derive(bytes(range(0x50)), bytes(range(0x60, 0xB0)), bytes(range(0xB0, 0x100)), 82)
        assert key.hex() == (
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
            "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
            "cc30c58179ec3e87c14c01d5c1f3434f1d87"
        )

    def test_empty_salt_and_info(self) -> None:
        key = derive(b"\x0b" * 22, b"", b"", 42)
        assert key.hex() == (
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
        )

    @pytest.mark.parametrize("length", [0, 255 * 32 + 1])
    def test_lengths(self, length: int) -> None:
        with pytest.raises(ValueError, match="HKDF"):
            derive(bytes(32), b"", b"", length)


class TestAgreement:
    def test_published_exchange(self) -> None:
        """RFC 7748, section 6.1; the shared secret is what the derivation starts from."""
        one, other = AgreementKey(bytes.fromhex(ALICE)), AgreementKey(bytes.fromhex(BOB))
        assert one.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
        assert other.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
        shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
        expected = derive(shared, b"".join(sorted((one.public, other.public))), b"what for")
        assert one.agree(other.public, b"what for") == other.agree(one.public, b"what for") == expected

    @pytest.mark.parametrize("point", SMALL_ORDER)
    @pytest.mark.parametrize("top_bit", [0, 0x80])
    def test_points_of_small_order_are_refused(self, point: str, top_bit: int) -> None:
        body = bytearray.fromhex(point)
        body[31] |= top_bit  # X25519 ignores this bit
        with pytest.raises(KeyRefused, match="large order"):
            AgreementKey().agree(bytes(body), b"")

    @pytest.mark.parametrize("length", [0, 31, 33])
    def test_bytes_that_are_no_key_are_refused(self, length: int) -> None:
        with pytest.raises(KeyRefused):
            AgreementKey().agree(bytes([9] * length), b"")

    def test_another_encoding_of_the_same_point_agrees_on_nothing(self) -> None:
        one, other = AgreementKey(), AgreementKey()
        same_point = other.public[:31] + bytes([other.public[31] | 0x80])
        assert one.agree(same_point, b"") != other.agree(one.public, b"")

    def test_keys_come_back_from_their_seed_and_are_new_without(self) -> None:
        key = AgreementKey()
        assert AgreementKey(key.seed).public == key.public != AgreementKey().public
        assert key.seed.hex() not in repr(key)
        with pytest.raises(ValueError, match="32 bytes"):
            AgreementKey(bytes(31))


class TestContext:
    @settings(max_examples=200, deadline=None)
    @given(CONTEXTS, CONTEXTS)
    def test_two_that_differ_give_other_bytes(
        self, one: tuple[str, str, int, str, str], other: tuple[str, str, int, str, str]
    ) -> None:
        assert (context(*one) == context(*other)) is (one == other)

    def test_letters_do_not_move_between_fields(self) -> None:
        assert context("p", "ab", 1, "c", "d") != context("p", "a", 1, "bc", "d")

    def test_a_pair_has_one_context_and_two_directions(self) -> None:
        assert pair_context("mask", "job", 3, "a", "b") == pair_context("mask", "job", 3, "b", "a")
        assert context("share", "job", 3, "a", "b") != context("share", "job", 3, "b", "a")

    @pytest.mark.parametrize("iteration", [-1, 2**64])
    def test_iterations(self, iteration: int) -> None:
        with pytest.raises(ValueError, match="iteration"):
            context("p", "job", iteration, "a", "b")

    def test_names_are_bounded(self) -> None:
        with pytest.raises(ValueError, match=str(MOST_CONTEXT_BYTES)):
            context("p", "j" * MOST_CONTEXT_BYTES, 1, "a", "b")

    @pytest.mark.parametrize(
        "elsewhere",
        [
            ("seal", "job", 4, "a", "b"),
            ("seal", "job", 3, "b", "a"),
            ("seal", "job", 3, "a", "c"),
            ("seal", "other", 3, "a", "b"),
            ("mask", "job", 3, "a", "b"),
        ],
    )
    def test_a_share_of_another_round_pair_direction_job_or_purpose_opens_nothing(
        self, elsewhere: tuple[str, str, int, str, str]
    ) -> None:
        a, b = AgreementKey(), AgreementKey()
        here = context("seal", "job", 3, "a", "b")
        sealed = seal(a.agree(b.public, here), b"share", here)
        assert open_sealed(b.agree(a.public, here), sealed, here) == b"share"
        there = context(*elsewhere)
        for key, associated in ((here, there), (there, here), (there, there)):
            with pytest.raises(SealRefused):
                open_sealed(b.agree(a.public, key), sealed, associated)


class TestSeal:
    KEY = bytes(range(32))

    @pytest.mark.parametrize("length", [0, 1, 66, 10_000])
    def test_opens_and_is_longer_by_what_is_told(self, length: int) -> None:
        plain = b"\x17" * length
        sealed = seal(self.KEY, plain, b"for whom")
        assert len(sealed) == length + SEAL_BYTES
        assert open_sealed(self.KEY, sealed, b"for whom") == plain

    def test_every_changed_byte_is_noticed(self) -> None:
        sealed = seal(self.KEY, b"plain text", b"for whom")
        for place in range(len(sealed)):
            changed = bytearray(sealed)
            changed[place] ^= 1
            with pytest.raises(SealRefused):
                open_sealed(self.KEY, bytes(changed), b"for whom")

    def test_another_key_opens_nothing(self) -> None:
        with pytest.raises(SealRefused):
            open_sealed(bytes(32), seal(self.KEY, b"plain", b""), b"")

    @pytest.mark.parametrize("length", [0, 12, SEAL_BYTES - 1])
    def test_what_is_too_short_is_refused(self, length: int) -> None:
        with pytest.raises(SealRefused, match="no sealed message"):
            open_sealed(self.KEY, bytes(length), b"")

    def test_sealing_twice_repeats_no_nonce(self) -> None:
        sealed = {seal(self.KEY, b"plain", b"")[:12] for _ in range(100)}
        assert len(sealed) == 100


class TestSignature:
    def test_published_signature(self) -> None:
        """RFC 8032, section 7.1, test 1."""
        key = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
        assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
        assert key.sign(b"").hex() == (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        )

    def test_another_message_key_or_signature_is_refused(self) -> None:
        key, other = SigningKey(), SigningKey()
        signature = key.sign(b"survivors")
        verify(key.public, b"survivors", signature)
        for public, message, told in (
            (key.public, b"others", signature),
            (other.public, b"survivors", signature),
            (key.public, b"survivors", other.sign(b"survivors")),
            (key.public, b"survivors", signature[:63]),
            (key.public, b"survivors", b""),
            (key.public[:31], b"survivors", signature),
        ):
            with pytest.raises(SignatureRefused):
                verify(public, message, told)

    def test_the_seed_is_not_shown(self) -> None:
        key = SigningKey()
        assert key.seed.hex() not in repr(key)
        assert SigningKey(key.seed).public == key.public


class TestCertificate:
    def test_the_registrar_vouches_for_one_client_in_one_job(self) -> None:
        registrar, key = Registrar(), SigningKey()
        certificate = registrar.certify("job", "device-1", key.public)
        certificate.check(registrar.public, "job", "device-1")
        for job, client in (("other", "device-1"), ("job", "device-2")):
            with pytest.raises(CertificateRefused, match="not of"):
                certificate.check(registrar.public, job, client)

    def test_what_the_registrar_did_not_sign_is_refused(self) -> None:
        registrar, key = Registrar(), SigningKey()
        certificate = registrar.certify("job", "a", key.public)
        forged = [
            replace(certificate, public=SigningKey().public),
            replace(certificate, client="b"),
            replace(certificate, job="jo"),
            Registrar().certify("job", "a", key.public),
        ]
        for one in forged:
            with pytest.raises(CertificateRefused, match="did not sign"):
                one.check(registrar.public, one.job, one.client)

    def test_a_registrar_comes_back_from_its_seed_and_certifies_keys_alone(self) -> None:
        assert Registrar(bytes(32)).public == Registrar(bytes(32)).public != Registrar().public
        with pytest.raises(KeyRefused, match="32 bytes"):
            Registrar().certify("job", "a", bytes(31))
