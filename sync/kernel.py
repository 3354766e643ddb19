"""How kernels are compiled, and the types they take.

Every kernel has one explicit signature: it is compiled when its module is first imported and then read from
numba's cache, so no request ever waits for a compiler, and no odd array makes a second specialisation.
Inputs are typed read-only, which accepts writable arrays too; arrays that came off the wire are read-only.

numba's cache looks at a kernel's own file only. Kernels therefore call nothing from other modules but
``mix``, which can never change, as stored values depend on it, and ``place_of`` and the intrinsics below, which
have nothing to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.types import Array, Type
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")

void: Final = types.void
i32: Final = types.int32
i64: Final = types.int64
u32: Final = types.uint32
u64: Final = types.uint64
f32: Final = types.float32
f64: Final = types.float64
u8: Final = types.uint8


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


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """For what kernels of one module share: it becomes part of a kernel before that is compiled. Calling a
    kernel from another one would count references to each array, every time."""
    return njit(inline="always", error_model="numpy")(function)


@inlined
def place_of(writers: np.ndarray[tuple[int], np.dtype[np.uint32]], writer: np.uint32) -> int:
    """Where ``writer`` is among the ascending ``writers``, or how many there are."""
    low = 0
    high = writers.shape[0]
    while low < high:
        middle = (low + high) // 2
        if writers[middle] < writer:
            low = middle + 1
        else:
            high = middle
    if low < writers.shape[0] and writers[low] != writer:
        low = writers.shape[0]
    return low


@kernel(u64(u64))
def mix(z: np.uint64) -> np.uint64:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of element ``index`` (int64) of a C-contiguous ``array``, counted flat, to read it
    soon. Only a hint: nothing is read, so an index outside the array does no harm.

    A batch of random look-ups spends its time waiting for memory, one line after the other. Asking for the
    lines of some dozens of keys before reading the first lets the waits overlap.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        i32_t = ir.IntType(32)
        line = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        hint = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32_t, i32_t, i32_t]),
            "llvm.prefetch.p0",
        )
        # Read access, to be kept in every level of cache, data rather than instructions.
        builder.call(hint, [line, i32_t(0), i32_t(3), i32_t(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def copy_line(typing_context: Any, target: Any, to: Any, source: Any, start: Any) -> Any:
    """Copy 16 float32, a cache line's worth, from element ``start`` (int64) of a C-contiguous ``source`` to element
    ``to`` of ``target``, both counted flat. Bounds are not looked at.

    One load and one store, where a loop over a row asks every time whether the arrays overlap.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), 16)

        def at(array: Any, value: Any, index: Any) -> Any:
            data = context.make_array(array)(context, builder, value).data
            return builder.bitcast(builder.gep(data, [index]), line.as_pointer())

        floats = builder.load(at(source, arguments[2], arguments[3]), align=4)
        builder.store(floats, at(target, arguments[0], arguments[1]), align=4)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


@intrinsic
def first_in_line(typing_context: Any, entries: Any, start: Any, tag: Any, tag_mask: Any) -> Any:
    """The first of the 16 uint32 from element ``start`` (uint64) of ``entries`` that is 0 or equals ``tag`` under
    ``tag_mask`` (both uint32): 0 to 15, or 16 where none is; uint64.

    One comparison of a whole cache line, where a loop would end at a place that the processor cannot predict.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i32_t, flags = ir.IntType(32), ir.IntType(16)
        line = ir.VectorType(i32_t, 16)

        def everywhere(value: Any) -> Any:
            first = builder.insert_element(ir.Constant(line, ir.Undefined), value, i32_t(0))
            return builder.shuffle_vector(first, ir.Constant(line, ir.Undefined), ir.Constant(line, None))

        data = context.make_array(entries)(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), line.as_pointer())
        loaded = builder.load(place, align=4)
        empty = builder.icmp_unsigned("==", loaded, ir.Constant(line, None))
        tagged = builder.and_(loaded, everywhere(arguments[3]))
        equal = builder.icmp_unsigned("==", tagged, everywhere(arguments[2]))
        found = builder.zext(builder.bitcast(builder.or_(empty, equal), flags), i32_t)
        # A seventeenth flag, always set, stands for none.
        ended = builder.or_(found, i32_t(1 << 16))
        return builder.zext(builder.cttz(ended, ir.IntType(1)(0)), ir.IntType(64))

    return types.uint64(entries, types.uint64, types.uint32, types.uint32), generate
