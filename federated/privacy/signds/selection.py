"""Which coordinates devices name: the largest of the signed difference or not, by a plan's probabilities. Batched.

ν is drawn by inverting its distribution in log space, its rarest value first: however small a probability is, rounding
moves it by less than 10⁻¹² of itself, so ε holds down to the events that nobody will ever see. Sets are drawn exactly
evenly. What is named stands in ascending order: the order tells nothing of what was among the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.privacy.randomness import Randomness, below
from federated.privacy.signds.plan import Plan
from federated.weights import Array

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_BLOCK: Final = 2**24  # values of a batch worked on at once


@dataclass(frozen=True, slots=True)
class Selected:
    """Of B devices: ``signs`` [B], 1 or −1; the ``places`` [B, h] that they name, ascending; ``magnitudes`` [B], the
    means of their top-k signed differences, which are still to be protected."""

    signs: npt.NDArray[np.int8]
    places: Integers
    magnitudes: Floats


def select(plan: Plan, vectors: Array, randomness: Sequence[Randomness]) -> Selected:
    """What B devices with differences ``vectors`` [B, D] name, each by its own randomness: the same as one by one.
    Raises ValueError for what is not finite."""
    if vectors.shape != (len(randomness), plan.dimension):
        raise ValueError(f"{vectors.shape} differences, {len(randomness)} sources, D = {plan.dimension}")
    rows = max(1, _BLOCK // plan.dimension)
    parts = [
        _select(plan, vectors[start : start + rows], randomness[start : start + rows])
        for start in range(0, len(vectors), rows)
    ]
    return Selected(
        np.concatenate([part.signs for part in parts]),
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.magnitudes for part in parts]),
    )


def log_uniform(randomness: Randomness) -> float:
    """log u of u evenly from (0, 1), with 64 bits after the first that is set: its tail has no end."""
    high, low = randomness.words(2).tolist()
    words = 1
    while high == 0:
        high, low = low, int(randomness.words(1)[0])
        words += 1
    return math.log(high + (low + 0.5) * 2.0**-64) - 64.0 * words * math.log(2.0)


def draw_overlaps(plan: Plan, log_uniforms: Floats) -> Integers:
    """ν [N] by the plan, of log u [N]."""
    order = np.argsort(plan.log_pmf, kind="stable")
    reached = np.logaddexp.accumulate(plan.log_pmf[order])
    reached[-1] = 0.0
    return order[np.searchsorted(reached, log_uniforms)]


def _select(plan: Plan, vectors: Array, randomness: Sequence[Randomness]) -> Selected:
    rows, top = len(vectors), plan.top
    signs = np.array([1 - 2 * int(one.words(1)[0] >> np.uint64(63)) for one in randomness], np.int8)
    overlaps = draw_overlaps(plan, np.array([log_uniform(one) for one in randomness]))
    signed = vectors * signs[:, None]
    largest = _largest(signed, top)
    values = np.take_along_axis(signed, largest, axis=1)
    inside_rows, inside = _subsets(overlaps, top, randomness)
    outside_rows, outside = _subsets(plan.named - overlaps, plan.dimension - top, randomness)
    named = np.concatenate(
        [
            inside_rows * plan.dimension + largest[inside_rows, inside],
            outside_rows * plan.dimension + _outside(largest, outside_rows, outside, plan.dimension),
        ]
    )
    named.sort()
    places = named.reshape(rows, plan.named) % plan.dimension
    return Selected(signs, places, values.mean(axis=1, dtype=np.float64))


def _largest(values: Array, count: int) -> Integers:
    """The places [B, ``count``] of the largest of each row of ``values`` [B, D], ascending; of equal ones the first."""
    if not (np.isfinite(values.min(axis=1)) & np.isfinite(values.max(axis=1))).all():
        raise ValueError("a difference holds NaN or infinity")
    dimension = values.shape[1]
    least = np.partition(values, dimension - count, axis=1)[:, dimension - count, None]
    chosen = values >= least
    for row in np.flatnonzero(chosen.sum(axis=1) > count):
        equal = np.flatnonzero(values[row] == least[row])
        spare = int(np.count_nonzero(chosen[row])) - count
        chosen[row, equal[len(equal) - spare :]] = False
    return np.nonzero(chosen)[1].reshape(len(values), count)


def _outside(largest: Integers, rows: Integers, ranks: Integers, dimension: int) -> Integers:
    """The places [N] of the ``ranks`` [N] among the coordinates that are not in ``rows``' ``largest`` [B, k]."""
    count = largest.shape[1]
    # The i-th of the largest has largest_i − i others before it: a rank comes after all those it reaches.
    before = largest - np.arange(count) + np.arange(len(largest))[:, None] * dimension
    passed = np.searchsorted(before.reshape(-1), ranks + rows * dimension, side="right") - rows * count
    places: Integers = ranks + passed
    return places


def _subsets(counts: Integers, of: int, randomness: Sequence[Randomness]) -> tuple[Integers, Integers]:
    """For each row a set of ``counts`` [B] of the numbers below ``of``, evenly: rows [Σ counts], ascending, and
    numbers.

    Numbers that are drawn twice are drawn again, which favours no number, so the set is even. Of a set of more than
    half the others are drawn, lest that take long.
    """
    swapped = counts > of // 2
    wanted = np.where(swapped, of - counts, counts)
    rows = np.repeat(np.arange(len(counts)), wanted)
    drawn = np.zeros(len(rows), np.int64)
    again = np.arange(len(rows))
    while len(again):
        drawn[again] = _draw(rows[again], of, randomness)
        keys = rows * of + drawn
        order = np.argsort(keys, kind="stable")
        again = np.sort(order[1:][keys[order[1:]] == keys[order[:-1]]])
    if not swapped.any():
        return rows, drawn
    kept = np.split(drawn, np.cumsum(wanted)[:-1])
    for row in np.flatnonzero(swapped):
        kept[row] = np.setdiff1d(np.arange(of), kept[row], assume_unique=True)
    return np.repeat(np.arange(len(counts)), counts), np.concatenate(kept)


def _draw(rows: Integers, of: int, randomness: Sequence[Randomness]) -> Integers:
    """A number below ``of`` for each of ``rows`` (ascending), from the row's own source."""
    found = np.empty(len(rows), np.int64)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        found[start:end] = below(randomness[rows[start]], np.full(end - start, of, np.uint64))
    return found
