"""What the networks on a batch axis need of NumPy or torch, where the two differ."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tensor = Any


class Arrays(Protocol):
    """NumPy, or torch on one device."""

    @property
    def module(self) -> Any:
        """The library."""

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """``array`` where the work is done; it may share memory."""

    def take(self, tensor: Tensor) -> npt.NDArray[Any]:
        """``tensor`` as an array of NumPy; it may share memory."""

    def empty(self, rows: int, columns: int) -> Tensor:
        """An uninitialised float32 array."""

    def copies(self, vector: Tensor, rows: int) -> Tensor:
        """``vector`` [D] as ``rows`` equal rows [B, D] of their own memory."""

    def count(self, rows: int) -> Tensor:
        """0, 1, …, rows − 1."""

    def integers(self, tensor: Tensor) -> Tensor:
        """As indices."""

    def rows(self, data: Tensor, indices: Tensor) -> Tensor:
        """``data`` [B, N, ...] at ``indices`` [B, M], client by client: [B, M, ...]."""

    def rectify(self, tensor: Tensor) -> Tensor:
        """The larger of 0 and ``tensor``, in its place."""

    def add_rows(self, tensor: Tensor, out: Tensor) -> None:
        """The sum of ``tensor`` [B, M, C] over M to ``out`` [B, 1, C]."""

    def softmax_loss(self, scores: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        """Mean cross-entropy [B] of ``scores`` [B, M, C] against ``labels`` [B, M] where row m weighs ``shares``
        [B, M]; its gradient takes the place of ``scores``."""

    def scatter_add(self, out: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Each row of ``out`` [B, V, E] becomes the sum of those of ``values`` [B, K, E] that have its number in
        ``numbers`` [B, K]."""

    def enter_thread(self) -> None:
        """Called first in a thread that is going to compute."""

    def leave(self) -> None:
        """Put back what ``enter_thread`` has changed for the process."""


class NumpyArrays:
    """NumPy on this machine's cores."""

    module: Any = np

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return array

    def take(self, tensor: Tensor) -> npt.NDArray[Any]:
        return np.asarray(tensor)

    def empty(self, rows: int, columns: int) -> Tensor:
        return np.empty((rows, columns), np.float32)

    def copies(self, vector: Tensor, rows: int) -> Tensor:
        return np.repeat(vector[None], rows, axis=0)

    def count(self, rows: int) -> Tensor:
        return np.arange(rows)

    def integers(self, tensor: Tensor) -> Tensor:
        return tensor.astype(np.intp, copy=False)

    def rows(self, data: Tensor, indices: Tensor) -> Tensor:
        return data[np.arange(len(indices))[:, None], indices]

    def rectify(self, tensor: Tensor) -> Tensor:
        return np.maximum(tensor, 0.0, out=tensor)

    def add_rows(self, tensor: Tensor, out: Tensor) -> None:
        np.sum(tensor, axis=1, keepdims=True, out=out)

    def softmax_loss(self, scores: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        places = (np.arange(scores.shape[0])[:, None], np.arange(scores.shape[1]), labels)
        scores -= scores.max(axis=2, keepdims=True)
        at_labels = scores[places]
        np.exp(scores, out=scores)
        totals = scores.sum(axis=2, keepdims=True)
        losses = ((np.log(totals[:, :, 0]) - at_labels) * shares).sum(axis=1)
        np.divide(shares[:, :, None], totals, out=totals)
        scores *= totals
        scores[places] -= shares
        return losses

    def scatter_add(self, out: Tensor, numbers: Tensor, values: Tensor) -> None:
        # One bincount per column of E is far faster than add.at over [B, K, E].
        clients, entries, width = out.shape
        flat = (numbers + np.arange(clients)[:, None] * entries).reshape(-1)
        for column in range(width):
            sums = np.bincount(flat, values[:, :, column].reshape(-1), clients * entries)
            out[:, :, column] = sums.reshape(clients, entries)

    def enter_thread(self) -> None:
        """BLAS runs products this small on the thread that calls; larger ones by its own setting."""

    def leave(self) -> None:
        """Nothing was changed."""
