"""torch as the networks on a batch axis need it. Imported by the torch engine alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Tensor = Any


class TorchArrays:
    """torch on ``device``: "cpu", "cuda" or "cuda:N". Computing threads use one core each; ``leave`` restores
    the process's number of threads."""

    def __init__(self, device: str = "cpu") -> None:
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device {device}: torch sees no CUDA device here; use device cpu")
        self.module: Any = torch
        self.device = torch.device(device)
        self._threads_before: int = torch.get_num_threads()

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return self.module.from_numpy(np.require(array, requirements=["W", "C"])).to(self.device)

    def take(self, tensor: Tensor) -> npt.NDArray[Any]:
        return np.asarray(tensor.cpu().numpy())

    def empty(self, rows: int, columns: int) -> Tensor:
        return self.module.empty((rows, columns), device=self.device)

    def copies(self, vector: Tensor, rows: int) -> Tensor:
        return vector.expand(rows, len(vector)).clone()

    def count(self, rows: int) -> Tensor:
        return self.module.arange(rows, device=self.device)

    def integers(self, tensor: Tensor) -> Tensor:
        return tensor.long()

    def rows(self, data: Tensor, indices: Tensor) -> Tensor:
        return data[self.count(len(indices))[:, None], indices]

    def rectify(self, tensor: Tensor) -> Tensor:
        return tensor.relu_()

    def add_rows(self, tensor: Tensor, out: Tensor) -> None:
        self.module.sum(tensor, 1, keepdim=True, out=out)

    def softmax_loss(self, scores: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        logarithms = self.module.log_softmax(scores, 2)
        places = labels[:, :, None]
        losses = -(logarithms.gather(2, places)[:, :, 0] * shares).sum(1)
        self.module.exp(logarithms, out=scores)
        scores *= shares[:, :, None]
        scores.scatter_add_(2, places, -shares[:, :, None])
        return losses

    def scatter_add(self, out: Tensor, numbers: Tensor, values: Tensor) -> None:
        out.zero_()
        # index_put_ with accumulate adds in a fixed order on CUDA, too; scatter_add_ there does not.
        out.index_put_((self.count(len(out))[:, None], numbers), values, accumulate=True)

    def enter_thread(self) -> None:
        # torch's pool of threads costs more than it gains on products this small: threads take whole chunks instead.
        self.module.set_num_threads(1)

    def leave(self) -> None:
        self.module.set_num_threads(self._threads_before)
