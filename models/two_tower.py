"""Two-tower retrieval: one vector per user, one per item, their inner product the score.

After Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations" (2019). Each
tower is the gated sum of its feature embeddings plus a small MLP over all of them. The sum learns from the
first example on, which matters when every example is seen once; the MLP adds what a sum cannot say. The
user's last coordinate is the constant 1, so an item's last coordinate is its bias. The bias is a function of
the item's numbers alone, among them its decayed counts: learned per item, it would remember all-time
popularity long after it faded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.parameters import DenseTensor


def tower_tensors(name: str, features: int, numbers: int, dim: int, hidden: int) -> tuple[DenseTensor, ...]:
    """Dense weights of a tower over F embeddings of width d and D numbers, with H hidden units."""
    inputs = features * dim + numbers
    return (
        DenseTensor(f"{name}.gates", (features,), constant=1.0),
        DenseTensor(f"{name}.linear", (numbers, dim)),
        DenseTensor(f"{name}.hidden.weight", (inputs, hidden), scale=(3.0 / inputs) ** 0.5),
        DenseTensor(f"{name}.hidden.bias", (hidden,)),
        DenseTensor(f"{name}.out.weight", (hidden, dim)),
    )


def two_tower_tensors(
    user: tuple[int, int], item: tuple[int, int], dim: int, hidden: int
) -> tuple[DenseTensor, ...]:
    """Dense weights of both towers; ``user`` and ``item`` are (embeddings, numbers)."""
    return (
        *tower_tensors("user", *user, dim, hidden),
        *tower_tensors("item", *item, dim, hidden),
        DenseTensor("item.bias", (item[1], 1)),
    )


def tower(name: str, vectors: Tensor, numeric: Tensor, dense: Mapping[str, Tensor]) -> Tensor:
    """One tower's output ``[N, d]`` from vectors ``[N, F, d]`` and numbers ``[N, D]``."""
    inputs = torch.cat([vectors.flatten(1), numeric], dim=1)
    hidden = torch.relu(torch.addmm(dense[f"{name}.hidden.bias"], inputs, dense[f"{name}.hidden.weight"]))
    summed = torch.matmul(dense[f"{name}.gates"], vectors)
    return summed + numeric @ dense[f"{name}.linear"] + hidden @ dense[f"{name}.out.weight"]


def user_vectors(vectors: Tensor, numeric: Tensor, dense: Mapping[str, Tensor]) -> Tensor:
    """User vectors ``[B, d]``, the last coordinate 1."""
    out = tower("user", vectors, numeric, dense)
    return torch.cat([out[:, :-1], torch.ones_like(out[:, :1])], dim=1)


def item_vectors(vectors: Tensor, numeric: Tensor, dense: Mapping[str, Tensor]) -> Tensor:
    """Item vectors ``[M, d]``, the last coordinate the item's bias."""
    out = tower("item", vectors, numeric, dense)
    return torch.cat([out[:, :-1], numeric @ dense["item.bias"]], dim=1)
