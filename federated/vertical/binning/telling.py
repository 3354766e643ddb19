"""What a host is told of its own columns, rounded and bounded, and what that could give away.

A host knows how many rows each of its bins has, so a weight of evidence tells how many of them are of the class: the
mean label of each group of rows that a bin is. A bin all of whose rows are of one class tells the label of each;
weights are therefore told within +-WOE_MOST, beyond which an almost pure bin looks like a pure one. Groups of many
columns overlap, and enough of them determine single labels, as equations do. An information value is one number a
column; from all digits of a float the counts that make it could be searched for, so it is told in steps.

``check_told`` refuses what could hold all labels: more bits than they have. Below that, some can still be likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.vertical.binning.evidence import Evidence
from federated.vertical.binning.options import BinningOptions

WOE_MOST: Final = 3.0
WOE_DIGITS: Final = 2
IV_MOST: Final = 3.0
IV_DIGITS: Final = 3
"""Decimal places that are told."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Told:
    """``iv`` [F], of the class that each column tells best; ``woe`` [M, K]; without rows where they are not told.
    ``kept``: bool [F]."""

    iv: Floats
    woe: Floats
    kept: npt.NDArray[np.bool_]


def tell(
    found: Sequence[Evidence], kept: npt.NDArray[np.bool_], classes: int, options: BinningOptions
) -> Told:
    """What the host of the columns ``found`` [F] hears, of ``classes`` that are weighed."""
    iv: Floats = np.empty(0)
    woe: Floats = np.empty((0, classes))
    if options.tell != "nothing":
        iv = np.array([one.iv.max() for one in found])
        iv = np.minimum(iv, IV_MOST).round(IV_DIGITS)
    if options.tell == "woe":
        woe = np.concatenate([woe, *(one.woe for one in found)])
        woe = np.clip(woe, -WOE_MOST, WOE_MOST).round(WOE_DIGITS)
    return Told(iv, woe, kept)


def told_bits(rows: Ints, columns: int, classes: int, options: BinningOptions) -> float:
    """The bits of what a host with so many rows in each bin [M] is told, at most."""
    bits = float(columns) if options.selects else 0.0
    if options.tell != "nothing":
        bits += columns * math.log2(IV_MOST * 10**IV_DIGITS + 1)
    if options.tell == "woe":
        steps = 2 * WOE_MOST * 10**WOE_DIGITS + 1
        bits += classes * float(np.log2(np.minimum(rows + 1, steps)).sum())
    return bits


def check_told(host: str, bits: float, labels_bits: float, options: BinningOptions) -> None:
    """Raise ValueError where ``bits`` could hold all labels."""
    if bits >= labels_bits:
        less = {"woe": "tell = iv or nothing, fewer bins", "iv": "tell = nothing"}.get(
            options.tell, "no select"
        )
        raise ValueError(
            f"what {host} would be told, {bits:.0f} bits, could hold all labels, {labels_bits:.0f} bits; "
            f"take {less}, or more rows"
        )
