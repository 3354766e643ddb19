"""The parts of a trained transfer, each at its own party."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import PeerFault
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.transfer.options import MOST_HIDDEN
from federated.vertical.wire import Arr, Expected, Float, Text, pack, unpack

Values = npt.NDArray[np.float64]

_FILE: Final = "this model"
_FORMS: Final = ("transfer host 1", "transfer guest 1")
_COMMON: Final[dict[str, Expected]] = {
    "form": Text(100),
    "mean": Arr("<f8", (None,), MOST_COLUMNS),
    # Columns that were constant have an infinite deviation.
    "deviation": Arr("<f8", (None,), MOST_COLUMNS, finite=False),
    "clip": Float(0.1, 100.0),
    "weights": Arr("<f8", (None, None), (MOST_COLUMNS + 1) * MOST_HIDDEN),
}
_GUEST: Final[dict[str, Expected]] = _COMMON | {"phi": Arr("<f8", (None,), MOST_HIDDEN), "host": Text(1_000)}


def inputs_of(scaling: Scaling, rows: Values) -> Values:
    """``rows`` [N, F] scaled, and a constant column: [N, F + 1]."""
    return np.hstack([scaling.apply(rows), np.ones((len(rows), 1))])


@dataclass(frozen=True, slots=True)
class HostModel:
    """``weights``: [F + 1, d]."""

    scaling: Scaling
    weights: Values

    def partial(self, rows: Values) -> Values:
        """The vectors u_B [N, d] of ``rows`` [N, F]."""
        return np.asarray(np.tanh(inputs_of(self.scaling, rows) @ self.weights))

    def dump(self) -> bytes:
        return pack(_fields(_FORMS[0], self.scaling, self.weights))


@dataclass(frozen=True, slots=True)
class GuestModel:
    """``phi``: Φ [d], with which a host's vectors are scored. The guest needs no row of its own for that."""

    scaling: Scaling
    weights: Values
    phi: Values
    host: str

    def combine(self, rows: Values, partials: Mapping[str, npt.NDArray[Any]]) -> Values:
        """Probabilities [N]. Raises PeerFault for a share that is none, ValueError where it is missing."""
        if self.host not in partials:
            raise ValueError(f"no share of {self.host}")
        share = partials[self.host]
        if share.dtype != np.float64 or share.shape != (len(rows), len(self.phi)):
            raise PeerFault(
                self.host, "malformed", f"a share of {share.dtype} {share.shape} for {len(rows)} rows"
            )
        if not (np.abs(share) <= 1).all():
            raise PeerFault(self.host, "malformed", "vectors beyond 1")
        return _probability(share @ self.phi)

    def alone(self, rows: Values) -> Values:
        """The same of the guest's own vectors of ``rows`` [N, F]: the guest's share of the model."""
        return _probability(np.tanh(inputs_of(self.scaling, rows) @ self.weights) @ self.phi)

    def dump(self) -> bytes:
        return pack(_fields(_FORMS[1], self.scaling, self.weights) | {"phi": self.phi, "host": self.host})


def load(body: bytes) -> HostModel | GuestModel:
    """The part that ``dump`` gave. Raises PeerFault (of ``this model``), ValueError."""
    try:
        fields = unpack(body, _FILE, _COMMON)
    except PeerFault:
        fields = unpack(body, _FILE, _GUEST)
    guest = "host" in fields
    if fields["form"] != _FORMS[guest]:
        raise ValueError(f"{fields['form'][:40]!r} is no form of model that this version knows")
    weights, columns = fields["weights"], len(fields["mean"])
    if len(fields["deviation"]) != columns or len(weights) != columns + 1:
        raise ValueError(f"a model of {len(weights)} rows of weights for {columns} columns")
    scaling = Scaling(fields["mean"], fields["deviation"], fields["clip"])
    if not guest:
        return HostModel(scaling, weights)
    if fields["phi"].shape != weights.shape[1:]:
        raise ValueError("a model whose vectors are of different lengths")
    return GuestModel(scaling, weights, fields["phi"], fields["host"])


def _fields(form: str, scaling: Scaling, weights: Values) -> dict[str, Any]:
    return {
        "form": form,
        "mean": scaling.mean,
        "deviation": scaling.deviation,
        "clip": scaling.clip,
        "weights": weights,
    }


def _probability(scores: Values) -> Values:
    return np.asarray(0.5 + 0.5 * np.tanh(scores / 2))
