"""What a job's protection is worth, in words and numbers: against whom, for whom, at which ε, and what to mistrust.

BudgetRefused (ValueError)     a budget that affords nothing; the message says what one release costs
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from federated.privacy.accounting import (
    Accountant,
    ConcentratedRelease,
    GaussianRelease,
    GaussianReport,
    LaplaceReport,
    PureReport,
    Release,
    accountants,
)
from federated.privacy.budget import affordable_reports, pure_epsilon_of
from federated.privacy.calibration import DistributedNoise
from federated.privacy.composition import MOST_RELEASES
from federated.privacy.section import LOCAL, PrivacySection

MEANINGLESS: Final = 20.0
"""ε from which on nobody is protected: what is learned of a client may change odds by a factor of e**20."""

_EXHAUSTED: Final = (
    "devices that took part in all of the first {} iterations have spent their budgets: the job goes on with others "
    "alone, and waits for them until it is stopped"
)

_LARGEST_DELTA: Final = 1e-3
"""From which on to warn where the number of clients is not known."""


class BudgetRefused(ValueError):
    """A budget that one release exceeds."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """What of a job decides what its protection costs: at most ``iterations``, in each of which a client is drawn with
    the earned sampling ``rate`` (1: it may always take part) out of ``population`` (None: unknown). ``noise`` is that
    of a distributed mechanism. ``simulated``: randomness is seeded. ``advice`` is what else to warn of. ``masked``:
    servers see sums alone."""

    section: PrivacySection
    iterations: int
    rate: float = 1.0
    population: int | None = None
    noise: DistributedNoise | None = None
    simulated: bool = False
    advice: tuple[str, ...] = ()
    masked: bool = False


@dataclass(frozen=True, slots=True)
class PrivacyStatement:
    """``epsilon_now`` and ``epsilon_at_end`` at ``delta``, None where nothing is promised. ``amplified``: sampling made
    them smaller. ``accountant`` is the one that counted."""

    mechanism: str
    adversary: str
    unit: str
    epsilon_now: float | None
    epsilon_at_end: float | None
    delta: float
    budget_epsilon: float
    accountant: str
    amplified: bool
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**asdict(self), "warnings": list(self.warnings)}

    def lines(self, *, over: bool = False) -> list[str]:
        """For people: one line of what holds, one for each warning. ``over``: nothing more will be spent."""
        if self.epsilon_at_end is None or self.epsilon_now is None:
            holds = f"privacy: none ({self.mechanism})"
        else:
            of = f" of {self.budget_epsilon:g}" if self.budget_epsilon else ""
            end = " spent" if over else f", {self.epsilon_at_end:.4g} at the end"
            holds = (
                f"privacy: {self.mechanism} against {self.adversary}; per {self.unit}: "
                f"epsilon {self.epsilon_now:.4g}{of}{end}, "
                f"delta {self.delta:g} ({self.accountant}{', amplified by sampling' if self.amplified else ''})"
            )
        return [holds, *(f"warning: {warning}" for warning in self.warnings)]


def release_of(exposure: Exposure) -> Release | None:
    """What one iteration releases (local mechanisms: one report), None without a mechanism."""
    section = exposure.section
    if section.mechanism == "none":
        return None
    if section.mechanism == "local_gaussian":
        return GaussianReport(section.epsilon, section.delta)
    if section.mechanism == "local_laplace":
        return LaplaceReport(section.epsilon)
    if section.mechanism == "signds":
        return PureReport(pure_epsilon_of(section))
    if section.mechanism == "central_gaussian":
        # Adaptive clipping gives the updates more noise, so that it and the counts together cost this much.
        return GaussianRelease(section.noise_multiplier, exposure.rate)
    if exposure.noise is None:
        raise ValueError(f"what {section.mechanism} costs depends on the noise of the devices: give it")
    return ConcentratedRelease(exposure.noise.bounds, exposure.noise.whole_orders)


def accountant_of(exposure: Exposure) -> Accountant | None:
    """The accountant that the section asks for, or the tightest that can count its mechanism; None without one. Reports
    are counted as devices count their own, exactly: a looser one would say more than the budget that they keep to."""
    release = release_of(exposure)
    if release is None:
        return None
    section = exposure.section
    able = accountants(release)
    asked = [kind for kind in able if kind == section.accountant and section.mechanism not in LOCAL]
    return Accountant(release, (*asked, *able)[0], section.budget_delta)


def most_releases(exposure: Exposure) -> int:
    """The most releases that the job's budget affords, 0 for no limit. That of local mechanisms is each device's own
    (``budget.affordable_reports``). Raises BudgetRefused when not even one is within it."""
    section, accountant = exposure.section, accountant_of(exposure)
    if accountant is None or not section.budget_epsilon:
        return 0
    local = section.mechanism in LOCAL
    most = affordable_reports(section) if local else accountant.affordable(section.budget_epsilon)
    if not most:
        raise BudgetRefused(
            f"one {'report' if local else 'iteration'} costs epsilon {accountant.epsilon(1):.4g} at delta "
            f"{section.budget_delta:g}, above budget_epsilon {section.budget_epsilon:g}: raise the budget or the noise"
        )
    return 0 if local or most == MOST_RELEASES else most


def last_release(exposure: Exposure) -> int:
    """How often a client is exposed at most by the job's end: in every iteration that the budget affords."""
    section, accountant = exposure.section, accountant_of(exposure)
    iterations = min(exposure.iterations, MOST_RELEASES)
    if accountant is None or not section.budget_epsilon:
        return iterations
    if section.mechanism in LOCAL:
        reports = affordable_reports(section)
        return iterations if reports is None else min(iterations, reports)
    return min(iterations, accountant.affordable(section.budget_epsilon))


def spent_by(section: PrivacySection, iteration: int, releases: int) -> int:
    """How often at most one client was exposed, by a job's header: every iteration that began may have had its report,
    even if it came to nothing; sums are out once they were aggregated. A device whose report was refused, and that
    began anew in the same iteration, has sent more than servers can tell from this: it counts them itself."""
    return iteration if section.mechanism in LOCAL else releases


def statement(exposure: Exposure, spent: int) -> PrivacyStatement:
    """What holds after ``spent`` releases (local mechanisms: reports of the client that sent the most), and at the
    job's end."""
    section, accountant = exposure.section, accountant_of(exposure)
    now, end, exhausted = None, None, tuple[str, ...]()
    if accountant is not None:
        last = last_release(exposure)
        if section.mechanism in LOCAL and spent > last:
            exhausted, spent = (_EXHAUSTED.format(last),), last
        last = max(last, spent)
        now, end = _finite(accountant.running(spent, last)), _finite(accountant.epsilon(last))
    return PrivacyStatement(
        section.mechanism,
        _adversary(exposure),
        _unit(section),
        now,
        end,
        section.budget_delta,
        section.budget_epsilon,
        accountant.kind if accountant is not None else "",
        accountant is not None and exposure.rate < 1.0,
        (*_warnings(exposure, accountant, end), *exhausted),
    )


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def _adversary(exposure: Exposure) -> str:
    mechanism = exposure.section.mechanism
    if mechanism == "none":
        return "nobody"
    if mechanism in LOCAL:
        return "everybody, the servers included"
    if mechanism == "central_gaussian":
        seen = "each sum before its noise" if exposure.masked else "every update"
        unseen = ", and not who or how many took part" if exposure.rate < 1.0 else ""
        return f"whoever sees models{unseen}; the servers see {seen} and are trusted"
    honest = exposure.noise.honest if exposure.noise is not None else 1
    return f"everybody, the servers included, while {honest} of the devices in each sum are honest"


def _unit(section: PrivacySection) -> str:
    if section.mechanism == "none":
        return "nobody"
    if section.mechanism in LOCAL:
        what = "signs" if section.mechanism == "signds" else f"clipped {section.protects}"
        return f"client, whatever its {what} in all its reports"
    return "client, with all that it adds or with zeros in its place (that it takes part may show)"


def _warnings(exposure: Exposure, accountant: Accountant | None, end: float | None) -> list[str]:
    section, found = exposure.section, list(exposure.advice)
    if exposure.simulated and accountant is not None:
        found.append(
            "not private: a simulation's randomness is seeded, and whoever knows the seed can take it off"
        )
    if accountant is None:
        return found
    one = accountant.epsilon(1)
    if one > MEANINGLESS:
        what = "report" if section.mechanism in LOCAL else "iteration"
        found.append(f"no meaningful privacy: one {what} alone has epsilon {one:.4g}")
    elif end is None or end > MEANINGLESS:
        cost = "no bound" if end is None else f"epsilon {end:.4g}"
        found.append(f"no meaningful privacy at the end: {cost}; set privacy.budget_epsilon or more noise")
    if exposure.population is not None and section.budget_delta * exposure.population >= 1.0:
        found.append(
            f"delta {section.budget_delta:g} is not below 1/{exposure.population}: it may expose one client entirely"
        )
    elif section.budget_delta > _LARGEST_DELTA:
        found.append(
            f"delta {section.budget_delta:g} is the chance that epsilon does not hold: set privacy.budget_delta below "
            "one over the number of clients"
        )
    if section.accountant not in ("auto", accountant.kind) and section.mechanism not in LOCAL:
        found.append(
            f"counted by {accountant.kind}: no privacy loss distribution is known for {section.mechanism}"
        )
    return found
