"""Losses of the two models, each a sum over samples, so that a batch means the sum of its samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def sampled_softmax(scores: Tensor, log_q: Tensor, weight: Tensor) -> Tensor:
    """Sum over samples of weight · −log softmax of the positive among its candidates.

    Shapes: scores ``[B, C]`` already divided by the temperature, column 0 the positive; log_q ``[B, C]``
    the log of each candidate's proposal rate, +inf to leave a candidate out; weight ``[B]``.
    Formula: Yi et al. 2019, s(u, i)/τ − log Q(i).
    """
    corrected = scores - log_q
    losses = torch.logsumexp(corrected, dim=1) - corrected[:, 0]
    return (losses * weight).sum()


def binary_cross_entropy(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """Sum of weight · cross entropy of labels in [0, 1] under ``logits``; all of one shape."""
    return (functional.binary_cross_entropy_with_logits(logits, label, reduction="none") * weight).sum()
