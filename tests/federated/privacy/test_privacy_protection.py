"""What devices send and servers add under each mechanism: sensitivities, divisors, kept secrets, BatchNorm's rule."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import federated
from federated.device import Update
from federated.job import FederatedJob, load_job
from federated.job_sections import JobRefused
from federated.layout import Field, Layout
from federated.privacy.clipping import NotFinite
from federated.privacy.gaussian import grid_of, sigma_of
from federated.privacy.mechanisms import make_protection
from federated.privacy.noised import CentralNoise, Circumstances, DistributedNoise, LocalNoise
from federated.privacy.protection import Protection, Unprotected, report_update
from federated.privacy.randomness import Randomness, SeededRandomness
from federated.privacy.section import DISTRIBUTED, PrivacySection
from federated.privacy.server import apply_sum, first_state, instructions_of
from federated.strategies import make_strategy, sum_for
from federated.sums import SCALE

PLAIN = Layout((Field("a", (40, 20)), Field("b", (40,))))
NORMED = Layout(
    (
        Field("a", (30, 5)),
        Field("norm.running_mean", (5,), kind="statistic"),
        Field("norm.running_var", (5,), kind="statistic"),
        Field("norm.num_batches_tracked", (), "int64", "counter"),
        Field("ids", (3,), "int64", "constant"),
        Field("b", (5,)),
    )
)
NOISY = ["local_gaussian", "local_laplace", "central_gaussian", "distributed_gaussian", "distributed_skellam"]


def seeded(seed: int) -> SeededRandomness:
    return SeededRandomness(np.random.default_rng(seed))


def protection(mechanism: str, divisor: float = 4.0, honest: int = 4, **options: Any) -> Protection:
    section = PrivacySection(mechanism=mechanism, **options)  # type: ignore[arg-type]
    around = (
        Circumstances(divisor, honest, 10) if mechanism in DISTRIBUTED else Circumstances(divisor, honest)
    )
    return make_protection(section, around)


def some_rows(layout: Layout, count: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(5).normal(size=(count, layout.size))).astype(np.float32)


def test_nothing_is_changed_without_a_mechanism() -> None:
    update = Update({"difference": some_rows(PLAIN, 1)[0]}, 17, 5, 0.25)
    made = make_protection(PrivacySection())
    assert isinstance(made, Unprotected)
    assert report_update(made, update, PLAIN, seeded(1), np.zeros(PLAIN.size, np.float32)) is update


@pytest.mark.parametrize("mechanism", NOISY)
def test_a_report_tells_neither_loss_nor_counts(mechanism: str) -> None:
    update = Update({"difference": some_rows(PLAIN, 1)[0]}, 17, 5, 0.25)
    sent = report_update(protection(mechanism), update, PLAIN, seeded(1), np.zeros(PLAIN.size, np.float32))
    assert (sent.examples, sent.steps, sent.loss, sent.bit) == (1, 1, 0.0, None)


@pytest.mark.parametrize("mechanism", NOISY)
@pytest.mark.parametrize("layout", [PLAIN, NORMED], ids=["plain", "normed"])
def test_reports_together_are_those_one_by_one(mechanism: str, layout: Layout) -> None:
    made, rows = protection(mechanism, statistics="keep"), some_rows(layout, 9)
    start = some_rows(layout, 1)[0]
    together = made.report({"difference": rows}, layout, [seeded(n) for n in range(9)], start)
    for place in range(9):
        update = Update({"difference": rows[place]}, 3, 3, 1.0)
        alone = report_update(made, update, layout, seeded(place), start)
        assert alone.vectors["difference"].tobytes() == together.vectors["difference"][place].tobytes()


def test_local_noise_is_for_any_two_clipped_vectors() -> None:
    """Δ = 2C: two reports of opposite directions must be as alike as ε says, which noise for Δ = C would not do."""
    gaussian = protection("local_gaussian", clip=3.0, epsilon=2.0, delta=1e-6)
    laplace = protection("local_laplace", clip=3.0, epsilon=2.0)
    assert isinstance(gaussian, LocalNoise)
    assert isinstance(laplace, LocalNoise)
    assert gaussian.scale == pytest.approx(6.0 * 2.230476, rel=1e-6)
    assert laplace.scale == 3.0
    # Measured, too, and on the clipped vector: not on the one that was learned.
    layout = Layout((Field("a", (40_000,)),))
    far = np.zeros((1, layout.size), np.float32)
    far[0, 0] = 1e6
    for made, law in ((gaussian, stats.norm(scale=gaussian.scale)), (laplace, stats.laplace(scale=3.0))):
        found = made.report({"difference": far}, layout, [seeded(3)], np.zeros(layout.size, np.float32))
        assert found.clipped is not None
        assert found.clipped.tolist() == [True]
        row = found.vectors["difference"][0]
        assert stats.kstest(row[1:], law.cdf).pvalue > 1e-9
        assert abs(float(row[0]) - 3.0) < 40.0 * made.scale
        cells = row.astype(np.float64) / grid_of(made.scale)
        assert (cells == np.rint(cells)).all()


def test_of_weights_the_clip_holds_for_start_and_difference_together() -> None:
    made = protection("local_gaussian", clip=100.0, epsilon=900.0, delta=0.5, protects="weights")
    small = Layout((Field("a", (6,)),))
    start, rows = 1e3 * some_rows(small, 2)[1], 1e3 * some_rows(small, 1)
    found = made.report({"difference": rows}, small, [seeded(1)], start).vectors["difference"][0]
    whole = start + rows[0]
    assert isinstance(made, LocalNoise)
    np.testing.assert_allclose(start + found, 100.0 * whole / np.linalg.norm(whole), atol=6.0 * made.scale)
    assert made.scale < 10.0


@pytest.mark.parametrize("mechanism", NOISY)
def test_what_diverged_is_refused(mechanism: str) -> None:
    rows = some_rows(PLAIN, 2)
    rows[1, 7] = np.nan
    with pytest.raises(NotFinite):
        protection(mechanism).report(
            {"difference": rows}, PLAIN, [seeded(1), seeded(2)], np.zeros(PLAIN.size, np.float32)
        )


@pytest.mark.parametrize("mechanism", NOISY)
def test_statistics_and_counters_are_refused_or_kept_by_the_server(mechanism: str) -> None:
    start = np.abs(some_rows(NORMED, 1)[0])
    trained, rows = NORMED.mask("weight"), some_rows(NORMED, 4)
    with pytest.raises(ValueError, match="statistics"):
        first_state(make_strategy("fedavg"), protection(mechanism), NORMED, start)
    with pytest.raises(ValueError, match="statistics"):
        protection(mechanism).report({"difference": rows}, NORMED, [seeded(1)] * 4, start)
    made = protection(mechanism, statistics="keep", noise_multiplier=3.0)
    found = made.report({"difference": rows}, NORMED, [seeded(n) for n in range(4)], start)
    assert not found.vectors["difference"][:, ~trained].any()
    assert found.vectors["difference"][:, trained].any()
    strategy = make_strategy("fedavg", max_examples=1)
    state, total = first_state(strategy, made, NORMED, start), sum_for(strategy, NORMED, 4)
    for row in found.vectors["difference"]:
        total.add(strategy.contribution(NORMED, Update({"difference": row}, 1, 1, 0.0)))
    after, _ = apply_sum(strategy, made, state, total, seeded(9))
    np.testing.assert_array_equal(after.weights[~trained], start[~trained])
    assert (after.weights[trained] != start[trained]).any()


class TestCentral:
    """The server adds noise to the integer sum and divides by a fixed number."""

    def total(self, made: Protection, rows: np.ndarray, bits: list[int] | None = None) -> Any:
        strategy = make_strategy("fedavg", max_examples=1)
        total = sum_for(strategy, PLAIN, 100)
        for place, row in enumerate(made.admit({"difference": rows}, PLAIN)["difference"]):
            bit = None if bits is None else bits[place]
            total.add(strategy.contribution(PLAIN, Update({"difference": row}, 1, 1, 0.0, bit)))
        return total

    def test_noise_has_the_deviation_of_the_multiplier_times_the_clip(self) -> None:
        made = protection("central_gaussian", clip=0.5, noise_multiplier=1.5)
        total = self.total(made, some_rows(PLAIN, 3))
        before = total.vectors["difference"].copy()
        noise = (made.release(total, PLAIN, seeded(4)).vectors["difference"] - before) / SCALE
        assert (total.vectors["difference"] == before).all()
        assert stats.kstest(noise, stats.norm(scale=0.75).cdf).pvalue > 1e-9
        again = (made.release(total, PLAIN, seeded(5)).vectors["difference"] - before) / SCALE
        assert (noise != again).any()

    @pytest.mark.parametrize("arrived", [1, 4, 9])
    def test_the_divisor_does_not_depend_on_who_came(self, arrived: int) -> None:
        made = protection("central_gaussian", clip=1.0, noise_multiplier=1e-9)
        rows = np.zeros((arrived, PLAIN.size), np.float32)
        rows[:, 0] = 0.5
        released = made.release(self.total(made, rows), PLAIN, seeded(1))
        assert released.mean()[0] == pytest.approx(arrived * 0.5 / 4.0, abs=1e-6)

    def test_a_sum_of_nobody_is_noise_over_the_divisor(self) -> None:
        made = protection("central_gaussian", clip=1.0)
        released = made.release(sum_for(make_strategy("fedavg", max_examples=1), PLAIN, 9), PLAIN, seeded(1))
        assert released.mean().std() == pytest.approx(0.25, rel=0.1)

    def test_one_client_moves_the_integer_sum_by_at_most_the_clip(self) -> None:
        """Also one that did not clip, and after rounding to the units of the sum."""
        made = protection("central_gaussian", clip=0.01)
        total = self.total(made, some_rows(PLAIN, 1, 1e3))
        assert math.hypot(*total.vectors["difference"].tolist()) / SCALE <= 0.01
        assert math.hypot(*total.vectors["difference"].tolist()) / SCALE > 0.0099

    def test_a_clip_that_rounding_may_exceed_is_refused(self) -> None:
        section, coarse = PrivacySection(mechanism="central_gaussian", clip=0.02), Circumstances(4, 4, 10)
        with pytest.raises(ValueError, match="step_bits"):
            make_protection(section, coarse).require_layout(PLAIN)
        # With half of it left, what is rounded keeps within the clip: under secure aggregation, too.
        made = make_protection(PrivacySection(mechanism="central_gaussian", clip=0.03), coarse)
        rows = np.full((1, PLAIN.size), 5.0, np.float32)
        found = made.report({"difference": rows}, PLAIN, [seeded(1)], rows[0]).vectors["difference"]
        assert np.linalg.norm(np.rint(found * 1024) / 1024) <= 0.03

    def test_a_hostile_body_without_a_norm_is_refused(self) -> None:
        rows = some_rows(PLAIN, 1)
        rows[0, 0] = np.inf
        with pytest.raises(NotFinite):
            protection("central_gaussian").admit({"difference": rows}, PLAIN)

    def test_an_adaptive_clip_travels_and_follows_the_noised_count(self) -> None:
        made = protection(
            "central_gaussian",
            divisor=100.0,
            clipping="adaptive",
            clip=2.0,
            clip_count_noise=10.0,
            clip_rate=0.2,
        )
        assert isinstance(made, CentralNoise)
        assert made.answers
        assert made.multiplier == pytest.approx(1.0 / math.sqrt(1.0 - 1.0 / 400.0))
        strategy = make_strategy("fedavg", max_examples=1)
        state = first_state(strategy, made, PLAIN, np.zeros(PLAIN.size, np.float32))
        assert instructions_of(strategy, made, state).threshold == 2.0
        rows = some_rows(PLAIN, 100, 1.0)
        rows *= np.linspace(0.5, 4.5, 100, dtype=np.float32)[:, None] / np.linalg.norm(rows, axis=1)[:, None]
        found = made.report({"difference": rows}, PLAIN, [seeded(1)] * 100, state.weights, 2.0)
        assert found.bits is not None
        assert found.bits.tolist() == [1] * 38 + [0] * 62
        assert np.linalg.norm(found.vectors["difference"], axis=1).max() <= 2.0
        clips = []
        total = self.total(made, found.vectors["difference"], found.bits.tolist())
        for seed in range(300):
            after, _ = apply_sum(strategy, made, state, total, seeded(seed))
            clips.append(after.scalars["clip"])
        # exp(−0.2 · (0.38 + N(0, 0.1) − 0.5)) · 2
        steps = np.log(np.array(clips) / 2.0)
        assert steps.mean() == pytest.approx(0.2 * 0.12, abs=0.006)
        assert steps.std() == pytest.approx(0.2 * 0.1, rel=0.2)
        assert after.to_bytes()  # the clip is in the stored state

    def test_noise_at_its_largest_leaves_no_integer_out(self) -> None:
        """The low bits of the integers that are added are even: else those of a sum would show."""
        made = protection("central_gaussian", clip=2.0**15, noise_multiplier=2.0)
        wide = Layout((Field("a", (40_000,)),))
        total = sum_for(make_strategy("fedavg", max_examples=1), wide, 4)
        noise = made.release(total, wide, seeded(1)).vectors["difference"]
        assert np.abs(noise).max() > 2**47
        for bit in range(3):
            assert np.count_nonzero(noise >> bit & 1) == pytest.approx(20_000, abs=600)

    def test_an_adaptive_clip_stops_where_its_noise_would_be_too_large(self) -> None:
        made = protection(
            "central_gaussian", clipping="adaptive", clip=0.5, noise_multiplier=100.0, clip_count_noise=1e4
        )
        scalars = made.first_scalars()
        total = self.total(made, some_rows(PLAIN, 3, 0.01), [0, 0, 0])
        for seed in range(60):
            scalars = made.follow(scalars, made.release(total, PLAIN, seeded(seed), scalars["clip"]))
            noise = made.release(total, PLAIN, seeded(seed), scalars["clip"]).vectors["difference"]
            assert np.abs(noise).max() < 2**49.5
        scalars["clip"] = 1e3
        released = made.release(total, PLAIN, seeded(1), 1.0)
        released.scalars["bit"] = -(2**60)
        assert made.follow(scalars, released)["clip"] == pytest.approx(2.0**16 / 100.0, rel=1e-4)

    def test_the_count_that_costs_everything_is_refused(self) -> None:
        with pytest.raises(ValueError, match="clip_count_noise"):
            protection("central_gaussian", clipping="adaptive", clip_count_noise=0.4)


class TestDistributed:
    """Whole steps within a norm; shares of noise that together are enough."""

    @pytest.mark.parametrize("mechanism", ["distributed_gaussian", "distributed_skellam"])
    def test_a_report_is_whole_steps_within_the_norm(self, mechanism: str) -> None:
        made = protection(mechanism, clip=0.5)
        assert isinstance(made, DistributedNoise)
        rows = some_rows(PLAIN, 20)
        found = made.report({"difference": rows}, PLAIN, [seeded(n) for n in range(20)], rows[0]).vectors[
            "difference"
        ]
        steps = found.astype(np.float64) * 1024
        assert (steps == np.rint(steps)).all()
        assert np.linalg.norm(steps, axis=1).max() <= made.noise(PLAIN).norm
        assert np.linalg.norm(found, axis=1).mean() == pytest.approx(0.5, rel=0.05)

    @pytest.mark.parametrize("mechanism", ["distributed_gaussian", "distributed_skellam"])
    def test_the_honest_devices_noise_adds_up_to_the_multiplier(self, mechanism: str) -> None:
        made = protection(mechanism, clip=0.5, noise_multiplier=2.0, honest=9)
        assert isinstance(made, DistributedNoise)
        layout = Layout((Field("a", (30_000,)), Field("n.running_mean", (50,), kind="statistic")))
        made = protection(mechanism, clip=0.5, noise_multiplier=2.0, honest=9, statistics="keep")
        assert isinstance(made, DistributedNoise)
        whole = np.arange(layout.size, dtype=np.int64)
        noise = sum(made.perturb(whole, layout, seeded(n)) - whole for n in range(9))
        assert isinstance(noise, np.ndarray)
        assert not noise[30_000:].any()
        assert noise.std() == pytest.approx(2.0 * made.noise(layout).norm, rel=0.03)

    def test_a_clip_of_too_many_steps_is_refused(self) -> None:
        with pytest.raises(ValueError, match="step_bits"):
            make_protection(
                PrivacySection(mechanism="distributed_gaussian", clip=2.0), Circumstances(4, 4, step_bits=24)
            )


class Loaded:
    """A source that gives the same words again: two devices with the same noise."""

    def words(self, count: int) -> Any:
        return np.full(count, 2**63 + 12345, np.uint64)


def test_noise_comes_from_the_randomness_that_is_given_alone() -> None:
    source: Randomness = Loaded()
    made, rows = protection("local_gaussian"), some_rows(PLAIN, 1)
    first = made.report({"difference": rows}, PLAIN, [source], rows[0]).vectors["difference"]
    second = made.report({"difference": rows}, PLAIN, [source], rows[0]).vectors["difference"]
    assert (first == second).all()


def job(privacy: dict[str, Any], **sections: dict[str, Any]) -> Any:
    tables: dict[str, Any] = {
        "rounds": {"start_fl_job_threshold": 10},
        "data": {"features": 6, "classes": 3, "clients": 100},
        "privacy": privacy,
    }
    for title, values in sections.items():
        tables[title] = {**tables.get(title, {}), **values}
    return load_job(tables)


ADAPTIVE = {"mechanism": "central_gaussian", "clipping": "adaptive"}
MASKED = {"secure_aggregation": {"protocol": "secagg"}}


@pytest.mark.parametrize(
    ("privacy", "sections", "reason"),
    [
        ({"mechanism": "distributed_gaussian"}, {}, "noise is too small to protect it alone"),
        (
            {"mechanism": "local_gaussian"},
            {"strategy": {"name": "scaffold"}},
            "more than the clipped difference",
        ),
        (
            {"mechanism": "central_gaussian"},
            {"strategy": {"name": "fednova"}},
            "more than the clipped difference",
        ),
        (
            {"mechanism": "central_gaussian"},
            {"strategy": {"name": "adaptive"}},
            "more than the clipped difference",
        ),
        (
            {"mechanism": "central_gaussian"},
            {"strategy": {"name": "median"}},
            "more than the clipped difference",
        ),
        ({"mechanism": "local_gaussian", "clipping": "adaptive"}, {}, "noised count"),
        ({**ADAPTIVE, "per_layer": True}, {}, "per_layer"),
        (ADAPTIVE, {"compression": {"upload": "quantise:8"}}, "lengthens updates"),
        (ADAPTIVE, MASKED, "not noised inside the sum"),
        ({**ADAPTIVE, "clip_count_noise": 0.1}, {}, "clip_count_noise"),
        ({**ADAPTIVE, "clip_count_noise": 1e9}, {}, "lower the clip, noise_multiplier or clip_count_noise"),
        ({"mechanism": "central_gaussian", "clip": 1e5}, {}, "lower the clip"),
        (
            {"mechanism": "central_gaussian"},
            {"rounds": {"mode": "buffered", "start_fl_job_threshold": 0}},
            "stand in one buffer twice",
        ),
        ({"mechanism": "central_gaussian", "protects": "weights"}, {}, "fixed number of clients"),
        (
            {"mechanism": "distributed_skellam"},
            {**MASKED, "compression": {"upload": "random_mask:0.5:shared"}},
            "whole steps of all coordinates",
        ),
        (
            {"mechanism": "central_gaussian"},
            {**MASKED, "compression": {"upload": "random_mask:0.5:shared"}},
            "cannot clip them again",
        ),
        ({"mechanism": "local_gaussian", "clip": 1e6, "epsilon": 0.01}, {}, "lower privacy.clip"),
        ({"mechanism": "local_gaussian", "epsilon": 5000.0}, {}, "epsilon must be"),
        ({"mechanism": "local_gaussian", "clip": 1e-9}, {}, "lost in the steps"),
        ({"mechanism": "local_laplace", "epsilon": 1e12}, {}, "lost in the steps"),
        ({"budget_epsilon": 2.0}, {}, "budget without a mechanism"),
        ({"epsilon": 2.0}, {}, "privacy.epsilon without a mechanism protects nobody"),
        ({"noise_multiplier": 2.0}, {}, "privacy.noise_multiplier without a mechanism protects nobody"),
        ({}, {"secure_aggregation": {"malicious": True}}, "without a protocol mask nothing"),
        ({"mechanism": "central_gaussian", "epsilon": 0.5}, {}, "takes noise_multiplier"),
        ({"mechanism": "distributed_skellam", "delta": 1e-6}, MASKED, "takes noise_multiplier"),
        ({"mechanism": "local_laplace", "noise_multiplier": 2.0}, {}, "leave privacy.noise_multiplier out"),
        ({"mechanism": "signds", "epsilon": 0.5}, {"strategy": {"name": "signds"}}, "sign_eps"),
        ({"mechanism": "signds", "protects": "weights"}, {"strategy": {"name": "signds"}}, "sign_eps"),
    ],
)
def test_unsound_jobs_are_refused_with_the_reason(
    privacy: dict[str, Any], sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobRefused, match=reason):
        job(privacy, **sections)


@pytest.mark.parametrize("mechanism", ["local_gaussian", "local_laplace", "central_gaussian"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_sound_jobs_weigh_every_client_the_same(mechanism: str, strategy: str) -> None:
    made = job({"mechanism": mechanism}, strategy={"name": strategy})
    assert made.make_strategy().largest_weight == 1
    assert load_job_again(made) == made


def load_job_again(made: Any) -> Any:
    import tomllib

    return load_job(tomllib.loads(made.to_toml()))


def test_sigma_of_a_job_is_that_of_its_own_numbers() -> None:
    made = job({"mechanism": "local_gaussian", "clip": 0.25, "epsilon": 4.0, "delta": 1e-6}).make_protection()
    assert made.scale == sigma_of(4.0, 1e-6, 0.5)


def test_what_messages_say_to_change_is_a_setting() -> None:
    made: FederatedJob = load_job({"rounds": {"start_fl_job_threshold": 3}})
    wrong, seen = set(), 0
    folder = Path(federated.__file__).parent
    for path in [folder / "job.py", *(folder / "privacy").rglob("*.py"), *(folder / "secagg").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            for title, key in re.findall(
                r"\b(privacy|secure_aggregation|rounds|compression)\.([a-z_]+)", node.value
            ):
                seen += 1
                if key not in {field.name for field in fields(getattr(made, title))}:
                    wrong.add(f"{path.name}: {title}.{key}")
    assert not wrong
    assert seen > 20
