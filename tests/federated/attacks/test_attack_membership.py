"""Was this record there? Shadow runs, and what they can tell under each mechanism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.attacking import SECURE, lines, setting

from federated.attacks import membership
from federated.attacks.audit import Claim, audit
from federated.attacks.lineup import Around, Contender, masked, plain
from federated.attacks.membership import Federations, Membership, attack
from federated.attacks.rates import auc_of, most_true
from federated.device import LocalTraining
from federated.privacy.section import PrivacySection

WORLDS, ROUNDS, CLIENTS = 60, 3, 5


def told(line: Contender, records: int = 4, worlds: int = WORLDS, seed: int = 50) -> Membership:
    federations = Federations(worlds, ROUNDS, CLIENTS, records)
    return attack(setting(), line.view, federations, np.random.default_rng(seed))


def around() -> Around:
    generator = np.random.default_rng(51)
    return Around(setting(), CLIENTS, ROUNDS, setting().strangers(setting().draw(generator, 100, 4)))


@pytest.mark.parametrize(("records", "least"), [(1, 0.95), (4, 0.6)])
def test_plain_updates_tell_who_was_there(records: int, least: float) -> None:
    """Of 4 records three are not known, and the rows overlap."""
    (line,) = plain(around())
    assert told(line, records, 200).told.auc.low > least


def test_sums_tell_it_too() -> None:
    _, total, _ = masked(around(), SECURE)
    assert told(total, 1, 200).told.auc.low > 0.58


@pytest.mark.parametrize(
    ("section", "records"),
    [
        (PrivacySection(mechanism="local_gaussian", epsilon=0.1), 1),
        (PrivacySection(mechanism="local_laplace", epsilon=0.1), 4),
        (PrivacySection(mechanism="signds", sign_eps=0.1, magnitude_epsilon=0.1, sign_k=0.05), 1),
        (PrivacySection(mechanism="central_gaussian", noise_multiplier=50.0), 4),
    ],
    ids=lambda value: value.mechanism if isinstance(value, PrivacySection) else str(value),
)
def test_strong_mechanisms_leave_chance(section: PrivacySection, records: int) -> None:
    line = lines(section, CLIENTS, ROUNDS)[1 if section.mechanism == "central_gaussian" else 0]
    areas = [told(line, records, seed=seed).told.auc.value for seed in (52, 53, 54)]
    assert abs(float(np.mean(areas)) - 0.5) < 0.11  # 3.5 deviations of the mean of 3


def test_batches_of_worlds_are_alike() -> None:
    """Two batches of worlds without the record: whatever is drawn for a whole batch must not mark its scores."""
    _, total, _ = masked(around(), SECURE)
    federations, off = Federations(8, ROUNDS, CLIENTS, 4), []
    for seed in range(60, 72):
        generator = np.random.default_rng(seed)
        learner = membership._Learner(setting())
        assumed = membership._assume(setting(), learner, total.view, federations, generator)
        batches = [
            membership._ratios(setting(), learner, total.view, assumed, federations, 60, False, generator)
            for _ in range(2)
        ]
        off.append(auc_of(*batches) - 0.5)
    # Each has a standard deviation of .053; the mean square of 12 is beyond 2.2 times its mean in 1 of 100.
    assert float(np.mean(np.square(off))) < 2.2 * 0.053**2


def test_claims_hold_against_the_attack() -> None:
    (line,) = lines(PrivacySection(mechanism="local_gaussian", epsilon=1.0), CLIENTS, ROUNDS)
    found = told(line)
    assert found.told.tpr_at_1.low <= most_true(0.01, line.epsilon_at_end, line.delta)
    claim = Claim(line.epsilon_at_end, line.delta, "any")
    assert audit(found.members, found.others, claim).passed


def test_plain_reports_prove_a_large_epsilon() -> None:
    (line,) = plain(around())
    found = told(line, 1, 200)
    assert audit(found.members, found.others, Claim(0.5, 1e-5, "any")).least_epsilon > 1.0


def test_more_noise_tells_less() -> None:
    section = PrivacySection(mechanism="central_gaussian", clip=0.5)
    areas = []
    for noise in (0.01, 0.3, 30.0):
        _, reader, _ = lines(replace(section, noise_multiplier=noise), CLIENTS, ROUNDS)
        areas.append(told(reader, 1).told.auc.value)
    assert areas[0] > areas[1] > areas[2] - 0.05
    assert areas[0] > 0.7


def test_clients_learn_as_devices_do() -> None:
    rows = np.arange(12).reshape(3, 4)
    for training in (LocalTraining(steps=3, batch_size=0), LocalTraining(epochs=2, batch_size=0)):
        here = replace(setting(), training=training)
        starts = np.tile(here.start, (3, 1))
        learned = membership._Learner(here).learn(starts, here.more_inputs[rows], here.more_labels[rows])
        assert np.allclose(learned, here.strangers(rows), atol=1e-6)


def test_too_small_federations_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 worlds"):
        Federations(worlds=4)
