"""What SignDS devices name, against the exact distribution."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from federated.device import device_generator
from federated.privacy.randomness import SYSTEM, SeededRandomness
from federated.privacy.signds.plan import make_plan
from federated.privacy.signds.selection import draw_overlaps, log_uniform, select


def sources(count: int, seed: int = 1) -> list[SeededRandomness]:
    return [SeededRandomness(device_generator(seed, client, 1, 3)) for client in range(count)]


@pytest.mark.parametrize(
    ("dimension", "top", "named", "epsilon"),
    [(8, 2, 3, 1.5), (9, 2, 6, 0.7), (12, 3, 1, 2.0), (8, 1, 8, 1.0)],
)
def test_reports_are_drawn_with_the_exact_probabilities(
    dimension: int, top: int, named: int, epsilon: float
) -> None:
    """Every sign and every set of named coordinates, by enumeration; chi-square."""
    plan = make_plan(dimension, top, epsilon, named=named)
    vector = np.random.default_rng(3).normal(size=dimension).astype(np.float32)
    draws = 10_000
    source = SeededRandomness(np.random.default_rng(11))
    selected = select(plan, np.tile(vector, (draws, 1)), [source] * draws)
    seen = Counter(zip(selected.signs.tolist(), map(tuple, selected.places.tolist()), strict=True))
    found, wanted = [], []
    for sign in (1, -1):
        largest = set(np.argsort(-sign * vector)[:top].tolist())
        for chosen in combinations(range(dimension), named):
            found.append(seen.pop((sign, chosen), 0))
            wanted.append(0.5 * draws * math.exp(plan.log_probability(len(largest & set(chosen)))))
    assert not seen
    statistic, p = stats.chisquare(found, wanted)
    assert p > 1e-4, (statistic, len(found))


def test_the_largest_are_those_of_the_signed_difference_and_the_first_of_equals() -> None:
    plan = make_plan(8, 2, 1000.0, named=2)  # ε so large that the top two are always named
    vector = np.array([0.0, 3.0, 1.0, 3.0, 3.0, -2.0, -5.0, -2.0], np.float32)
    selected = select(plan, np.tile(vector, (64, 1)), sources(64))
    assert {1, -1} == set(selected.signs.tolist())
    for sign, places, magnitude in zip(
        selected.signs.tolist(), selected.places.tolist(), selected.magnitudes.tolist(), strict=True
    ):
        assert (places, magnitude) == (([1, 3], 3.0) if sign == 1 else ([5, 6], 3.5))


def test_many_at_once_name_what_each_names_alone() -> None:
    plan = make_plan(500, 50, 8.0)
    rows = np.random.default_rng(0).normal(size=(40, 500)).astype(np.float32)
    together = select(plan, rows, sources(40))
    for client in range(40):
        alone = select(plan, rows[client : client + 1], sources(40)[client : client + 1])
        assert alone.signs[0] == together.signs[client]
        assert (alone.places[0] == together.places[client]).all()
        assert alone.magnitudes[0] == together.magnitudes[client]


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(300, 30, 16.0)
    rows = np.random.default_rng(0).normal(size=(9, 300)).astype(np.float32)
    whole = select(plan, rows, sources(9))
    monkeypatch.setattr("federated.privacy.signds.selection._BLOCK", 2 * 300)
    parts = select(plan, rows, sources(9))
    assert (whole.places == parts.places).all()
    assert (whole.signs == parts.signs).all()


@pytest.mark.parametrize("named", [1, 240, 900, 1_000])
def test_every_report_names_h_different_coordinates(named: int) -> None:
    plan = make_plan(1_000, 250, 50.0, named=named)
    places = select(
        plan, np.random.default_rng(0).normal(size=(5, 1_000)).astype(np.float32), [SYSTEM] * 5
    ).places
    assert places.shape == (5, named)
    assert (np.diff(places, axis=1) > 0).all()
    assert 0 <= places.min() <= places.max() < 1_000


def test_how_many_are_among_the_largest_follows_the_plan_to_its_rarest_value() -> None:
    """At ε = 100 fewer than ν_th of ten have a chance of e^-80 and less, which 53 bits cannot draw."""
    plan = make_plan(1_000, 200, 100.0, named=10)
    low = float(np.logaddexp.reduce(plan.log_pmf[: plan.threshold]))
    assert low < -80.0
    assert draw_overlaps(plan, np.array([low - 1e-9]))[0] < plan.threshold
    assert draw_overlaps(plan, np.array([low + 0.1]))[0] != draw_overlaps(plan, np.array([low - 1e-9]))[0]
    # Every value has a stretch of log u as long as its probability.
    order = np.argsort(plan.log_pmf, kind="stable")
    edges = np.logaddexp.accumulate(plan.log_pmf[order])
    middles = [np.logaddexp(edge, before) - math.log(2.0) for before, edge in pairwise(edges)]
    assert (draw_overlaps(plan, np.array(middles)) == order[1:]).all()
    assert draw_overlaps(plan, np.array([0.0]))[0] == order[-1]


class Few:
    """Words that begin with zeros."""

    def __init__(self, *words: int) -> None:
        self._words = list(words)

    def words(self, count: int) -> np.ndarray:
        taken, self._words = self._words[:count], self._words[count:]
        assert len(taken) == count
        return np.array(taken, np.uint64)


def test_logarithms_of_uniform_numbers_have_no_end() -> None:
    word = math.log(2.0) * 64
    assert log_uniform(Few(2**63, 0)) == pytest.approx(-math.log(2.0))
    assert log_uniform(Few(0, 2**63, 0)) == pytest.approx(-word - math.log(2.0))
    assert log_uniform(Few(0, 0, 0, 2**62, 1)) == pytest.approx(-3 * word - math.log(4.0))
    assert log_uniform(Few(1, 2**63)) == pytest.approx(math.log(1.5) - word)
    drawn = [-log_uniform(source) for source in sources(4_000)]
    assert stats.kstest(drawn, "expon").pvalue > 1e-4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    rows = np.zeros((2, 100), np.float32)
    rows[1, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        select(make_plan(100, 10, 8.0), rows, sources(2))
    with pytest.raises(ValueError, match="sources"):
        select(make_plan(100, 10, 8.0), rows, sources(3))


def test_a_difference_of_zeros_is_reported_like_any_other() -> None:
    selected = select(make_plan(100, 10, 8.0), np.zeros((50, 100), np.float32), sources(50))
    assert len(np.unique(selected.places)) > 20
    assert (selected.magnitudes == 0.0).all()
