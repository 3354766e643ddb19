"""Federations out of plain arrays: clients by a partition, by whom the rows belong to, or more clients than rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.data.augmentation import Augmentation, Numbers
from federated.data.federation import Federation, Inputs, Labels, Shares
from federated.partition import Partition, PartitionImpossible, by_user, make_partition

HELD_OUT: Final = 0.2
"""Share of each client's rows that it keeps for evaluation."""
ROWS_A_CLIENT: Final = 20
"""Training rows of a client whose data are augmented."""
_TEST_SEED: Final = 20_260_101
# Streams of the federation's seed: what one part draws never moves another's draws.
_PARTITION, _HELD_OUT, _LABELS, _WAYS = range(4)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows [N, F] with labels [N] below ``classes``, and test rows [T, F] that no client may have."""

    name: str
    inputs: Inputs
    labels: Labels
    classes: int
    test_inputs: Inputs
    test_labels: Labels
    image: tuple[int, int] | None = None
    """Height and width where the F features are an image."""
    source: str = ""


def split_test(labels: Labels, share: float = 0.2) -> tuple[Numbers, Numbers]:
    """Row numbers for training and for test: of every class the same share, and at least one, is test.

    The draw is fixed, so that runs of any seed are measured on the same rows.
    """
    generator = np.random.default_rng(_TEST_SEED)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        test[rows[: max(1, round(share * len(rows)))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def federate(table: Table, clients: int, seed: int, partition: str = "iid") -> Federation:
    """Each row of ``table`` with one of ``clients`` clients. Raises PartitionImpossible, ValueError."""
    divided = make_partition(partition, table.labels, clients, _generator(seed, _PARTITION))
    training, held_out = hold_out(divided, HELD_OUT, _generator(seed, _HELD_OUT))
    return Federation(
        table.name,
        table.inputs,
        table.labels,
        table.classes,
        training,
        held_out,
        table.test_inputs,
        table.test_labels,
        source=table.source,
    )


def federate_augmented(table: Table, clients: int, seed: int, partition: str = "iid") -> Federation:
    """More clients than rows: ``ROWS_A_CLIENT`` training rows a client on average, and a quarter as many held out.

    The partition cuts a longer list of labels in the table's proportions. Each place in it takes an image of that
    label, in turn, from one part of the images for training and from another for what is held out, so that no image
    is in both, whichever client asks. Raises PartitionImpossible, ValueError for a table without images.
    """
    if table.image is None:
        raise ValueError(f"{table.name} holds no images, so its rows cannot be shifted and turned")
    generator = _generator(seed, _LABELS)
    pool_training, pool_held = split_test(table.labels, HELD_OUT)
    # Rounded up, so that after each client's own rounding ROWS_A_CLIENT stay.
    places = clients * round(ROWS_A_CLIENT / (1.0 - HELD_OUT))
    labels = table.labels[generator.permutation(np.resize(np.arange(len(table.labels)), places))]
    divided = make_partition(partition, labels, clients, _generator(seed, _PARTITION))
    training, held_out = hold_out(divided, HELD_OUT, _generator(seed, _HELD_OUT))
    return Federation(
        table.name,
        table.inputs,
        table.labels,
        table.classes,
        _in_turn(training, labels, table.labels, pool_training, generator),
        _in_turn(held_out, labels, table.labels, pool_held, generator),
        table.test_inputs,
        table.test_labels,
        augmentation=Augmentation(_sub_seed(seed), *table.image),
        source=table.source,
    )


def federate_owned(
    name: str,
    inputs: Inputs,
    labels: Labels,
    classes: int,
    owners: Numbers,
    ids: Sequence[str],
    *,
    clients: int | None,
    seed: int,
    test: tuple[Inputs, Labels] | None = None,
    held_out: npt.NDArray[np.bool_] | None = None,
    source: str = "",
) -> Federation:
    """Rows that belong to somebody: every one of ``ids`` is a client, or ``clients`` of them drawn by ``seed``.

    ``owners`` [N] index ``ids``, or are -1 for rows that nobody has. ``held_out`` [N] marks rows kept for evaluation;
    without it a part of each client's is drawn. Without ``test`` the held-out rows of all clients are the test rows.
    Raises PartitionImpossible.
    """
    owned = np.flatnonzero(owners >= 0)
    divided = by_user(owners[owned])
    divided = Partition(owned[divided.rows], divided.offsets)
    if divided.clients != len(ids):
        raise PartitionImpossible(f"{len(ids)} users, but rows of {divided.clients}")
    if held_out is None:
        training, held = hold_out(divided, HELD_OUT, _generator(seed, _HELD_OUT))
    else:
        training, held = _marked(divided, held_out, keep=False), _marked(divided, held_out, keep=True)
    if clients is not None and clients != len(ids):
        if not 1 <= clients <= len(ids):
            raise PartitionImpossible(f"{name} has {len(ids)} users, which cannot be {clients} clients")
        chosen = np.sort(_generator(seed, _PARTITION).permutation(len(ids))[:clients])
        training, held = _chosen(training, chosen), _chosen(held, chosen)
        ids = [ids[client] for client in chosen]
    test_inputs, test_labels = test or (inputs[held.rows], labels[held.rows])
    return Federation(
        name, inputs, labels, classes, training, held, test_inputs, test_labels, ids=tuple(ids), source=source
    )


def hold_out(partition: Partition, share: float, generator: np.random.Generator) -> tuple[Shares, Shares]:
    """Every client's rows in two: for training and held out, in an order drawn anew.

    ``floor(share · n)`` of a client's n rows are held out, so a client always keeps one for training; whoever has
    fewer than 1 / ``share`` rows holds out none.
    """
    sizes = partition.sizes
    owner = np.repeat(np.arange(partition.clients), sizes)
    # Shuffled within each client by one sort of numbers that lead with the client and end in random bits.
    bits = 62 - int(partition.clients).bit_length()
    order = np.argsort((owner << bits) | generator.integers(0, 1 << bits, len(owner)))
    held_sizes = np.floor(sizes * share + 1e-9).astype(np.int64)
    rank = np.arange(len(owner)) - np.repeat(partition.offsets[:-1], sizes)
    held = rank < np.repeat(held_sizes, sizes)
    rows = narrow(partition.rows[order])
    return _shares(rows[~held], sizes - held_sizes), _shares(rows[held], held_sizes)


def narrow(rows: Numbers) -> npt.NDArray[Any]:
    """As int32 where that holds them: row numbers are most of a large federation's memory."""
    return rows.astype(np.int32) if len(rows) == 0 or rows.max() < 2**31 else rows


def _in_turn(
    shares: Shares, labels: Labels, table_labels: Labels, pool: Numbers, generator: np.random.Generator
) -> Shares:
    """The same shares, every place in them replaced by an image of its label out of ``pool``."""
    wanted = labels[shares.rows]
    taken = np.empty(len(wanted), np.int32)
    for label in np.unique(wanted):
        images = generator.permutation(pool[table_labels[pool] == label])
        if len(images) == 0:
            raise PartitionImpossible(
                f"class {label} has one image, but needs one to train on and one to hold out"
            )
        places = np.flatnonzero(wanted == label)
        taken[places] = np.resize(images, len(places))
    return Shares(taken, shares.offsets)


def _marked(partition: Partition, marks: npt.NDArray[np.bool_], *, keep: bool) -> Shares:
    kept = marks[partition.rows] == keep
    owner = np.repeat(np.arange(partition.clients), partition.sizes)
    return _shares(narrow(partition.rows[kept]), np.bincount(owner[kept], minlength=partition.clients))


def _chosen(shares: Shares, clients: Numbers) -> Shares:
    sizes = shares.sizes[clients]
    parts = [shares.rows[shares.offsets[client] : shares.offsets[client + 1]] for client in clients]
    return _shares(np.concatenate(parts), sizes)


def _shares(rows: npt.NDArray[Any], sizes: Numbers) -> Shares:
    return Shares(rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))


def _sub_seed(seed: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=(_WAYS,)).generate_state(1, np.uint64)[0])
