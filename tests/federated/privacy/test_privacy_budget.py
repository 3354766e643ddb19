"""Budgets of devices and of jobs, and what a job says of its privacy."""

import json
from dataclasses import replace
from typing import Any

import pytest

from federated.job import FederatedJob, load_job
from federated.job_sections import JobRefused
from federated.layout import Field, Layout
from federated.privacy.accounting import Accountant, LaplaceReport
from federated.privacy.accounting_statement import (
    BudgetRefused,
    Exposure,
    accountant_of,
    last_release,
    most_releases,
    spent_by,
    statement,
)
from federated.privacy.budget import affordable_reports, report_epsilon
from federated.privacy.calibration import DistributedNoise
from federated.privacy.noised import DistributedNoise as NoiseOfDevices
from federated.privacy.section import Mechanism, PrivacySection
from federated.secagg.graph import Degree, smallest_group
from federated.secagg.settings import make_plan

NOISE = DistributedNoise.of(
    PrivacySection(mechanism="distributed_gaussian", noise_multiplier=4.0),
    dimension=1000,
    step_bits=16,
    honest=70,
)
LOCALS: list[Mechanism] = ["local_gaussian", "local_laplace", "signds"]
SUMS: list[Mechanism] = ["central_gaussian", "distributed_gaussian", "distributed_skellam"]


def section(mechanism: Mechanism, **options: Any) -> PrivacySection:
    return PrivacySection(mechanism=mechanism, **{"noise_multiplier": 4.0, "budget_epsilon": 8.0, **options})


def exposed(mechanism: Mechanism, iterations: int = 100, **options: Any) -> Exposure:
    return Exposure(section(mechanism, **options), iterations, noise=NOISE)


@pytest.mark.parametrize("mechanism", LOCALS)
def test_a_device_affords_as_many_reports_as_its_budget_holds(mechanism: Mechanism) -> None:
    mine = section(mechanism, sign_eps=0.5, magnitude_epsilon=0.25)
    most = affordable_reports(mine)
    assert most is not None
    assert most > 0
    assert report_epsilon(mine, most) <= 8.0 < report_epsilon(mine, most + 1)
    assert affordable_reports(section(mechanism, budget_epsilon=0.0)) is None
    assert report_epsilon(mine, 0) == 0.0


def test_signds_pays_for_its_magnitude_too() -> None:
    mine = section("signds", budget_epsilon=101.0, sign_eps=100.0, magnitude_epsilon=1.0)
    assert affordable_reports(mine) == 1
    assert (
        affordable_reports(section("signds", budget_epsilon=100.5, sign_eps=100.0, magnitude_epsilon=1.0))
        == 0
    )
    assert report_epsilon(mine, 3) == pytest.approx(303.0, rel=1e-3)


def test_a_device_never_counts_less_than_the_accountants() -> None:
    for reports in (1, 4, 30):
        mine = section("local_laplace", epsilon=0.5)
        counted = Accountant(LaplaceReport(0.5), "pld", mine.budget_delta).epsilon(reports)
        assert report_epsilon(mine, reports) >= counted


@pytest.mark.parametrize("mechanism", SUMS)
def test_a_sum_has_no_budget_at_each_device(mechanism: Mechanism) -> None:
    assert affordable_reports(section(mechanism)) is None
    with pytest.raises(ValueError, match="protects the sum"):
        report_epsilon(section(mechanism), 1)


@pytest.mark.parametrize("mechanism", SUMS)
def test_a_job_affords_as_many_sums_as_its_budget_holds(mechanism: Mechanism) -> None:
    exposure = exposed(mechanism)
    most, accountant = most_releases(exposure), accountant_of(exposure)
    assert accountant is not None
    assert accountant.epsilon(most) <= 8.0 < accountant.epsilon(most + 1)
    assert last_release(exposure) == most
    assert last_release(exposed(mechanism, most - 1)) == most - 1
    assert most_releases(exposed(mechanism, budget_epsilon=0.0)) == 0
    with pytest.raises(BudgetRefused, match="one iteration costs epsilon"):
        most_releases(exposed(mechanism, budget_epsilon=0.01))


def test_the_budget_of_local_reports_is_no_limit_of_the_job_but_must_hold_one() -> None:
    assert most_releases(exposed("local_gaussian")) == 0
    with pytest.raises(BudgetRefused, match="one report costs epsilon 1"):
        most_releases(exposed("local_gaussian", budget_epsilon=0.5))


def test_sampling_makes_a_budget_last_longer() -> None:
    whole = Exposure(section("central_gaussian", noise_multiplier=1.0, accountant="rdp"), 10_000)
    drawn = Exposure(whole.section, 10_000, rate=0.02)
    assert most_releases(drawn) > 100 * most_releases(whole)
    assert statement(drawn, 1).amplified
    assert not statement(whole, 1).amplified


@pytest.mark.parametrize("mechanism", [*LOCALS, *SUMS])
def test_a_statement_says_what_is_spent_and_what_will_be(mechanism: Mechanism) -> None:
    exposure = exposed(mechanism, sign_eps=0.5, magnitude_epsilon=0.25)
    last = last_release(exposure)
    told = [statement(exposure, spent) for spent in (0, 2, last)]
    costs = [said.epsilon_now for said in told]
    assert costs[0] == 0.0
    assert costs[1] is not None
    assert 0.0 < costs[1] < 8.0
    assert costs[2] == told[0].epsilon_at_end
    assert costs[2] is not None
    assert costs[1] < costs[2] <= 8.0
    servers_are_seen_through = mechanism == "central_gaussian"
    assert ("trusted" in told[0].adversary) == servers_are_seen_through
    assert ("servers included" in told[0].adversary) != servers_are_seen_through
    assert json.loads(json.dumps(told[1].as_json()))["epsilon_now"] == costs[1]
    assert f"epsilon {costs[1]:.4g} of 8" in told[1].lines()[0]


def test_no_mechanism_promises_nothing() -> None:
    said = statement(Exposure(PrivacySection(), 10, simulated=True), 5)
    assert (said.epsilon_now, said.epsilon_at_end, said.warnings) == (None, None, ())
    assert said.lines() == ["privacy: none (none)"]


def test_warnings_say_what_not_to_rely_on() -> None:
    def warned(exposure: Exposure) -> str:
        return " | ".join(statement(exposure, 0).warnings)

    default = Exposure(PrivacySection(mechanism="signds"), 10)
    assert warned(default) == "no meaningful privacy: one report alone has epsilon 101"
    assert "not private: a simulation's randomness is seeded" in warned(
        Exposure(default.section, 10, simulated=True)
    )
    assert "at the end: epsilon" in warned(Exposure(PrivacySection(mechanism="local_gaussian"), 1000))
    assert warned(Exposure(PrivacySection(mechanism="local_gaussian"), 1000, population=10**6)).count(
        "1/1000000"
    )
    assert "counted by rdp" in warned(exposed("distributed_skellam", accountant="pld"))
    assert warned(exposed("distributed_skellam")) == ""
    assert warned(Exposure(section("central_gaussian", accountant="rdp"), 100, population=1000)) == ""
    assert warned(exposed("distributed_skellam", accountant="rdp")) == ""


def test_what_servers_see_of_central_noise_is_said() -> None:
    plain = Exposure(section("central_gaussian"), 10)
    assert "the servers see every update" in statement(plain, 0).adversary
    assert "the servers see each sum before its noise" in statement(replace(plain, masked=True), 0).adversary


def test_what_a_header_tells_of_a_clients_exposure() -> None:
    """A report that came too late was seen all the same; a sum that never was is not out."""
    assert spent_by(section("local_gaussian"), 7, 3) == 7
    assert spent_by(section("central_gaussian"), 7, 3) == 3


def test_the_cost_of_distributed_noise_needs_the_noise() -> None:
    with pytest.raises(ValueError, match="depends on the noise"):
        statement(Exposure(section("distributed_gaussian"), 10), 0)


def job(privacy: dict[str, Any], **sections: dict[str, Any]) -> FederatedJob:
    tables: dict[str, dict[str, Any]] = {
        "rounds": {"start_fl_job_threshold": 20, "fl_iteration_num": 1000},
        "data": {"clients": 1000, "features": 64, "classes": 10},
        "privacy": privacy,
    }
    return load_job(
        {title: tables.get(title, {}) | sections.get(title, {}) for title in {**tables, **sections}}
    )


CENTRAL = {
    "mechanism": "central_gaussian",
    "noise_multiplier": 1.0,
    "accountant": "rdp",
    "budget_epsilon": 8.0,
}


def test_a_job_gives_its_rounds_the_budget_and_the_draw() -> None:
    drawn = job(CENTRAL, selection={"name": "poisson", "rate": 0.05})
    rounds = drawn.make_rounds(500)
    assert rounds.sampled == 1000
    assert rounds.most_releases == most_releases(drawn.exposure(500)) > 100
    assert (rounds.thresholds.starts_floor, rounds.thresholds.starts_close) == (20, 1000)
    everyone = job({**CENTRAL, "noise_multiplier": 4.0})
    assert everyone.make_rounds(500).sampled == 0
    # First-come clients earn nothing, whatever their share.
    assert everyone.exposure(500).rate == 1.0
    assert job(CENTRAL, selection={"name": "random", "share": 0.05}).exposure(500).rate == 1.0


@pytest.mark.parametrize("mechanism", LOCALS)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_what_is_said_of_reports_is_within_the_budget_that_devices_keep(
    mechanism: Mechanism, accountant: str
) -> None:
    mine = exposed(mechanism, 1000, epsilon=0.5, sign_eps=0.3, magnitude_epsilon=0.2, accountant=accountant)
    most = affordable_reports(mine.section)
    assert most is not None
    found = statement(mine, most)
    assert found.epsilon_now == found.epsilon_at_end
    assert found.epsilon_now is not None
    assert found.epsilon_now <= report_epsilon(mine.section, most) <= 8.0
    assert not any("counted by" in warning for warning in found.warnings)


def test_a_job_whose_devices_have_no_budget_left_says_what_it_waits_for() -> None:
    """Nobody asks any more, so no window of it ever opens or ends."""
    mine = exposed("local_gaussian", epsilon=2.0, budget_epsilon=4.0)
    most = affordable_reports(mine.section)
    assert most == 3
    for spent, told in ((1, 0), (most, 0), (most + 1, 1), (50, 1)):
        found = statement(mine, spent)
        assert sum("first 3 iterations have spent" in warning for warning in found.warnings) == told
        assert found.epsilon_now is not None
        assert found.epsilon_now <= 4.0


def test_a_delta_that_makes_every_epsilon_small_is_warned_of() -> None:
    for delta, told in ((1e-5, False), (0.5, True)):
        found = statement(exposed("central_gaussian", budget_delta=delta), 0)
        assert any("chance that epsilon does not hold" in warning for warning in found.warnings) == told


def test_amplification_is_that_of_a_valid_iteration() -> None:
    """An iteration of too few publishes nothing: whoever sees a version knows that enough were drawn."""
    draw = {"selection": {"name": "poisson", "rate": 0.002}}
    strict = job(CENTRAL, rounds={"start_fl_job_threshold": 2}, **draw).exposure(500)
    valid = 1.0 - 0.998**1000 - 1000 * 0.002 * 0.998**999
    assert strict.rate == pytest.approx(0.002 * (1.0 - 0.998**999) / valid, rel=1e-9)
    assert strict.rate > 1.4 * 0.002
    told = statement(strict, 0)
    assert "not who or how many took part" in told.adversary
    assert any("lower rounds.start_fl_job_threshold" in warning for warning in told.warnings)
    lax = job(
        CENTRAL, rounds={"start_fl_job_threshold": 20}, selection={"name": "poisson", "rate": 0.05}
    ).exposure(500)
    assert lax.rate == pytest.approx(0.05, rel=1e-5)
    assert not lax.advice


def test_noise_is_counted_over_what_is_trained() -> None:
    """Statistics get no noise, and the norm that rounding may add to is that of what does."""
    layout = Layout((Field("a", (60,)), Field("mean", (9_000,), kind="statistic")))
    made = job(
        {"mechanism": "distributed_gaussian", "statistics": "keep"},
        rounds={"start_fl_job_threshold": 100},
        secure_aggregation={"protocol": "secagg", "dropouts": 0.15, "step_bits": 3},
    )
    protection = made.make_protection(layout)
    assert isinstance(protection, NoiseOfDevices)
    assert layout.trained == 60
    assert made.exposure(layout.trained).noise == protection.noise(layout)


def test_distributed_noise_is_counted_for_the_fewest_honest_survivors() -> None:
    made = job(
        {"mechanism": "distributed_gaussian", "noise_multiplier": 4.0, "budget_epsilon": 8.0},
        rounds={"start_fl_job_threshold": 100},
        secure_aggregation={"protocol": "secagg", "dropouts": 0.15},
    )
    exposure = made.exposure(500)
    assert exposure.noise is not None
    assert exposure.noise.honest == 70  # 80 survivors, of whom 10 may collude
    assert made.make_rounds(500).most_releases > 10
    costs = [
        accountant.epsilon(10) for d in (500, 5_000_000) if (accountant := accountant_of(made.exposure(d)))
    ]
    assert costs[0] <= costs[1]


def test_noise_is_enough_in_the_part_of_a_cohort_that_a_lying_server_may_learn() -> None:
    """In malicious secagg+ devices ask their own neighbours alone who survived; elsewhere there is one sum."""
    found = {
        (protocol, malicious): job(
            {"mechanism": "distributed_gaussian"},
            rounds={"start_fl_job_threshold": 100},
            secure_aggregation={"protocol": protocol, "malicious": malicious, "dropouts": 0.15},
        )
        for protocol in ("secagg", "secagg+")
        for malicious in (False, True)
    }
    honest = {}
    for kind, made in found.items():
        noise = made.exposure(500).noise
        assert noise is not None
        assert made.make_protection().around.honest == noise.honest  # type: ignore[attr-defined]
        honest[kind] = noise.honest
    plan = make_plan(found["secagg+", True].secure_aggregation, 100, 500)
    part = smallest_group(100, 0.1, Degree(plan.degree, plan.threshold))
    assert 30 < part < 70
    assert honest == {
        ("secagg", False): 70,
        ("secagg", True): 70,
        ("secagg+", False): 70,
        ("secagg+", True): part,
    }


@pytest.mark.parametrize(
    ("privacy", "sections", "why"),
    [
        ({**CENTRAL, "budget_epsilon": 0.1}, {}, "one iteration costs"),
        ({"mechanism": "local_gaussian", "epsilon": 2.0, "budget_epsilon": 1.0}, {}, "one report costs"),
        (CENTRAL, {"rounds": {"most_releases": 5}}, "not set by hand"),
        (CENTRAL, {"rounds": {"sampled": 30}}, "not set by hand"),
        (CENTRAL, {"selection": {"name": "poisson", "rate": 0.01}}, "draws on average"),
        (
            CENTRAL,
            {"selection": {"name": "poisson", "rate": 0.05}, "rounds": {"mode": "buffered"}},
            "mode sync",
        ),
        (CENTRAL, {"selection": {"name": "poisson+random", "rate": 0.05}}, "stands alone"),
        ({"mechanism": "none"}, {"selection": {"name": "poisson", "rate": 0.05}}, "accounting"),
    ],
)
def test_jobs_that_cannot_keep_their_budget_do_not_start(
    privacy: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(JobRefused, match=why):
        job(privacy, **sections).make_rounds(500)


def test_poisson_needs_to_know_the_population() -> None:
    with pytest.raises(JobRefused, match=r"set data\.clients"):
        load_job(
            {"rounds": {"start_fl_job_threshold": 2}, "selection": {"name": "poisson"}, "privacy": CENTRAL}
        )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_next_to_no_noise_promises_nothing_in_words_and_numbers(accountant: str, rate: float) -> None:
    bare = section("central_gaussian", noise_multiplier=1e-200, budget_epsilon=0.0, accountant=accountant)
    said = statement(Exposure(bare, 10, rate=rate), 1)
    assert (said.epsilon_now, said.epsilon_at_end) == (None, None)
    assert "no meaningful privacy: one iteration alone has epsilon inf" in said.warnings
    assert json.loads(json.dumps(said.as_json(), allow_nan=False))["epsilon_now"] is None
    little = Exposure(replace(bare, noise_multiplier=1e-3), 10, rate=rate)
    found = statement(little, 1).epsilon_now
    assert found is None or found > 1e5
