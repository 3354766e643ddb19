"""Federations: rows by client, padded and alone; images that are made when asked; nothing shared with the test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.data import (
    Augmentation,
    Federation,
    Shares,
    Table,
    federate,
    federate_augmented,
    federate_owned,
    split_test,
)
from federated.partition import PartitionImpossible


def table(rows: int = 300, side: int = 6, seed: int = 0) -> Table:
    """Images whose first pixel tells which they are, so that rows can be traced."""
    generator = np.random.default_rng(seed)
    inputs = generator.random((rows, side * side)).astype(np.float32)
    inputs[:, 0] = np.arange(rows)
    labels = np.arange(rows) % 5
    training, test = split_test(labels)
    return Table(
        "made", inputs[training], labels[training], 5, inputs[test], labels[test], (side, side), "a test"
    )


def shares_of(*lists: list[int]) -> Shares:
    offsets = np.cumsum([0, *map(len, lists)])
    return Shares(np.array([row for some in lists for row in some], np.int32), offsets)


def small() -> Federation:
    inputs = np.arange(24, dtype=np.float32).reshape(12, 2)
    return Federation(
        "small",
        inputs,
        np.arange(12) % 3,
        3,
        shares_of([0, 1, 2], [5], [7, 9, 10, 11]),
        shares_of([3], [], [8]),
        inputs[:0],
        np.zeros(0, np.int64),
    )


def test_rows_are_padded_with_zeros_beyond_each_clients_count() -> None:
    made = small().rows(np.array([2, 1, 2]))
    assert made.inputs.shape == (3, 4, 2)
    assert made.counts.tolist() == [4, 1, 4]
    assert made.inputs[0, :, 0].tolist() == [14, 18, 20, 22]
    assert made.inputs[1, :, 0].tolist() == [10, 0, 0, 0]
    assert made.labels.tolist() == [[1, 0, 1, 2], [2, 0, 0, 0], [1, 0, 1, 2]]
    assert made.mask.tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    assert small().rows(np.array([0]), width=6).inputs.shape == (1, 6, 2)


def test_a_client_without_held_out_rows_has_none() -> None:
    federation = small()
    assert federation.held_out_rows(np.array([0, 1])).counts.tolist() == [1, 0]
    assert federation.held_out_rows(np.array([1])).inputs.shape == (1, 0, 2)
    assert federation.client(1).held_inputs.shape == (0, 2)
    assert federation.rows(np.zeros(0, np.int64)).inputs.shape == (0, 0, 2)


def test_what_does_not_exist_or_fit_is_refused() -> None:
    federation = small()
    for client in (-1, 3):
        with pytest.raises(IndexError, match="numbered 0 to 2"):
            federation.client(client)
    with pytest.raises(ValueError, match="do not fit a width of 3"):
        federation.rows(np.array([2]), width=3)
    with pytest.raises(ValueError, match="offsets must rise"):
        Shares(np.zeros(3, np.int32), np.array([0, 2, 1, 3]))
    with pytest.raises(ValueError, match="offsets must rise"):
        Shares(np.zeros(3, np.int32), np.array([0, 2]))
    with pytest.raises(ValueError, match="row that does not exist"):
        Federation(
            "bad", np.zeros((2, 1)), np.zeros(2, np.int64), 1, shares_of([2]), shares_of([]),
            np.zeros((0, 1)), np.zeros(0, np.int64),
        )  # fmt: skip
    with pytest.raises(ValueError, match="labels must lie between"):
        Federation(
            "bad", np.zeros((2, 1)), np.array([0, 1]), 1, shares_of([0]), shares_of([]),
            np.zeros((0, 1)), np.zeros(0, np.int64),
        )  # fmt: skip


@given(st.integers(0, 2**32), st.lists(st.integers(0, 39), min_size=1, max_size=12), st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_clients_bits_do_not_depend_on_the_batch_it_is_in(
    seed: int, clients: list[int], augmented: bool
) -> None:
    make = federate_augmented if augmented else federate
    federation = make(table(), 40, seed % 7, "quantity:0.8")
    together = federation.rows(np.array(clients))
    held = federation.held_out_rows(np.array(clients))
    for place, client in enumerate(clients):
        alone = federation.client(client)
        count, held_count = len(alone.labels), len(alone.held_labels)
        assert together.counts[place] == count
        assert np.array_equal(together.inputs[place, :count], alone.inputs)
        assert np.array_equal(together.labels[place, :count], alone.labels)
        assert not together.inputs[place, count:].any()
        assert np.array_equal(held.inputs[place, :held_count], alone.held_inputs)


def traced(federation: Federation, shares: Shares) -> set[int]:
    return {int(value) for value in federation.inputs[shares.rows][:, 0]}


@pytest.mark.parametrize("clients", [20, 500])
@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.2", "label:2"])
def test_no_image_is_in_two_of_training_held_out_and_test(clients: int, partition: str) -> None:
    source = table()
    make = federate_augmented if clients > 50 else federate
    federation = make(source, clients, 3, partition)
    training, held = traced(federation, federation.training), traced(federation, federation.held_out)
    test = {int(value) for value in federation.test_inputs[:, 0]}
    assert training
    assert held
    assert not training & held
    assert not (training | held) & test
    assert np.array_equal(federation.test_inputs, source.test_inputs), "test rows stay as they are"


def test_an_augmented_client_has_twenty_rows_with_the_labels_of_their_images() -> None:
    source = table()
    federation = federate_augmented(source, 500, 3, "iid")
    assert set(federation.counts.tolist()) == {20}
    assert set(federation.held_out.sizes.tolist()) == {5}
    data = federation.client(17)
    rows = federation.training.rows[federation.training.offsets[17] :][:20]
    assert np.array_equal(data.labels, source.labels[rows])
    changed = (data.inputs != source.inputs[rows]).any(axis=1)
    assert changed.mean() > 0.8, "all but the ways that leave an image alone change it"


def test_the_same_image_is_changed_in_each_clients_own_way_and_the_same_way_again() -> None:
    federation = federate_augmented(table(), 500, 3, "iid")
    image = int(federation.training.rows[0])
    holders = np.searchsorted(
        federation.training.offsets, np.flatnonzero(federation.training.rows == image), "right"
    )
    made = set()
    for client in holders - 1:
        data = federation.client(int(client))
        start = federation.training.offsets[client]
        place = int(np.flatnonzero(federation.training.rows[start : start + 20] == image)[0])
        made.add(data.inputs[place].tobytes())
    assert len(holders) > 30
    assert len(made) > 15
    assert np.array_equal(federation.rows(np.arange(9)).inputs, federation.rows(np.arange(9)).inputs)
    other = federate_augmented(table(), 500, 4, "iid")
    assert not np.array_equal(other.rows(np.arange(9)).inputs, federation.rows(np.arange(9)).inputs)


def test_an_image_left_as_it_is_keeps_its_bits_and_a_shift_moves_it() -> None:
    ways = Augmentation(0, 16, 16)
    image = np.zeros((1, 256), np.float32)
    image[0, 7 * 16 + 5] = 0.7
    found = {}
    for way in range(ways.ways):
        made = ways.apply(image, np.array([way]))[0].reshape(16, 16)
        found[way] = made
        assert made.sum() <= 0.7 * 1.3
    plain = [way for way, made in found.items() if np.array_equal(made.ravel(), image[0])]
    assert len(plain) == 1
    # A sixteenth of 16 pixels is one pixel, exactly.
    down = [
        way for way, made in found.items() if made[8, 5] == np.float32(0.7) and np.count_nonzero(made) == 1
    ]
    assert len(down) == 1


def test_a_turned_image_agrees_with_a_straight_computation() -> None:
    ways = Augmentation(0, 8, 8)
    generator = np.random.default_rng(1)
    image = generator.random(64).astype(np.float32)
    degrees, shifts = (-15, -10, -5, 0, 5, 10, 15), (-0.5, 0.0, 0.5)
    order = [(a, dy, dx) for a in degrees for dy in shifts for dx in shifts]
    for way in (0, 5, 30, 62):
        angle, down, right = np.deg2rad(order[way][0]), order[way][1], order[way][2]
        expected = np.zeros((8, 8))
        for y in range(8):
            for x in range(8):
                v, u = y - 3.5 - down, x - 3.5 - right
                sy = np.cos(angle) * v + np.sin(angle) * u + 3.5
                sx = np.cos(angle) * u - np.sin(angle) * v + 3.5
                for py in range(8):
                    for px in range(8):
                        share = max(0.0, 1 - abs(sy - py)) * max(0.0, 1 - abs(sx - px))
                        expected[y, x] += share * image[py * 8 + px]
        made = ways.apply(image[None], np.array([way]))[0].reshape(8, 8)
        np.testing.assert_allclose(made, expected, atol=1e-6)


def test_kept_images_and_images_made_on_the_spot_are_the_same() -> None:
    ways = Augmentation(3, 6, 6)
    images = table().inputs[:20]
    kept = ways.table(images)
    chosen = np.array([0, 5, 62, 17])
    assert np.array_equal(kept[chosen + ways.ways * np.arange(4)], ways.apply(images[:4], chosen))


def test_ways_are_drawn_evenly_and_by_client_row_and_seed() -> None:
    ways = Augmentation(5, 8, 8)
    clients, rows = np.repeat(np.arange(3_000), 21), np.tile(np.arange(21), 3_000)
    drawn = ways.draw(clients, rows)
    counts = np.bincount(drawn, minlength=ways.ways)
    # Chi-squared with 62 degrees of freedom: above 120 once in 10^5.
    assert ((counts - 1_000.0) ** 2 / 1_000.0).sum() < 120.0
    assert not np.array_equal(drawn, Augmentation(6, 8, 8).draw(clients, rows))
    assert len(np.unique(drawn[:21])) > 10


def test_a_hundred_thousand_clients_cost_about_a_hundred_bytes_each() -> None:
    federation = federate_augmented(table(), 100_000, 1, "iid")
    assert (federation.training.nbytes + federation.held_out.nbytes) / federation.clients < 120
    assert federation.rows(np.array([99_999, 0])).inputs.shape == (2, 20, 36)


def test_rows_of_users_stay_theirs_and_fewer_clients_are_drawn_among_them() -> None:
    owners = np.repeat(np.arange(10), 10)
    inputs = owners[:, None].astype(np.float32)
    labels = np.arange(100) % 2
    names = [f"user {user}" for user in range(10)]
    every = federate_owned("owned", inputs, labels, 2, owners, names, clients=None, seed=1)
    assert every.ids == tuple(names)
    assert every.counts.tolist() == [8] * 10
    assert len(every.test_labels) == 20
    some = federate_owned("owned", inputs, labels, 2, owners, names, clients=4, seed=1)
    assert some.ids is not None
    for client, name in enumerate(some.ids):
        data = some.client(client)
        assert {f"user {int(value)}" for value in data.inputs[:, 0]} == {name}
        assert {f"user {int(value)}" for value in data.held_inputs[:, 0]} == {name}
    with pytest.raises(PartitionImpossible, match="has 10 users, which cannot be 11 clients"):
        federate_owned("owned", inputs, labels, 2, owners, names, clients=11, seed=1)


def test_rows_without_an_owner_belong_to_nobody() -> None:
    owners = np.array([0] * 6 + [-1] + [1] * 6)
    made = federate_owned(
        "gap", np.arange(13.0)[:, None], np.zeros(13, np.int64), 1, owners, ["a", "b"], clients=None, seed=0
    )
    assert 6 not in set(made.training.rows) | set(made.held_out.rows)
    assert len(made.training.rows) + len(made.held_out.rows) == 12


def test_the_split_for_tests_is_of_every_class_and_always_the_same() -> None:
    labels = np.array([0] * 100 + [1] * 10 + [2])
    training, test = split_test(labels)
    assert np.bincount(labels[test]).tolist() == [20, 2, 1]
    assert sorted([*training, *test]) == list(range(111))
    assert np.array_equal(split_test(labels)[1], test)


def test_only_images_can_be_augmented() -> None:
    plain = Table(
        "plain", np.zeros((9, 2)), np.zeros(9, np.int64), 1, np.zeros((1, 2)), np.zeros(1, np.int64)
    )
    with pytest.raises(ValueError, match="holds no images"):
        federate_augmented(plain, 100, 0)


def test_a_class_with_a_single_image_cannot_be_trained_on_and_held_out() -> None:
    labels = np.array([0] * 9 + [1])
    lone = Table("lone", np.zeros((10, 4)), labels, 2, np.zeros((0, 4)), labels[:0], (2, 2))
    with pytest.raises(PartitionImpossible, match="class 1 has one image"):
        federate_augmented(lone, 100, 0)
