"""Options of joint boosting; the same at all parties."""

from __future__ import annotations

from dataclasses import dataclass

from federated.vertical.boosting.objective import LOSSES, Rule
from federated.vertical.boosting.trees import MOST_DEPTH, MOST_TREES
from federated.vertical.histograms.bins import MOST_BINS


@dataclass(frozen=True, slots=True)
class BoostingOptions:
    """``depth``: splits on the way to a leaf. ``bins``: of each column, by quantiles. ``rate``: of each tree's step.
    ``l2``: on leaves, above 0. ``least_gain``: of a split; of numbers, in about their variance. ``least_rows``: on each
    side of a split, and in each bin of all rows; hosts hold to it, since sums over few rows tell of single rows.
    ``loss``: logistic, softmax, squared, or auto, as the labels are.

    Raises ValueError.
    """

    trees: int = 20
    depth: int = 3
    bins: int = 32
    rate: float = 0.3
    l2: float = 1.0
    least_gain: float = 1e-6
    least_rows: int = 20
    loss: str = "auto"

    def __post_init__(self) -> None:
        for name, least, most in (("trees", 1, MOST_TREES), ("depth", 1, MOST_DEPTH), ("bins", 2, MOST_BINS)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, not within {least} and {most}")
        if not (0 < self.rate <= 1 and self.l2 > 0 and self.least_gain > 0 and self.least_rows >= 1):
            raise ValueError(
                "rate must be above 0 and at most 1, l2 and least_gain above 0, least_rows 1 or more"
            )
        if self.loss != "auto" and self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}, none of auto, {', '.join(LOSSES)}")

    @property
    def rule(self) -> Rule:
        """When to split."""
        return Rule(self.l2, self.least_gain, self.least_rows, self.rate)
