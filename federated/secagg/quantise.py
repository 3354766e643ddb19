"""Updates as integers that masks can hide, and their sum as the ``Sum`` of a plain job, bit for bit.

A value becomes q = rint(value · 2**step_bits); what is beyond the clip is clipped and counted. A client adds w · q with
a whole weight w. For a coordinate that no client clipped, the weighted mean is off by at most half a step,
2**-(step_bits + 1), whatever the weights: it is a mean of errors none of which is above half a step. A clipped value
adds w · (|value| - clip) / Σ w to that. The sum itself is exact: shifted left by 30 - step_bits it is what ``sums``
makes of the values q · 2**-step_bits.

Scalars (weight, loss, examples, steps, those of the strategy) are carried exactly, as the integers that ``sums`` adds,
in digits that the ring holds. The most steps of one client cannot be known: the mean, rounded up, stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.secagg.settings import Plan
from federated.sums import (
    MOST_STEPS,
    OWN_SCALARS,
    SCALE_BITS,
    Bounds,
    Contribution,
    Sum,
    SumMismatch,
    fixed,
    scalar_limit,
)

Integers = npt.NDArray[np.int64]
Perturb = Callable[[Integers], Integers]
"""Adds integer noise to all q [V · D] of one client: distributed differential privacy."""

_MOST_EXAMPLES: Final = 2**53


class ValuesRefused(ValueError):
    """A contribution that cannot be quantised (not finite, a weight that is not whole, a scalar beyond its limit), or a
    revealed sum that no honest clients can have made."""


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Where everything stands in the ring's vector: the ``names`` [``size``] in order, then the digits of
    ``OWN_SCALARS`` and of ``scalars``. An element is at most ``weight`` · ``bound`` in magnitude.

    Raises ValuesRefused when the bounds of sums do not hold such values.
    """

    size: int
    names: tuple[str, ...]
    scalars: tuple[str, ...]
    bounds: Bounds
    weight: int
    bound: int
    step_bits: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(sorted(self.names)))
        object.__setattr__(self, "scalars", tuple(sorted(self.scalars)))
        if min(self.size, self.weight, self.bound) < 1 or not 0 <= self.step_bits <= SCALE_BITS:
            raise ValuesRefused("size, weight and bound are at least 1, step_bits 0 to 30")
        if self.weight > self.bounds.examples:
            raise ValuesRefused(f"weight {self.weight} is above the {self.bounds.examples} that sums hold")
        if self.bound > self.bounds.magnitude * 2**self.step_bits:
            raise ValuesRefused(
                f"values up to {self.bound * 2.0**-self.step_bits:g} are above the {self.bounds.magnitude:g} that sums "
                "hold: lower the clip, the weights or the number of clients"
            )

    @property
    def digit_bits(self) -> int:
        """A digit has so many bits and a sign, which an element holds."""
        return (self.weight * self.bound + 1).bit_length() - 1

    def digits(self) -> dict[str, int]:
        """How many digits each scalar has, in order."""
        weight, magnitude = self.weight, self.bounds.magnitude
        limits = {
            "weight": weight << SCALE_BITS,
            "loss": fixed(magnitude * weight) + 1,
            "examples": _MOST_EXAMPLES,
            "steps": MOST_STEPS,
            **dict.fromkeys(self.scalars, fixed(scalar_limit(self.size, self.bounds) * weight) + 1),
        }
        assert tuple(limits)[: len(OWN_SCALARS)] == OWN_SCALARS
        return {name: -(-limit.bit_length() // self.digit_bits) for name, limit in limits.items()}

    @property
    def values(self) -> int:
        """Elements that are values, the first ones."""
        return len(self.names) * self.size

    @property
    def length(self) -> int:
        """L."""
        return self.values + sum(self.digits().values())


@dataclass(frozen=True, slots=True)
class Quantised:
    """One client's ring vector ``values`` int64 [L], and how many coordinates were clipped."""

    values: Integers
    clipped: int


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Contributions to ring vectors, and their sum back. Raises ValueError for a layout that is not the plan's."""

    layout: RingLayout
    plan: Plan

    def __post_init__(self) -> None:
        layout, plan = self.layout, self.plan
        given = (layout.length, layout.weight, layout.bound, layout.step_bits)
        planned = (plan.length, plan.max_weight, plan.bound, plan.step_bits)
        if given != planned:
            raise ValueError(f"length, weight, bound and step bits {given} where the plan says {planned}")

    def values(self, contribution: Contribution, perturb: Perturb | None = None) -> Quantised:
        """What a client puts into the ring. ``perturb`` adds its share of the noise before masking: it then weighs 1.
        Raises ValuesRefused."""
        layout = self.layout
        weight = self._weight(contribution)
        q, clipped = self._integers(contribution)
        if perturb is not None:
            if weight != 1:
                raise ValuesRefused(f"under distributed noise every client weighs 1, not {weight}")
            # The plan's bound is passed with probability 2**-40 at most.
            q = np.clip(perturb(q), -self.plan.bound, self.plan.bound)
        scalars = {
            "weight": weight << SCALE_BITS,
            "loss": _rounded(contribution.loss, weight, "loss"),
            "examples": contribution.examples,
            "steps": contribution.steps,
            **{name: _rounded(value, weight, name) for name, value in contribution.scalars.items()},
        }
        if scalars.keys() != layout.digits().keys():
            raise ValuesRefused(
                f"scalars {sorted(contribution.scalars)} where {list(layout.scalars)} are summed"
            )
        out = np.empty(layout.length, np.int64)
        np.multiply(q, weight, out=out[: layout.values])
        at = layout.values
        for name, count in layout.digits().items():
            out[at : at + count] = _to_digits(scalars[name], count, layout.digit_bits, name)
            at += count
        return Quantised(out, clipped)

    def to_sum(self, total: Integers, clients: int) -> Sum:
        """The ``Sum`` that ``total`` int64 [L], the elements of ``clients`` added up, stands for. Raises ValuesRefused
        for one that breaks the bounds: a client sent what is none of these vectors."""
        layout = self.layout
        if total.shape != (layout.length,):
            raise ValuesRefused(f"a sum of shape {list(total.shape)}, not [{layout.length}]")
        found = Sum(layout.size, layout.bounds, layout.names)
        limit = clients * layout.weight * layout.bound
        values = total[: layout.values]
        if int(values.max()) > limit or int(values.min()) < -limit:
            raise ValuesRefused("a sum is larger than these clients can have made it")
        for place, name in enumerate(layout.names):
            part = values[place * layout.size : (place + 1) * layout.size]
            found.vectors[name] = part << (SCALE_BITS - layout.step_bits)
        at = layout.values
        for name, count in layout.digits().items():
            digits = total[at : at + count].tolist()
            found.scalars[name] = sum(
                digit << (layout.digit_bits * place) for place, digit in enumerate(digits)
            )
            at += count
        found.clients = clients
        steps = found.scalars["steps"]
        found.most_steps = -(-steps // clients)
        if min(steps, found.scalars["examples"]) < clients:
            raise ValuesRefused("fewer examples or steps than clients")
        try:
            return Sum.from_bytes(found.to_bytes(), layout.size, layout.bounds, layout.names)
        except SumMismatch as error:
            raise ValuesRefused(str(error)) from None

    def plain(self, contribution: Contribution) -> Contribution:
        """What a client of a plain job would have to send for the same bits: values q · 2**-step_bits."""
        q, _ = self._integers(contribution)
        size, step = self.layout.size, 2.0**-self.plan.step_bits
        vectors = {
            name: (q[place * size : (place + 1) * size] * step).astype(np.float32)
            for place, name in enumerate(self.layout.names)
        }
        return replace(contribution, vectors=vectors)

    def _weight(self, contribution: Contribution) -> int:
        weight = contribution.weight
        if not 1 <= weight <= self.plan.max_weight or weight != int(weight):
            raise ValuesRefused(f"weight {weight}: masked weights are whole, 1 to {self.plan.max_weight}")
        return int(weight)

    def _integers(self, contribution: Contribution) -> tuple[Integers, int]:
        """All q [V · D] within the clip, and how many values were beyond it."""
        layout, limit = self.layout, float(self.plan.clip_steps)
        if set(contribution.vectors) != set(layout.names):
            raise ValuesRefused(f"{sorted(contribution.vectors)} where {list(layout.names)} are summed")
        scaled = np.empty(layout.values)
        for place, name in enumerate(layout.names):
            vector = contribution.vectors[name]
            if vector.shape != (layout.size,):
                raise ValuesRefused(f"{name} has shape {list(vector.shape)}, not [{layout.size}]")
            scaled[place * layout.size : (place + 1) * layout.size] = vector
        if not np.isfinite(scaled).all():
            raise ValuesRefused("a value is NaN or infinite")
        scaled *= 2.0**self.plan.step_bits
        np.rint(scaled, out=scaled)
        clipped = int(np.count_nonzero(np.abs(scaled) > limit))
        if clipped:
            np.clip(scaled, -limit, limit, out=scaled)
        return scaled.astype(np.int64), clipped


def _rounded(value: float, weight: int, name: str) -> int:
    if not math.isfinite(value):
        raise ValuesRefused(f"{name} is {value}")
    return fixed(value * weight)


def _to_digits(number: int, count: int, bits: int, name: str) -> list[int]:
    """``number`` in ``count`` digits of ``bits`` bits, the lowest first, each with the number's sign."""
    sign, rest = (-1 if number < 0 else 1), abs(number)
    if rest >> (bits * count):
        raise ValuesRefused(f"{name} is beyond its limit")
    return [sign * ((rest >> (bits * place)) & ((1 << bits) - 1)) for place in range(count)]
