"""Noise that a restart repeats: a function of a secret key and of all that it is about."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from federated.privacy.randomness import normal
from federated.vertical.split.repeated import RepeatedNoise

KEY = bytes(range(32))
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def drawn(change: Callable[[RepeatedNoise], object] = lambda noise: None, key: bytes = KEY) -> bytes:
    noise = RepeatedNoise(key)
    noise.begin(3)
    noise.about("rows", ROWS)
    change(noise)
    return noise.words(4).tobytes()


def nudged() -> np.ndarray:
    found = ROWS.copy()
    found[1, 2] = np.nextafter(found[1, 2], np.float32(9))
    return found


def test_the_same_is_the_same_whatever_came_before_the_checkpoint() -> None:
    noise = RepeatedNoise(KEY)
    noise.about("rows", nudged())
    noise.words(5)
    noise.begin(3)
    noise.about("rows", ROWS)
    assert noise.words(4).tobytes() == drawn()


@pytest.mark.parametrize(
    "change",
    [
        lambda noise: noise.begin(3),
        lambda noise: noise.begin(4),
        lambda noise: noise.about("rows", ROWS),
        lambda noise: noise.about("gradients", ROWS),
        lambda noise: noise.words(4),
    ],
)
def test_whatever_differs_has_noise_of_its_own(change: Callable[[RepeatedNoise], object]) -> None:
    assert drawn(change) != drawn()


def test_one_bit_the_shape_or_another_key_give_other_noise() -> None:
    def of(rows: np.ndarray) -> bytes:
        noise = RepeatedNoise(KEY)
        noise.begin(3)
        noise.about("rows", rows)
        return noise.words(4).tobytes()

    assert of(ROWS) == drawn()
    others = [of(nudged()), of(ROWS.reshape(3, 2)), of(ROWS.astype(np.float64)), of(ROWS.view(np.int32))]
    assert len({*others, drawn(), drawn(key=KEY[::-1])}) == 6


def test_it_is_as_good_as_any_noise() -> None:
    noise = RepeatedNoise(KEY)
    found = np.stack([normal(noise, 20_000) for _ in range(2)])
    assert found.mean() == pytest.approx(0.0, abs=0.03)
    assert found.std() == pytest.approx(1.0, abs=0.02)
    assert abs(np.mean(found[0] * found[1])) < 0.03
