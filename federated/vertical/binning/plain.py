"""Counts of classes in bins, in the clear: what the joint counts must equal, and the guest's own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federated.vertical.binning.columns import cut_columns
from federated.vertical.binning.options import BinningOptions

Ints = npt.NDArray[np.int64]


def count_classes(
    features: npt.NDArray[np.float64], labels: npt.NDArray[np.float64], options: BinningOptions
) -> list[Ints]:
    """For each column of features [N, F] the counts [B, C] of labels [N], classes in rising order."""
    columns = cut_columns(features, options)
    values = np.unique(labels)
    found: list[Ints] = []
    for codes, bins in zip(columns.codes.T, columns.bins.tolist(), strict=True):
        counts = [np.bincount(codes[labels == value], minlength=bins) for value in values]
        found.append(np.stack(counts, axis=1).astype(np.int64))
    return found
