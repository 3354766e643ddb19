"""How named arrays lie in one flat vector, and what averaging may do to each of them.

A model travels, is summed and is compressed as one float32 vector [D]. Every field of it has a kind:

=========== ============================== ======================================================
kind        is                             after an iteration
=========== ============================== ======================================================
weight      what is trained                the strategy decides (means, server optimisers, controls)
statistic   a running mean or variance     the weighted mean of the clients' values: no server
                                           optimiser, rate or momentum; variances never fall below 0
counter     the number of training steps   the largest of the cohort: the server's + its most steps
constant    any other integer buffer       the server's, for ever
local       stays on the device            the server's first value, for ever; each device its own
=========== ============================== ======================================================

"Values" and "differences" are the same thing for a statistic while all clients start from the same version; with
buffered iterations the mean difference is applied to the newest version, hence the floor under variances.
``local`` on the statistics alone is SiloBN (Andreux et al. 2020), on everything of a normalisation layer FedBN (Li et
al. 2021), on the last layers personalisation. Integers travel as float32, exact up to 2**24: ``flatten`` refuses larger
ones, and a counter stops there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from federated.weights import Array, WeightsMismatch, require_same_shape

Kind = Literal["weight", "statistic", "counter", "constant", "local"]
Mask = npt.NDArray[np.bool_]

LARGEST_INTEGER = 2**24
_KINDS = ("weight", "statistic", "counter", "constant", "local")


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a model. ``dtype`` is its own type, whatever travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: Kind = "weight"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"{self.name}: kind {self.kind!r} is none of {', '.join(_KINDS)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a negative size")

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The order of a model's fields in its vector [D]."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if len({field.name for field in self.fields}) != len(self.fields):
            raise ValueError("two fields of a layout have the same name")

    @cached_property
    def size(self) -> int:
        """D, the length of the vector."""
        return sum(field.size for field in self.fields)

    @cached_property
    def trained(self) -> int:
        """How many of them are trained: the rest are statistics, counters and constants."""
        return sum(field.size for field in self.fields if field.kind == "weight")

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each field lies in the vector."""
        found, start = {}, 0
        for field in self.fields:
            found[field.name] = slice(start, start + field.size)
            start += field.size
        return found

    @cached_property
    def only_weights(self) -> bool:
        """Whether every field is trained and averaged, as in most models: then no mask is needed."""
        return all(field.kind == "weight" for field in self.fields)

    def mask(self, *kinds: Kind) -> Mask:
        """[D], true where a field is of one of ``kinds``."""
        return self._mask_where(lambda field: field.kind in kinds)

    @cached_property
    def nonnegative(self) -> Mask:
        """[D], true where a running variance lies."""
        return self._mask_where(lambda field: field.kind == "statistic" and field.name.endswith("var"))

    def _mask_where(self, holds: Callable[[Field], bool]) -> Mask:
        mask = np.zeros(self.size, np.bool_)
        for field in self.fields:
            if holds(field):
                mask[self.slices[field.name]] = True
        return mask

    def fingerprint(self) -> bytes:
        """8 bytes that two layouts share only if names, shapes, types, kinds and order are the same."""
        rows = [[field.name, list(field.shape), field.dtype, field.kind] for field in self.fields]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).digest()[:8]

    def require_vector(self, vector: npt.NDArray[Any], what: str = "vector") -> None:
        """Raise WeightsMismatch unless ``vector`` is float32 [D]."""
        if vector.dtype != np.float32 or vector.shape != (self.size,):
            raise WeightsMismatch(
                f"{what}: float32 [{self.size}] was expected, not {vector.dtype} {list(vector.shape)}"
            )

    def views(self, vector: Array) -> dict[str, Array]:
        """The fields as float32 views into ``vector`` [D]: writing to one writes to the vector."""
        return {field.name: vector[self.slices[field.name]].reshape(field.shape) for field in self.fields}

    def flatten(self, weights: Mapping[str, npt.NDArray[Any]]) -> Array:
        """Named arrays as one float32 vector [D]. Raises WeightsMismatch, naming the first field that does not
        fit in name, shape or (integers above 2**24) in value."""
        require_same_shape({field.name: np.empty(field.shape, np.bool_) for field in self.fields}, weights)
        vector = np.empty(self.size, np.float32)
        for field in self.fields:
            array = np.asarray(weights[field.name])
            if array.dtype.kind in "iu" and array.size and _largest(array) > LARGEST_INTEGER:
                raise WeightsMismatch(f"{field.name}: an integer above 2**24 is not exact in float32")
            vector[self.slices[field.name]] = array.reshape(-1)
        return vector

    def unflatten(self, vector: Array) -> dict[str, npt.NDArray[Any]]:
        """The arrays of ``vector`` [D] in their own types (copies; integers are rounded). Raises WeightsMismatch."""
        self.require_vector(vector)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for field in self.fields:
            part = vector[self.slices[field.name]].reshape(field.shape)
            dtype = np.dtype(field.dtype)
            arrays[field.name] = (np.rint(part) if dtype.kind in "iub" else part).astype(dtype)
        return arrays

    @cached_property
    def _kept_back(self) -> Mask:
        return self.mask("counter", "constant", "local")

    def conceal(self, difference: Array) -> Array:
        """Zero, in place, what never leaves a device: counters (the steps tell), constants and local fields."""
        if not self.only_weights:
            difference[self._kept_back] = 0.0
        return difference

    def with_local(self, downloaded: Array, kept: Array | None) -> Array:
        """What a device starts from: ``downloaded`` [D], with the local fields of ``kept``, its last weights."""
        if kept is None or self.only_weights:
            return downloaded
        return np.where(self.mask("local"), kept, downloaded)

    def localise(self, belongs: Callable[[str], bool]) -> Layout:
        """The same layout with the fields whose name ``belongs`` kept on the device."""
        return Layout(
            tuple(replace(field, kind="local") if belongs(field.name) else field for field in self.fields)
        )


def kind_of(name: str, dtype: npt.DTypeLike) -> Kind:
    """The kind of a buffer or parameter by its name (torch's: ``running_mean``, ``running_var``,
    ``num_batches_tracked``) and its type."""
    last = name.rsplit(".", 1)[-1]
    if last in ("running_mean", "running_var"):
        return "statistic"
    if last == "num_batches_tracked":
        return "counter"
    return "constant" if np.dtype(dtype).kind in "iub" else "weight"


def layout_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Layout:
    """The layout of named arrays in their order, with kinds by ``kind_of``."""
    return Layout(
        tuple(
            Field(name, array.shape, array.dtype.name, kind_of(name, array.dtype))
            for name, array in arrays.items()
        )
    )


def weight_layout(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of a model that is float32 weights alone."""
    return Layout(tuple(Field(name, shape) for name, shape in shapes))


def _largest(array: npt.NDArray[Any]) -> int:
    return max(abs(int(array.max())), abs(int(array.min())))
