"""How kernels are compiled, and the types they take.

Every kernel has one explicit signature: it is compiled when its module is first imported and then read from
numba's cache, so no request ever waits for a compiler, and no odd array makes a second specialisation.
Inputs are typed read-only, which accepts writable arrays too; arrays that came off the wire are read-only.

numba's cache looks at a kernel's own file only. Kernels therefore call nothing from other modules but
``mix``, which can never change, as stored values depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import numpy as np
from numba import njit
from numba.core import types
from numba.core.types import Array, Type

P = ParamSpec("P")
R = TypeVar("R")

void: Final = types.void
i32: Final = types.int32
i64: Final = types.int64
u32: Final = types.uint32
u64: Final = types.uint64
f32: Final = types.float32


def inp(dtype: Type, ndim: int = 1) -> Array:
    """A C-contiguous array that the kernel reads."""
    return Array(dtype, ndim, "C", readonly=True)


def out(dtype: Type, ndim: int = 1) -> Array:
    """A C-contiguous array that the kernel writes."""
    return Array(dtype, ndim, "C")


def kernel(signature: Type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile for ``signature`` alone, cached on disk, without the GIL; a division by zero gives what
    NumPy's does.

    Never with fast-math: kernels must have the same bits as their NumPy twins.
    """
    return njit(signature, cache=True, nogil=True, error_model="numpy")


@kernel(u64(u64))
def mix(z: np.uint64) -> np.uint64:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
