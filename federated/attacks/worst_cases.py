"""The inputs that a mechanism finds hardest to hide, for ``audit``: one huge update, clipped as devices clip, against
its opposite (local reports: any two) or against no client at all (sums).

Noise is independent in every coordinate, so of a sum with the clipped value in all of N coordinates each is a sum of
its own, where the other coordinates of the one client are zero: N releases for the price of one.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from federated.attacks.audit import Audit, Claim, audit
from federated.attacks.effects import clip_by, noise_of
from federated.attacks.likelihoods import Laplace, Likelihood, Normal
from federated.attacks.rates import Floats
from federated.attacks.signs import SignLikelihood, Signs
from federated.attacks.spread import Spread
from federated.layout import Layout, weight_layout
from federated.privacy.noised import DistributedNoise, LocalNoise
from federated.privacy.protection import Protection
from federated.privacy.randomness import Randomness, SeededRandomness
from federated.privacy.signds import SignDS, plan_for
from federated.sums import SCALE, Bounds, Sum
from federated.weights import Array

HUGE: Final = 1e6
"""Of the clip, so that nothing but the clip bounds the update."""
_LOCAL_SIZE: Final = 4
_SIGN_SIZE: Final = 200
_SIGN_THRESHOLD: Final = 2.0


def audit_protection(
    protection: Protection, claim: Claim, tries: int, generator: np.random.Generator
) -> Audit:
    """Audit ``tries`` reports or releases of each of two inputs. ``protection`` is made for a cohort all of whose
    devices are honest."""
    if isinstance(protection, SignDS):
        first, second = _signs(protection, tries, generator)
    elif isinstance(protection, LocalNoise):
        first, second = _reports(protection, tries, generator)
    else:
        first, second = _sums(protection, tries, generator)
    return audit(first, second, claim)


def _reports(protection: LocalNoise, tries: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    layout = _layout(_LOCAL_SIZE)
    canary = np.zeros((tries, layout.size), np.float32)
    canary[:, 0] = HUGE * protection.section.clip
    clipped = clip_by(layout, protection.section, np.zeros(layout.size, np.float32))
    likelihood: Likelihood = Normal(_isotropic(layout.size, protection.scale**2), clipped)
    if protection.norm == "l1":
        likelihood = Laplace(protection.scale, clipped)
    return _ratios(protection, layout, likelihood, (canary, -canary), generator)


def _signs(protection: SignDS, tries: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Two updates with other largest coordinates under either sign, one below the bit's threshold, one above."""
    layout, section = _layout(_SIGN_SIZE), protection.section
    rising = np.linspace(-1.0, 1.0, layout.size, dtype=np.float32)
    first, second = np.tile(rising, (tries, 1)), np.tile(-3.0 * rising, (tries, 1))
    plan = plan_for(
        layout.size, section.sign_k, section.sign_eps, section.sign_thr_ratio, section.sign_dim_out
    )
    likelihood = SignLikelihood(plan, _SIGN_THRESHOLD, section.magnitude_epsilon)
    return _ratios(protection, layout, likelihood, (first, second), generator, _SIGN_THRESHOLD)


def _ratios(
    protection: Protection,
    layout: Layout,
    likelihood: Likelihood,
    inputs: tuple[Array, Array],
    generator: np.random.Generator,
    threshold: float | None = None,
) -> tuple[Floats, Floats]:
    """Log-likelihood ratios of reports of the first and of the second of ``inputs`` [N, D] each."""
    start, first, second = np.zeros(layout.size, np.float32), *inputs
    found = []
    for rows in inputs:
        sources: list[Randomness] = [SeededRandomness(generator)] * len(rows)
        reported = protection.report({"difference": rows}, layout, sources, start, threshold)
        votes = reported.vectors["difference"]
        seen = votes if reported.bits is None else Signs(votes, reported.bits)
        found.append(likelihood.rows(seen, first) - likelihood.rows(seen, second))
    return found[0], found[1]


def _sums(protection: Protection, tries: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Ratios of sums with the client and without it, both under the noise that is claimed."""
    layout = _layout(tries)
    randomness: Randomness = SeededRandomness(generator)
    canary = np.zeros((1, tries), np.float32)
    canary[0, 0] = HUGE * protection.section.clip
    start = np.zeros(tries, np.float32)
    reported = protection.report({"difference": canary}, layout, [randomness], start)
    value = float(reported.vectors["difference"][0, 0])
    sigma = noise_of(protection, layout)
    found = []
    for added in (value, 0.0):
        if isinstance(protection, DistributedNoise):
            whole = np.zeros((protection.around.honest, tries), np.int64)
            whole[0] = round(added * protection.steps)
            shares = [protection.perturb(row, layout, randomness) for row in whole]
            seen = np.sum(shares, axis=0) / protection.steps
        else:
            total = Sum(tries, Bounds(1, 1))
            total.vectors["difference"][:] = round(added * SCALE)
            seen = protection.release(total, layout, randomness).vectors["difference"] / SCALE
        found.append((seen - value / 2.0) * (value / sigma**2))
    return found[0], found[1]


def _layout(size: int) -> Layout:
    return weight_layout([("values", (size,))])


def _isotropic(size: int, variance: float) -> Spread:
    return Spread(np.zeros((size, 0)), np.zeros(0), variance)
