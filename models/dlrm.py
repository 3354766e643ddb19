"""DLRM ranking (Naumov et al. 2019, "Deep learning recommendation model for personalization").

A bottom MLP brings the numbers to width d. Of the n + 1 vectors of that width (n embeddings and the bottom
output) all pairwise dot products below the diagonal are taken; with the bottom output they make
d + n(n + 1)/2 inputs of the top MLP, whose one output is the logit of a like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from models.parameters import DenseTensor


def top_inputs(embeddings: int, dim: int) -> int:
    """Inputs of the top MLP for n embeddings of width d: d + n(n + 1)/2."""
    return dim + embeddings * (embeddings + 1) // 2


def _layers(name: str, widths: Sequence[int], bias: float = 0.0) -> list[DenseTensor]:
    tensors = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        last = number == len(widths) - 2
        tensors += [
            # He's uniform initialisation for the rectified layers.
            DenseTensor(f"{name}.{number}.weight", (inputs, outputs), scale=(6.0 / max(inputs, 1)) ** 0.5),
            DenseTensor(f"{name}.{number}.bias", (outputs,), constant=bias if last else 0.0),
        ]
    return tensors


def dlrm_tensors(
    embeddings: int, numbers: int, dim: int, bottom: Sequence[int], top: Sequence[int], bias: float
) -> tuple[DenseTensor, ...]:
    """Dense weights for n embeddings and D numbers; ``bottom`` and ``top`` are hidden widths, ``bias`` the
    initial logit."""
    return (
        *_layers("ranking.bottom", (numbers, *bottom, dim)),
        *_layers("ranking.top", (top_inputs(embeddings, dim), *top, 1), bias),
    )


def _mlp(name: str, inputs: Tensor, dense: Mapping[str, Tensor], *, rectify_last: bool) -> Tensor:
    out, number = inputs, 0
    while f"{name}.{number}.weight" in dense:
        out = torch.addmm(dense[f"{name}.{number}.bias"], out, dense[f"{name}.{number}.weight"])
        number += 1
        if rectify_last or f"{name}.{number}.weight" in dense:
            out = torch.relu(out)
    return out


@lru_cache(maxsize=64)
def _below_diagonal(vectors: int) -> tuple[Tensor, Tensor]:
    # Kept for all callers: made while scoring, they would be inference tensors, of no use in training.
    with torch.inference_mode(mode=False):
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
    return rows, columns


def interact(bottom: Tensor, embeddings: Tensor) -> Tensor:
    """Inputs of the top MLP ``[P, d + n(n + 1)/2]`` from the bottom output ``[P, d]`` and embeddings
    ``[P, n, d]``: the bottom output, then the dots below the diagonal, row by row."""
    vectors = torch.cat([bottom.unsqueeze(1), embeddings], dim=1)
    dots = torch.bmm(vectors, vectors.transpose(1, 2))
    rows, columns = _below_diagonal(vectors.shape[1])
    return torch.cat([bottom, dots[:, rows, columns]], dim=1)


def dlrm_logits(embeddings: Tensor, numeric: Tensor, dense: Mapping[str, Tensor]) -> Tensor:
    """Logits ``[P]`` of P user-item pairs from embeddings ``[P, n, d]`` and numbers ``[P, D]``."""
    bottom = _mlp("ranking.bottom", numeric, dense, rectify_last=True)
    return _mlp("ranking.top", interact(bottom, embeddings), dense, rectify_last=False).squeeze(1)
