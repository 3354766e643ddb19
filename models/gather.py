"""From encoded keys to embedding vectors: which row of a gathered table each key is.

A step asks the store for each key once. `unique_keys` names them, `Index` says which of the returned rows
each feature of each entity is, and `embed` looks the vectors up inside torch, so that autograd sums the
gradients of a row that several entities share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from featurestore.encoded import MISSING, Encoded, Keys


def unique_keys(parts: Iterable[Encoded]) -> Keys:
    """All keys of ``parts`` but MISSING, each once, ascending ``[U]``."""
    columns = [
        column for part in parts for column in (part.categorical.reshape(-1), *(r.values for r in part.lists))
    ]
    keys = np.unique(np.concatenate(columns)) if columns else np.empty(0, np.uint64)
    return keys[1:] if len(keys) and keys[0] == MISSING else keys


def tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """A tensor over ``array``; a read-only or strided one is copied, since tensors are writable."""
    fit = array.flags.writeable and array.flags.c_contiguous
    return torch.from_numpy(array if fit else np.array(array, order="C"))


@dataclass(frozen=True, slots=True)
class Index:
    """Where the features of N entities lie among gathered rows.

    Shapes: categorical ``[N, C]`` int64, one (values ``[T]``, offsets ``[N + 1]``) int64 pair per list,
    numeric ``[N, D]`` float32.
    """

    categorical: Tensor
    lists: tuple[tuple[Tensor, Tensor], ...]
    numeric: Tensor

    @staticmethod
    def into(keys: Keys, encoded: Encoded) -> Index:
        """Look ``encoded`` up in the ascending unique ``keys`` ``[U]``. Raises KeyError for a missing key."""
        return Index(
            _positions(keys, encoded.categorical),
            tuple((_positions(keys, ragged.values), tensor(ragged.offsets)) for ragged in encoded.lists),
            tensor(encoded.numeric),
        )


def _positions(keys: Keys, wanted: Keys) -> Tensor:
    """Rows of ``wanted`` among ``keys``; MISSING is the row after the last, which ``embed`` keeps at zero."""
    flat = wanted.reshape(-1)
    at = np.searchsorted(keys, flat)
    padded = np.append(keys, np.uint64(MISSING))
    at[flat == MISSING] = len(keys)
    if not np.array_equal(padded[at], flat):
        raise KeyError("an encoded key is not among the gathered keys")
    return torch.from_numpy(at.reshape(wanted.shape))


def embed(index: Index, rows: Tensor) -> Tensor:
    """Vectors of all features ``[N, C + L, d]`` from gathered rows ``[U, d]``: categorical ones first, then
    the mean of each list (0 for an empty one). What is MISSING has the vector 0 and gets no gradient."""
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    vectors = [functional.embedding(index.categorical, rows)]
    for values, offsets in index.lists:
        pooled = functional.embedding_bag(values, rows, offsets, mode="mean", include_last_offset=True)
        vectors.append(pooled.unsqueeze(1))
    return torch.cat(vectors, dim=1)
