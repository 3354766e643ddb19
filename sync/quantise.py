"""Rows of values in fewer bytes, for links between regions. Pure, vectorised.

``float32`` is exact. What is read back is float32 again, so that nothing else knows how it travelled; and reading a
row back twice, or at two regions, gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from sync.errors import RecordDamaged
from sync.kernel import f32, inp, kernel, out, u8, void

Precision = Literal["float32", "float16", "int8"]
Values = npt.NDArray[np.float32]
Array = npt.NDArray[np.generic]

PARTS: Final[dict[Precision, int]] = {"float32": 1, "float16": 1, "int8": 2}
"""How many arrays values take."""
_LARGEST_HALF: Final = np.float32(65_504.0)
_LARGEST: Final = float(np.finfo(np.float32).max)


def quantise(values: Values, precision: Precision) -> tuple[Array, ...]:
    """``values`` [N, d] float32, finite, as arrays that travel.

    ``float32``: [N, d], exact. ``float16``: [N, d] as uint16, the nearest half; off by |x| / 2048 at most, by 2^-25
    where |x| < 2^-14, and ±65504 stands for what is larger. ``int8``: codes [N, d] uint8, and [N, 2] float32, offset
    and scale of each row: x is offset + scale · code, off by (largest - least of the row) / 510 at most, beside the
    rounding of float32 (2^-22 of the row's largest magnitude, and 2^-141).
    """
    if precision == "float32":
        return (values,)
    if precision == "float16":
        halves = np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)
        return (halves.view(np.uint16),)
    codes, rows = np.zeros(values.shape, np.uint8), np.zeros((len(values), 2), np.float32)
    if values.size:
        _to_codes(np.ascontiguousarray(values), codes, rows)
    return codes, rows


def value_bytes(dim: int, precision: Precision) -> int:
    """Bytes that the values of one row of ``dim`` take."""
    return {"float32": 4 * dim, "float16": 2 * dim, "int8": dim + 8}[precision]


def restore(arrays: Sequence[Array], precision: Precision, shape: tuple[int, int]) -> Values:
    """The values [N, d] that ``quantise`` made ``arrays`` of. Raises RecordDamaged where they cannot be its."""
    kinds: tuple[tuple[type[np.generic], tuple[int, int]], ...]
    if precision == "int8":
        kinds = (np.uint8, shape), (np.float32, (shape[0], 2))
    else:
        kinds = ((np.float32 if precision == "float32" else np.uint16, shape),)
    if len(arrays) != len(kinds):
        raise RecordDamaged(f"{len(arrays)} arrays for values of {precision}")
    for array, (dtype, wanted) in zip(arrays, kinds, strict=True):
        if array.dtype != dtype or array.shape != wanted:
            raise RecordDamaged(f"{array.dtype} {list(array.shape)} for {precision} values {list(shape)}")
    if precision == "float32":
        return arrays[0].view(np.float32)
    if precision == "float16":
        halves: npt.NDArray[np.float16] = np.ascontiguousarray(arrays[0]).view(np.float16)
        return halves.astype(np.float32)
    codes, rows = arrays[0].view(np.uint8), arrays[1].view(np.float32)
    if not np.isfinite(rows).all():
        raise RecordDamaged("offset or scale of a row is not finite")
    restored = np.empty(shape, np.float32)
    _from_codes(np.ascontiguousarray(codes), np.ascontiguousarray(rows), restored)
    return restored


@kernel(void(inp(f32, 2), out(u8, 2), out(f32, 2)))
def _to_codes(values: Values, codes: npt.NDArray[np.uint8], rows: Values) -> None:
    for i in range(values.shape[0]):
        least = values[i, 0]
        largest = values[i, 0]
        for c in range(1, values.shape[1]):
            least = min(least, values[i, c])
            largest = max(largest, values[i, c])
        # In float64, as the span of a row may be twice the largest float32.
        scale = np.float32((np.float64(largest) - np.float64(least)) / 255.0)
        rows[i, 0] = least
        rows[i, 1] = scale
        if scale > 0.0:
            for c in range(values.shape[1]):
                code = np.rint((np.float64(values[i, c]) - np.float64(least)) / np.float64(scale))
                codes[i, c] = np.uint8(min(max(code, 0.0), 255.0))


@kernel(void(inp(u8, 2), inp(f32, 2), out(f32, 2)))
def _from_codes(codes: npt.NDArray[np.uint8], rows: Values, values: Values) -> None:
    for i in range(codes.shape[0]):
        least = np.float64(rows[i, 0])
        scale = np.float64(rows[i, 1])
        for c in range(codes.shape[1]):
            found = least + scale * np.float64(codes[i, c])
            values[i, c] = np.float32(min(max(found, -_LARGEST), _LARGEST))
