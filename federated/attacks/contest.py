"""All attacks on all mechanisms, as rows of one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from federated.attacks.audit import Claim, audit
from federated.attacks.effects import claimed, median_norm, protection_of
from federated.attacks.inversion import Client, Inversion, Trials, draw_trials, invert
from federated.attacks.lineup import Around, Contender, label_of, masked, plain, protected
from federated.attacks.membership import Federations, Membership, attack
from federated.attacks.rates import most_advantage, most_identified, most_true
from federated.attacks.setting import Setting
from federated.attacks.worst_cases import audit_protection
from federated.data import Federation
from federated.device import INITIAL, LocalTraining, device_generator
from federated.models import Model
from federated.privacy.budget import pure_epsilon_of
from federated.privacy.section import PrivacySection, SecureAggregationSection

Attack = Literal["inversion", "membership", "audit"]

ATTACKS: Final[tuple[Attack, ...]] = ("inversion", "membership", "audit")
_PURE: Final = frozenset({"local_laplace", "signds"})
_SPARE: Final = 100
"""Rows beyond the candidates that an adversary needs to know what updates look like."""


class TooFewRows(ValueError):
    """The data have fewer rows than candidates and others need."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played. ``sections`` are the mechanisms, with a clip at the median norm of updates unless ``keep_clips``;
    ``schemes`` are compressions; ``secure`` is also what sums are quantised by. ``clients`` make a cohort, ``audited``
    is how many reports of each input an audit takes. ``seed`` decides all that is drawn."""

    sections: tuple[PrivacySection, ...]
    attacks: tuple[Attack, ...] = ATTACKS
    schemes: tuple[str, ...] = ()
    secure: SecureAggregationSection = field(default_factory=SecureAggregationSection)
    keep_clips: bool = False
    victims: tuple[Client, ...] = (Client(1), Client(8))
    trials: int = 200
    clients: int = 10
    delta: float = 1e-5
    federations: Federations = field(default_factory=Federations)
    audited: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1 or self.clients < 2 or self.audited < 8 or not self.victims:
            raise ValueError("at least 1 trial, 2 clients in a cohort, 8 audited reports and a victim")


@dataclass(frozen=True, slots=True)
class InversionRow:
    """One mechanism in the game of naming. ``most`` is the largest rate of naming the record at once that the claim
    leaves; 1 where nothing is claimed."""

    line: Contender
    client: Client
    found: Inversion
    most: float


@dataclass(frozen=True, slots=True)
class MembershipRow:
    """One mechanism in the membership game, at ε of all iterations. ``least_epsilon`` is what the attack alone proves
    that ε is at least."""

    line: Contender
    found: Membership
    most_tpr_at_1: float
    most_advantage: float
    least_epsilon: float


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A mechanism's noise on its worst inputs: ε that is claimed of one report or release, and the least that it can
    be."""

    mechanism: str
    label: str
    epsilon: float
    delta: float
    least_epsilon: float
    passed: bool


Row = InversionRow | MembershipRow | AuditRow


def make_setting(
    federation: Federation, model: Model, training: LocalTraining, candidates: int, seed: int
) -> Setting:
    """A setting with ``candidates`` rows of the federation, the adversary's own knowledge from all others, and the
    model as the job's ``seed`` begins it. Raises TooFewRows."""
    rows = len(federation.labels)
    if rows + len(federation.test_labels) < candidates + _SPARE or rows < candidates:
        raise TooFewRows(
            f"{federation.name} has {rows:,} rows: {candidates:,} candidates and {_SPARE} others are too many"
        )
    order = np.random.default_rng([seed, 0]).permutation(rows)
    chosen, rest = order[:candidates], order[candidates:]
    return Setting(
        model,
        model.initial(device_generator(seed, 0, 0, INITIAL)),
        training,
        seed,
        federation.inputs[chosen],
        federation.labels[chosen],
        np.concatenate([federation.inputs[rest], federation.test_inputs]),
        np.concatenate([federation.labels[rest], federation.test_labels]),
    )


def games(setting: Setting, plan: Plan) -> list[Callable[[], Row]]:
    """What is to be played, in the order of the table; each call takes seconds. Raises TooFewRows."""
    records = max(client.records for client in plan.victims)
    needed = plan.clients * plan.federations.records if "membership" in plan.attacks else 0
    if max(records, needed) > setting.others:
        raise TooFewRows(
            f"{setting.others:,} rows are nobody's, and {plan.clients} clients of {plan.federations.records} records, "
            f"none of whom share a row, need {max(records, needed):,}"
        )
    found: list[Callable[[], Row]] = []
    if "inversion" in plan.attacks:
        for place, client in enumerate(plan.victims):
            found += _inversions(setting, plan, client, np.random.default_rng([plan.seed, 1, place]))
    if "membership" in plan.attacks:
        found += _memberships(setting, plan)
    if "audit" in plan.attacks:
        for place, section in enumerate(plan.sections):
            found.append(_later(_audited, section, plan, np.random.default_rng([plan.seed, 3, place])))
    return found


def _inversions(
    setting: Setting, plan: Plan, client: Client, generator: np.random.Generator
) -> Iterator[Callable[[], Row]]:
    trials = draw_trials(setting, client, plan.trials, plan.clients, generator)
    for line in _lines(Around(setting, plan.clients, 1, trials.alike), plan):
        yield _later(_inverted, line, client, trials, generator)


def _inverted(line: Contender, client: Client, trials: Trials, generator: np.random.Generator) -> Row:
    found = invert(line.view, trials, generator)
    return InversionRow(line, client, found, most_identified(line.epsilon, line.delta, found.candidates))


def _memberships(setting: Setting, plan: Plan) -> Iterator[Callable[[], Row]]:
    federations = replace(plan.federations, clients=plan.clients)
    generator = np.random.default_rng([plan.seed, 2])
    alike = setting.strangers(setting.draw(generator, 200, federations.records))
    around = Around(setting, plan.clients, federations.rounds, alike)
    for place, line in enumerate(_lines(around, plan)):
        if line.membership:
            yield _later(_told, setting, line, federations, np.random.default_rng([plan.seed, 2, place]))


def _told(setting: Setting, line: Contender, federations: Federations, generator: np.random.Generator) -> Row:
    found = attack(setting, line.view, federations, generator)
    epsilon, delta = line.epsilon_at_end, line.delta
    least = audit(found.members, found.others, Claim(epsilon, delta, "any"), 0.95).least_epsilon
    return MembershipRow(line, found, most_true(0.01, epsilon, delta), most_advantage(epsilon, delta), least)


def _audited(section: PrivacySection, plan: Plan, generator: np.random.Generator) -> Row:
    section = replace(section, budget_delta=plan.delta)
    protection = protection_of(section, plan.clients, plan.secure.step_bits)
    if section.mechanism in _PURE:
        claim = Claim(pure_epsilon_of(section), 0.0, "any")
    else:
        # An audited sum has a coordinate for each release.
        epsilon = claimed(section, plan.clients, plan.secure.step_bits, plan.audited, 1)
        claim = Claim(epsilon, plan.delta, "gaussian")
    found = audit_protection(protection, claim, plan.audited, generator)
    return AuditRow(
        section.mechanism, label_of(section), claim.epsilon, claim.delta, found.least_epsilon, found.passed
    )


def _lines(around: Around, plan: Plan) -> list[Contender]:
    lines = list(plain(around, plan.schemes))
    if plan.secure.protocol != "none":
        lines += masked(around, plan.secure)
    for section in plan.sections:
        clip = section.clip
        if not plan.keep_clips:
            clip = median_norm(around.alike, "l1" if section.mechanism == "local_laplace" else "l2")
        lines += protected(around, replace(section, clip=clip, budget_delta=plan.delta), plan.secure)
    return lines


def _later(play: Callable[..., Row], *arguments: object) -> Callable[[], Row]:
    return lambda: play(*arguments)


def finite(value: float) -> float | None:
    """``value``, or None where it is infinite, as JSON and tables want it."""
    return value if math.isfinite(value) else None
