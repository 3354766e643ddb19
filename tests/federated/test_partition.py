"""Partitioners: each row once, nobody empty, the same again for the same seed, and an end whatever is asked."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.partition import (
    Partition,
    PartitionImpossible,
    by_label,
    by_quantity,
    by_user,
    dirichlet,
    dirichlet_equal,
    iid,
    make_partition,
    shards,
    top_up,
)

ASKED = st.sampled_from(
    [
        "iid",
        "dirichlet:0.1",
        "dirichlet:1e-8",
        "dirichlet:1e6",
        "dirichlet_equal:0.05",
        "shards:2",
        "label:1",
        "label:3",
        "quantity:0",
        "quantity:1.5",
        "quantity:400",
    ]
)


def labels_of(seed: int, rows: int, classes: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.choice(classes, rows, p=generator.dirichlet(np.ones(classes))).astype(np.int64)


def classes_per_client(partition: Partition, labels: np.ndarray) -> list[int]:
    return [len(np.unique(labels[partition.of(client)])) for client in range(partition.clients)]


@given(ASKED, st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 60), st.integers(1, 12))
@settings(deadline=None, max_examples=300)
def test_a_partition_holds_each_row_once_and_leaves_no_client_empty(
    text: str, seed: int, rows: int, clients: int, classes: int
) -> None:
    labels = labels_of(seed, rows, classes)
    try:
        made = make_partition(text, labels, clients, np.random.default_rng(seed))
    except PartitionImpossible:
        # It may only be refused where it is impossible: too few rows for the clients, or of a class.
        present, counts = np.unique(labels, return_counts=True)
        name, _, each = text.partition(":")
        least = clients * (int(each) if name == "shards" else 1)
        few_of_a_class = name == "label" and (
            int(each) > len(present)
            or clients * int(each) < len(present)
            or counts.min() < clients * int(each)
        )
        assert rows < least or few_of_a_class
        return
    assert made.clients == clients
    assert np.array_equal(np.sort(made.rows), np.arange(rows))
    assert made.offsets[0] == 0
    assert made.offsets[-1] == rows
    assert made.sizes.min() >= 1
    again = make_partition(text, labels, clients, np.random.default_rng(seed))
    assert np.array_equal(made.rows, again.rows)
    assert np.array_equal(made.offsets, again.offsets)


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 5), st.integers(0, 100))
@settings(deadline=None)
def test_topping_up_gives_everyone_enough_and_takes_from_nobody_who_has_less(
    seed: int, clients: int, least: int, extra: int
) -> None:
    generator = np.random.default_rng(seed)
    rows = clients * max(least, 1) + extra
    owners = generator.integers(0, generator.integers(1, clients + 1), rows)
    before = np.bincount(owners, minlength=clients)
    made = top_up(owners, clients, least, generator)
    assert np.array_equal(np.sort(made.rows), np.arange(rows))
    assert made.sizes.min() >= least
    lost = made.sizes < before
    if lost.any():
        # The largest are cut to one level: nobody who kept everything is above it by more than the rounding.
        assert made.sizes[lost].min() >= least
        assert before[~lost].max(initial=0) <= made.sizes[lost].max() + 1
    assert made.sizes.sum() == rows
    if not (before < least).any():
        assert np.array_equal(made.sizes, before)


def test_iid_is_even_and_mixes_classes() -> None:
    labels = np.repeat(np.arange(10), 1_000)
    made = iid(labels, 7, np.random.default_rng(0))
    assert set(made.sizes.tolist()) == {1428, 1429}
    shares = np.array([np.bincount(labels[made.of(c)], minlength=10) / made.sizes[c] for c in range(7)])
    assert np.abs(shares - 0.1).max() < 0.04


@pytest.mark.parametrize("partitioner", [dirichlet, dirichlet_equal])
def test_a_small_alpha_gives_few_classes_and_a_large_one_all(partitioner: object) -> None:
    assert callable(partitioner)
    labels = np.repeat(np.arange(10), 1_000)
    largest = {}
    for alpha in (0.05, 1.0, 1_000.0):
        made = partitioner(labels, 20, np.random.default_rng(3), alpha=alpha)
        shares = [np.bincount(labels[made.of(c)], minlength=10).max() / made.sizes[c] for c in range(20)]
        largest[alpha] = float(np.mean(shares))
    assert largest[0.05] > 0.6 > largest[1.0] > 0.2 > largest[1_000.0]
    assert largest[1_000.0] == pytest.approx(0.1, abs=0.05)


def test_the_mean_share_of_dirichlet_is_even_and_its_spread_follows_alpha() -> None:
    # One class over C clients: shares have mean 1 / C and variance (C − 1) / (C² (C·alpha + 1)).
    labels, clients, alpha = np.zeros(50_000, np.int64), 5, 0.5
    shares = np.array(
        [dirichlet(labels, clients, np.random.default_rng(seed), alpha).sizes / 50_000 for seed in range(400)]
    )
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.mean(axis=0) == pytest.approx(1 / clients, abs=0.04)
    assert shares.var(axis=0) == pytest.approx(variance, rel=0.3)


def test_dirichlet_equal_gives_equal_sizes() -> None:
    made = dirichlet_equal(labels_of(1, 1_003, 10), 50, np.random.default_rng(1), alpha=0.1)
    assert set(made.sizes.tolist()) == {20, 21}


def test_by_label_gives_each_client_exactly_so_many_classes() -> None:
    labels = labels_of(2, 4_000, 10)
    for classes in (1, 2, 3, 7, 10):
        made = by_label(labels, 30, np.random.default_rng(2), classes)
        assert set(classes_per_client(made, labels)) == {classes}


def test_shards_are_few_classes_and_equal_sizes() -> None:
    labels = np.repeat(np.arange(10), 600)
    made = shards(labels, 100, np.random.default_rng(4), 2)
    assert set(made.sizes.tolist()) == {60}
    assert max(classes_per_client(made, labels)) == 2


def test_quantities_fall_by_a_power_of_the_rank() -> None:
    made = by_quantity(np.zeros(100_000, np.int64), 100, np.random.default_rng(5), 1.0)
    falling = np.sort(made.sizes)[::-1]
    assert falling[0] / falling[9] == pytest.approx(10.0, rel=0.02)
    assert falling[0] / falling[99] == pytest.approx(100.0, rel=0.05)
    assert made.sizes.argmax() != 0, "the largest client is drawn, not the first"


def test_users_keep_their_rows_in_order() -> None:
    made = by_user(np.array([2, 0, 1, 0, 2, 2]))
    assert [made.of(client).tolist() for client in range(3)] == [[1, 3], [2], [0, 4, 5]]
    for owners in ([0, 2], [-1, 0], []):
        with pytest.raises(PartitionImpossible):
            by_user(np.array(owners, np.int64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iid:3", "takes no option"),
        ("dirichlet:many", "needs alpha as a number"),
        ("label:1.5", "needs classes as a number"),
        ("fair", "is no partition; known are iid"),
        ("dirichlet:0", "alpha must be positive"),
        ("dirichlet:nan", "alpha must be positive"),
        ("dirichlet:inf", "alpha must be positive"),
        ("quantity:-1", "not negative"),
        ("shards:0", "at least one shard"),
        ("label:11", "but the rows have 10"),
        ("label:0", "but the rows have 10"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(text, np.arange(100) % 10, 10, np.random.default_rng(0))


def test_a_class_with_fewer_rows_than_holders_is_named() -> None:
    labels = np.array([0] * 50 + [1] * 3)
    with pytest.raises(PartitionImpossible, match="class 1 has 3 rows for 10 clients"):
        by_label(labels, 10, np.random.default_rng(0), 2)


def test_a_hundred_thousand_clients_take_seconds_at_most() -> None:
    labels = np.arange(400_000) % 10
    for text in ("iid", "dirichlet:0.1", "dirichlet_equal:0.1", "label:2", "shards:2", "quantity:1.1"):
        started = time.process_time()
        made = make_partition(text, labels, 100_000, np.random.default_rng(7))
        # Half a second on a quiet machine; a loop over clients takes tens.
        assert time.process_time() - started < 5.0
        assert made.sizes.min() >= 1
