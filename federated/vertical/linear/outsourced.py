"""An epoch of logistic regression by somebody who holds no key: the data, the labels and the weights are encrypted.

This is the setting of TenSEAL's tutorial "Training on Encrypted Data": the owner encrypts everything, another party
takes one step of gradient descent over all rows, the owner decrypts the weights and encrypts them afresh. The joint
protocols do not need it; it is here to be measured against that tutorial. Differences: a ciphertext holds a column of
all rows instead of a row, so an epoch takes 2F products and F sums of slots instead of some thousands, and each
product is rescaled to 26 bits instead of 21.

With t = k*u, k^3 = 0.004, the tutorial's sigmoid 0.5 + 0.197*u - 0.004*u^3 is 0.5 + t*(a1 - t^2), a1 = 0.197 / k. The
owner sends columns times k, the gradient's factor k is taken off with the rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import Opener, Parameters, Scheme, Sealer

Values = npt.NDArray[np.float64]

PARAMETERS: Final = Parameters(8_192, (40, 26, 26, 26, 26, 26, 40), 26)
"""Five multiplications, one after another; 210 bits of 218."""
LINEAR: Final = 0.197
CUBIC: Final = 0.004
_FACTOR: Final = CUBIC ** (1 / 3)
_A1: Final = LINEAR / _FACTOR


@dataclass(frozen=True, slots=True)
class EncryptedData:
    """``columns``: F ciphertexts of k * x, a constant column last. ``less``: of 0.5 less the label. Rows repeat with
    ``period``. The two key sets are the public ones that computing needs."""

    columns: tuple[sealapi.Ciphertext, ...]
    less: sealapi.Ciphertext
    rows: int
    period: int
    products: sealapi.RelinKeys
    rotations: sealapi.GaloisKeys


class Owner:
    """Who has the data and the key."""

    def __init__(self) -> None:
        self.scheme = Scheme(PARAMETERS)
        self._opener = Opener(self.scheme)
        self._sealer = Sealer(self.scheme, self._opener.public())

    def encrypt(self, features: Values, labels: Values) -> EncryptedData:
        """``features`` [N, F] standardised, ``labels`` [N] of 0 and 1. Raises ValueError for more rows than slots."""
        rows = len(labels)
        slots = PARAMETERS.slots
        if not 2 <= rows <= slots:
            raise ValueError(f"{rows} rows; a ciphertext holds 2 to {slots}")
        period = 1 << (rows - 1).bit_length()

        def spread(values: Values) -> Values:
            return np.tile(np.concatenate([values, np.zeros(period - rows)]), slots // period)

        level, scale = residual_level(self.scheme)
        matrix = _FACTOR * np.hstack([features, np.ones((rows, 1))])
        return EncryptedData(
            tuple(self._sealer.seal(spread(one), PARAMETERS.top, PARAMETERS.scale) for one in matrix.T),
            self._sealer.seal(spread(0.5 - labels), level, scale),
            rows,
            period,
            self._opener.relinearisation(),
            self._opener.rotations([2**power for power in range(period.bit_length() - 1)]),
        )

    def encrypt_weights(self, weights: Values) -> tuple[sealapi.Ciphertext, ...]:
        """``weights`` [F + 1], each in every slot of a ciphertext of its own."""
        return tuple(
            self._sealer.seal(np.full(PARAMETERS.slots, one), PARAMETERS.top, PARAMETERS.scale)
            for one in weights.tolist()
        )

    def decrypt_weights(self, weights: Sequence[sealapi.Ciphertext]) -> Values:
        """The weights [F + 1]: every slot holds one, and their mean is nearer than any of them."""
        return np.array([float(self._opener.open(one).mean()) for one in weights])


def residual_level(scheme: Scheme) -> tuple[int, float]:
    """Level and scale that the residuals have."""
    top, primes, scale = PARAMETERS.top, scheme.primes, PARAMETERS.scale
    predictor = scale * scale / primes[top - 1]
    square = predictor * predictor / primes[top - 2]
    return top - 3, predictor * square / primes[top - 3]


def epoch(
    scheme: Scheme, data: EncryptedData, weights: Sequence[sealapi.Ciphertext], rate: float, decay: float
) -> tuple[sealapi.Ciphertext, ...]:
    """One step over all rows: w - rate * (mean gradient) - ``decay`` * w, encrypted, with no key."""
    predictor = scheme.times(data.columns[0], weights[0], data.products)
    for column, weight in zip(data.columns[1:], weights[1:], strict=True):
        predictor = scheme.add(predictor, scheme.times(column, weight, data.products))
    square = scheme.times(predictor, predictor, data.products)
    # t * (t^2 - a1) is the odd part with the sign turned; so is the rest of the residual, until the step.
    odd = scheme.times(predictor, scheme.plus(square, -_A1), data.products)
    turned = scheme.minus(odd, data.less)
    found = []
    for column, weight in zip(data.columns, weights, strict=True):
        gradient = scheme.total(scheme.times(column, turned, data.products), data.period, data.rotations)
        level = scheme.level(gradient)
        kept = scheme.weighted(scheme.lower(weight, level), scheme.encode(1 - decay, level, PARAMETERS.scale))
        scale = kept.scale / gradient.scale
        step = scheme.weighted(gradient, scheme.encode(rate / (_FACTOR * data.rows), level, scale))
        found.append(scheme.rescaled(scheme.add(kept, step)))
    return tuple(found)


def epoch_plain(features: Values, labels: Values, weights: Values, rate: float, decay: float) -> Values:
    """What ``epoch`` computes, in the clear: weights [F + 1]."""
    matrix = np.hstack([features, np.ones((len(labels), 1))])
    predictor = matrix @ weights
    residual = 0.5 + LINEAR * predictor - CUBIC * predictor**3 - labels
    found: Values = (1 - decay) * weights - rate * matrix.T @ residual / len(labels)
    return found
