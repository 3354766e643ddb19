"""What all parties of a joint regression agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

MOST_EPOCHS: Final = 10_000


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """Raises ValueError for what cannot be.

    ``surrogate``: what stands for the sigmoid: ``degree5``, fitted on [-8, 8], or ``taylor``, the tangent at 0: faster,
    with another optimum. ``batch``: rows of a mini-batch, at most; the batches are the same in every epoch, since each
    new mix of the same rows would tell a party more about single labels. ``rate``, ``momentum``, ``decay``: the step of
    epoch e is rate / (1 + decay * e). ``l2``: weight of the penalty, as 1 / C of scikit-learn. ``clip``: standardised
    features beyond it are cut. ``curvature``: each party scales its steps by the inverse of its own columns' second
    moments; nothing is sent for it. ``tolerance``: training ends when an epoch changes the mean loss by less.
    ``precision``: standard deviation that masks may add to a mean gradient. ``noise``: standard deviation of what a key
    holder adds to a mean gradient before it returns it.
    """

    family: Literal["logistic", "linear"] = "logistic"
    surrogate: Literal["degree5", "taylor"] = "degree5"
    epochs: int = 20
    batch: int = 4_096
    rate: float = 0.3
    momentum: float = 0.5
    decay: float = 0.0
    l2: float = 1.0
    clip: float = 3.0
    curvature: bool = True
    tolerance: float = 1e-4
    precision: float = 2.0**-15
    noise: float = 1e-4

    def __post_init__(self) -> None:
        if not 1 <= self.epochs <= MOST_EPOCHS:
            raise ValueError(f"epochs is {self.epochs}, not within 1 and {MOST_EPOCHS}")
        if not 2 <= self.batch <= 8_192:
            raise ValueError(f"batch is {self.batch}, not within 2 and 8192")
        for name, least, most in (
            ("rate", 0.0, 100.0),
            ("momentum", 0.0, 0.999),
            ("decay", 0.0, 100.0),
            ("l2", 0.0, 1e9),
            ("clip", 0.1, 100.0),
            ("tolerance", 0.0, 1e6),
            ("precision", 2.0**-30, 0.1),
            ("noise", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or not least <= value <= most:
                raise ValueError(f"{name} is {value}, not within {least} and {most}")
        if self.rate == 0:
            raise ValueError("rate is 0: nothing would be learned")
