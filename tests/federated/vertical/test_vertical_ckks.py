"""CKKS and its masks: errors within their bounds, what key holders cannot read, what is refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from tenseal import sealapi

from federated.vertical.ckks import (
    DEEP,
    FLOOR,
    SHALLOW,
    Opener,
    Parameters,
    Scheme,
    Sealer,
    read_relinearisation,
    stored,
)
from federated.vertical.masks import BITS, Masks, gaussian
from federated.vertical.parties import PeerFault


@pytest.fixture(scope="module")
def scheme() -> Scheme:
    return Scheme(SHALLOW)


@pytest.fixture(scope="module")
def opener(scheme: Scheme) -> Opener:
    return Opener(scheme)


@pytest.fixture(scope="module")
def sealer(scheme: Scheme, opener: Opener) -> Sealer:
    return Sealer(scheme, opener.public())


def values_of(scheme: Scheme, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, scheme.parameters.slots)


class TestScheme:
    @pytest.mark.parametrize("parameters", [SHALLOW, DEEP], ids=["shallow", "deep"])
    def test_a_fresh_encryption_is_as_near_as_its_bound_says(self, parameters: Parameters) -> None:
        scheme = Scheme(parameters)
        opener = Opener(scheme)
        values = values_of(scheme)
        cipher = Sealer(scheme, opener.public()).seal(values, parameters.top, parameters.scale)
        error = np.abs(opener.open(cipher) - values).max()
        assert 0 < error < parameters.fresh_error < 2e-6

    def test_too_many_bits_for_the_degree_are_refused(self) -> None:
        with pytest.raises(ValueError, match="security"):
            Scheme(Parameters(8_192, (60, 60, 60, 60)))

    def test_products_and_sums(self, scheme: Scheme, opener: Opener, sealer: Sealer) -> None:
        one, other = values_of(scheme, 1), values_of(scheme, 2)
        top, scale = SHALLOW.top, SHALLOW.scale
        first, second = sealer.seal(one, top, scale), sealer.seal(other, top, scale)
        keys = opener.relinearisation()
        assert opener.open(scheme.times(first, second, keys)) == pytest.approx(one * other, abs=1e-5)
        assert opener.open(scheme.times(first, first, keys)) == pytest.approx(one**2, abs=1e-5)
        assert opener.open(scheme.minus(first, second)) == pytest.approx(one - other, abs=1e-5)
        weighted = scheme.weighted(first, scheme.encode(other, top, 2.0**20))
        assert opener.open(weighted) == pytest.approx(one * other, abs=1e-3)
        # Nothing above changed its arguments.
        assert opener.open(first) == pytest.approx(one, abs=1e-5)

    def test_sums_of_slots_stand_in_every_slot(self, scheme: Scheme, opener: Opener, sealer: Sealer) -> None:
        values = np.tile(np.arange(8.0), SHALLOW.slots // 8)
        cipher = sealer.seal(values, SHALLOW.top, SHALLOW.scale)
        total = scheme.total(cipher, 8, opener.rotations([1, 2, 4]))
        assert opener.open(total) == pytest.approx(np.full(SHALLOW.slots, 28.0), abs=1e-4)

    def test_other_scales_do_not_add(self, scheme: Scheme, sealer: Sealer) -> None:
        one = sealer.zero(SHALLOW.top, 2.0**40)
        with pytest.raises(ValueError, match="scales"):
            scheme.add(one, sealer.zero(SHALLOW.top, 2.0**41))


class TestReading:
    def test_what_was_written_is_read(self, scheme: Scheme, opener: Opener, sealer: Sealer) -> None:
        values = values_of(scheme)
        body = stored(sealer.seal(values, FLOOR, 2.0**40))
        assert opener.open(scheme.read(body, "a", FLOOR, 2.0**40)) == pytest.approx(values, abs=1e-5)

    def test_another_level_or_scale_is_refused(self, scheme: Scheme, sealer: Sealer) -> None:
        body = stored(sealer.zero(FLOOR, 2.0**40))
        for level, scale in ((SHALLOW.top, 2.0**40), (FLOOR, 2.0**41)):
            with pytest.raises(PeerFault) as caught:
                scheme.read(body, "bob", level, scale)
            assert (caught.value.peer, caught.value.rule) == ("bob", "ciphertext")

    def test_a_changed_or_cut_body_is_refused_or_decrypts_out_of_range(
        self, scheme: Scheme, opener: Opener, sealer: Sealer
    ) -> None:
        body = stored(sealer.zero(FLOOR, 2.0**60))
        masks = Masks(10)
        rules = []
        places = [*range(16), *range(16, 120, 5), *range(120, len(body), 20_011)]
        for place in places:
            changed = bytearray(body)
            changed[place] ^= 0x40
            try:
                opened = opener.open(scheme.read(bytes(changed), "bob", FLOOR, 2.0**60))
                masks.check(opened, "bob")
            except PeerFault as fault:
                rules.append(fault.rule)
            else:
                # Two bytes of SEAL's header are for later versions: the ciphertext is the same as before.
                assert place in (6, 7)
                assert np.abs(opened).max() < 1e-6
        assert set(rules) == {"ciphertext", "range"}
        assert len(rules) == len(places) - 2
        for cut in (b"", body[:15], body[:-1], body + bytes(SHALLOW.most_bytes(SHALLOW.top))):
            with pytest.raises(PeerFault, match="ciphertext"):
                scheme.read(cut, "bob", FLOOR, 2.0**60)

    def test_what_is_not_encrypted_is_refused(self, scheme: Scheme) -> None:
        blank = sealapi.Ciphertext(scheme.context)
        with pytest.raises(PeerFault, match="ciphertext"):
            scheme.read(stored(blank), "bob", SHALLOW.top, 2.0**40)

    def test_another_schemes_ciphertexts_and_keys_are_refused(self, scheme: Scheme, opener: Opener) -> None:
        other = Opener(Scheme(Parameters(8_192, (57, 57, 40, 57))))
        zero = Sealer(other.scheme, other.public()).zero(FLOOR, 2.0**40)
        with pytest.raises(PeerFault, match="ciphertext"):
            scheme.read(stored(zero), "bob", FLOOR, 2.0**40)
        with pytest.raises(PeerFault, match="ciphertext"):
            Sealer.of(scheme, stored(other.public()), "bob")
        with pytest.raises(PeerFault, match="ciphertext"):
            read_relinearisation(scheme, stored(opener.public()), "bob")


def second_polynomial(cipher: sealapi.Ciphertext, count: int) -> list[int]:
    """The first coefficients of c1 modulo the first prime, in SEAL's transformed order."""
    start = cipher.poly_modulus_degree() * cipher.coeff_modulus_size()
    data = cipher.dyn_array()
    return [data.at(start + place) for place in range(count)]


class TestHiding:
    def test_a_key_holder_cannot_divide_out_what_its_ciphertext_was_multiplied_by(
        self, scheme: Scheme, sealer: Sealer
    ) -> None:
        column = np.random.default_rng(3).integers(0, 2, SHALLOW.slots).astype(float)
        sent = sealer.seal(values_of(scheme), FLOOR, 2.0**40)
        plain = scheme.encode(column, FLOOR, 2.0**20)
        bare = scheme.weighted(sent, plain)
        masks = Masks(10)
        hidden = sealer.hide(bare, masks.split(masks.draw(SHALLOW.slots, os.urandom)))
        count, prime = 64, scheme.primes[0]
        inverse = [pow(one, -1, prime) for one in second_polynomial(sent, count)]
        truth = [plain.data(place) for place in range(count)]

        def divided(returned: sealapi.Ciphertext) -> list[int]:
            found = second_polynomial(returned, count)
            return [one * other % prime for one, other in zip(found, inverse, strict=True)]

        # The attack is real: without hiding it reads the column; with it not one coefficient.
        assert divided(bare) == truth
        assert not set(divided(hidden)) & set(truth)

    def test_masks_come_off_exactly_up_to_their_stated_error(
        self, scheme: Scheme, opener: Opener, sealer: Sealer
    ) -> None:
        values = values_of(scheme)
        masks = Masks.fitting(2.0**-8, SHALLOW.floor_bits, 60)
        drawn = masks.draw(SHALLOW.slots, os.urandom)
        hidden = sealer.hide(sealer.seal(values, FLOOR, 2.0**60), masks.split(drawn))
        opened = masks.integers(masks.check(opener.open(hidden), "a"))
        error = masks.values((opened - drawn.whole) - drawn.part) - values
        assert 0 < error.std() < masks.error <= 2.0**-8
        assert np.abs(np.corrcoef(masks.values(opened), values)[0, 1]) < 0.07

    def test_nothing_stands_between_the_grids_points(
        self, scheme: Scheme, opener: Opener, sealer: Sealer
    ) -> None:
        # Values a third of a step above the grid. Narrow masks, so that float64 shows the place between its points.
        masks = Masks(BITS - 20)
        values = np.full(SHALLOW.slots, masks.values(np.array([1 / 3]))[0])
        sealed = sealer.seal(values, FLOOR, 2.0**60)
        drawn = masks.draw(SHALLOW.slots, os.urandom)
        narrow = drawn.whole >> 30, drawn.part

        def place(parts: tuple[np.ndarray, ...]) -> np.ndarray:
            hidden = sealer.hide(sealed, [masks.values(part) for part in parts])
            steps = np.ldexp(opener.open(hidden), masks.grid)
            return np.abs(np.exp(2j * np.pi * steps).mean())

        # With whole steps alone every slot tells its value's place; with the part none does.
        assert place(narrow[:1]) > 0.5
        assert place(narrow) < 0.1


class TestMasks:
    def test_the_widest_that_precision_and_modulus_allow(self) -> None:
        assert Masks.fitting(2.0**-8, 200, 60).grid == 8
        assert Masks.fitting(2.0**-8, 100, 60).grid == 60 + BITS + 6 - 100
        with pytest.raises(ValueError, match="hide nothing"):
            Masks.fitting(2.0**-40, 200, 60)

    def test_statistical_distance(self) -> None:
        masks = Masks(8)
        assert masks.reach == 2.0**43
        assert masks.distance(4.0) == 2.0**-42
        assert masks.distance(4.0, 2.0**20) == 2.0**-22
        # The exact distance of uniform numbers from shifted ones, counted on a small range.
        small = Masks(BITS - 4)
        low = np.arange(-8, 8)
        assert len(np.setdiff1d(low + 3, low)) / 16 == small.distance(3.0)

    def test_draws_fill_the_range_and_no_more(self) -> None:
        masks = Masks(0)
        zero = masks.draw(1, lambda count: bytes(count))
        assert (zero.whole[0], zero.part[0]) == (0, 0.0)
        top = masks.draw(1, lambda _: 2 * (2**63 - 1).to_bytes(8, "little"))
        assert (top.whole[0], top.part[0]) == (2**51 - 1, 0.5 - 2.0**-53)
        low = masks.draw(1, lambda _: 2 * (2**63).to_bytes(8, "little"))
        assert (low.whole[0], low.part[0]) == (-(2**51), -0.5)
        drawn = masks.draw(20_000, os.urandom)
        assert abs(drawn.part.mean()) < 0.02
        assert abs(drawn.part.var() - 1 / 12) < 0.005
        many = masks.values(drawn.whole) / masks.reach
        assert abs(many.mean()) < 0.03
        assert abs(many.var() - 1 / 3) < 0.02

    def test_range(self) -> None:
        masks = Masks(8)
        masks.check(np.array([masks.reach, -masks.reach]), "bob")
        for wrong in (1.1 * masks.reach, -1.1 * masks.reach, np.nan, np.inf):
            with pytest.raises(PeerFault, match="bob: range"):
                masks.check(np.array([0.0, wrong]), "bob")

    def test_noise_is_normal(self) -> None:
        found = gaussian(40_001, 1_000.0, os.urandom) / 1_000
        assert len(found) == 40_001
        assert abs(found.mean()) < 0.03
        assert abs(found.std() - 1) < 0.02
        assert abs((np.abs(found) > 2).mean() - 0.0455) < 0.006
