"""Negatives: drawn as often as their log Q says; frequencies estimated as Yi et al. do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.negatives import EstimatorFormatError, FrequencyEstimator, NegativeSampler


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def test_first_steps_by_hand():
    # B starts at 100, A at 0, alpha 1/2: step 1 → (100 + 1)/2, step 4 → (50.5 + 3)/2.
    estimator = FrequencyEstimator.init(1_024, interval=100.0)
    estimator = estimator.update(keys(5), alpha=0.5)
    assert estimator.probability(keys(5))[0] == pytest.approx(1 / 50.5)
    estimator = estimator.update(keys(6), 0.5).update(keys(6), 0.5).update(keys(5), 0.5)
    assert estimator.probability(keys(5))[0] == pytest.approx(1 / 26.75)
    assert estimator.probability(keys(7))[0] == pytest.approx(1 / 100)


def test_an_item_every_fiftieth_step_gets_one_fiftieth():
    # Where A is not moved on, B grows without end: here it has to settle.
    estimator = FrequencyEstimator.init(4_096)
    for step in range(20_000):
        estimator = estimator.update(keys(1) if step % 50 == 0 else keys(2))
    assert 1 / estimator.probability(keys(1))[0] == pytest.approx(50, rel=0.01)
    assert 1 / estimator.probability(keys(2))[0] == pytest.approx(1, abs=0.1)


def test_an_item_twice_in_a_batch_counts_once():
    once = FrequencyEstimator.init(64).update(keys(1)).update(keys(1, 2))
    twice = FrequencyEstimator.init(64).update(keys(1)).update(keys(1, 2, 1))
    np.testing.assert_array_equal(once.interval, twice.interval)


def test_several_hashes_survive_a_collision():
    # Many frequent keys in few slots: with one hash the rare key often shares a frequent one's slot.
    rare = np.arange(1_000, 1_040, dtype=np.uint64)
    errors = []
    for hashes in (1, 4):
        estimator = FrequencyEstimator.init(128, hashes=hashes, interval=500.0)
        for _ in range(200):
            estimator = estimator.update(np.arange(20, dtype=np.uint64))
        errors.append(int((estimator.probability(rare) > 1 / 400).sum()))
    assert errors[0] > 0
    assert errors[1] < errors[0]


def test_updating_leaves_the_old_state_alone():
    before = FrequencyEstimator.init(16)
    before.update(keys(3))
    assert before.step == 0
    assert not before.last_seen.any()


def test_the_estimator_comes_back_from_its_bytes():
    estimator = FrequencyEstimator.init(32, hashes=3).update(keys(1, 2)).update(keys(2))
    back = FrequencyEstimator.from_bytes(estimator.to_bytes())
    assert back.step == 2
    np.testing.assert_array_equal(back.last_seen, estimator.last_seen)
    np.testing.assert_array_equal(back.interval, estimator.interval)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x02" + FrequencyEstimator.init(4).to_bytes()[1:],
        FrequencyEstimator.init(4).to_bytes()[:-1],
        FrequencyEstimator.init(4).to_bytes() + b"\0",
        b"\x01" + np.array([0, -1, -2], "<i8").tobytes() + b"\0" * 32,
    ],
)
def test_other_bytes_are_not_an_estimator(data):
    with pytest.raises(EstimatorFormatError):
        FrequencyEstimator.from_bytes(data)


@settings(max_examples=40, deadline=None)
@given(observed=st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=6), reservoir=st.integers(1, 10))
def test_the_reservoir_holds_the_last_positives(observed, reservoir):
    sampler = NegativeSampler(popular=0.5, reservoir=reservoir)
    for items in observed:
        sampler.observe(np.array(items, np.int64))
    last = [item for items in observed for item in items][-reservoir:]
    np.testing.assert_array_equal(sampler.recent(), last)
    assert len(sampler) == len(last)
    expected = (0.5 if last else 1.0) / 40 + 0.5 * np.bincount(last or [0], minlength=40) / max(
        len(last), 1
    ) * bool(last)
    np.testing.assert_allclose(sampler.probability(np.arange(40), 40), expected)
    assert sampler.probability(np.arange(40), 40).sum() == pytest.approx(1)


def test_items_are_drawn_as_often_as_log_q_says():
    sampler = NegativeSampler(popular=0.5)
    sampler.observe(np.array([3] * 6 + [4] * 3 + [5]))
    draw = sampler.draw(np.full(2_000, 9), 10, 50, (0, 1))
    share = np.bincount(draw.items.reshape(-1), minlength=10) / draw.items.size
    np.testing.assert_allclose(share, sampler.probability(np.arange(10), 10), atol=0.005)
    for item in (0, 3, 4, 5):
        of_item = draw.log_q[:, 1:][draw.items == item]
        np.testing.assert_allclose(of_item, np.log(share[item]), atol=0.1)
    np.testing.assert_allclose(draw.log_q[:, 0], np.log(0.05), rtol=1e-5)


def test_the_positive_and_what_the_user_knows_are_left_out():
    sampler = NegativeSampler()
    known = (np.array([0, 0, 1]), np.array([4, 5, 6]))
    draw = sampler.draw(np.array([1, 2]), 8, 200, (3, 4), known)
    for sample, out in enumerate(({1, 4, 5}, {2, 6})):
        left_out = np.isinf(draw.log_q[sample, 1:])
        assert set(draw.items[sample][left_out].tolist()) == out
        assert not set(draw.items[sample][~left_out].tolist()) & out
    assert np.isfinite(draw.log_q[:, 0]).all()


def test_an_item_that_the_catalogue_lacks_leaves_nothing_out():
    known = (np.array([0, 1]), np.array([-1, -1]))
    draw = NegativeSampler().draw(np.array([7, 6]), 8, 300, (0, 0), known)
    for sample, positive in enumerate((7, 6)):
        left_out = np.isinf(draw.log_q[sample, 1:])
        assert set(draw.items[sample][left_out].tolist()) == {positive}


def test_the_same_seed_draws_the_same_and_another_differs():
    sampler = NegativeSampler()
    sampler.observe(np.arange(50))
    first, again, other = (sampler.draw(np.array([1]), 1_000, 30, (0, n)).items for n in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_catalogue_of_one_has_nothing_to_push_away():
    draw = NegativeSampler().draw(np.array([0]), 1, 4, (0, 0))
    assert np.isinf(draw.log_q[0, 1:]).all()
    assert draw.log_q[0, 0] == 0


def test_nothing_to_draw_for_and_nothing_to_draw_from():
    assert NegativeSampler().draw(np.array([], np.int64), 0, 4, (0, 0)).log_q.shape == (0, 5)
    with pytest.raises(ValueError, match="no item"):
        NegativeSampler().draw(np.array([0]), 0, 4, (0, 0))


@pytest.mark.parametrize(("popular", "reservoir"), [(1.0, 5), (-0.1, 5), (0.5, 0)])
def test_senseless_mixtures_are_refused(popular, reservoir):
    with pytest.raises(ValueError, match=r"popular share|reservoir"):
        NegativeSampler(popular, reservoir)
