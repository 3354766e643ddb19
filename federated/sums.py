"""Sums of contributions in integers: the only way in which contributions are added, anywhere.

Floating-point sums depend on their order; integers do not. Each value becomes rint(value · weight · 2**30) as int64,
rounded once per contribution, and integers are added. So the order of arrival, the grouping over servers, edges and
chunks, and the number of each never change a bit. ``Bounds`` proves before the first upload that no sum can overflow.

A mean is ``vectors[name] / scalars["weight"]``; both carry the same scale. Its rounding error is at most 2**-31
divided by the mean weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.packing import BodyMalformed, pack, unpack
from federated.weights import Array

SCALE_BITS = 30
SCALE = 2.0**SCALE_BITS
LARGEST_MAGNITUDE = 2.0**24
MOST_STEPS = 2**31
OWN_SCALARS = ("weight", "loss", "examples", "steps")

_MAGIC = b"HWs1"
_EXACT = 2.0**53  # float64 adds integers exactly as long as no partial sum passes this
_WIDTH, _BLOCK = (
    8192,
    65_536,
)  # coordinates and values worked on at once: their float64 copies stay in the cache
_LARGEST_SCALAR = 2**200

Totals = npt.NDArray[np.int64]
Wide = npt.NDArray[np.float64]
Rows = list[Array] | npt.NDArray[np.float32]


class ContributionRefused(ValueError):
    """A contribution breaks a rule and nothing of it was added. ``rule`` is stable: names, length, type, not_finite,
    magnitude, weight, examples, steps, loss, scalars, uploads."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class SumMismatch(ValueError):
    """Two sums, or a sum and its bytes, are of different jobs or break the bounds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Proof that no sum overflows: uploads · weight · magnitude · 2**30, with every rounding, stays below 2**63.

    ``uploads`` is the most contributions that one sum may hold, ``examples`` the largest weight of one (a client that
    claims more is capped by the strategy), ``magnitude`` the largest |value|: the largest power of two that the proof
    allows, at most 2**24. Raises ValueError when not even 1 is allowed.
    """

    uploads: int
    examples: int
    magnitude: float = field(init=False)

    def __post_init__(self) -> None:
        if self.uploads < 1 or self.examples < 1:
            raise ValueError(
                f"a sum needs bounds of at least 1, not {self.uploads} uploads of {self.examples}"
            )
        room = (2**63 - 1 - self.uploads) // (self.uploads * self.examples << SCALE_BITS)
        if room < 1:
            raise ValueError(
                f"{self.uploads} uploads of weight up to {self.examples} do not fit into 63 bits: lower one of them"
            )
        object.__setattr__(self, "magnitude", min(2.0 ** (room.bit_length() - 1), LARGEST_MAGNITUDE))


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one client adds: ``vectors`` [D] float32 by name, ``weight`` > 0, and what is reported.

    ``loss`` and ``scalars`` are averaged with the same weight; ``steps`` and ``examples`` are counted.
    """

    vectors: Mapping[str, Array]
    weight: float
    examples: int
    steps: int
    loss: float
    scalars: Mapping[str, float] = field(default_factory=dict)

    def scaled(self, factor: float) -> Contribution:
        """The same with its weight times ``factor``, as staleness demands."""
        return replace(self, weight=self.weight * factor)


class Sum:
    """An accumulator of contributions with vectors [D] of the given names.

    ``vectors`` are int64 [D]; ``scalars`` are integers without bound: "weight", "loss" and those that the strategy adds
    at scale 2**30, "examples" and "steps" plain. ``clients`` counts contributions, ``most_steps`` is the largest number
    of steps of one.
    """

    def __init__(self, size: int, bounds: Bounds, names: Sequence[str] = ("difference",)) -> None:
        self.size = size
        self.bounds = bounds
        self.vectors: dict[str, Totals] = {name: np.zeros(size, np.int64) for name in sorted(names)}
        self.scalars: dict[str, int] = dict.fromkeys(OWN_SCALARS, 0)
        self.clients = 0
        self.most_steps = 0

    def add(self, contribution: Contribution) -> None:
        """Add one contribution, or raise ContributionRefused and add nothing."""
        add_all(self, [contribution])

    def merge(self, other: Sum) -> None:
        """Add another sum of the same job. Raises SumMismatch and adds nothing when it does not fit."""
        if (other.size, other.bounds, other.vectors.keys()) != (self.size, self.bounds, self.vectors.keys()):
            raise SumMismatch("the sums differ in their vectors or bounds")
        if self.clients + other.clients > self.bounds.uploads:
            raise SumMismatch(f"more than {self.bounds.uploads} uploads")
        for name, vector in self.vectors.items():
            vector += other.vectors[name]
        for name, value in other.scalars.items():
            self.scalars[name] = self.scalars.get(name, 0) + value
        self.clients += other.clients
        self.most_steps = max(self.most_steps, other.most_steps)

    def mean(self, name: str = "difference") -> Wide:
        """The weighted mean [D] of a vector. Raises ZeroDivisionError for an empty sum."""
        weight = self.scalars["weight"]
        if weight == 0:
            raise ZeroDivisionError("the mean of no contribution")
        return self.vectors[name] / np.float64(weight)

    def mean_scalar(self, name: str) -> float:
        """The weighted mean of "loss" or of one of the strategy's scalars."""
        return self.scalars[name] / self.scalars["weight"]

    def to_bytes(self) -> bytes:
        """For another server; ``from_bytes`` reads it."""
        values = {
            "clients": self.clients,
            "most_steps": self.most_steps,
            "uploads": self.bounds.uploads,
            "weight": self.bounds.examples,
            "scalars": self.scalars,
        }
        return pack(_MAGIC, values, self.vectors)

    @staticmethod
    def from_bytes(body: bytes, size: int, bounds: Bounds, names: Sequence[str] = ("difference",)) -> Sum:
        """The sum in ``body``, which must have these vectors and bounds and keep to them. Raises SumMismatch."""
        try:
            values, vectors = unpack(_MAGIC, body)
        except BodyMalformed as error:
            raise SumMismatch(str(error)) from error
        total = Sum(0, bounds, names)
        total.size = size
        if vectors.keys() != total.vectors.keys() or any(
            vector.dtype != np.int64 or len(vector) != size for vector in vectors.values()
        ):
            raise SumMismatch(f"the sum is not of {sorted(names)} with {size} values each")
        total.vectors = {name: vectors[name] for name in total.vectors}
        _take_values(total, values)
        return total


def _take_values(total: Sum, values: Mapping[str, Any]) -> None:
    """Check the header of a sum's bytes against its bounds, so that what comes from elsewhere keeps the proof."""
    bounds = total.bounds
    scalars = values.get("scalars")
    counts = [values.get(name) for name in ("clients", "most_steps", "uploads", "weight")]
    if not isinstance(scalars, dict) or any(type(n) is not int for n in [*counts, *scalars.values()]):
        raise SumMismatch("the sum's header is not of integers")
    clients, most_steps, uploads, weight = (int(n) for n in counts if n is not None)
    if (uploads, weight) != (bounds.uploads, bounds.examples):
        raise SumMismatch(f"the sum was made for {uploads} uploads of weight {weight}, not for {bounds}")
    if not (0 <= clients <= uploads and 0 <= most_steps <= MOST_STEPS):
        raise SumMismatch(f"{clients} uploads of at most {most_steps} steps break the bounds")
    if not set(OWN_SCALARS) <= scalars.keys():
        raise SumMismatch("the sum lacks a scalar")
    if not 0 <= scalars["weight"] <= clients * weight << SCALE_BITS or (clients == 0) != (
        scalars["weight"] == 0
    ):
        raise SumMismatch("the sum's weight breaks its bound")
    if any(abs(number) > _LARGEST_SCALAR for number in scalars.values()):
        raise SumMismatch("a scalar of the sum is too large")
    # No mean above the magnitude: a weight may have been rounded down by half a unit, a value up by as much.
    magnitude = int(bounds.magnitude)
    largest = (
        min(magnitude * (scalars["weight"] + clients), clients * (magnitude * weight << SCALE_BITS)) + clients
    )
    for name, vector in total.vectors.items():
        if len(vector) and (int(vector.max()) > largest or int(vector.min()) < -largest):
            raise SumMismatch(f"{name} is larger than {clients} uploads of this weight can be")
    total.scalars, total.clients, total.most_steps = dict(scalars), clients, most_steps


def check(
    contribution: Contribution, size: int, bounds: Bounds, names: Sequence[str] = ("difference",)
) -> None:
    """Raise ContributionRefused unless a sum of these vectors, size and bounds would take ``contribution``. A server
    asks when the upload arrives, long before it adds."""
    _check_names(contribution.vectors, names)
    for name, vector in contribution.vectors.items():
        _largest(vector, size, bounds, name)
    _check_numbers(bounds, [contribution.weight], [contribution.examples], [contribution.steps])
    _weighted([contribution.loss], [contribution.weight], bounds.magnitude, "loss")
    for value in contribution.scalars.values():
        _weighted([value], [contribution.weight], scalar_limit(size, bounds), "scalars")


def add_all(total: Sum, contributions: Sequence[Contribution]) -> None:
    """Add contributions together: the same bits as one after the other, in fewer passes. All or nothing: raises
    ContributionRefused for the first that breaks a rule and adds none."""
    if not contributions:
        return
    scalars = contributions[0].scalars.keys()
    for contribution in contributions:
        _check_names(contribution.vectors, total.vectors)
        if contribution.scalars.keys() != scalars:
            raise ContributionRefused("scalars", "the contributions have different scalars")
    rows = {name: [c.vectors[name] for c in contributions] for name in total.vectors}
    largest = {
        name: [_largest(row, total.size, total.bounds, name) for row in vectors]
        for name, vectors in rows.items()
    }
    _add_rows(
        total,
        rows,
        largest,
        [c.weight for c in contributions],
        [c.examples for c in contributions],
        [c.steps for c in contributions],
        [c.loss for c in contributions],
        {name: [c.scalars[name] for c in contributions] for name in scalars},
    )


def add_batch(
    total: Sum,
    vectors: Mapping[str, npt.NDArray[np.float32]],
    weights: Sequence[float] | Wide,
    examples: Sequence[int] | Totals,
    steps: Sequence[int] | Totals,
    losses: Sequence[float] | Wide,
    scalars: Mapping[str, Sequence[float] | Wide] | None = None,
) -> None:
    """Add B contributions with vectors [B, D] and weights, examples, steps and losses [B]: the same bits as ``add`` in
    a loop. All or nothing: raises ContributionRefused and adds none."""
    _check_names(vectors, total.vectors)
    largest = {
        name: _largest_of_rows(batch, total.size, total.bounds, name) for name, batch in vectors.items()
    }
    many = {name: _plain(values) for name, values in (scalars or {}).items()}
    _add_rows(total, vectors, largest, _plain(weights), _plain(examples), _plain(steps), _plain(losses), many)


def _plain(values: Sequence[Any] | npt.NDArray[Any]) -> list[Any]:
    listed: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return listed


def _check_names(vectors: Iterable[str], names: Iterable[str]) -> None:
    given, wanted = set(vectors), set(names)
    if given != wanted:
        raise ContributionRefused("names", f"{sorted(given)} where {sorted(wanted)} are summed")


def _add_rows(
    total: Sum,
    rows: Mapping[str, Rows],
    largest: Mapping[str, list[float]],
    weights: list[float],
    examples: list[int],
    steps: list[int],
    losses: list[float],
    scalars: Mapping[str, list[float]],
) -> None:
    """Add rows whose values were checked and are at most ``largest``; all the rest is checked here, then added."""
    count = len(weights)
    columns: list[Sized] = [*rows.values(), examples, steps, losses, *scalars.values()]
    if any(len(column) != count for column in columns):
        raise ContributionRefused("length", "the columns of a batch have different lengths")
    if total.clients + count > total.bounds.uploads:
        raise ContributionRefused("uploads", f"the sum holds at most {total.bounds.uploads}")
    _check_numbers(total.bounds, weights, examples, steps)
    integers = {"loss": _weighted(losses, weights, total.bounds.magnitude, "loss")}
    for name, values in scalars.items():
        if name in OWN_SCALARS:
            raise ContributionRefused("scalars", f"{name} is the sum's own")
        integers[name] = _weighted(values, weights, scalar_limit(total.size, total.bounds), "scalars")
    # Nothing may be refused below this line: the sum changes.
    for name, vectors in rows.items():
        _add_scaled(total.vectors[name], vectors, weights, largest[name])
    integers["weight"] = sum(fixed(weight) for weight in weights)
    integers["examples"], integers["steps"] = sum(map(int, examples)), sum(map(int, steps))
    for name, integer in integers.items():
        total.scalars[name] = total.scalars.get(name, 0) + integer
    total.clients += count
    total.most_steps = max([total.most_steps, *map(int, steps)])


def scalar_limit(size: int, bounds: Bounds) -> float:
    """The largest |value| of a strategy's scalar, which may be a squared norm."""
    return bounds.magnitude**2 * max(size, 1)


def _check_numbers(bounds: Bounds, weights: list[float], examples: list[int], steps: list[int]) -> None:
    for weight, seen, taken in zip(weights, examples, steps, strict=True):
        if not 1 <= seen <= 2**53:
            raise ContributionRefused("examples", f"{seen} examples")
        # Below half a unit of the scale a weight would count as nothing and a mean could divide by zero.
        if not 1.0 / SCALE <= weight <= bounds.examples:
            raise ContributionRefused("weight", f"{weight} is not above 0 and at most {bounds.examples}")
        if not 1 <= taken <= MOST_STEPS:
            raise ContributionRefused("steps", f"{taken} steps")


def _weighted(values: list[float], weights: list[float], largest: float, rule: str) -> int:
    if not all(abs(value) <= largest for value in values):
        raise ContributionRefused(rule, f"a value is not finite or above {largest:g}")
    return sum(fixed(value * weight) for value, weight in zip(values, weights, strict=True))


def fixed(value: float) -> int:
    """The integer that stands for a weighted value."""
    return round(float(value) * SCALE)


def _largest(row: Array, size: int, bounds: Bounds, name: str) -> float:
    """The largest |value| of a vector, or ContributionRefused."""
    if row.ndim != 1:
        raise ContributionRefused("length", f"{name} has shape {list(row.shape)}, not [{size}]")
    return _largest_of_rows(row[None], size, bounds, name)[0]


def _largest_of_rows(batch: npt.NDArray[np.float32], size: int, bounds: Bounds, name: str) -> list[float]:
    """The largest |value| of each row [B] of a batch [B, D], or ContributionRefused."""
    if batch.dtype != np.float32:
        raise ContributionRefused("type", f"{name} is {batch.dtype}, not float32")
    if batch.ndim != 2 or batch.shape[1] != size:
        raise ContributionRefused("length", f"{name} has shape {list(batch.shape)}, not [{size}] a client")
    if size == 0:
        return [0.0] * len(batch)
    # Two reductions read the rows where they lie; |batch| would write them first. NaN comes out of both.
    ends = np.maximum(np.maximum.reduce(batch, axis=1), -np.minimum.reduce(batch, axis=1))
    if not (ends <= bounds.magnitude).all():
        if not np.isfinite(ends).all():
            raise ContributionRefused("not_finite", f"{name} holds NaN or infinity")
        raise ContributionRefused("magnitude", f"{name} reaches {ends.max():g}, above {bounds.magnitude:g}")
    largest: list[float] = ends.tolist()
    return largest


def _add_scaled(into: Totals, rows: Rows, weights: list[float], largest: list[float]) -> None:
    """into += Σ rint(row · weight · 2**30), exactly.

    Rows are added up as float64 integers while the bound on their sum stays below 2**53, where float64 is exact; then
    the group's sum becomes int64. A row that is larger on its own is a group of its own: no addition, no rounding.
    """
    factors = np.array(weights) * SCALE
    reach = [factor * most + 1.0 for factor, most in zip(factors.tolist(), largest, strict=True)]
    width = min(len(into), _WIDTH)
    if width == 0:
        return
    scaled = np.empty((max(1, min(_BLOCK // width, len(rows))), width), np.float64)
    for first, last in _groups(reach, len(scaled)):
        factor = factors[first:last, None]
        for left in range(0, len(into), width):
            right = min(left + width, len(into))
            part = scaled[: last - first, : right - left]
            if isinstance(rows, np.ndarray):
                np.copyto(part, rows[first:last, left:right])
            else:
                for target, row in zip(part, rows[first:last], strict=True):
                    np.copyto(target, row[left:right])
            part *= factor
            np.rint(part, out=part)
            into[left:right] += np.add.reduce(part, axis=0).astype(np.int64)


def _groups(reach: list[float], most_rows: int) -> list[tuple[int, int]]:
    """Consecutive ranges of at most ``most_rows`` whose reaches add up to less than 2**53, or of one row."""
    groups, start, filled = [], 0, 0.0
    for place, most in enumerate(reach):
        if place > start and (filled + most >= _EXACT or place - start == most_rows):
            groups.append((start, place))
            start, filled = place, 0.0
        filled += most
    if reach:
        groups.append((start, len(reach)))
    return groups
