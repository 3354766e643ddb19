"""Rotations, products and sums of slots in the clear; masks and sums modulo the primes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.ckks import FLOOR, Scheme
from federated.vertical.transfer.layout import Layout
from federated.vertical.transfer.residues import Residues
from federated.vertical.transfer.sealed import FLAT


def products(layout: Layout, matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What is done to ciphertexts, done to slots [groups, slots]."""
    chunks = layout.spread(matrix)
    found = np.zeros((layout.groups, layout.slots))
    for group in range(layout.groups):
        for giant in range(layout.turns // layout.babies):
            total = np.zeros(layout.slots)
            for chunk, baby, slots in layout.diagonals(weights, group, giant):
                total += np.roll(chunks[chunk], -baby * layout.stride) * slots
            found[group] += np.roll(total, -giant * layout.babies * layout.stride)
    return found


@pytest.mark.parametrize(
    ("height", "width", "outputs", "slots"),
    [
        (5, 3, 4, 64),  # copies side by side
        (16, 4, 7, 64),  # one copy that fills the ciphertext
        (37, 4, 9, 64),  # three chunks
        (5, 16, 11, 64),  # more outputs than a ciphertext's rows: groups
        (1, 1, 1, 64),
        (100, 64, 3, 64),  # a row a ciphertext
    ],
)
def test_all_outputs_are_the_weighted_sums(height: int, width: int, outputs: int, slots: int) -> None:
    rng = np.random.default_rng(height)
    matrix, weights = rng.standard_normal((height, width)), rng.standard_normal((outputs, height, width))
    layout = Layout(height, width, outputs, slots)
    slots_of = products(layout, matrix, weights).reshape(layout.groups, -1, layout.residues).sum(axis=1)
    assert layout.gathered(slots_of) == pytest.approx((weights * matrix).sum(axis=1), abs=1e-12)
    # No more rotations than it says, and each within a ciphertext.
    assert all(0 < step < slots for step in layout.steps())


def test_a_job_of_few_rows_is_one_ciphertext_and_few_rotations() -> None:
    layout = Layout(106, 8, 41, 4_096)
    assert (layout.chunks, layout.copies, layout.turns, layout.groups) == (1, 4, 16, 1)
    assert len(layout.steps()) == 6
    with pytest.raises(ValueError, match="too many for one step"):
        Layout(10**6, 256, 100, 4_096)
    with pytest.raises(ValueError, match="columns in"):
        Layout(10, 65, 3, 64)


class TestResidues:
    scheme = Scheme(FLAT)

    @pytest.mark.parametrize("period", [1, 64, 4_096])
    def test_the_sum_of_slots_comes_off_a_uniform_mask(self, period: int) -> None:
        residues, rng = Residues(self.scheme, period), np.random.default_rng(period)
        slots, scale = rng.standard_normal(FLAT.slots), 2.0**70
        mask = residues.uniform(rng.bytes)
        plain = residues.of(self.scheme.encode(slots, FLOOR, scale))
        masked = (plain + mask) % residues.primes
        told = residues.less(residues.trace(masked), residues.trace(mask))
        truth = slots.reshape(-1, period).sum(axis=0)
        assert residues.sums(told, scale) == pytest.approx(truth, abs=1e-10)
        # Another's mask leaves nothing of it.
        other = residues.less(residues.trace(masked), residues.trace(residues.uniform(rng.bytes)))
        assert np.abs(residues.sums(other, scale)).max() > 2.0**40

    def test_masks_are_uniform_below_each_prime(self) -> None:
        residues = Residues(self.scheme, 8)
        mask = residues.uniform(np.random.default_rng(0).bytes)
        assert (mask < residues.primes).all()
        counts, _ = np.histogram(mask / residues.primes.astype(np.float64), 16, (0.0, 1.0))
        expected = mask.size / 16
        # Chi squared with 15 degrees of freedom: above 45 once in ten thousand seeds.
        assert ((counts - expected) ** 2 / expected).sum() < 45

    def test_what_reaches_the_prime_is_drawn_again(self) -> None:
        residues, rng = Residues(self.scheme, 8), np.random.default_rng(0)
        calls: list[int] = []

        def draw(count: int) -> bytes:
            calls.append(count)
            return b"\xff" * count if len(calls) == 1 else rng.bytes(count)

        assert (residues.uniform(draw) < residues.primes).all()
        assert calls == [8 * FLAT.degree] * 3

    def test_a_plaintext_of_another_level_is_refused(self) -> None:
        residues = Residues(self.scheme, 8)
        with pytest.raises(ValueError, match="8192 numbers, expected 16384"):
            residues.of(self.scheme.encode(1.0, 1, 2.0**20))
