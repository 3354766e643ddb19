"""Options of joint binning; the same at all parties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from federated.vertical.histograms.bins import MOST_BINS

Tell = Literal["nothing", "iv", "woe"]


@dataclass(frozen=True, slots=True)
class BinningOptions:
    """``bins``: of each column, by quantiles. ``least_rows``: in each bin, of missing values too; fewer are joined with
    a neighbour. ``smoothing``: rows of each class that are added to each bin, above 0.

    ``tell``: what a host hears of its own columns: nothing, their information value, or also the weight of evidence of
    each bin, which is the share of each class among that bin's rows (``telling`` says what that gives away).
    ``select``: keep the columns of the largest information value, this many of all parties' (0: all); ``least_iv``:
    keep those that have at least so much. Which of its columns are kept is told to each host. Raises ValueError.
    """

    bins: int = 10
    least_rows: int = 20
    smoothing: float = 0.5
    tell: Tell = "iv"
    select: int = 0
    least_iv: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= self.bins <= MOST_BINS:
            raise ValueError(f"bins is {self.bins}, not within 2 and {MOST_BINS}")
        if self.least_rows < 1 or not 0 < self.smoothing <= 1_000:
            raise ValueError("least_rows must be 1 or more, smoothing above 0 and at most 1000")
        if self.select < 0 or not self.least_iv >= 0:
            raise ValueError("select and least_iv must be 0 or more")

    @property
    def selects(self) -> bool:
        """Whether any column may be dropped."""
        return self.select > 0 or self.least_iv > 0
