"""What a transfer is worth with few common users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")
pytest.importorskip("sklearn", reason="the extra `datasets` is not installed")

from federated.vertical.tables import read_table
from federated.vertical.transfer.curve import curve, latent_tables
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.stack import ALIKE, Stack

DATA = Path(__file__).parents[4] / "shared" / "data"


def test_the_choice_of_gamma_sees_no_held_out_row() -> None:
    """Other labels of the rows to be scored change nothing but the measures."""
    guest, host = latent_tables(400, seed=3, columns=(4, 4), factors=3, label_noise=0.5)
    options = TransferOptions(hidden=3, steps=20)
    found = curve(guest, host, options, 0, shares=(0.2,), gammas=(0.1, 1.0))[0]
    assert found.rows == 56
    labels = guest.labels
    assert labels is not None
    held = np.random.default_rng(0).permutation(400)[:120]
    labels[held] = 1 - labels[held]
    turned = curve(guest, host, options, 0, shares=(0.2,), gammas=(0.1, 1.0))[0]
    assert turned.gamma == found.gamma
    assert turned.transfer == pytest.approx(1 - found.transfer)
    assert turned.stacked == pytest.approx(1 - found.stacked)
    assert turned.alone["logistic"] == pytest.approx(1 - found.alone["logistic"])


class TestStack:
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(400) < 0.4, 1.0, -1.0)

    def test_it_is_the_minimum_of_what_it_says(self) -> None:
        scores = self.labels[:, None] * (0.5, 1.0, 0.0) + self.rng.standard_normal((400, 3))
        found = Stack.of(scores, self.labels)
        inputs = (scores - scores.mean(axis=0)) / scores.std(axis=0)

        def loss(weights: np.ndarray) -> float:
            intercepts = np.linspace(-3, 3, 601)
            margins = self.labels * (inputs @ weights + intercepts[:, None])
            pull = ALIKE * float(((weights - weights.mean()) ** 2).sum())
            return float(np.logaddexp(0, -margins).sum(axis=1).min()) + pull

        least = loss(found.weights)
        for _ in range(200):
            near = np.maximum(found.weights + 0.05 * self.rng.standard_normal(3), 0.0)
            assert loss(near) > least - 2e-3
        assert found.apply(scores) == pytest.approx(inputs @ found.weights)

    def test_rows_decide_where_there_are_many_and_the_mean_where_there_are_few(self) -> None:
        good, bad = 2 * self.labels + self.rng.standard_normal(400), self.rng.standard_normal(400)
        scores = np.stack([good, bad], axis=1)
        many, few = Stack.of(scores, self.labels).weights, Stack.of(scores[:6], self.labels[:6]).weights
        assert many[0] > 3 * many[1]
        assert few[0] < 2 * few[1]

    def test_no_weight_is_below_nothing_and_constants_have_no_say(self) -> None:
        scores = np.stack([self.labels, -self.labels, np.zeros(400)], axis=1)
        found = Stack.of(scores + np.array([0.0, 0.0, 7.0]), self.labels)
        assert (found.weights >= 0).all()
        assert np.isfinite(found.apply(scores + np.array([0.0, 0.0, 9.0]))).all()
        with pytest.raises(ValueError, match="one class"):
            Stack.of(scores, np.ones(400))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_one_percent_common_it_beats_the_host_alone() -> None:
    """Generated latent factors: above the best of regression, boosting and network at every seed."""
    for seed in range(3):
        guest, host = latent_tables(14_000, seed)
        point = curve(guest, host, TransferOptions(), seed, shares=(0.01,))[0]
        assert point.rows == 98
        assert point.transfer > point.best_alone, point
        assert point.stacked > point.best_alone - 0.01, point


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (DATA / "default_credit_hetero_guest.csv").exists(), reason="../shared/data is not there"
)
def test_default_credit_is_told_as_it_is() -> None:
    """No claim that it wins there: only that it is far from chance with one in a hundred users common."""
    guest = read_table(DATA / "default_credit_hetero_guest.csv", label_column="y")
    host = read_table(DATA / "default_credit_hetero_host.csv").align(guest.ids)
    point = curve(guest, host, TransferOptions(), 0, shares=(0.01,))[0]
    assert point.rows == 210
    assert point.transfer > 0.6
