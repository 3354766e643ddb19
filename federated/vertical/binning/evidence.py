"""Weight of evidence and information value of a column's bins, from counts.

With e_i rows of a class and n_i others in bin i of B, E and N in all, and smoothing s: p_i = (e_i + s) / (E + s B),
q_i = (n_i + s) / (N + s B), woe_i = ln(p_i / q_i), IV = sum (p_i - q_i) woe_i (Siddiqi, Credit Risk Scorecards, 2006,
with s of additive smoothing). KS = sum |e_i / E - n_i / N| / 2: Kolmogorov and Smirnov's statistic of the bins in the
order of their weight of evidence, so that it needs no order of an anonymous column's bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one column with B bins for K classes, each against the rest. ``woe`` [B, K]; ``iv``, ``ks`` [K]."""

    woe: Floats
    iv: Floats
    ks: Floats

    @property
    def best(self) -> int:
        """The class that the column tells apart best."""
        return int(self.iv.argmax())


def outcomes(counts: Ints) -> Ints:
    """The classes that are weighed, of counts [..., C]: the second alone of two, all of more."""
    return counts[..., 1:] if counts.shape[-1] == 2 else counts


def weigh(counts: Ints, smoothing: float) -> Evidence:
    """Of counts [B, C], rows of each class in each bin; no class without rows. The same for bins in any order."""
    events = outcomes(counts)
    others = counts.sum(axis=1, keepdims=True) - events
    bins = len(counts)
    inside = (events + smoothing) / (events.sum(axis=0) + smoothing * bins)
    outside = (others + smoothing) / (others.sum(axis=0) + smoothing * bins)
    woe: Floats = np.log(inside / outside)
    apart = np.abs(events / events.sum(axis=0) - others / others.sum(axis=0)) / 2
    # Sums that are rounded once, whatever the order: an anonymous column's bins come in another one.
    iv = np.array([math.fsum(one) for one in ((inside - outside) * woe).T.tolist()])
    return Evidence(woe, iv, np.array([math.fsum(one) for one in apart.T.tolist()]))


def entropy_bits(totals: Ints) -> float:
    """What all labels together hold at most, in bits, with so many of each class [C]."""
    shares = totals / totals.sum()
    return float(totals.sum() * -(shares * np.log2(shares)).sum())
