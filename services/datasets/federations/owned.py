"""Rows that belong to somebody, as readers of files give them, before they become clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.data import Federation, federate_owned
from federated.partition import make_partition
from services.datasets.errors import DatasetError, DatasetUnsuited

BY_USER = "user"


@dataclass(frozen=True, slots=True)
class Owned:
    """Inputs [N, F] and labels [N] of the users ``ids``, whom ``owners`` [N] index (-1: nobody's).

    ``held_out`` [N] marks each user's own rows for evaluation, and ``test`` holds rows that are nobody's; both may be
    missing. ``divisible`` says whether rows may be dealt to other clients than their users.
    """

    name: str
    inputs: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    classes: int
    owners: npt.NDArray[np.int64]
    ids: Sequence[str]
    held_out: npt.NDArray[np.bool_] | None = None
    test: tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None = None
    divisible: bool = True
    source: str = ""

    def federation(self, clients: int | None, seed: int, partition: str | None) -> Federation:
        """By user; or, where ``partition`` says another way, as if the rows were nobody's.

        Raises DatasetUnsuited, DatasetError, PartitionImpossible, ValueError.
        """
        owners, ids, held_out = self.owners, self.ids, self.held_out
        if partition not in (None, BY_USER):
            assert partition is not None
            if not self.divisible:
                raise DatasetError(
                    f"rows of {self.name} overlap within a user, so its partition is {BY_USER!r}, not {partition!r}"
                )
            if clients is None:
                raise DatasetUnsuited(
                    f"partition {partition!r} needs a number of clients: data.clients, --clients"
                )
            generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
            divided = make_partition(partition, self.labels, clients, generator)
            owners = np.empty_like(owners)
            owners[divided.rows] = np.repeat(np.arange(clients), divided.sizes)
            ids, held_out = [str(client) for client in range(clients)], None
        return federate_owned(
            self.name,
            self.inputs,
            self.labels,
            self.classes,
            owners,
            ids,
            clients=clients,
            seed=seed,
            test=self.test,
            held_out=held_out,
            source=self.source,
        )


def coded(labels: Sequence[object], where: str) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels [N] as numbers 0 to K − 1 and their names: whole numbers by value, other text by alphabet.

    Raises DatasetError when there is but one class.
    """
    texts = [str(label) for label in labels]
    names = sorted(set(texts), key=lambda text: (0, int(text), text) if _whole(text) else (1, 0, text))
    if len(names) < 2:
        raise DatasetError(f"{where}: all labels are {names[0]!r}; a classifier needs at least two classes")
    number = {name: code for code, name in enumerate(names)}
    return np.array([number[text] for text in texts], np.int64), tuple(names)


def last_of_each(
    owners: npt.NDArray[np.int64], times: npt.NDArray[Any], share: float
) -> npt.NDArray[np.bool_]:
    """Marks [N] of each owner's last ``floor(share · n)`` rows by time; rows of one time keep their order."""
    order = np.lexsort((np.arange(len(owners)), times, owners))
    sizes = np.bincount(owners)
    ends = np.repeat(np.cumsum(sizes), sizes)
    from_end = ends - 1 - np.arange(len(owners))
    marks = np.empty(len(owners), bool)
    marks[order] = from_end < np.repeat(np.floor(sizes * share + 1e-9), sizes)
    return marks


def _whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()
