"""SignDS's mechanism and strategy: randomised bits, the magnitude that follows them, and the step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.device import Update, device_generator
from federated.layout import Field, Layout, weight_layout
from federated.privacy.mechanisms import make_protection
from federated.privacy.protection import report_update
from federated.privacy.randomness import SeededRandomness
from federated.privacy.section import PrivacySection
from federated.privacy.signds import SignDS, plan_for
from federated.privacy.signds.mechanism import randomised
from federated.strategies import ServerState, SignVotes, StateRefused, sum_for
from federated.strategies.signds import LARGEST, SMALLEST, Magnitude, true_ones
from federated.sums import Sum

LAYOUT = weight_layout([("w", (200,))])
SECTION = PrivacySection(mechanism="signds", sign_k=0.1, sign_eps=8.0, magnitude_epsilon=2.0)


def sources(count: int) -> list[SeededRandomness]:
    return [SeededRandomness(device_generator(5, client, 1, 3)) for client in range(count)]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_bits_are_kept_with_the_probability_of_randomised_response(epsilon: float) -> None:
    count = 20_000
    kept = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    source = SeededRandomness(np.random.default_rng(1))
    for bit in (0, 1):
        given = np.full(count, bit, np.int8)
        same = np.count_nonzero(randomised(given, epsilon, [source] * count) == given)
        assert abs(same - count * kept) < 4.5 * math.sqrt(count * kept * (1.0 - kept))
    # What a report can tell of the bit is ε: the two likelihoods of either answer.
    assert math.log(kept / (1.0 - kept)) == pytest.approx(epsilon)


@given(st.integers(1, 5_000), st.data(), st.floats(0.01, 50.0))
def test_the_number_of_true_ones_is_estimated_as_published(
    devices: int, data: st.DataObject, epsilon: float
) -> None:
    ones = data.draw(st.integers(0, devices))
    kept = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    plain = (ones - devices + devices * kept) / (2.0 * kept - 1.0)
    assert true_ones(ones, devices, epsilon) == pytest.approx(
        min(max(plain, 0.0), devices), rel=1e-9, abs=1e-7 * devices
    )
    # Exact in expectation: T ones become T P + (N − T)(1 − P).
    assert true_ones(devices, devices, 800.0) == devices


def test_the_magnitude_grows_until_it_reaches_and_shrinks_from_then_on() -> None:
    """r = .3: without noise, by the published rules alone."""
    now, seen = Magnitude(0.01), []
    for real in [0.3] * 8 + [0.05] * 6:
        ones = 100 if real < now.threshold else 0
        now = now.following(ones, 100, 50.0)
        seen.append((round(now.estimate, 4), now.contracting))
    assert seen[:5] == [(0.02, False), (0.04, False), (0.08, False), (0.16, False), (0.16, True)]
    assert seen[7] == (0.16, True)  # within [r_est, 2 r_est): it stays
    assert seen[8:] == [(0.08, True), (0.04, True), (0.04, True), (0.04, True), (0.04, True), (0.04, True)]


def test_a_half_is_no_majority_and_the_magnitude_keeps_its_range() -> None:
    assert Magnitude(1.0).following(50, 100, 1.0) == Magnitude(2.0)
    assert Magnitude(1.0, True).following(50, 100, 1.0) == Magnitude(1.0, True)
    assert Magnitude(LARGEST).following(0, 100, 1.0).estimate == LARGEST
    assert Magnitude(SMALLEST, True).following(100, 100, 1.0).estimate == SMALLEST


def total_of(strategy: SignVotes, votes: list[dict[int, float]], bits: list[int]) -> Sum:
    total = sum_for(strategy, LAYOUT, len(votes))
    for named, bit in zip(votes, bits, strict=True):
        vector = np.zeros(LAYOUT.size, np.float32)
        vector[list(named)] = list(named.values())
        total.add(strategy.contribution(LAYOUT, Update({"difference": vector}, 1_000_000, 77, 9.0, bit)))
    return total


def test_votes_become_a_step_of_twice_the_magnitude() -> None:
    strategy = SignVotes(server_rate=0.5, magnitude=0.125, magnitude_epsilon=20.0)
    state = strategy.init(LAYOUT, np.ones(LAYOUT.size, np.float32))
    assert strategy.instructions(state).threshold == 0.25
    after = strategy.apply(state, total_of(strategy, [{3: 1, 4: 1}, {3: 1, 5: 1}, {5: -1, 6: -1}], [1, 1, 0]))
    # rate · 2 r_est · N · mean = .5 · .25 · votes
    wanted = np.ones(LAYOUT.size, np.float32)
    wanted[[3, 4, 6]] += np.array([0.25, 0.125, -0.125], np.float32)
    np.testing.assert_array_equal(after.weights, wanted)
    assert (after.scalars["magnitude"], after.scalars["contracting"]) == (0.125, 1.0)
    assert strategy.instructions(after).threshold == 0.125
    again = ServerState.from_bytes(after.to_bytes(), LAYOUT)
    shrunk = strategy.apply(again, total_of(strategy, [{3: 1, 4: 1}], [1]))
    assert shrunk.scalars["magnitude"] == 0.0625
    assert shrunk.weights[3] == np.float32(1.25 + 0.5 * 0.125)  # the new magnitude


def test_a_device_has_one_vote_whatever_it_claims() -> None:
    strategy = SignVotes()
    total = total_of(strategy, [{1: 1}], [0])
    assert (total.scalars["weight"], total.scalars["bit"]) == (2**30, 0)
    np.testing.assert_array_equal(np.flatnonzero(total.mean()), [1])


def test_a_sum_without_bits_is_refused() -> None:
    strategy = SignVotes()
    total = sum_for(strategy, LAYOUT, 1)
    total.add(strategy.contribution(LAYOUT, Update({"difference": np.ones(200, np.float32)}, 1, 1, 0.0)))
    with pytest.raises(StateRefused, match="no bits"):
        strategy.apply(strategy.init(LAYOUT, np.ones(200, np.float32)), total)


@pytest.mark.parametrize("options", [{"magnitude": 0.0}, {"magnitude": 1e9}, {"magnitude_epsilon": 0.0}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="signds"):
        SignVotes(**options)  # type: ignore[arg-type]


def test_a_report_is_one_sign_at_h_places_and_a_bit() -> None:
    protection = make_protection(SECTION)
    assert protection.answers
    named = plan_for(200, 0.1, 8.0, 0.6, 0).named
    rows = np.random.default_rng(2).normal(size=(300, 200)).astype(np.float32)
    for threshold, usual in ((1e-6, 0), (1e6, 1)):
        reported = protection.report({"difference": rows}, LAYOUT, sources(300), rows[0], threshold)
        values = reported.vectors["difference"]
        assert values.dtype == np.float32
        assert (np.count_nonzero(values, axis=1) == named).all()
        assert (np.abs(values.sum(axis=1)) == named).all()
        assert reported.bits is not None
        assert np.mean(reported.bits == usual) > 0.8  # e² / (1 + e²) = .88
        alone = report_update(
            protection, Update({"difference": rows[7]}, 50, 9, 1.5), LAYOUT, sources(8)[7], rows[0], threshold
        )
        np.testing.assert_array_equal(alone.vectors["difference"], values[7])
        assert (alone.examples, alone.steps, alone.loss, alone.bit) == (1, 1, 0.0, reported.bits[7])


def test_a_report_costs_both_epsilons() -> None:
    assert SignDS(SECTION).epsilon == 10.0
    limited = PrivacySection(mechanism="signds", sign_eps=3.0, magnitude_epsilon=1.0, budget_epsilon=12.0)
    assert SignDS(limited).most_reports == 3


def test_what_is_not_trained_is_refused_or_left_to_the_server() -> None:
    layout = Layout((Field("w", (100,)), Field("running_mean", (100,), kind="statistic")))
    rows = np.zeros((40, 200), np.float32)
    rows[:, 100:] = 7.0
    with pytest.raises(ValueError, match=r"running_mean is a statistic.*keep"):
        SignDS(SECTION).report({"difference": rows}, layout, sources(40), rows[0], 1.0)
    keeps = PrivacySection(
        mechanism="signds", sign_k=0.1, sign_eps=100.0, magnitude_epsilon=30.0, statistics="keep"
    )
    reported = SignDS(keeps).report({"difference": rows}, layout, sources(40), rows[0], 1.0)
    # Nothing is larger than the zeros: 7 is not seen, neither in the choice nor in the bit.
    assert reported.bits is not None
    assert reported.bits.tolist() == [1] * 40
    strategy = SignVotes()
    state = strategy.init(layout, np.ones(200, np.float32))
    total = sum_for(strategy, layout, 40)
    for row in reported.vectors["difference"]:
        total.add(strategy.contribution(layout, Update({"difference": row}, 1, 1, 0.0, 1)))
    after = strategy.apply(state, total)
    assert (after.weights[100:] == 1.0).all()
    assert (after.weights[:100] != 1.0).any()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sign_k": 0.3}, "a quarter"),
        ({"sign_eps": 2000.0}, "epsilon"),
        ({"sign_thr_ratio": 0.4}, "ratio"),
        ({"sign_dim_out": 100_000}, "coordinates"),
    ],
)
def test_options_that_no_model_could_have_are_refused_at_once(options: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_protection(PrivacySection(mechanism="signds", **options))  # type: ignore[arg-type]


def test_a_report_needs_the_difference_and_a_threshold() -> None:
    rows = np.zeros((1, 200), np.float32)
    for vectors, threshold in (({"difference": rows}, None), ({"control": rows, "difference": rows}, 1.0)):
        with pytest.raises(ValueError, match="threshold"):
            make_protection(SECTION).report(vectors, LAYOUT, sources(1), rows[0], threshold)
