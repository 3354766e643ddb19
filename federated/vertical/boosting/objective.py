"""What boosting lowers: gradients of the losses, their whole numbers, the gain of a split and a leaf's value.

K outputs: one for two classes and for numbers, one for each of more classes (a tree's leaf then holds K values and its
gain is the sum over them: Chen et al., SecureBoost-MO, 2021). Per row there are L = 2K *lanes*, first K gradients,
then K second derivatives. Formulas: Chen and Guestrin, XGBoost, 2016, equations 5 to 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from federated.vertical.evaluation import MOST_CLASSES, task_of

Loss = Literal["logistic", "softmax", "squared"]
LOSSES: Final[tuple[Loss, ...]] = get_args(Loss)
LEAST_CURVATURE: Final = 1e-6
"""Second derivatives are at least this: rows that are fitted already still count."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss with K outputs; ``base``: float64 [K], the scores before the first tree. ``unit``: of numbers' scores, a
    power of two near the labels' deviation, so that the least gain of a split means the same in any unit."""

    loss: Loss
    base: Floats
    unit: float = 1.0

    @property
    def outputs(self) -> int:
        """K."""
        return len(self.base)

    def derivatives(self, scores: Floats, targets: Floats) -> Floats:
        """First and second derivatives [N, 2K] at scores [N, K]; ``targets`` [N, K] as ``fit`` gives them."""
        if self.loss == "squared":
            return np.concatenate([scores - targets, np.ones_like(scores)], axis=1)
        chances = self._chances(scores)
        return np.concatenate(
            [chances - targets, np.maximum(chances * (1 - chances), LEAST_CURVATURE)], axis=1
        )

    def answer(self, scores: Floats) -> Floats:
        """What scores [N, K] mean: the second class's probability [N], all classes' [N, K], or the number [N]."""
        if self.loss == "squared":
            return scores[:, 0] * self.unit
        chances = self._chances(scores)
        return chances[:, 0] if self.loss == "logistic" else chances

    def _chances(self, scores: Floats) -> Floats:
        if self.loss == "logistic":
            # Without overflow at either end.
            small = np.exp(-np.abs(scores))
            return np.where(scores >= 0, 1.0, small) / (1.0 + small)
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        total: Floats = raised / raised.sum(axis=1, keepdims=True)
        return total


def fit_objective(labels: Floats, loss: str) -> tuple[Objective, Floats]:
    """The objective for labels [N], and targets [N, K]. ``loss``: one of LOSSES, or ``auto``: as ``task_of`` says.

    Raises ValueError for labels that the loss does not fit.
    """
    if loss == "auto":
        loss = {"binary": "logistic", "classes": "softmax", "number": "squared"}[task_of(labels)]
    if loss == "squared":
        targets, unit = _in_units(labels)
        return Objective("squared", np.array([targets.mean()]), unit), targets[:, None]
    values = np.unique(labels)
    if loss == "logistic":
        if len(values) != 2:
            raise ValueError(f"logistic loss needs labels of two values, there are {len(values)}")
        targets = (labels == values[1]).astype(np.float64)[:, None]
        share = targets.mean()
        return Objective("logistic", np.array([np.log(share) - np.log1p(-share)])), targets
    if loss != "softmax":
        raise ValueError(f"there is no loss {loss!r}; there are auto, {', '.join(LOSSES)}")
    if not 2 <= len(values) <= MOST_CLASSES:
        raise ValueError(f"softmax loss needs labels of 2 to {MOST_CLASSES} values, there are {len(values)}")
    targets = (labels[:, None] == values[None, :]).astype(np.float64)
    return Objective("softmax", np.log(targets.mean(axis=0))), targets


def _in_units(labels: Floats) -> tuple[Floats, float]:
    """``labels`` [N] over the power of two below their deviation, and that power; numbers of any size."""
    exponent = int(np.frexp(np.abs(labels).max(initial=0.0))[1])
    within = np.ldexp(labels, -exponent)
    spread = float(within.std())
    # Below 2^-40 of their size they are one number, up to rounding.
    own = exponent + (int(np.frexp(spread)[1]) - 1 if spread > 2.0**-40 else 0)
    own = min(max(own, -1_022), 1_023)
    return np.ldexp(labels, -own), float(np.ldexp(1.0, own))


@dataclass(frozen=True, slots=True)
class Whole:
    """Derivatives as whole numbers: ``values`` int64 [N, L] are round(x * ``scale``); scale float64 [L], powers of two.

    A lane's absolute values add up to at most ``half``, so no sum over any set of rows leaves [-half, half].
    """

    values: Ints
    scale: Floats


def whole(derivatives: Floats, half: int) -> Whole:
    """``derivatives`` [N, L] with the finest scales for which every subset's sum stays within ``half``.

    Rounding moves each value by at most 1/2, so scale * sum|x| + N / 2 <= half is enough. Raises ValueError where N
    alone is too many.
    """
    rows = len(derivatives)
    room = half - (rows + 1) // 2
    if room < rows:
        raise ValueError(f"{rows} rows are too many for sums within {half}")
    totals = np.abs(derivatives).sum(axis=0)
    # 2^-30 for what float64 loses in that sum; a lane of zeros takes any scale.
    power = np.floor(np.log2(room / np.maximum(totals, 1e-200) * (1 - 2.0**-30)))
    scale = np.exp2(np.clip(power, -200, 60))
    scale[totals == 0] = 1.0
    values = np.rint(derivatives * scale).astype(np.int64)
    if int(np.abs(values).sum(axis=0).max(initial=0)) > half:
        raise ValueError("derivatives do not fit")
    return Whole(values, scale)


@dataclass(frozen=True, slots=True)
class Rule:
    """When a split is made: ``l2`` > 0 on leaves, gain of at least ``least_gain``, ``least_rows`` on each side."""

    l2: float = 1.0
    least_gain: float = 1e-6
    least_rows: int = 20
    rate: float = 0.3


def quality(sums: Ints, scale: Floats, l2: float) -> Floats:
    """sum over K of G^2 / (H + l2) for sums [..., L]: [...].

    Output by output, in order: the result is the same to the bit however the array lies in memory.
    """
    outputs = sums.shape[-1] // 2
    total = np.zeros(sums.shape[:-1])
    for output in range(outputs):
        first = sums[..., output] / scale[output]
        second = sums[..., outputs + output] / scale[outputs + output]
        total += first * first / (second + l2)
    return total


def gains(left: Ints, total: Ints, scale: Floats, l2: float) -> Floats:
    """Of sending ``left`` [M, L] of a node with sums ``total`` [L] left: [M]. Equation 7 without its half."""
    found: Floats = quality(left, scale, l2) + quality(total - left, scale, l2) - quality(total, scale, l2)
    return found


def leaf_value(total: Ints, scale: Floats, rule: Rule) -> Floats:
    """-rate * G / (H + l2): [K] for sums [L]. Equation 5."""
    outputs = len(total) // 2
    first, second = total[:outputs] / scale[:outputs], total[outputs:] / scale[outputs:]
    value: Floats = -rule.rate * first / (second + rule.l2)
    return value
