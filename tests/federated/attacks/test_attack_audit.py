"""Our own noise, audited: sound mechanisms pass, and each way of breaking one is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from federated.attacks.audit import Audit, Claim, audit
from federated.attacks.effects import claimed, protection_of
from federated.attacks.worst_cases import audit_protection
from federated.layout import Layout
from federated.privacy.budget import pure_epsilon_of
from federated.privacy.noised import CentralNoise, Circumstances, DistributedNoise, LocalNoise
from federated.privacy.protection import Protection, Reported, Whole
from federated.privacy.randomness import Randomness, SeededRandomness, laplace, normal
from federated.privacy.section import PrivacySection
from federated.privacy.signds import SignDS
from federated.sums import Sum
from federated.weights import Array

CLIENTS, STEP_BITS = 4, 16
TRIES = 4_000

LOCAL_GAUSSIAN = PrivacySection(mechanism="local_gaussian")
LOCAL_LAPLACE = PrivacySection(mechanism="local_laplace")
SIGNS = PrivacySection(mechanism="signds", sign_eps=1.0, sign_k=0.1)
CENTRAL = PrivacySection(mechanism="central_gaussian")
DISTRIBUTED = PrivacySection(mechanism="distributed_gaussian")
SKELLAM = PrivacySection(mechanism="distributed_skellam")


def claim_of(section: PrivacySection) -> Claim:
    if section.mechanism in ("local_laplace", "signds"):
        return Claim(pure_epsilon_of(section), 0.0, "any")
    return Claim(claimed(section, CLIENTS, STEP_BITS, TRIES, 1), section.budget_delta, "gaussian")


def audited(protection: Protection, claim: Claim, tries: int = TRIES) -> Audit:
    return audit_protection(protection, claim, tries, np.random.default_rng(40))


@pytest.mark.parametrize(
    "section",
    [LOCAL_GAUSSIAN, LOCAL_LAPLACE, SIGNS, CENTRAL, DISTRIBUTED, SKELLAM],
    ids=lambda section: section.mechanism,
)
def test_what_is_claimed_holds_and_the_audit_comes_near_it(section: PrivacySection) -> None:
    found = audited(protection_of(section, CLIENTS, STEP_BITS), claim_of(section))
    assert found.passed
    assert found.least_epsilon > found.claim.epsilon / 5  # else it would not find much


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", [LOCAL_GAUSSIAN, LOCAL_LAPLACE, SIGNS], ids=lambda section: section.mechanism
)
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_what_is_claimed_holds_over_many_reports(section: PrivacySection, epsilon: float) -> None:
    section = replace(section, epsilon=epsilon, sign_eps=epsilon)
    found = audited(protection_of(section, CLIENTS, STEP_BITS), claim_of(section), 60_000)
    assert found.claim.epsilon / 3 < found.least_epsilon <= found.claim.epsilon


class HalfLocal(LocalNoise):
    """Noise for a sensitivity of C, as if only one of two vectors were clipped."""

    def __init__(self, section: PrivacySection) -> None:
        super().__init__(section)
        self.scale /= 2.0


class NoLocal(LocalNoise):
    """Clipped, and the noise forgotten."""

    def report(
        self,
        vectors: Mapping[str, Array],
        layout: Layout,
        randomness: Sequence[Randomness],
        start: Array,
        threshold: float | None = None,
    ) -> Reported:
        return Reported({"difference": self._clipped(layout, vectors["difference"], self.section.clip)[0]})


class HalfCentral(CentralNoise):
    """Half the noise."""

    def __init__(self, section: PrivacySection, around: Circumstances) -> None:
        super().__init__(section, around)
        self.multiplier /= 2.0


class NoCentral(CentralNoise):
    """No noise."""

    def release(
        self, total: Sum, layout: Layout, randomness: Randomness, threshold: float | None = None
    ) -> Sum:
        return total


class Unclipped(CentralNoise):
    """Noise for a clip that devices are not held to."""

    def _inner(self, layout: Layout, threshold: float | None) -> float:
        return 3.0 * self.section.clip


class Idle(DistributedNoise):
    """Every device but the first of four forgets its share."""

    def __init__(self, section: PrivacySection, around: Circumstances) -> None:
        super().__init__(section, around)
        self._asked = -1

    def perturb(self, whole: Whole, layout: Layout, randomness: Randomness) -> Whole:
        self._asked += 1
        return whole if self._asked % CLIENTS else super().perturb(whole, layout, randomness)


@pytest.mark.parametrize("section", [LOCAL_GAUSSIAN, LOCAL_LAPLACE], ids=lambda section: section.mechanism)
@pytest.mark.parametrize("broken", [HalfLocal, NoLocal])
def test_broken_local_noise_is_found(section: PrivacySection, broken: type[LocalNoise]) -> None:
    section = replace(section, epsilon=2.0)
    assert not audited(broken(section), claim_of(section)).passed


@pytest.mark.parametrize("broken", [HalfCentral, NoCentral, Unclipped])
def test_broken_central_noise_is_found(broken: type[CentralNoise]) -> None:
    assert not audited(broken(CENTRAL, Circumstances(CLIENTS, CLIENTS)), claim_of(CENTRAL)).passed


@pytest.mark.parametrize("section", [DISTRIBUTED, SKELLAM], ids=lambda section: section.mechanism)
def test_missing_shares_of_distributed_noise_are_found(section: PrivacySection) -> None:
    around = Circumstances(CLIENTS, CLIENTS, STEP_BITS)
    assert not audited(Idle(section, around), claim_of(section)).passed


def test_signs_that_tell_more_than_claimed_are_found() -> None:
    stronger = SignDS(replace(SIGNS, sign_eps=5.0))
    assert not audited(stronger, claim_of(SIGNS)).passed


def test_low_bits_of_noise_that_is_not_rounded_are_found() -> None:
    """Laplace noise as numbers of float64, without the grid: which low bits occur tells the value (Mironov 2012)."""
    randomness = SeededRandomness(np.random.default_rng(41))
    epsilon, tries = 1.0, 20_000

    def ratios(value: float, finish: Callable[[Any], Any]) -> Any:
        seen = finish(value + 2.0 / epsilon * laplace(randomness, tries))
        return (np.abs(seen + 1.0) - np.abs(seen - 1.0)) * epsilon / 2.0

    claim = Claim(epsilon, 0.0, "any")
    rough = [ratios(value, lambda seen: seen) for value in (1.0, -1.0)]
    assert not audit(*rough, claim).passed
    rounded = [ratios(value, lambda seen: np.rint(seen * 2**15) / 2**15) for value in (1.0, -1.0)]
    assert audit(*rounded, claim).passed


def test_sound_noise_looks_broken_no_more_often_than_the_confidence_says() -> None:
    """With 90 % confidence at most a tenth of audits of exact noise may fail; no slack is left in the claim."""
    generator = np.random.default_rng(42)
    randomness, claim = SeededRandomness(generator), Claim(0.9, 1e-5, "gaussian")
    from federated.privacy.gaussian import sigma_of

    sigma = sigma_of(claim.epsilon, claim.delta)
    failed = 0
    for _ in range(100):
        first, second = normal(randomness, 400) * sigma + 1.0, normal(randomness, 400) * sigma
        failed += not audit(first, second, claim, 0.9).passed
    assert failed <= 19  # binomial(100, .1): beyond it in one of 500


def test_too_few_reports_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        audit(np.zeros(3), np.zeros(9), Claim(1.0, 0.0, "any"))
