"""Which record was it? What each mechanism shows to whom."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import pytest
from support.attacking import CANDIDATES, SECURE, lines, setting

from federated.attacks.effects import median_norm, quantised_sum
from federated.attacks.inversion import Client, Inversion, Trials, draw_trials, invert, judge
from federated.attacks.likelihoods import unchanged
from federated.attacks.lineup import Around, masked, plain
from federated.attacks.rates import wilson
from federated.attacks.signs import SignLikelihood, Signs
from federated.attacks.views import Masked, Sent, Summed, View
from federated.compression import make_scheme
from federated.privacy.section import PrivacySection
from federated.privacy.signds import make_plan
from federated.secagg.local import Local, run
from federated.secagg.settings import make_plan as plan_protocol
from federated.secagg.stages import Stage

CHANCE = 1.0 / CANDIDATES
ONE = Client(1)


@lru_cache(maxsize=8)
def trials(client: Client = ONE, count: int = 200, clients: int = 5) -> Trials:
    return draw_trials(setting(), client, count, clients, np.random.default_rng(30), companions=100)


def play(view: View, client: Client = ONE, count: int = 200) -> Inversion:
    return invert(view, trials(client, count), np.random.default_rng(31))


def clip(norm: str = "l2") -> float:
    return median_norm(trials().alike, "l1" if norm == "l1" else "l2")


def at_chance(found: Inversion) -> bool:
    return found.top_1.holds(CHANCE) and found.mean_rank.holds((CANDIDATES + 1) / 2)


@pytest.mark.parametrize("client", [Client(1), Client(8)])
def test_plain_updates_name_the_record(client: Client) -> None:
    assert play(Sent(), client).top_1.value > 0.9


def test_plain_updates_tell_much_even_if_nothing_is_known_of_the_other_records() -> None:
    found = play(Sent(), Client(8, "candidates"))
    assert found.top_1.low > 10 * CHANCE
    assert found.mean_rank.high < CANDIDATES / 5


@pytest.mark.parametrize(
    "scheme", ["top_k:0.1,quantise:1,deflate", "rotate,quantise:4,deflate", "random_mask:0.5:shared"]
)
def test_compression_hides_nothing(scheme: str) -> None:
    assert play(Sent(make_scheme(scheme))).top_1.value > 0.9


@pytest.mark.parametrize(
    "section",
    [
        PrivacySection(mechanism="local_gaussian", epsilon=0.05),
        PrivacySection(mechanism="local_laplace", epsilon=0.05),
        PrivacySection(mechanism="signds", sign_eps=0.02, magnitude_epsilon=0.02, sign_k=0.05),
    ],
    ids=lambda section: section.mechanism,
)
def test_strong_local_mechanisms_leave_chance(section: PrivacySection) -> None:
    (line,) = lines(section)
    assert line.epsilon < 0.051
    assert at_chance(play(line.view, count=400))


def test_weak_local_noise_and_usual_signds_leave_little_to_guess() -> None:
    (line,) = lines(PrivacySection(mechanism="local_gaussian", epsilon=500.0, clip=clip()))
    assert play(line.view).top_1.value > 0.5
    (line,) = lines(PrivacySection(mechanism="signds", sign_k=0.1))
    assert line.epsilon == pytest.approx(101.0, rel=1e-3)
    assert play(line.view).top_1.value > 0.5


@pytest.mark.parametrize("mechanism", ["local_gaussian", "local_laplace", "signds", "central_gaussian"])
def test_nobody_does_better_than_what_is_claimed(mechanism: str) -> None:
    section = PrivacySection(mechanism=mechanism, clip=clip(), epsilon=1.0, sign_eps=1.0)  # type: ignore[arg-type]
    for line in lines(section):
        bound = min(1.0, math.exp(min(line.epsilon, 700.0)) * CHANCE + line.delta)
        assert play(line.view).top_1.low <= bound


def test_one_masked_update_is_chance_and_the_sum_is_not() -> None:
    around = Around(setting(), 5, 1, trials().alike)
    one, total, informed = masked(around, SECURE)
    assert at_chance(play(one.view, count=400))
    assert play(total.view).top_1.low > 10 * CHANCE
    assert play(informed.view).top_1.value > 0.9
    (bare,) = plain(around)
    assert math.isinf(bare.epsilon)


def test_masked_words_do_not_depend_on_what_is_masked() -> None:
    """The same masks over other updates: the words differ by the updates alone, and each is uniform."""
    view = Masked(3, 8.0, 4)
    zeros = np.zeros((400, 50), np.float32)
    for updates in (zeros, zeros + 8.0, zeros - 8.0):
        words = view.observe(updates, updates[:, None], np.random.default_rng(5)).ravel() * 16
        cells = np.bincount((words.astype(np.int64) & 15), minlength=16)
        assert ((cells - len(words) / 16) ** 2 / (len(words) / 16)).sum() < 45.0  # chi-square, 15: p = 1e-4
        assert abs(words.mean()) < 5 * words.std() / math.sqrt(len(words))


def test_what_servers_get_in_the_real_protocol_is_chance() -> None:
    """Every client's masked body of 50 iterations, as a server reads it."""
    expected = setting().updates(np.arange(CANDIDATES))
    steps = np.rint(expected * 2.0**SECURE.step_bits).astype(np.int64)
    plan = plan_protocol(SECURE, 4, expected.shape[1], weight=1)
    truths = np.random.default_rng(7).integers(0, CANDIDATES, (50, 4))
    seen = []
    for chosen in truths:
        local = Local(plan, dict(zip("abcd", steps[chosen], strict=True)), keep_messages=True)
        outcome = local.run()
        assert outcome.total is not None
        assert np.array_equal(outcome.total, steps[chosen].sum(axis=0))
        bodies = {name: body for name, stage, body in outcome.transcript.messages if stage is Stage.MASKED}
        words = [plan.ring.signed(plan.ring.unpack(bodies[name], plan.length)) for name in "abcd"]
        seen += [row * 2.0**-SECURE.step_bits for row in words]
    likelihood = Masked(4, SECURE.clip, SECURE.step_bits).explain(None, expected, 3)
    scores = likelihood.pairs(np.array(seen), expected)
    found = judge(scores, truths.ravel(), np.random.default_rng(8))
    # Masks are drawn by the system: intervals that one run in 100,000 misses.
    assert wilson(round(found.top_1.value * 200), 200, 1 - 1e-5).holds(CHANCE)
    assert abs(found.mean_rank.value - (CANDIDATES + 1) / 2) < 4.4 * CANDIDATES / math.sqrt(12 * 200)


def test_the_view_of_a_sum_is_what_the_protocol_reveals_and_one_survivor_reveals_nothing() -> None:
    updates = setting().updates(np.arange(4))
    plan = plan_protocol(SECURE, 4, updates.shape[1], weight=1)
    steps = np.rint(updates * 2.0**SECURE.step_bits).astype(np.int64)
    inputs = dict(zip("abcd", steps, strict=True))
    revealed = run(plan, inputs).total
    assert revealed is not None
    seen = quantised_sum(SECURE, updates, np.random.default_rng(0))
    assert np.array_equal(revealed * 2.0**-SECURE.step_bits, seen)
    alone = run(plan, inputs, dict.fromkeys("bcd", Stage.MASKED))
    assert alone.total is None
    assert str(plan.least) in alone.reason, alone.reason


def test_central_noise_protects_from_readers_not_from_its_server() -> None:
    server, reader, informed = lines(
        PrivacySection(mechanism="central_gaussian", clip=clip(), noise_multiplier=2.0)
    )
    assert math.isinf(server.epsilon)
    assert play(server.view).top_1.value > 0.9
    for line in (reader, informed):
        assert play(line.view).top_1.value < 0.1
        assert line.epsilon < 3.0


@pytest.mark.parametrize("mechanism", ["distributed_gaussian", "distributed_skellam"])
def test_distributed_noise_protects_from_the_server(mechanism: str) -> None:
    section = PrivacySection(mechanism=mechanism, clip=clip(), noise_multiplier=2.0)  # type: ignore[arg-type]
    for line in lines(section):
        assert play(line.view, count=60).top_1.value < 0.1
    (line, _) = lines(PrivacySection(mechanism=mechanism, clip=clip(), noise_multiplier=0.01))  # type: ignore[arg-type]
    assert play(line.view, count=60).top_1.low > 10 * CHANCE


def test_knowing_the_others_is_as_good_as_seeing_the_update() -> None:
    view = Summed(lambda updates, generator: updates.sum(axis=0, dtype=np.float64), unchanged, 0.0, True)
    assert play(view).top_1.value > 0.9


def test_probabilities_of_sign_reports_add_up() -> None:
    """Over every report there is; the sign, which is even, counts for a factor of two."""
    plan = make_plan(8, 2, 1.5, named=3)
    votes, bits = [], []
    for places in itertools.combinations(range(8), 3):
        for sign, bit in itertools.product((1.0, -1.0), (0, 1)):
            row = np.zeros(8, np.float32)
            row[list(places)] = sign
            votes.append(row)
            bits.append(bit)
    seen = Signs(np.array(votes), np.array(bits, np.int8))
    updates = np.random.default_rng(6).normal(size=(5, 8)).astype(np.float32)
    found = SignLikelihood(plan, 0.7, 0.8).pairs(seen, updates)
    assert np.allclose(np.exp(found).sum(axis=0), 2.0)
    # The worst ratio is that of the claim: the choice's epsilon and the bit's.
    worst = max(float((found[:, i] - found[:, j]).max()) for i in range(5) for j in range(5))
    assert worst <= 1.5 + 0.8 + 1e-9
    rows = SignLikelihood(plan, 0.7, 0.8).rows(seen, np.repeat(updates[:1], len(votes), axis=0))
    assert np.allclose(rows, found[:, 0])
