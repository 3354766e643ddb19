"""An item table as a job's model: one row of data is a whole device, which makes its private vector at every step.

A device's data are the numbers of the items it knows; they become one row, 1 for each of them. So every device is one
example and counts alike, whatever batches the job asks for, and the private vector is always made from all it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from federated.layout import Layout
from federated.models.model import Inputs, Labels, Metrics, classification_metrics
from federated.recommendation.liked import Numbers
from federated.recommendation.objective import Objective, Softmax, SquaredError, initial_table, table_layout
from federated.weights import Array

_KNOWN = np.float32(-1e9)
"""The score of what a device knows already: finite, and below any other."""


@dataclass(frozen=True)
class ItemTable:
    """``items`` vectors of ``objective.dim``, the one field ``items`` [I, d]; with the softmax objective an item's last
    value is its bias. Inputs [N, I] are 1 where a device knows an item; labels [N] an item each is judged by."""

    items: int
    objective: Objective

    def __post_init__(self) -> None:
        if self.items < 1:
            raise ValueError(f"an item table needs at least one item, not {self.items}")

    @property
    def name(self) -> str:
        """Under which ``make_model`` makes it."""
        return "items"

    @cached_property
    def _layout(self) -> Layout:
        return table_layout(self.items, self.objective.dim)

    def layout(self) -> Layout:
        """How the table lies in the vector."""
        return self._layout

    def initial(self, generator: np.random.Generator) -> Array:
        """Small normal values [I·d]."""
        return initial_table(self.items, self.objective.dim, generator).reshape(-1)

    def _table(self, vector: Array) -> Array:
        return vector.reshape(self.items, self.objective.dim)

    def logits(self, vector: Array, inputs: Inputs) -> Array:
        """Scores [N, I] by vectors made from ``inputs`` [N, I]; what a device knows already is never recommended."""
        table, liked = self._table(vector), np.asarray(inputs, np.float32)
        scores = self.objective.scores(table, self.objective.private_vectors(table, liked))
        return np.where(liked > 0, _KNOWN, scores)

    def loss_and_gradient(
        self, vector: Array, inputs: Inputs, labels: Labels, out: Array | None = None
    ) -> tuple[float, Array]:
        """Mean of the devices' losses and its gradient [I·d]; ``labels`` play no part: the objective wants all that is
        known. The gradient is at the private vectors held fast."""
        table, liked = self._table(vector), np.asarray(inputs, np.float32)
        losses, gradients = self.objective.gradients(
            table, self.objective.private_vectors(table, liked), liked
        )
        gradient = np.empty_like(vector) if out is None else out
        np.mean(gradients.reshape(len(liked), -1), axis=0, out=gradient)
        return float(losses.mean()), gradient

    def metrics(self, vector: Array, inputs: Inputs, labels: Labels) -> Metrics:
        """How many have ``labels`` [N] as the first item recommended, the summed cross-entropy, and N."""
        return classification_metrics(self.logits(vector, inputs), labels)


OBJECTIVES: Mapping[str, type[Softmax] | type[SquaredError]] = {"softmax": Softmax, "squares": SquaredError}


def item_table(items: int, dim: int = 32, objective: str = "softmax", **options: float) -> ItemTable:
    """The model by the options of a job's file; ``options`` are the objective's own (``temperature``, ``unobserved``,
    ``regularisation``, ...). Raises ValueError, and TypeError for an option that it does not have."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is none of {', '.join(OBJECTIVES)}")
    kind = OBJECTIVES[objective]
    wholes = {"dim": dim, **({"steps": options["steps"]} if "steps" in options else {})}
    for name, value in (wholes | options).items():
        wanted = int if name in wholes else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError(f"{name} must be a {'whole ' if name in wholes else ''}number, not {value!r}")
    return ItemTable(items, kind(dim, **options))  # type: ignore[arg-type]


def device_rows(known: Numbers, items: int) -> tuple[Inputs, Labels]:
    """What a device that knows the items ``known`` trains on: inputs [1, I] and labels [1]. Raises ValueError where it
    knows none, or one that does not exist."""
    if not len(known):
        raise ValueError("a device that knows no item has nothing to teach")
    if not 0 <= int(known.min()) <= int(known.max()) < items:
        raise ValueError(f"an item is none of the {items}: they are numbered from 0")
    inputs = np.zeros((1, items), np.float32)
    inputs[0, known] = 1.0
    return inputs, known[-1:].astype(np.int64)


def load_known(path: Path, ids: tuple[str, ...], items: int) -> tuple[Inputs, Labels]:
    """A device's own file: ``.npz`` with the array ``items`` of numbers, or ``.txt`` with an item's id a line, of which
    those that are none of ``ids`` are passed over. Raises ValueError and OSError."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            if "items" not in arrays.files:
                raise ValueError(f"{path} has no array items")
            known = arrays["items"]
        if known.ndim != 1 or not np.issubdtype(known.dtype, np.integer):
            raise ValueError(f"{path}: items are not one row of whole numbers")
    elif path.suffix == ".txt":
        number_of = {name: number for number, name in enumerate(ids)}
        found = [number_of.get(line.strip(), -1) for line in path.read_text(encoding="utf-8").splitlines()]
        known = np.array([number for number in found if number >= 0], np.int64)
    else:
        raise ValueError(f"{path} is neither .npz nor .txt")
    return device_rows(known.astype(np.int64), items)
