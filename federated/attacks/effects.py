"""What a mechanism does to updates: how it bounds them, the noise of a sum, what is seen of it, and what it claims.

All by the code that devices and servers run.
"""

from __future__ import annotations

import math

import numpy as np

from federated.attacks.likelihoods import Clip
from federated.attacks.rates import Floats
from federated.layout import Layout
from federated.privacy.clipping import Norm, clip_rows, parts_of
from federated.privacy.mechanisms import make_protection
from federated.privacy.noised import CentralNoise, Circumstances, DistributedNoise
from federated.privacy.protection import Protection
from federated.privacy.randomness import Randomness, SeededRandomness
from federated.privacy.section import DISTRIBUTED, PrivacySection, SecureAggregationSection
from federated.sums import SCALE, Bounds, Sum, add_batch
from federated.weights import Array


def protection_of(section: PrivacySection, clients: int, step_bits: int) -> Protection:
    """The mechanism in a cohort of ``clients`` that are all honest. Raises ValueError."""
    return make_protection(section, Circumstances(float(clients), clients, step_bits))


def claimed(section: PrivacySection, clients: int, step_bits: int, size: int, releases: int) -> float:
    """ε at ``budget_delta`` that so many ``releases`` cost, of models of D = ``size``, in cohorts of honest clients."""
    from federated.privacy.accounting_statement import Exposure, accountant_of
    from federated.privacy.calibration import DistributedNoise

    noise = None
    if section.mechanism in DISTRIBUTED:
        noise = DistributedNoise.of(section, dimension=size, step_bits=step_bits, honest=clients)
    accountant = accountant_of(Exposure(section, releases, noise=noise))
    return math.inf if accountant is None else accountant.epsilon(releases)


def clip_by(layout: Layout, section: PrivacySection, start: Array) -> Clip:
    """What the mechanism makes of updates from ``start`` [D] before its noise."""
    norm: Norm = "l1" if section.mechanism == "local_laplace" else "l2"
    parts = parts_of(layout, section.clip, norm, section.per_layer)
    if section.protects == "weights":
        return lambda updates: clip_rows(start + updates, parts, norm)[0] - start
    return lambda updates: clip_rows(updates, parts, norm)[0]


def noise_of(protection: Protection, layout: Layout) -> float:
    """The standard deviation of the noise in a sum of devices that are all honest."""
    if isinstance(protection, DistributedNoise):
        noise = protection.noise(layout)
        return noise.local_sigma * math.sqrt(noise.honest) / protection.steps
    assert isinstance(protection, CentralNoise)
    return protection.multiplier * protection.section.clip


def median_norm(rows: Array, norm: Norm) -> float:
    """The median norm of updates [Q, D]: what a clip that neither bends all nor none would be."""
    return float(np.median(np.linalg.norm(rows, 1 if norm == "l1" else 2, axis=1)))


def release_by(
    protection: Protection, layout: Layout, start: Array, updates: Array, generator: np.random.Generator
) -> Floats:
    """The sum [D] of ``updates`` [n, D] as the mechanism lets it be seen: devices report, add what noise is theirs to
    the whole numbers that they mask, and the server adds its own to the sum."""
    randomness: Randomness = SeededRandomness(generator)
    reported = protection.report({"difference": updates}, layout, [randomness] * len(updates), start)
    reports = reported.vectors["difference"]
    if not isinstance(protection, DistributedNoise):
        return read_sum(protection.release(sum_of(reports), layout, randomness))
    whole = np.rint(reports.astype(np.float64) * protection.steps).astype(np.int64)
    added = np.sum([protection.perturb(row, layout, randomness) for row in whole], axis=0)
    return np.asarray(added / protection.steps)


def quantised_sum(secure: SecureAggregationSection, updates: Array, generator: np.random.Generator) -> Floats:
    """What secure aggregation reveals of ``updates`` [n, D]: the exact sum [D] of what clients quantise."""
    steps = np.rint(np.clip(updates, -secure.clip, secure.clip) * 2.0**secure.step_bits)
    return np.asarray(steps.sum(axis=0) * 2.0**-secure.step_bits)


def sum_of(updates: Array) -> Sum:
    """The Sum of ``updates`` [n, D] where every client weighs 1 and reports nothing beside, as under a mechanism."""
    count = len(updates)
    total = Sum(updates.shape[1], Bounds(max(count, 1), 1))
    add_batch(total, {"difference": updates}, [1.0] * count, [1] * count, [1] * count, [0.0] * count)
    return total


def read_sum(total: Sum) -> Floats:
    """A Sum's vector [D] as numbers."""
    return np.asarray(total.vectors["difference"] / SCALE)
