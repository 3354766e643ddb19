"""The clip that follows a quantile: its step, what counting costs, and that it arrives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from federated.privacy.adaptive import LARGEST, SMALLEST, next_clip, noise_left


def test_a_step_is_geometric_and_stops_at_the_quantile() -> None:
    assert next_clip(2.0, 0.5, 0.5, 0.2) == 2.0
    assert next_clip(2.0, 1.0, 0.5, 0.2) == pytest.approx(2.0 * math.exp(-0.1))
    assert next_clip(2.0, 0.0, 0.9, 0.5) == pytest.approx(2.0 * math.exp(0.45))


def test_noise_can_move_the_clip_only_so_far() -> None:
    assert next_clip(1.0, -1e9, 0.5, 1.0) == LARGEST
    assert next_clip(1.0, 1e9, 0.5, 1.0) == SMALLEST


def test_what_is_left_for_updates_and_the_count_cost_together_what_was_given() -> None:
    """Two Gaussians compose as one: (1/z)² = (1/z_Δ)² + (sensitivity ½ over σ_b)²."""
    left = noise_left(1.0, 10.0)
    assert left == pytest.approx(1.0 / math.sqrt(1.0 - 1.0 / 400.0))
    assert left**-2 + (0.5 / 10.0) ** 2 == pytest.approx(1.0)
    with pytest.raises(ValueError, match="clip_count_noise"):
        noise_left(2.0, 1.0)


@pytest.mark.parametrize("start", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_clip_arrives_at_the_quantile_from_anywhere(start: float, quantile: float) -> None:
    generator = np.random.default_rng(6)
    clip, clients, noise = start, 500, 10.0
    for _ in range(300):
        norms = generator.lognormal(0.7, 0.5, clients)
        within = (np.count_nonzero(norms <= clip) + generator.normal(0.0, noise)) / clients
        clip = next_clip(clip, within, quantile, 0.2)
    wanted = float(np.quantile(generator.lognormal(0.7, 0.5, 100_000), quantile))
    assert clip == pytest.approx(wanted, rel=0.15)
