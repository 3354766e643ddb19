"""What stands for the sigmoid under encryption, and the loss whose derivative it is.

A surrogate maps a linear predictor u to o + c1*u + c3*u^3 + c5*u^5. Parties send t = k*u with k chosen such that the
leading coefficient becomes 1: no ciphertext is then multiplied by a constant, which would cost a level.

    degree 1: k = c1,           value = o + t,                          loss = (t^2 + 2*(o - y)*t) / 2k
    degree 5: k = c5^(1/5),     value = o + t*(v*(v + a3) + a1),        v = t^2, a3 = c3/k^3, a1 = c1/k
                                loss  = (v*(v*(v + 1.5*a3) + 3*a1) + 6*(o - y)*t) / 6k

Hardy et al. 2017 use the first with c1 = 1/4, o = 1/2 (labels -1 and 1 there, 0 and 1 here: the same residual).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.ckks import DEEP, SHALLOW, Parameters
from federated.vertical.linear.options import LinearOptions

Values = npt.NDArray[np.float64]

FREE_PARTIES: Final = 4
"""With the default rate: columns that are the same at 5 and 6 parties still converge, at 7 the loss rises first."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """``offset``: o. ``c1``, ``c3``, ``c5``: the odd coefficients; the last two both 0 or c5 above 0. ``curvature``: a
    bound on the derivative of what it stands for. ``constant``: the loss at u = 0."""

    offset: float
    c1: float
    c3: float
    c5: float
    curvature: float
    constant: float

    @property
    def deep(self) -> bool:
        return self.c5 > 0

    @property
    def parameters(self) -> Parameters:
        return DEEP if self.deep else SHALLOW

    @property
    def factor(self) -> float:
        """k: what a predictor is multiplied by before it is sent."""
        return float(self.c5**0.2) if self.deep else self.c1

    def joint_curvature(self, parties: int) -> float:
        """What each of so many parties reckons with. They step at once: where their columns say the same, their steps
        add up, which descent bears for FREE_PARTIES of them."""
        return self.curvature * max(1.0, parties / FREE_PARTIES)

    @property
    def a1(self) -> float:
        return self.c1 / self.factor

    @property
    def a3(self) -> float:
        return self.c3 / self.factor**3

    @property
    def loss_factor(self) -> float:
        """What the encrypted loss is multiplied by to be the loss."""
        return 1 / ((6 if self.deep else 2) * self.factor)

    def residual(self, predictor: Values, labels: Values) -> Values:
        """Value less label, [N]: the loss's derivative."""
        return self.offset - labels + self._odd(predictor)

    def loss(self, predictor: Values, labels: Values) -> Values:
        """The loss whose derivative ``residual`` is, [N]."""
        square = predictor**2
        even = square * (self.c1 / 2 + square * (self.c3 / 4 + square * self.c5 / 6))
        found: Values = self.constant + (self.offset - labels) * predictor + even
        return found

    def _odd(self, predictor: Values) -> Values:
        square = predictor**2
        found: Values = predictor * (self.c1 + square * (self.c3 + square * self.c5))
        return found


@cache
def fitted_sigmoid(reach: float = 8.0) -> tuple[float, float, float]:
    """c1, c3, c5 of the least-squares odd polynomial of degree 5 for the sigmoid less one half on [-reach, reach]."""
    points = np.linspace(-reach, reach, 4_001)
    powers = np.stack([points, points**3, points**5], axis=1)
    found = np.linalg.lstsq(powers, 0.5 * np.tanh(points / 2), rcond=None)[0]
    return float(found[0]), float(found[1]), float(found[2])


def surrogate_of(options: LinearOptions) -> Surrogate:
    """The one that ``options`` name. Linear regression needs none: its own derivative is of degree 1."""
    if options.family == "linear":
        return Surrogate(0.0, 1.0, 0.0, 0.0, 1.0, 0.5)
    if options.surrogate == "taylor":
        return Surrogate(0.5, 0.25, 0.0, 0.0, 0.25, math.log(2))
    return Surrogate(0.5, *fitted_sigmoid(), 0.25, math.log(2))
