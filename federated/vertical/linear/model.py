"""The parts of a trained regression, each at its own party, and what the guest can answer alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.solver import Scaling
from federated.vertical.parties import PeerFault
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Arr, Expected, Float, Text, pack, unpack

Values = npt.NDArray[np.float64]

_HOST: Final = "linear host 1"
_GUEST: Final = "linear guest 1"
_FILE: Final = "this model"
_VECTOR: Final = Arr("<f8", (None,), MOST_COLUMNS + 1)
# Columns that were constant have an infinite deviation.
_DEVIATION: Final = Arr("<f8", (None,), MOST_COLUMNS, finite=False)
_COMMON: Final[dict[str, Expected]] = {
    "form": Text(),
    "mean": _VECTOR,
    "deviation": _DEVIATION,
    "clip": Float(0.1, 100.0),
    "weights": _VECTOR,
}
_GUEST_FIELDS: Final[dict[str, Expected]] = _COMMON | {
    "alone": _VECTOR,
    "family": Text(),
    "label_mean": Float(),
    "label_deviation": Float(),
    "hosts": Text(10_000),
}


def _common(form: str, scaling: Scaling, weights: Values) -> dict[str, Any]:
    return {
        "form": form,
        "mean": scaling.mean,
        "deviation": scaling.deviation,
        "clip": scaling.clip,
        "weights": weights,
    }


def _check(scaling: Scaling, weights: Values, extra: int) -> None:
    if len(scaling.deviation) != len(scaling.mean) or len(weights) != len(scaling.mean) + extra:
        raise ValueError(f"a model of {len(weights)} weights for {len(scaling.mean)} columns")


@dataclass(frozen=True, slots=True)
class HostModel:
    """``weights``: [F] of scaled columns."""

    scaling: Scaling
    weights: Values

    def partial(self, rows: Values) -> Values:
        """This party's share of the linear predictor, [N]."""
        found: Values = self.scaling.apply(rows) @ self.weights
        return found

    def dump(self) -> bytes:
        return pack(_common(_HOST, self.scaling, self.weights))


@dataclass(frozen=True, slots=True)
class GuestModel:
    """``weights``, ``weights_alone``: [F + 1], the constant's last; the second were fitted to the guest's columns only.

    ``mean``, ``deviation``: of the labels of a linear regression."""

    family: str
    scaling: Scaling
    weights: Values
    weights_alone: Values
    mean: float
    deviation: float
    hosts: tuple[str, ...]

    def combine(self, rows: Values, partials: Mapping[str, Values]) -> Values:
        """Probabilities, or values of a linear regression, [N]. Raises PeerFault for a share that is none, ValueError
        where one is missing."""
        if missing := [name for name in self.hosts if name not in partials]:
            raise ValueError(f"no share of {', '.join(missing)}")
        total = self._predictor(rows, self.weights)
        for name in self.hosts:
            share = partials[name]
            if share.dtype != np.float64 or share.shape != total.shape or not np.isfinite(share).all():
                raise PeerFault(
                    name, "malformed", f"a share of {share.dtype} {share.shape} for {len(total)} rows"
                )
            total = total + share
        return self._answer(total)

    def alone(self, rows: Values) -> Values:
        """Answers [N] of the model that was fitted to the guest's columns only."""
        return self._answer(self._predictor(rows, self.weights_alone))

    def dump(self) -> bytes:
        fields = _common(_GUEST, self.scaling, self.weights) | {
            "alone": self.weights_alone,
            "family": self.family,
            "label_mean": self.mean,
            "label_deviation": self.deviation,
            "hosts": "\n".join(self.hosts),
        }
        return pack(fields)

    def _predictor(self, rows: Values, weights: Values) -> Values:
        found: Values = self.scaling.apply(rows) @ weights[:-1] + weights[-1]
        return found

    def _answer(self, predictor: Values) -> Values:
        if self.family == "linear":
            return self.mean + self.deviation * predictor
        # tanh saturates where exp would overflow.
        found: Values = 0.5 + 0.5 * np.tanh(predictor / 2)
        return found


def load(body: bytes) -> HostModel | GuestModel:
    """The part that ``dump`` gave. Raises PeerFault (of ``this model``), ValueError."""
    try:
        fields = unpack(body, _FILE, _COMMON)
    except PeerFault:
        fields = unpack(body, _FILE, _GUEST_FIELDS)
    scaling = Scaling(fields["mean"], fields["deviation"], fields["clip"])
    if fields["form"] == _HOST and "hosts" not in fields:
        _check(scaling, fields["weights"], 0)
        return HostModel(scaling, fields["weights"])
    if fields["form"] != _GUEST or "hosts" not in fields:
        raise ValueError(f"{fields['form'][:40]!r} is no form of model that this version knows")
    _check(scaling, fields["weights"], 1)
    _check(scaling, fields["alone"], 1)
    return GuestModel(
        fields["family"],
        scaling,
        fields["weights"],
        fields["alone"],
        fields["label_mean"],
        fields["label_deviation"],
        tuple(fields["hosts"].split("\n")),
    )


def fit_alone(features: Values, labels: Values, options: LinearOptions) -> Values:
    """Weights [F] of the guest's own regression on scaled ``features`` [N, F] (the last one constant), by Newton's
    method with the exact sigmoid, in the clear."""
    rows, width = features.shape
    ridge = np.full(width, options.l2 / rows)
    ridge[-1] = 1e-9
    weights = np.zeros(width)
    for _ in range(1 if options.family == "linear" else 30):
        predictor = features @ weights
        if options.family == "linear":
            value, slope = predictor, np.ones(rows)
        else:
            value = 0.5 + 0.5 * np.tanh(predictor / 2)
            slope = np.maximum(value * (1 - value), 1e-6)
        gradient = features.T @ (value - labels) / rows + ridge * weights
        hessian = (features.T * slope) @ features / rows + np.diag(ridge + 1e-9)
        step = np.linalg.solve(hessian, gradient)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    return weights
