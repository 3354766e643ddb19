"""The parts of a trained model: the guest has the trees and the leaves, each party the splits by its own columns.

An answer takes one round: a host says for all of its splits at once which rows go left. The guest so learns also where
rows would go at splits that they do not reach; asking split by split would cost a round a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.boosting.objective import LOSSES, Objective
from federated.vertical.boosting.plain import PlainModel
from federated.vertical.boosting.trees import LEAF, MOST_SPLITS, MOST_TREES, SPLIT_FIELDS, Splits, Tree
from federated.vertical.histograms.lanes import MOST_LANES
from federated.vertical.parties import PeerFault
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Arr, Blobs, Bytes, Expected, Float, Int, Text, pack, unpack

_MOST_NODES: Final = 2 * MOST_SPLITS + MOST_TREES
_HERE: Final = "this model"
_HOST: Final = "host"
_GUEST: Final = "guest"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class HostModel:
    """``opaque``: the number that stands for each column at the guest, int64 [F]; ``trees``: how many are grown."""

    splits: Splits
    opaque: Ints
    names: tuple[str, ...]
    trees: int

    def partial(self, rows: Floats) -> npt.NDArray[np.bool_]:
        """Whether each split sends each row of ``rows`` [N, F] left: [N, S]. Raises ValueError for other columns."""
        _check_columns(rows, self.names)
        return self.splits.left(rows)

    def dump(self) -> bytes:
        """For ``read``."""
        names = [name.encode() for name in self.names]
        return pack(
            {
                "part": _HOST,
                "opaque": self.opaque,
                "names": names,
                "trees": self.trees,
                **self.splits.fields(),
            }
        )

    @staticmethod
    def read(body: bytes) -> HostModel:
        """Raises PeerFault for what ``dump`` did not give."""
        fields = unpack(body, _HERE, _HOST_FIELDS)
        names = tuple(name.decode() for name in fields["names"])
        return HostModel(Splits.read(fields), fields["opaque"], names, fields["trees"])


@dataclass(slots=True)
class GuestModel:
    """``trees``: owners by place: 0 the guest, then ``hosts``. ``columns``: for each host, its splits' opaque columns.
    ``own``: what answers without hosts: a model of the guest's columns alone, when training is over."""

    objective: Objective
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    splits: Splits
    columns: tuple[list[int], ...]
    trees: list[Tree]
    own: PlainModel | None = None

    def scores(self, rows: Floats, partials: Mapping[str, npt.NDArray[Any]]) -> Floats:
        """Raw scores [N, K]. Raises PeerFault for a host's share of another type or shape."""
        _check_columns(rows, self.names)
        lefts = [self.splits.left(rows)]
        for host, columns in zip(self.hosts, self.columns, strict=True):
            share = partials[host]
            if share.dtype != np.bool_ or share.shape != (len(rows), len(columns)):
                raise PeerFault(host, "malformed", f"{share.dtype} of shape {share.shape}")
            lefts.append(share)
        found = np.tile(self.objective.base, (len(rows), 1))
        for tree in self.trees:
            found += tree.score(lefts)
        return found

    def combine(self, rows: Floats, partials: Mapping[str, npt.NDArray[Any]]) -> Floats:
        """The second class's probability [N], every class's [N, C], or the number [N]."""
        return self.objective.answer(self.scores(rows, partials))

    def alone(self, rows: Floats) -> Floats:
        """The same by the model that was trained on the guest's columns alone."""
        _check_columns(rows, self.names)
        if self.own is None:
            raise ValueError("training is not over")
        return self.own.answer(rows)

    def importance(self) -> dict[str, tuple[float, int]]:
        """Gain and number of splits by column: the guest's by name, a host's as ``HOST column NUMBER``, most first."""
        found: dict[str, tuple[float, int]] = {}
        for tree in self.trees:
            for owner, split, gain in zip(tree.owner, tree.split, tree.gain, strict=True):
                if owner == LEAF:
                    continue
                name = (
                    self.names[self.splits.feature[split]]
                    if owner == 0
                    else f"{self.hosts[owner - 1]} column {self.columns[owner - 1][split]}"
                )
                before = found.get(name, (0.0, 0))
                found[name] = (before[0] + gain, before[1] + 1)
        return dict(sorted(found.items(), key=lambda one: -one[1][0]))

    def importance_by_party(self) -> dict[str, tuple[float, int]]:
        """Gain and number of splits by party, the guest as ``guest``."""
        found = dict.fromkeys(("guest", *self.hosts), (0.0, 0))
        for tree in self.trees:
            for owner, gain in zip(tree.owner, tree.gain, strict=True):
                if owner != LEAF:
                    name = ("guest", *self.hosts)[owner]
                    found[name] = (found[name][0] + gain, found[name][1] + 1)
        return found

    def dump(self) -> bytes:
        """For ``read``."""
        return pack(
            {
                "part": _GUEST,
                "loss": self.objective.loss,
                "base": self.objective.base,
                "unit": self.objective.unit,
                "names": [name.encode() for name in self.names],
                "hosts": [name.encode() for name in self.hosts],
                "column counts": np.array([len(one) for one in self.columns], np.int64),
                "columns": np.array([one for columns in self.columns for one in columns], np.int64),
                **self.splits.fields(),
                **_tree_fields(self.trees, self.objective.outputs),
                "own": b"" if self.own is None else _dump_plain(self.own),
            }
        )

    @staticmethod
    def read(body: bytes) -> GuestModel:
        """Raises PeerFault for what ``dump`` did not give."""
        fields = unpack(body, _HERE, _GUEST_FIELDS)
        ends = np.cumsum(fields["column counts"])
        columns = tuple(part.tolist() for part in np.split(fields["columns"], ends[:-1])) if len(ends) else ()
        return GuestModel(
            _objective(fields),
            tuple(name.decode() for name in fields["names"]),
            tuple(name.decode() for name in fields["hosts"]),
            Splits.read(fields),
            columns,
            _read_trees(fields),
            _read_plain(fields["own"]) if fields["own"] else None,
        )


def load(body: bytes) -> HostModel | GuestModel:
    """The part in ``body``. Raises PeerFault for what is none."""
    # Both begin with this party's role, which pack writes as they do.
    begins = pack({"part": _HOST})[2:]
    return HostModel.read(body) if body[2:].startswith(begins) else GuestModel.read(body)


def _check_columns(rows: Floats, names: Sequence[str]) -> None:
    if rows.ndim != 2 or rows.shape[1] != len(names):
        raise ValueError(f"rows of shape {rows.shape}; this part was trained on {len(names)} columns")


def _objective(fields: Mapping[str, Any]) -> Objective:
    for loss in LOSSES:
        if loss == fields["loss"]:
            return Objective(loss, fields["base"], fields["unit"])
    raise PeerFault(_HERE, "malformed", f"there is no loss {fields['loss']!r}")


def _tree_fields(trees: Sequence[Tree], outputs: int) -> dict[str, npt.NDArray[Any]]:
    values = [value for tree in trees for value in tree.value]
    return {
        "sizes": np.array([len(tree) for tree in trees], np.int64),
        "owner": np.array([one for tree in trees for one in tree.owner], np.int64),
        "split": np.array([one for tree in trees for one in tree.split], np.int64),
        "left": np.array([one for tree in trees for one in tree.left], np.int64),
        "right": np.array([one for tree in trees for one in tree.right], np.int64),
        "gain": np.array([one for tree in trees for one in tree.gain], np.float64),
        "value": np.array(values, np.float64).reshape(len(values), outputs),
    }


def _read_trees(fields: Mapping[str, Any]) -> list[Tree]:
    trees: list[Tree] = []
    start = 0
    for size in fields["sizes"].tolist():
        part = slice(start, start + size)
        start += size
        columns = [fields[name][part].tolist() for name in ("owner", "split", "left", "right", "gain")]
        owner, split, left, right, gain = columns
        values = fields["value"]
        trees.append(Tree(values.shape[1], owner, split, left, right, gain, list(values[part])))
    return trees


def _dump_plain(model: PlainModel) -> bytes:
    objective = model.objective
    return pack(
        {
            "loss": objective.loss,
            "base": objective.base,
            "unit": objective.unit,
            **model.splits.fields(),
            **_tree_fields(model.trees, objective.outputs),
        }
    )


def _read_plain(body: bytes) -> PlainModel:
    fields = unpack(body, _HERE, _PLAIN_FIELDS)
    return PlainModel(_objective(fields), Splits.read(fields), tuple(_read_trees(fields)))


_TREE_FIELDS: Final[dict[str, Expected]] = {
    "sizes": Arr("<i8", (None,), MOST_TREES),
    **{name: Arr("<i8", (None,), _MOST_NODES) for name in ("owner", "split", "left", "right")},
    "gain": Arr("<f8", (None,), _MOST_NODES),
    "value": Arr("<f8", (None, None), MOST_LANES * _MOST_NODES),
}
_PLAIN_FIELDS: Final[dict[str, Expected]] = {
    "loss": Text(),
    "base": Arr("<f8", (None,), MOST_LANES),
    "unit": Float(),
    **SPLIT_FIELDS,
    **_TREE_FIELDS,
}
_GUEST_FIELDS: Final[dict[str, Expected]] = {
    "part": Text(),
    "loss": Text(),
    "base": Arr("<f8", (None,), MOST_LANES),
    "unit": Float(),
    "names": Blobs(MOST_COLUMNS, 1_000_000),
    "hosts": Blobs(1_000, 1_000),
    "column counts": Arr("<i8", (None,), 1_000),
    "columns": Arr("<i8", (None,), MOST_SPLITS),
    **SPLIT_FIELDS,
    **_TREE_FIELDS,
    "own": Bytes(2**31),
}
_HOST_FIELDS: Final[dict[str, Expected]] = {
    "part": Text(),
    "opaque": Arr("<i8", (None,), MOST_COLUMNS),
    "names": Blobs(MOST_COLUMNS, 1_000_000),
    "trees": Int(0, MOST_TREES),
    **SPLIT_FIELDS,
}
