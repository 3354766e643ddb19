"""What a model needs of the parameter store, said without importing it.

Embedding rows live in tables found by 64-bit key; the dense weights of a model are one more table, whose
rows are chunks of a fixed number of floats with keys 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

RETRIEVAL: Final = "retrieval"
RANKING: Final = "ranking"
DENSE: Final = "dense"


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """A table of rows ``[dim]``, initially uniform in ±scale, trained at the learning rate ``rate``."""

    name: str
    dim: int
    scale: float
    rate: float


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A named weight: initially ``constant`` plus a uniform draw in ±scale per element."""

    name: str
    shape: tuple[int, ...]
    scale: float = 0.0
    constant: float = 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """Initial values of the dense rows from ``first_key`` up to the next segment."""

    first_key: int
    scale: float
    constant: float


@dataclass(frozen=True)
class DenseLayout:
    """Where each dense tensor lies in the dense table: whole chunks of ``chunk`` floats, in order.

    Every tensor starts at a chunk boundary, so that a segment of keys has one initial distribution. The rest
    of a tensor's last chunk is unused: it is never read and its gradient is 0.
    """

    tensors: tuple[DenseTensor, ...]
    chunk: int = 256

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"a chunk holds at least one float, not {self.chunk}")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"dense tensors share a name: {sorted(names)}")

    def _rows(self, tensor: DenseTensor) -> int:
        return -(-tensor.size // self.chunk)

    @cached_property
    def first_keys(self) -> dict[str, int]:
        """The first row of each tensor, by name."""
        keys, row = {}, 0
        for tensor in self.tensors:
            keys[tensor.name] = row
            row += self._rows(tensor)
        return keys

    @cached_property
    def chunks(self) -> int:
        """Rows of the dense table."""
        return sum(self._rows(tensor) for tensor in self.tensors)

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Keys of the dense table ``[chunks]``."""
        return np.arange(self.chunks, dtype=np.uint64)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Initial distributions by ascending first key."""
        return tuple(Segment(self.first_keys[t.name], t.scale, t.constant) for t in self.tensors)

    def unpack(self, values: Floats) -> dict[str, Floats]:
        """Views of the tensors inside ``values`` ``[chunks, chunk]``. Raises ValueError on another shape."""
        if values.shape != (self.chunks, self.chunk):
            raise ValueError(f"dense values have shape {values.shape}, not {(self.chunks, self.chunk)}")
        flat = values.reshape(-1)
        views = {}
        for tensor in self.tensors:
            start = self.first_keys[tensor.name] * self.chunk
            views[tensor.name] = flat[start : start + tensor.size].reshape(tensor.shape)
        return views

    def pack(self, tensors: Mapping[str, Floats]) -> Floats:
        """The table's values ``[chunks, chunk]`` from one array per tensor; unused floats are 0.

        Raises KeyError where a tensor is missing, ValueError where its shape differs.
        """
        values = np.zeros((self.chunks, self.chunk), np.float32)
        for name, view in self.unpack(values).items():
            if tensors[name].shape != view.shape:
                raise ValueError(f"dense tensor {name} has shape {tensors[name].shape}, not {view.shape}")
            view[...] = tensors[name]
        return values

    def initial(self, generator: np.random.Generator) -> Floats:
        """Initial values ``[chunks, chunk]`` by a local generator, for training without a parameter store."""
        values = np.zeros((self.chunks, self.chunk), np.float32)
        for tensor in self.tensors:
            start = self.first_keys[tensor.name]
            rows = values[start : start + self._rows(tensor)]
            rows[...] = tensor.constant + tensor.scale * generator.uniform(-1, 1, rows.shape)
        return values


@dataclass(frozen=True)
class ModelNeeds:
    """All a model asks of the store: embedding tables, and the dense table named ``dense``, trained at the
    learning rate ``dense_rate``."""

    tables: tuple[EmbeddingTable, ...]
    dense: DenseLayout
    dense_rate: float
