"""What every party of a joint regression works out alike from the options, the seed and the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.ckks import Scheme
from federated.vertical.kinds import Setup
from federated.vertical.linear.batches import Batches, check_batches, check_labels
from federated.vertical.linear.circuit import Circuit, flooding
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.solver import Scaling, Solver
from federated.vertical.linear.surrogate import Surrogate, surrogate_of
from federated.vertical.masks import Masks
from federated.vertical.tables import NAMED, Table

Values = npt.NDArray[np.float64]

LOGISTIC_RESIDUAL: Final = 2.0
"""The residual of 0/1 labels that statements about masks reckon with, at most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``masks``: of gradients' terms; ``loss_masks``: of the loss's; ``row_masks``: of residuals themselves (no
    coordinator). ``curvature``: what each party's steps reckon with."""

    options: LinearOptions
    surrogate: Surrogate
    scheme: Scheme
    circuit: Circuit
    batches: Batches
    masks: Masks
    loss_masks: Masks
    row_masks: Masks
    rows: int
    flooding: float
    curvature: float

    @classmethod
    def of(cls, options: LinearOptions, rows: int, seed: int, hosts: int) -> Plan:
        """Raises ValueError where masks or noise would be too small."""
        surrogate = surrogate_of(options)
        scheme = Scheme(surrogate.parameters)
        circuit = Circuit(scheme, surrogate)
        batches = Batches.of(rows, options.batch, scheme.parameters.slots, seed)
        # Errors of slots add up like independent ones: a sum's is sqrt(rows) larger, a mean's as much smaller.
        error = options.precision * math.sqrt(batches.least)
        bits = scheme.parameters.floor_bits

        def fitting(wanted: float, scale: float) -> Masks:
            return Masks.fitting(wanted, bits, math.ceil(math.log2(scale)))

        flood = flooding(options.noise, batches.least, options.clip, circuit.error(hosts))
        if not options.noise:
            raise ValueError("noise is 0: what a key holder returns exactly reveals its key")
        if flood < 1:
            raise ValueError(
                f"noise {options.noise} is below the error of the encryption over {batches.least} rows; "
                f"it must be at least {options.noise / flood:.1e}"
            )
        return cls(
            options,
            surrogate,
            scheme,
            circuit,
            batches,
            fitting(error, circuit.term_scale),
            fitting(error, circuit.loss_scale),
            fitting(error / 2, circuit.residual_scale),
            rows,
            flood,
            surrogate.joint_curvature(1 + hosts),
        )

    def check_host(self, features: int) -> None:
        """Raise ValueError where a host with so many features could learn all labels of a batch."""
        check_batches(self.batches, features)
        if self.options.family == "logistic":
            check_labels(self.batches, features, self.options.noise, self.options.epochs)

    @property
    def residual(self) -> float:
        """The residual that statements about masks reckon with, at most. One of N standardised labels can be as far out
        as sqrt(N), a predictor that follows it as well."""
        return LOGISTIC_RESIDUAL if self.options.family == "logistic" else 2 * math.sqrt(self.rows)

    def slot_distance(self, features: int) -> float:
        """Statistical distance from noise, at most, of all that a key holder decrypts of a party's masked terms in the
        whole job."""
        value = self.options.clip * self.residual
        return self.masks.distance(value, float(self.rows) * features * self.options.epochs)

    def row_distance(self) -> float:
        """The same of the masked residuals themselves, in the form without a coordinator."""
        copies = self.rows * self.batches.copies
        return self.row_masks.distance(self.residual, float(copies) * self.options.epochs)

    def figures(self, features: int) -> dict[str, float | int | str]:
        """What a party shows of the protection. ``equations_per_row``: how many linear equations its gradients of an
        epoch are for each unknown residual; at 1 they would tell all."""
        return {
            "encryption": str(self.scheme.parameters),
            "rows": self.rows,
            "batches": len(self.batches.rows),
            "features": features,
            "equations_per_row": round(len(self.batches.rows) * features / self.rows, 4),
            "mask_bits": int(math.log2(self.masks.reach)),
            "mask_distance_log2": round(math.log2(self.slot_distance(features)), 1),
            "noise_over_error": round(self.flooding, 1),
        }


@dataclass(frozen=True, slots=True)
class Own:
    """A party's own columns, scaled [N, F] (a constant one last at the guest), and its solver."""

    scaling: Scaling
    features: Values
    solver: Solver

    @classmethod
    def of(
        cls, table: Table, options: LinearOptions, curvature: float, state: bytes | None, intercept: bool
    ) -> Own:
        scaling = Scaling.of(table.features, options.clip)
        features = scaling.apply(table.features)
        if intercept:
            features = np.hstack([features, np.ones((len(features), 1))])
        return cls(scaling, features, Solver.of(features, options, curvature, state, intercept))

    @property
    def width(self) -> int:
        return len(self.solver.weights)

    def predictor(self, rows: npt.NDArray[np.int64]) -> Values:
        """This party's share of the linear predictor of ``rows``."""
        found: Values = self.features[rows] @ self.solver.weights
        return found


@dataclass(frozen=True, slots=True)
class Labels:
    """The guest's labels as they are learned, [N]: 0 and 1, or those of a linear regression standardised by ``mean``
    and ``deviation``."""

    scaled: Values
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, labels: Values, options: LinearOptions) -> Labels:
        if options.family == "logistic":
            return cls((labels == labels.max()).astype(np.float64))
        scaling = Scaling.of(labels[:, None], options.clip)
        mean, deviation = float(scaling.mean[0]), float(scaling.deviation[0])
        if not math.isfinite(deviation):
            raise ValueError("all labels are the same number")
        return cls((labels - mean) / deviation, mean, deviation)


def own_table(setup: Setup, options: LinearOptions, guest: bool) -> Table:
    """The party's table, fit for this job. Raises ValueError."""
    table = setup.table
    if table is None:
        raise ValueError(f"{setup.me} has no table")
    if not guest:
        if not table.names:
            raise ValueError(f"{setup.me} has no features")
        return table
    if table.labels is None:
        raise ValueError(f"{setup.me} is the guest and has no labels")
    values = np.unique(table.labels).tolist()
    if options.family == "logistic" and values not in ([0.0, 1.0], [-1.0, 1.0]):
        there = ", ".join(f"{value:g}" for value in values[:NAMED]) + (", …" if len(values) > NAMED else "")
        raise ValueError(
            f"labels of a logistic regression are 0 and 1, or -1 and 1, both present; there are {there}. "
            "The option family=linear learns numbers, the kind boosting more classes, too"
        )
    if options.family == "linear":
        Labels.of(table.labels, options)
    return table
