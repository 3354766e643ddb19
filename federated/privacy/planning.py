"""How much noise, or how many rounds, a wanted ε takes: accounting read backwards.

    PlanningRefused (ValueError)     numbers between which no noise is found; the message says what to change

Noise is a multiplier of central and distributed mechanisms, more of which is safer; of local ones it is the ε of one
report, less of which is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from federated.privacy.accounting import Kind
from federated.privacy.accounting_statement import Exposure, accountant_of, most_releases
from federated.privacy.calibration import CalibrationRefused, DistributedNoise
from federated.privacy.composition import MOST_RELEASES
from federated.privacy.section import DISTRIBUTED, LOCAL, Mechanism, PrivacySection

STEP_BITS: Final = 16
"""Of the ring, as [secure_aggregation] has it where nothing is said."""
_STEPS: Final = 20
_PRECISION: Final = 1e-3  # relative
_DIGITS: Final = 4


class PlanningRefused(ValueError):
    """Numbers for which there is no noise."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is known beforehand: ``rate`` is that of Poisson sampling (central_gaussian), ``weights`` and ``honest`` the
    model's size and the devices whose noise surely is in each sum (distributed mechanisms), ``clients`` the
    population, None if unknown. ``base`` says what else decides (the clip, a report's δ), ``step_bits`` how finely
    distributed noise is rounded."""

    mechanism: Mechanism
    delta: float = 1e-5
    rate: float = 1.0
    weights: int = 0
    honest: int = 0
    clients: int | None = None
    base: PrivacySection = field(default_factory=PrivacySection)
    step_bits: int = STEP_BITS

    def __post_init__(self) -> None:
        if self.mechanism == "none":
            raise PlanningRefused("without a mechanism no noise is enough")
        if not 0.0 < self.delta < 1.0:
            raise PlanningRefused(f"delta must be above 0 and below 1, not {self.delta}")
        if not 0.0 < self.rate <= 1.0:
            raise PlanningRefused(f"a sampling rate is above 0 and at most 1, not {self.rate}")
        if self.rate < 1.0 and self.mechanism != "central_gaussian":
            raise PlanningRefused(
                f"{self.mechanism} earns nothing by sampling, since the servers see who takes part: leave the rate out"
            )
        if self.mechanism in DISTRIBUTED and not (self.weights > 0 and self.honest > 0):
            raise PlanningRefused(
                f"what {self.mechanism} costs depends on the model's weights, and on how many honest devices' "
                "noise is in each sum: say both"
            )

    def exposure(self, noise: float, rounds: int, budget: float = 0.0) -> Exposure:
        """A job of ``rounds`` with so much ``noise``. Raises ValueError for noise that is none."""
        section = _with_noise(
            replace(self.base, mechanism=self.mechanism, budget_epsilon=budget, budget_delta=self.delta),
            noise,
        )
        distributed = None
        if self.mechanism in DISTRIBUTED:
            distributed = DistributedNoise.of(
                section, dimension=self.weights, step_bits=self.step_bits, honest=self.honest
            )
        return Exposure(section, rounds, self.rate, self.clients, distributed)

    def epsilon(self, noise: float, rounds: int, *, kind: Kind | None = None) -> float:
        """ε of so many rounds, at most by 1e-4 too large; infinite for noise that is too little to be counted. ``kind``
        is another accountant than the job's: "rdp" is fast, and seldom less."""
        try:
            accountant = accountant_of(self.exposure(noise, rounds))
        except CalibrationRefused:
            return math.inf
        assert accountant is not None
        return replace(accountant, kind=kind or accountant.kind).coarsely(rounds)


def noise_for(question: Question, epsilon: float, rounds: int) -> float:
    """The least noise (within a thousandth, rounded to the private side) whose ``rounds`` cost at most ``epsilon``.
    Raises PlanningRefused."""
    _require_epsilon(epsilon)
    if not 1 <= rounds <= MOST_RELEASES:
        raise PlanningRefused(f"rounds must be 1 to {MOST_RELEASES}, not {rounds}")
    local = question.mechanism in LOCAL

    def cost(amount: float, kind: Kind | None = None) -> float:
        return question.epsilon(1.0 / amount if local else amount, rounds, kind=kind)

    rough = _least(lambda amount: cost(amount, "rdp") <= epsilon, 1.0, 2.0, epsilon)
    # Distributions of losses take tenths of a second each: few, near the rough answer.
    amount = _least(lambda amount: cost(amount) <= epsilon, rough, 1.1, epsilon)
    return _rounded(1.0 / amount, math.floor) if local else _rounded(amount, math.ceil)


def rounds_within(question: Question, noise: float, epsilon: float) -> int:
    """The most rounds with so much ``noise`` that cost at most ``epsilon``; MOST_RELEASES stands for any number. Raises
    BudgetRefused where one costs more."""
    _require_epsilon(epsilon)
    exposure = question.exposure(noise, MOST_RELEASES, epsilon)
    if question.mechanism not in LOCAL:
        return most_releases(exposure) or MOST_RELEASES
    most_releases(exposure)  # refuses a budget below one report
    accountant = accountant_of(exposure)
    assert accountant is not None
    return accountant.affordable(epsilon)


def _with_noise(section: PrivacySection, noise: float) -> PrivacySection:
    if section.mechanism == "signds":
        magnitude = min(1.0, noise / 2.0)
        return replace(section, sign_eps=noise - magnitude, magnitude_epsilon=magnitude)
    if section.mechanism in LOCAL:
        return replace(section, epsilon=noise)
    return replace(section, noise_multiplier=noise)


def _least(enough: Callable[[float], bool], start: float, step: float, epsilon: float) -> float:
    """The least amount that is ``enough``, within _PRECISION, from above; looked for from ``start`` on by factors of
    ``step``."""
    high = start
    for _ in range(_STEPS):
        if enough(high):
            break
        high *= step
    else:
        raise PlanningRefused(
            f"no noise up to {high:.3g} keeps epsilon {epsilon:g}: raise it or delta, or take fewer rounds"
        )
    low = high / step
    for _ in range(_STEPS):
        if not enough(low):
            break
        low, high = low / step, low
    while high > low * (1.0 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _rounded(value: float, to: Callable[[float], int]) -> float:
    digits = _DIGITS - 1 - math.floor(math.log10(value))
    return round(to(value * 10.0**digits) / 10.0**digits, digits)


def _require_epsilon(epsilon: float) -> None:
    if not 0.0 < epsilon < math.inf:
        raise PlanningRefused(f"epsilon must be positive, not {epsilon}")
