"""A party's own side of the descent: scaling, steps, state. No message, no key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.linear.options import LinearOptions
from federated.vertical.tables import MOST_COLUMNS
from federated.vertical.wire import Arr, Expected, Float, Int, pack, unpack

Values = npt.NDArray[np.float64]

RIDGE_NOISES: Final = 4.0
"""How many times the key holder's noise the ridge is at least: a step's noise then moves a weight by rate / 4."""
_STATE: Final[dict[str, Expected]] = {
    "epoch": Int(0, 10_000),
    "stopped": Int(0, 1),
    "weights": Arr("<f8", (None,), MOST_COLUMNS + 1),
    "velocity": Arr("<f8", (None,), MOST_COLUMNS + 1),
    "losses": Arr("<f8", (None,), 10_000),
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """Standardises and cuts off. A missing value counts as the mean.

    ``mean``, ``deviation``: [F], of the training rows."""

    mean: Values
    deviation: Values
    clip: float

    @classmethod
    def of(cls, features: Values, clip: float) -> Scaling:
        """From training rows [N, F]; a column of one value becomes 0."""
        # In units of each column's own size: squares neither overflow nor vanish, and the units change no rounding.
        largest = np.max(np.abs(np.nan_to_num(features, nan=0.0)), axis=0, initial=0.0)
        exponent = np.frexp(largest)[1]
        within = np.ldexp(features, -exponent)
        count = np.maximum((~np.isnan(features)).sum(axis=0), 1)
        mean = np.nansum(within, axis=0) / count
        spread = np.sqrt(np.nansum((within - mean) ** 2, axis=0) / count)
        deviation = np.where(spread > 1e-12, np.ldexp(spread, exponent), np.inf)
        return cls(np.ldexp(mean, exponent), deviation, clip)

    def apply(self, features: Values) -> Values:
        """``features`` [N, F] scaled, all finite. Raises ValueError for another F."""
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise ValueError(f"features {features.shape} where {len(self.mean)} columns were trained on")
        with np.errstate(over="ignore", invalid="ignore"):
            # What is infinite here is cut off below, or has a deviation that is: a column without weight.
            scaled = (features - self.mean) / self.deviation
        return np.clip(
            np.nan_to_num(scaled, nan=0.0, posinf=self.clip, neginf=-self.clip), -self.clip, self.clip
        )


@dataclass(slots=True)
class Solver:
    """Weights [F] and how they move. ``matrix``: what a gradient is multiplied by [F, F]; ``penalty``: weight of the L2
    term per row; ``penalised``: which weights it counts for, 0 or 1 [F]."""

    weights: Values
    velocity: Values
    matrix: Values
    penalty: float
    penalised: Values
    options: LinearOptions
    epoch: int = 0
    stopped: bool = False
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, features: Values, options: LinearOptions, curvature: float, state: bytes | None, intercept: bool
    ) -> Solver:
        """For scaled ``features`` [N, F] (the last column constant where ``intercept``), from a checkpoint's state or
        from zeros. ``curvature``: bound on the loss's second derivative."""
        rows, width = features.shape
        penalty = options.l2 / rows
        penalised = np.ones(width)
        if intercept:
            penalised[-1] = 0.0
        matrix = np.eye(width) / curvature
        if options.curvature and width:
            # Second moments bound the Hessian's own block (Böhning and Lindsay 1988); the ridge keeps constant columns
            # and rounding out of the inverse.
            moments = curvature * (features.T @ features) / rows + np.diag(penalty * penalised)
            # So do directions with moments below the noise of gradients, which would else drive their weights far out.
            ridge = max(1e-6 * float(np.trace(moments)) / width, RIDGE_NOISES * options.noise, 1e-18)
            matrix = np.linalg.inv(moments + ridge * np.eye(width))
        # A column of zeros has no gradient but the key holder's noise: its weight stays 0.
        live = features.any(axis=0)
        matrix = matrix * np.outer(live, live)
        found = cls(np.zeros(width), np.zeros(width), matrix, penalty, penalised, options)
        if state is not None:
            found._restore(state)
        return found

    @property
    def done(self) -> bool:
        return self.stopped or self.epoch >= self.options.epochs

    @property
    def penalty_loss(self) -> float:
        """This party's L2 term of the mean loss."""
        return 0.5 * self.penalty * float((self.penalised * self.weights**2).sum())

    def step(self, gradient: Values) -> None:
        """One step along the mean loss's ``gradient`` [F], to which the penalty's is added here."""
        rate = self.options.rate / (1 + self.options.decay * self.epoch)
        full = gradient + self.penalty * self.penalised * self.weights
        self.velocity = self.options.momentum * self.velocity - rate * (self.matrix @ full)
        self.weights = self.weights + self.velocity

    def end_epoch(self, loss: float, stop: bool) -> bytes:
        """Note the epoch's loss; the checkpoint's state."""
        self.epoch += 1
        self.stopped = stop
        self.losses.append(loss)
        return pack(
            {
                "epoch": self.epoch,
                "stopped": int(self.stopped),
                "weights": self.weights,
                "velocity": self.velocity,
                "losses": np.array(self.losses),
            }
        )

    def _restore(self, state: bytes) -> None:
        fields = unpack(state, "this checkpoint", _STATE)
        if fields["weights"].shape != self.weights.shape:
            raise ValueError(
                f"a checkpoint of {len(fields['weights'])} weights, there are {len(self.weights)}"
            )
        self.epoch, self.stopped = fields["epoch"], bool(fields["stopped"])
        self.weights, self.velocity = fields["weights"].copy(), fields["velocity"].copy()
        self.losses = fields["losses"].tolist()


def ends(losses: list[float], options: LinearOptions) -> bool:
    """Whether the last of ``losses`` is so near the one before that training ends, or all epochs are over."""
    near = len(losses) > 1 and abs(losses[-1] - losses[-2]) < options.tolerance
    return near or len(losses) >= options.epochs


def verdict(loss: float, stop: bool) -> bytes:
    """The body of the message that ends an epoch."""
    return pack({"loss": loss, "stop": int(stop)})


def read_verdict(body: bytes, sender: str) -> tuple[float, bool]:
    """Mean loss and whether to stop. Raises PeerFault."""
    fields = unpack(body, sender, {"loss": Float(), "stop": Int(0, 1)})
    return fields["loss"], bool(fields["stop"])
