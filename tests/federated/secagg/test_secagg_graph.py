"""Regular graphs that anybody can draw again, and degrees that are enough by exact counting."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb, exp, log

import numpy as np
import numpy.typing as npt
import pytest

from federated.secagg import Degree, DegreeRefused, choose, complete, regular_graph, smallest_group
from federated.secagg.graph import _log_disconnected, _log_tails

CASES = [
    (n, colluding, dropouts, malicious)
    for n in (10, 50, 100, 300)
    for colluding in (0.0, 0.1, 0.3)
    for dropouts in (0.0, 0.1, 0.3)
    for malicious in (False, True)
    if (n, colluding, dropouts, malicious) != (10, 0.3, 0.3, True)  # refused, see below
]


def tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """P[X >= least], exactly, for the number of marked ones among those drawn."""
    ways = sum(
        comb(marked, x) * comb(population - marked, drawn - x) for x in range(max(0, least), drawn + 1)
    )
    return Fraction(ways, comb(population, drawn))


def is_connected(neighbours: npt.NDArray[np.int32], present: set[int]) -> bool:
    reached, frontier = set[int](), [next(iter(present))]
    while frontier:
        client = frontier.pop()
        if client not in reached:
            reached.add(client)
            frontier += [int(other) for other in neighbours[client] if int(other) in present]
    return reached == present


@pytest.mark.parametrize(
    ("n", "k"), [(3, 2), (4, 3), (5, 4), (6, 3), (10, 2), (10, 5), (50, 12), (101, 30), (64, 63)]
)
def test_every_client_has_k_others_both_ways_and_all_hang_together(n: int, k: int) -> None:
    neighbours = regular_graph(n, k, b"seed")
    assert neighbours.shape == (n, k)
    assert neighbours.dtype == np.int32
    edges = {(client, int(other)) for client in range(n) for other in neighbours[client]}
    assert len(edges) == n * k
    assert all(one != other and (other, one) in edges for one, other in edges)
    assert (np.diff(neighbours, axis=1) > 0).all()
    assert is_connected(neighbours, set(range(n)))


def test_the_seed_alone_draws_the_graph() -> None:
    assert (regular_graph(40, 6, b"a") == regular_graph(40, 6, b"a")).all()
    assert (regular_graph(40, 6, b"a") != regular_graph(40, 6, b"b")).any()
    # The same on every machine and with every version of NumPy.
    assert regular_graph(6, 2, b"fixed").tolist() == [[2, 3], [2, 4], [0, 1], [0, 5], [1, 5], [3, 4]]


def test_every_circle_is_as_likely_as_any_other() -> None:
    circles = Counter(regular_graph(5, 2, number.to_bytes(4)).tobytes() for number in range(6_000))
    assert len(circles) == 12  # 4! / 2
    assert (
        sum((count - 500) ** 2 / 500 for count in circles.values()) < 31.3
    )  # 11 degrees of freedom: 1 in 1,000


@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 1), (5, 5), (5, 3), (0, 0), (2**20 + 1, 2)])
def test_graphs_that_do_not_exist_are_refused(n: int, k: int) -> None:
    with pytest.raises(DegreeRefused):
        regular_graph(n, k, b"")


@pytest.mark.parametrize(
    ("population", "marked", "drawn"), [(9, 0, 4), (9, 9, 4), (19, 7, 8), (99, 30, 40), (299, 90, 150)]
)
def test_tails_are_those_of_direct_summation(population: int, marked: int, drawn: int) -> None:
    tails = _log_tails(population, marked, drawn)
    for least, value in enumerate(tails):
        exact = tail(population, marked, drawn, least)
        assert exp(value) == pytest.approx(float(exact), rel=1e-9, abs=0.0)


@pytest.mark.parametrize(("n", "colluding", "dropouts", "malicious"), CASES)
def test_what_is_chosen_is_sound_by_exact_counting(
    n: int, colluding: float, dropouts: float, malicious: bool
) -> None:
    degree = choose(n, colluding, dropouts, malicious)
    c, d = round(n * colluding), round(n * dropouts)
    k, t = degree.k, degree.threshold
    assert 2 <= t <= k < n
    # A secret leaks when this many of the neighbours collude.
    leaking = 2 * t - k if malicious else t
    assert n * tail(n - 1, c, k, leaking) <= Fraction(1, 2**41)
    assert n * tail(n - 1, d, k, k - t + 1) <= Fraction(1, 2**30)
    if k == n - 1:
        return
    assert k % 2 == 0
    if malicious:
        assert smallest_group(n, colluding, degree) >= (n - c) / 3
    elif k <= c + d:
        pairs = Fraction(n * (n - k - 1), 2)
        assert pairs * Fraction(comb(n - k, c + d - k), comb(n, c + d)) <= Fraction(1, 2**41)


@pytest.mark.parametrize(("n", "colluding", "dropouts", "malicious"), CASES)
def test_no_smaller_threshold_at_this_degree_is_sound(
    n: int, colluding: float, dropouts: float, malicious: bool
) -> None:
    degree = choose(n, colluding, dropouts, malicious)
    if degree.threshold == 2:
        return  # never one share alone
    t = degree.threshold - 1
    leaking = 2 * t - degree.k if malicious else t
    assert n * tail(n - 1, round(n * colluding), degree.k, leaking) > Fraction(1, 2**41)


@pytest.mark.parametrize(
    ("n", "colluding", "dropouts", "malicious", "k", "threshold"),
    [
        (100, 0.1, 0.1, False, 22, 11),
        (500, 0.1, 0.3, False, 88, 33),
        (1000, 0.3, 0.3, False, 244, 126),
        (100, 0.1, 0.1, True, 32, 22),
        (1000, 0.1, 0.1, True, 114, 78),
        (10_000, 0.1, 0.1, False, 60, 32),
    ],
)
def test_degrees_do_not_change_unnoticed(
    n: int, colluding: float, dropouts: float, malicious: bool, k: int, threshold: int
) -> None:
    assert choose(n, colluding, dropouts, malicious) == Degree(k, threshold)


@pytest.mark.parametrize(("n", "k", "bad"), [(10, 4, 5), (10, 4, 6), (11, 2, 4), (12, 4, 6), (12, 6, 7)])
def test_the_bound_on_falling_apart_is_above_what_counting_finds(n: int, k: int, bad: int) -> None:
    neighbours = regular_graph(n, k, b"any")
    apart = sum(
        not is_connected(neighbours, set(range(n)) - set(gone)) for gone in combinations(range(n), bad)
    ) / comb(n, bad)
    assert 0 < apart <= exp(_log_disconnected(n, k, bad))
    assert _log_disconnected(n, k, k - 1) == -float("inf")


@pytest.mark.parametrize(
    ("n", "colluding", "dropouts", "malicious", "threshold"),
    [
        (3, 0, 0, False, 2),
        (10, 0.3, 0.3, False, 4),
        (10, 0.3, 0.2, True, 7),
        (500, 0.1, 0.3, True, 275),
        (500, 0, 0, True, 250),
    ],
)
def test_the_complete_graph_leaves_nothing_to_chance(
    n: int, colluding: float, dropouts: float, malicious: bool, threshold: int
) -> None:
    degree = complete(n, colluding, dropouts, malicious)
    assert degree == Degree(n - 1, threshold)
    c, d = round(n * colluding), round(n * dropouts)
    assert threshold > c
    assert threshold <= n - 1 - d
    assert not malicious or 2 * threshold > n - 1 + c


@pytest.mark.parametrize(
    ("n", "colluding", "dropouts", "malicious"),
    [(10, 0.5, 0.5, False), (10, 0.3, 0.3, True), (100, 0.5, 0.5, False), (100, 0.3, 0.4, True)],
)
def test_too_many_that_collude_and_vanish_are_refused(
    n: int, colluding: float, dropouts: float, malicious: bool
) -> None:
    for function in (complete, choose):
        with pytest.raises(DegreeRefused, match="remain"):
            function(n, colluding, dropouts, malicious)


@pytest.mark.parametrize(
    ("n", "colluding", "dropouts"),
    [(2, 0.0, 0.0), (2**20 + 1, 0.1, 0.1), (9, 1.0, 0.1), (9, -0.1, 0.1), (9, 0.1, 1.0)],
)
def test_numbers_without_meaning_are_refused(n: int, colluding: float, dropouts: float) -> None:
    for function in (complete, choose):
        with pytest.raises(DegreeRefused):
            function(n, colluding, dropouts, False)


@pytest.mark.parametrize(
    ("n", "colluding", "degree"),
    [(50, 0.1, Degree(16, 11)), (100, 0.3, Degree(52, 42)), (60, 0.1, Degree(10, 6))],
)
def test_the_smallest_group_is_that_of_exact_counting(n: int, colluding: float, degree: Degree) -> None:
    c = round(n * colluding)
    total, size = Fraction(0), 0
    while total <= Fraction(1, 2**41):
        size += 1
        one = tail(n - 1, size - 1 + c, degree.k, degree.threshold)
        total += comb(n - c, size) * one**size
    assert smallest_group(n, colluding, degree) == size


def test_among_all_others_only_one_sum_can_be_learnt() -> None:
    n, colluding = 100, 0.1
    degree = complete(n, colluding, 0.2, True)
    group = smallest_group(n, colluding, degree)
    assert group == degree.threshold - 10 + 1
    assert 2 * group > 90  # two disjoint groups do not exist


def test_a_degree_grows_with_the_logarithm_of_the_clients() -> None:
    degrees = [choose(n, 0.1, 0.1, False).k for n in (1_000, 10_000, 100_000)]
    assert degrees == sorted(degrees)
    assert degrees[-1] < 6 * log(100_000)
