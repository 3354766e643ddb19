"""The residual and the loss of encrypted predictors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import FLOOR, Scheme
from federated.vertical.linear.surrogate import Surrogate

Values = npt.NDArray[np.float64]

FEATURE_SCALE: Final = 2.0**20
"""Of encoded features: their rounding then stays below the error of the masks."""
GROWTH: Final = 8.0
"""How much the polynomial of degree 5 enlarges an error at most, with |t| up to 1.06: 5 from its derivative and the
products' intermediate values, the rest for rescaling and key switching (measured below 2)."""


@dataclass(frozen=True, slots=True)
class Computed:
    """At the floor: the residuals in every slot of every copy, and the loss's terms in the slots of the first."""

    residual: sealapi.Ciphertext
    loss: sealapi.Ciphertext


class Circuit:
    """``surrogate`` over ciphertexts of t = k*u [slots]."""

    def __init__(self, scheme: Scheme, surrogate: Surrogate) -> None:
        self.scheme, self.surrogate = scheme, surrogate
        start, primes, top = scheme.parameters.scale, scheme.primes, scheme.parameters.top
        # The scales follow from the primes alone, so that a receiver knows them.
        square = start * start / primes[top - 1]
        self.residual_scale, self.loss_scale = start, square
        if surrogate.deep:
            fourth = square * square / primes[top - 2]
            self.residual_scale = start * fourth / primes[top - 3]
            self.loss_scale = square * fourth / primes[top - 3]
        self.term_scale = self.residual_scale * FEATURE_SCALE

    def error(self, hosts: int) -> float:
        """Bound on a residual's error, from the parameters."""
        fresh = hosts * self.scheme.parameters.fresh_error
        return fresh * (GROWTH if self.surrogate.deep else 1.0)

    def predictor(self, shares: Sequence[sealapi.Ciphertext], own: Values) -> sealapi.Ciphertext:
        """The hosts' ``shares`` and the guest's ``own`` [slots], added."""
        found = shares[0]
        for share in shares[1:]:
            found = self.scheme.add(found, share)
        return self.scheme.plus(found, own)

    def compute(self, predictor: sealapi.Ciphertext, less: Values, keys: sealapi.RelinKeys) -> Computed:
        """Residual and loss of a batch. ``less`` [slots]: offset less label, 0 where there is no row.

        Slots of copies beyond the first, and empty ones, hold loss terms, too: the caller leaves them out.
        """
        scheme, surrogate = self.scheme, self.surrogate
        square = scheme.times(predictor, predictor, keys)
        if surrogate.deep:
            fourth = scheme.plus(scheme.times(square, scheme.plus(square, surrogate.a3), keys), surrogate.a1)
            residual = scheme.times(predictor, fourth, keys)
            sixth = scheme.times(square, scheme.plus(square, 1.5 * surrogate.a3), keys)
            even = scheme.times(square, scheme.plus(sixth, 3 * surrogate.a1), keys)
        else:
            residual, even = scheme.lower(predictor, FLOOR), square
        residual = scheme.plus(residual, less)
        if not less.any():
            # A product with zero would not be encrypted; labels of a regression can all be its mean.
            return Computed(residual, even)
        above = scheme.lower(predictor, FLOOR + 1)
        scale = even.scale * scheme.primes[FLOOR] / above.scale
        weight = (6.0 if surrogate.deep else 2.0) * less
        linear = scheme.rescaled(scheme.weighted(above, scheme.encode(weight, FLOOR + 1, scale)))
        return Computed(residual, scheme.add(even, linear))


def flooding(noise: float, rows: int, clip: float, error: float) -> float:
    """How many times larger ``noise`` (of a mean gradient over ``rows``) is than the error of CKKS in it, where each
    row's term is off by at most ``clip`` * ``error`` independently of the others."""
    return noise * math.sqrt(rows) / (clip * error)
