"""Many clients' data in memory: the rows once, and per client no more than where its row numbers begin.

A client's rows are gathered when asked for, one client at a time (a real device) or padded for a whole cohort (the
simulator); where the clients outnumber the rows, each row is also shifted and turned in that client's own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.data.augmentation import Augmentation, Numbers

Inputs = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClientData:
    """What lies on one device: training rows [n, F] with labels [n], and its own held-out rows [h, F] with labels."""

    inputs: Inputs
    labels: Labels
    held_inputs: Inputs
    held_labels: Labels


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of B clients: inputs [B, M, F] and labels [B, M] are 0 beyond the counts [B] of each client."""

    inputs: Inputs
    labels: Labels
    counts: Numbers

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which places [B, M] hold a row."""
        places: npt.NDArray[np.bool_] = np.arange(self.labels.shape[1]) < self.counts[:, None]
        return places


@dataclass(frozen=True, slots=True)
class Shares:
    """Row numbers by client: client c has ``rows[offsets[c]:offsets[c + 1]]``.

    ``rows`` int32 or int64 [R], ``offsets`` [C + 1]. Raises ValueError unless the offsets rise from 0 to R.
    """

    rows: npt.NDArray[Any]
    offsets: Numbers

    def __post_init__(self) -> None:
        ends = len(self.offsets) and self.offsets[0] == 0 and self.offsets[-1] == len(self.rows)
        if not ends or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0 to the {len(self.rows)} rows")

    @property
    def sizes(self) -> Numbers:
        """Rows of each client [C]."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Memory that grows with the clients."""
        return int(self.rows.nbytes + self.offsets.nbytes)


@dataclass(frozen=True)
class Federation:
    """N rows of F features with labels [N] below ``classes``, and the share of each of C clients in them.

    ``training`` and ``held_out`` name rows of ``inputs``; no row is in both. ``test_inputs`` [T, F] are nobody's, and
    original: they are never augmented. ``ids`` are the clients' own names where the source has such (users, speakers).
    Text is one strided view of its characters, so windows cost nothing until gathered.
    """

    name: str
    inputs: Inputs
    labels: Labels
    classes: int
    training: Shares
    held_out: Shares
    test_inputs: Inputs
    test_labels: Labels
    ids: tuple[str, ...] | None = None
    augmentation: Augmentation | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or len(self.test_inputs) != len(self.test_labels):
            raise ValueError("inputs and labels differ in length")
        if len(self.training.offsets) != len(self.held_out.offsets):
            raise ValueError("training and held-out rows are of different numbers of clients")
        if self.ids is not None and len(self.ids) != self.clients:
            raise ValueError(f"{len(self.ids)} ids for {self.clients} clients")
        for labels in (self.labels, self.test_labels):
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
                raise ValueError(f"labels must lie between 0 and {self.classes - 1}")
        for shares in (self.training, self.held_out):
            if len(shares.rows) and not 0 <= shares.rows.min() <= shares.rows.max() < len(self.inputs):
                raise ValueError("a client has a row that does not exist")

    @property
    def clients(self) -> int:
        """C."""
        return len(self.training.offsets) - 1

    @property
    def features(self) -> int:
        """F."""
        return int(self.inputs.shape[1])

    @property
    def counts(self) -> Numbers:
        """Training rows of each client [C]."""
        return self.training.sizes

    def rows(self, clients: Numbers, width: int | None = None) -> Padded:
        """Training rows of ``clients`` [B], padded to ``width`` or the largest of them.

        The same bits for a client in whatever batch. Raises IndexError for a client that does not exist, ValueError
        for a width that is too small.
        """
        return self._gather(self.training, clients, width, 0)

    def held_out_rows(self, clients: Numbers, width: int | None = None) -> Padded:
        """Held-out rows of ``clients`` [B], like ``rows``; a client may have none."""
        return self._gather(self.held_out, clients, width, len(self.inputs))

    def client(self, client: int) -> ClientData:
        """What lies on one device. Raises IndexError."""
        one = np.array([client], np.int64)
        rows, held = self.rows(one), self.held_out_rows(one)
        return ClientData(rows.inputs[0], rows.labels[0], held.inputs[0], held.labels[0])

    def _gather(self, shares: Shares, clients: Numbers, width: int | None, first: int) -> Padded:
        clients = np.asarray(clients, np.int64)
        if len(clients) and not 0 <= clients.min() <= clients.max() < self.clients:
            raise IndexError(f"clients are numbered 0 to {self.clients - 1}")
        starts = shares.offsets[clients]
        counts = shares.offsets[clients + 1] - starts
        largest = int(counts.max(initial=0))
        if width is not None and width < largest:
            raise ValueError(f"a client has {largest} rows, which do not fit a width of {width}")
        shape = (len(clients), largest if width is None else width)
        places = np.arange(shape[1])
        mask = places < counts[:, None]
        if mask.all():
            found = shares.rows[starts[:, None] + places].reshape(-1)
            inputs, labels = self._rows_at(found, clients, np.broadcast_to(places, shape), mask, first)
            return Padded(inputs.reshape(*shape, self.features), labels.reshape(shape), counts)
        found = shares.rows[(starts[:, None] + places)[mask]]
        some, labels = self._rows_at(found, clients, np.broadcast_to(places, shape), mask, first)
        padded = np.zeros((*shape, self.features), some.dtype)
        padded[mask] = some
        padded_labels = np.zeros(shape, np.int64)
        padded_labels[mask] = labels
        return Padded(padded, padded_labels, counts)

    def _rows_at(
        self,
        found: npt.NDArray[Any],
        clients: Numbers,
        places: Numbers,
        mask: npt.NDArray[np.bool_],
        first: int,
    ) -> tuple[Inputs, Labels]:
        """Inputs and labels of the row numbers ``found``, changed in each client's own way."""
        labels = self.labels[found]
        if self.augmentation is None:
            return self.inputs[found], labels
        owners = np.broadcast_to(clients[:, None], mask.shape)[mask]
        ways = self.augmentation.draw(owners, places[mask] + first)
        if self._made is None:
            return self.augmentation.apply(self.inputs[found], ways), labels
        return self._made[found.astype(np.int64) * self.augmentation.ways + ways], labels

    @cached_property
    def _made(self) -> npt.NDArray[np.float32] | None:
        """All augmented images, where they are few: independent of the number of clients."""
        if self.augmentation is None or not self.augmentation.fits_table(len(self.inputs)):
            return None
        return self.augmentation.table(self.inputs)
