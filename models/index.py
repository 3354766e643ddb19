"""Exact nearest items by inner product: one matrix product, then a partition. NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class Hits:
    """The best rows of one query, best first. Shapes: rows and scores ``[k]``, fewer where fewer exist."""

    rows: Rows
    scores: Floats


def top_k(scores: Floats, k: int, allowed: Mask | None = None) -> Hits:
    """The k highest of ``scores`` ``[N]`` among the ``allowed`` ``[N]``; ties go to the lower row."""
    values = scores if allowed is None else np.where(allowed, scores, scores.dtype.type(-np.inf))
    rows = _contenders(values, k)
    if allowed is not None:
        rows = rows[allowed[rows]]
    values = values[rows]
    k = min(k, len(values))
    if k <= 0:
        return Hits(np.empty(0, np.int64), np.empty(0, np.float32))
    if k < len(values):
        # Everything above the k-th value is in; of those equal to it, the lowest rows fill up.
        least = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > least)
        equal = np.flatnonzero(values == least)[: k - len(above)]
        chosen = np.concatenate([above, equal])
    else:
        chosen = np.arange(len(values))
    chosen = chosen[np.lexsort((chosen, -values[chosen]))]
    return Hits(rows[chosen].astype(np.int64), values[chosen])


def _contenders(values: Floats, k: int) -> Rows:
    """Rows ``[C]``, ascending, that hold the k highest of ``values`` ``[N]`` and most likely few others.

    The k blocks of the highest maxima hold k values at least as high as the k-th maximum, so nothing below
    it is among the k highest: one pass over the values, and a partition of the few maxima.
    """
    blocks = len(values) // _BLOCK
    if blocks <= max(k, 1):
        return np.arange(len(values), dtype=np.int64)
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    least = np.partition(maxima, blocks - max(k, 1))[blocks - max(k, 1)]
    return np.flatnonzero(values >= least)


class VectorIndex:
    """Vectors of items by row number; rows may be added and changed at any time.

    Shapes: N rows of width d. The last ``bias`` coordinates carry an item's bias: they take part in `search`
    and not in `similar`. Not thread-safe for writers; a reader during an update may see some rows new, some
    old, each whole or torn (swap two indices where that matters).
    """

    def __init__(self, dim: int, bias: int = 1) -> None:
        if not 0 <= bias < dim:
            raise ValueError(f"of {dim} coordinates, {bias} cannot be bias")
        self._bias = bias
        self._vectors = np.zeros((0, dim), np.float32)
        self._scale = np.zeros(0, np.float32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def dim(self) -> int:
        """Width of a vector."""
        return self._vectors.shape[1]

    @property
    def vectors(self) -> Floats:
        """All vectors ``[N, d]``, as a view."""
        return self._vectors[: self._size]

    def update(self, rows: npt.NDArray[np.integer], vectors: Floats) -> None:
        """Set ``rows`` ``[M]`` to ``vectors`` ``[M, d]``; rows beyond the end grow the index, gaps being 0.

        Raises ValueError on another shape, on a negative row, and where a vector is not finite.
        """
        if vectors.shape != (len(rows), self.dim):
            raise ValueError(f"vectors have shape {vectors.shape}, not {(len(rows), self.dim)}")
        if len(rows) == 0:
            return
        if int(rows.min()) < 0 or not np.isfinite(vectors).all():
            raise ValueError("rows are at least 0 and vectors finite")
        self._grow(int(rows.max()) + 1)
        self._vectors[rows] = vectors
        length = np.linalg.norm(vectors[:, : self.dim - self._bias], axis=1)
        self._scale[rows] = np.where(length > 0, 1.0 / np.maximum(length, 1e-12), 0.0)

    def _grow(self, size: int) -> None:
        if size > len(self._vectors):
            capacity = max(size, 2 * len(self._vectors), 1_024)
            vectors, scale = np.zeros((capacity, self.dim), np.float32), np.zeros(capacity, np.float32)
            vectors[: self._size], scale[: self._size] = self.vectors, self._scale[: self._size]
            self._vectors, self._scale = vectors, scale
        self._size = max(self._size, size)

    def search(self, queries: Floats, k: int, allowed: Mask | None = None) -> list[Hits]:
        """For each query ``[B, d]`` the k rows of the highest inner product among ``allowed`` ``[N]``."""
        return [top_k(scores, k, allowed) for scores in queries @ self.vectors.T]

    def directions(self, rows: npt.NDArray[np.integer]) -> Floats:
        """Unit vectors ``[M, d - bias]`` of rows, for cosines; 0 for a vector without direction."""
        unit: Floats = self._vectors[rows, : self.dim - self._bias] * self._scale[rows, None]
        return unit

    def similar(self, rows: npt.NDArray[np.integer], k: int, allowed: Mask | None = None) -> Hits:
        """The k rows of the highest mean cosine with ``rows`` ``[M]``, those themselves left out."""
        centre = self.directions(rows).sum(axis=0) / max(len(rows), 1)
        others = np.ones(self._size, bool) if allowed is None else allowed.copy()
        others[rows] = False
        # A zero for each bias coordinate keeps the product over whole, contiguous rows.
        towards = np.concatenate([centre, np.zeros(self._bias, np.float32)])
        cosines = (self.vectors @ towards) * self._scale[: self._size]
        return top_k(cosines, k, others)
