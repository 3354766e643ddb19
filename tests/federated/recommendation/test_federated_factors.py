"""Learning an item table from devices: the pieces, the whole on a small cut, and what an upload would tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from federated.recommendation import (
    Liked,
    Objective,
    Rounds,
    Softmax,
    SquaredError,
    by_device,
    cohort_of,
    cohort_updates,
    default_strategy,
    device_update,
    draw_negatives,
    evaluate,
    initial_table,
    learn,
    leave_last_out,
    pooled,
    popular,
    rank_held_out,
    sum_of,
    table_layout,
    table_of,
)
from federated.strategies import make_strategy, sum_for
from federated.sums import add_all
from federated.weights import Array

ROOT = Path(__file__).parents[3]
ITEMS, DEVICES, GROUPS = 60, 90, 3
OBJECTIVES = (SquaredError(dim=6), Softmax(dim=6))


def ring(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Devices of three tastes, each of which knows 12 of the 20 items of its taste, and 2 others, in random order."""
    generator = np.random.default_rng(seed)
    owners, items = [], []
    for device in range(DEVICES):
        own = np.arange(device % GROUPS, ITEMS, GROUPS)
        others = np.setdiff1d(np.arange(ITEMS), own)
        # The last is of the own taste, so that there is something to predict.
        liked = generator.choice(own, 12, replace=False)
        items += [*generator.choice(others, 2, replace=False), *liked]
        owners += [device] * 14
    times = np.tile(np.arange(14), DEVICES)
    return np.array(owners), np.array(items), times


def liked() -> Liked:
    owners, items, _ = ring()
    return by_device(owners, items, DEVICES, ITEMS)


class TestLiked:
    def test_pairs_in_any_order_and_repeated_are_the_same(self) -> None:
        found = by_device(np.array([2, 0, 2, 0, 2]), np.array([3, 1, 0, 1, 3]), 3, 4)
        assert [found.of(device).tolist() for device in range(3)] == [[1], [], [0, 3]]
        assert found.mask(np.array([2, 1])).tolist() == [[1, 0, 0, 1], [0, 0, 0, 0]]
        assert found.counts.tolist() == [1, 0, 2]

    @pytest.mark.parametrize(
        ("items", "offsets"),
        [([0, 4], [0, 2]), ([-1], [0, 1]), ([1], [0, 2]), ([1], [1, 1]), ([1], [0, 2, 1])],
    )
    def test_what_does_not_fit_is_refused(self, items: list[int], offsets: list[int]) -> None:
        with pytest.raises(ValueError, match=r"offsets|catalogue"):
            Liked(np.array(items), np.array(offsets), 4)

    def test_an_owner_who_is_no_device_is_refused(self) -> None:
        with pytest.raises(ValueError, match="none of the 2 devices"):
            by_device(np.array([2]), np.array([0]), 2, 4)

    def test_the_last_by_time_is_held_back_and_of_a_tie_the_first(self) -> None:
        owners = np.array([0, 0, 0, 1, 2, 2, 2])
        items = np.array([1, 2, 3, 1, 2, 3, 2])
        times = np.array([5, 9, 9, 7, 1, 2, 3])
        split = leave_last_out(owners, items, times, 4, 5)
        assert split.held_out.tolist() == [2, -1, 2, -1]
        assert [split.training.of(device).tolist() for device in range(4)] == [[1, 3], [1], [3], []]

    @pytest.mark.parametrize("seed", range(5))
    def test_negatives_are_distinct_and_unknown_and_the_seeds(self, seed: int) -> None:
        known = liked()
        drawn = draw_negatives(known, 40, np.random.default_rng(seed))
        for device, row in enumerate(drawn):
            assert len(set(row.tolist()) - set(known.of(device).tolist())) == 40
        assert (drawn == draw_negatives(known, 40, np.random.default_rng(seed))).all()

    def test_more_negatives_than_there_are_is_refused(self) -> None:
        with pytest.raises(ValueError, match="device 0 knows all but 46 items"):
            draw_negatives(liked(), 47, np.random.default_rng(0))


def whole_loss(objective: Objective, table: Array, mask: Array) -> float:
    """A device's loss as its docstring writes it, the private vector being solved for; float64 where it is ours."""
    private = objective.private_vectors(table, mask).astype(np.float64)
    scores = private @ table.astype(np.float64).T
    count = mask.sum()
    if isinstance(objective, SquaredError):
        a, held = objective.unobserved, objective.regularisation
        fit = (mask * (scores - 1) ** 2).sum() + a * (scores**2).sum()
        own = held * (count + a * len(table)) * (private**2).sum()
        shared = held * ((mask[0] + a)[:, None] * table.astype(np.float64) ** 2).sum()
        return 0.5 * float(fit + own + shared)
    assert isinstance(objective, Softmax)
    scores = scores / objective.temperature
    logs = scores - np.log(np.exp(scores).sum())
    return float(-(mask * logs).sum() / count)


class TestObjectives:
    def test_squared_errors_private_vector_is_the_minimum(self) -> None:
        objective, table = OBJECTIVES[0], initial_table(ITEMS, 6, np.random.default_rng(1), 0.5)
        mask = liked().mask(np.array([4]))
        private = objective.private_vectors(table, mask).astype(np.float64)
        a, held, t = 0.3, 0.01, table.astype(np.float64)
        slope = ((a * (private @ t.T) + mask * (private @ t.T - 1)) @ t) + held * (14 + a * ITEMS) * private
        assert np.abs(slope).max() < 1e-4

    def test_squared_errors_gradient_is_that_of_the_whole_loss(self) -> None:
        """Also through the private vector: at its minimum it adds nothing."""
        objective, table = OBJECTIVES[0], initial_table(ITEMS, 6, np.random.default_rng(1), 0.5)
        mask = liked().mask(np.array([4]))
        _, (gradient,) = objective.gradients(table, objective.private_vectors(table, mask), mask)
        for item in (0, 59, int(liked().of(4)[0])):
            up, down = table.copy(), table.copy()
            up[item, 2] += 0.02
            down[item, 2] -= 0.02
            slope = (whole_loss(objective, up, mask) - whole_loss(objective, down, mask)) / 0.04
            assert gradient[item, 2] == pytest.approx(slope, rel=0.02, abs=2e-3)

    def test_softmaxs_gradient_is_its_losss_and_its_steps_go_down(self) -> None:
        table = initial_table(ITEMS, 6, np.random.default_rng(1), 0.5)
        mask = liked().mask(np.array([4]))
        losses = []
        for steps in (1, 5, 30, 200):
            objective = Softmax(dim=6, steps=steps)
            private = objective.private_vectors(table, mask)
            assert private[0, -1] == 1.0
            (loss,), (gradient,) = objective.gradients(table, private, mask)
            assert loss == pytest.approx(whole_loss(objective, table, mask), rel=1e-4)
            losses.append(loss)
        assert losses == sorted(losses, reverse=True)
        probabilities = np.exp(objective.scores(table, private)[0].astype(np.float64))
        probabilities /= probabilities.sum()
        expected = (probabilities - mask[0] / 14)[:, None] * private / objective.temperature
        assert np.abs(gradient - expected).max() < 1e-5

    def test_softmax_does_not_diverge_on_a_table_of_any_size(self) -> None:
        table = initial_table(ITEMS, 6, np.random.default_rng(1), 100.0)
        private = Softmax(dim=6, rate=1e6).private_vectors(table, liked().mask(np.arange(5)))
        assert np.isfinite(private).all()

    @pytest.mark.parametrize(
        "bad", [lambda: SquaredError(dim=0), lambda: SquaredError(unobserved=0), lambda: Softmax(dim=1),
                lambda: Softmax(temperature=0), lambda: Softmax(steps=0)]
    )  # fmt: skip
    def test_settings_out_of_range_are_refused(self, bad: object) -> None:
        assert callable(bad)
        with pytest.raises(ValueError, match="must be"):
            bad()


class TestUpdates:
    @pytest.mark.parametrize("objective", OBJECTIVES, ids=["squared", "softmax"])
    def test_a_cohort_is_its_devices_one_by_one(self, objective: Objective) -> None:
        table = initial_table(ITEMS, 6, np.random.default_rng(2), 0.3)
        for device, update in enumerate(cohort_updates(objective, table, liked(), np.arange(10))):
            alone = device_update(objective, table, liked().of(device))
            assert (update.examples, update.steps) == (alone.examples, alone.steps) == (14, 1)
            assert np.abs(update.vectors["difference"] - alone.vectors["difference"]).max() < 1e-5
            assert update.loss == pytest.approx(alone.loss, rel=1e-5)

    @pytest.mark.parametrize("objective", OBJECTIVES, ids=["squared", "softmax"])
    def test_every_row_moves_and_yet_one_upload_tells_what_was_rated(self, objective: Objective) -> None:
        """Why a single upload must be hidden: rows are not sparse, but what was rated points the other way."""
        table = initial_table(ITEMS, 6, np.random.default_rng(2), 0.3)
        items = liked().of(7)
        rows = device_update(objective, table, items).vectors["difference"].reshape(ITEMS, 6)
        assert (np.abs(rows).sum(axis=1) > 0).all()
        _, _, directions = np.linalg.svd(rows, full_matrices=False)
        along = np.argsort(rows @ directions[0])
        # Up to the sign of the private vector, which two guesses settle.
        guesses = (along[: len(items)], along[-len(items) :])
        assert max(len(np.intersect1d(guess, items)) for guess in guesses) >= len(items) - 1

    def test_a_device_without_an_item_has_nothing_to_teach(self) -> None:
        with pytest.raises(ValueError, match="nothing to teach"):
            device_update(OBJECTIVES[0], initial_table(4, 6, np.random.default_rng(0)), np.zeros(0, np.int64))


class TestLearning:
    def test_the_sum_is_that_of_any_order_and_chunk(self) -> None:
        table = initial_table(ITEMS, 6, np.random.default_rng(2), 0.3)
        strategy, objective, devices = default_strategy(), OBJECTIVES[0], np.arange(40)
        whole = sum_of(strategy, objective, table, liked(), devices)
        layout = table_layout(ITEMS, 6)
        updates = cohort_updates(objective, table, liked(), devices)
        other = sum_for(strategy, layout, len(devices))
        add_all(other, [strategy.contribution(layout, update) for update in reversed(updates)])
        assert other.to_bytes() == whole.to_bytes()
        assert whole.scalars["weight"] == 40 << 30, "each device counts alike"

    def test_cohorts_are_of_devices_that_know_something_and_of_the_seed(self) -> None:
        some = by_device(np.array([1, 3, 5]), np.array([0, 0, 1]), 8, 2)
        assert cohort_of(some, Rounds(1, 10), 0).tolist() == [1, 3, 5]
        drawn = {tuple(cohort_of(liked(), Rounds(1, 10, seed), n)) for seed in range(3) for n in range(3)}
        assert len(drawn) == 9
        assert (cohort_of(liked(), Rounds(9, 10, 4), 7) == cohort_of(liked(), Rounds(9, 10, 4), 7)).all()

    def test_a_run_repeats_bit_for_bit(self) -> None:
        def run(seed: int) -> bytes:
            return list(learn(OBJECTIVES[0], liked(), Rounds(5, 20, seed)))[-1].weights.tobytes()

        assert run(1) == run(1)
        assert run(1) != run(2)

    def test_what_cannot_be_learned_is_refused(self) -> None:
        nothing = by_device(np.zeros(0, np.int64), np.zeros(0, np.int64), 3, 4)
        with pytest.raises(ValueError, match="no device knows any item"):
            next(learn(OBJECTIVES[0], nothing, Rounds(1)))
        with pytest.raises(ValueError, match="cannot learn from a sum"):
            next(learn(OBJECTIVES[0], liked(), Rounds(1), make_strategy("median", max_examples=1)))
        with pytest.raises(ValueError, match="at least 1"):
            Rounds(0)

    def test_devices_learn_what_the_pooled_model_learns(self) -> None:
        """Within the noise of 90 devices, both far above what is popular. The real figures are the benchmark's."""
        owners, items, times = ring()
        split = leave_last_out(owners, items, times, DEVICES, ITEMS)
        negatives = draw_negatives(by_device(owners, items, DEVICES, ITEMS), 40, np.random.default_rng(0))
        objective = SquaredError(dim=6)
        central = evaluate(objective, pooled(objective, split.training, 10, 0), split, negatives)
        *_, state = learn(objective, split.training, Rounds(60, 30), default_strategy(0.1))
        federated = evaluate(objective, table_of(state), split, negatives)
        floor = popular(split, negatives)
        assert (central.devices, federated.devices, floor.devices) == (DEVICES,) * 3
        assert federated.hit_rate > 0.9 * central.hit_rate
        assert federated.ndcg > 0.9 * central.ndcg
        assert federated.hit_rate > floor.hit_rate + 0.3

    @pytest.mark.parametrize("objective", [Softmax(dim=6)], ids=["softmax"])
    def test_softmax_learns_too(self, objective: Objective) -> None:
        states = list(learn(objective, liked(), Rounds(40, 30), default_strategy(0.1)))
        everyone = np.arange(DEVICES)

        def loss(table: Array) -> float:
            mask = liked().mask(everyone)
            return float(objective.gradients(table, objective.private_vectors(table, mask), mask)[0].mean())

        # ln 60 = 4.09 knows nothing; the tastes alone give about 3.5.
        assert loss(table_of(states[0])) > 3.6
        assert loss(table_of(states[-1])) < 3.45


class TestRanking:
    def test_places_and_ties(self) -> None:
        scores = np.array([[5.0, 1, 2, 3], [2.0, 1, 5, 3], [1.0, 1, 1, 1], [0.0, 1, 2, 3]])
        found = rank_held_out(scores, k=3)
        assert found.hit_rate == 0.5
        assert found.ndcg == pytest.approx((1.0 + 1 / np.log2(4)) / 4)

    def test_nobody_to_judge_by(self) -> None:
        with pytest.raises(ValueError, match="held-out"):
            rank_held_out(np.zeros((0, 4)))


def test_a_device_needs_numpy_alone() -> None:
    """In a process where nothing else that is installed can be imported."""
    program = """
import sys
import numpy

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        if top not in sys.stdlib_module_names and top not in ('numpy', 'federated'):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from federated.recommendation import SquaredError, device_update, initial_table
table = initial_table(9, 32, numpy.random.default_rng(0))
print(device_update(SquaredError(), table, numpy.array([1, 4])).examples)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")
