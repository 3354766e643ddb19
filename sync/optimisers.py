"""How gradients change rows: one kernel per optimiser, each with a slow clear twin in ``reference.py``.

Every kernel takes the same arguments and has the same bits as its twin: all arithmetic is float32 in a
fixed order, and nothing is reassociated. ``squares`` holds each gradient's sum of squares, which
``measure`` computed while it looked for what must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import f32, i32, i64, inp, kernel, out, u64, void

Slots = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Apply = Callable[[Rows, Rows, Slots, Rows, Rows, np.float32, np.float32], None]
"""(values [C, d], state [C, s], slots [N] distinct, gradients [N, d], squares [N], rate, epsilon)."""

_APPLY: Final = void(out(f32, 2), out(f32, 2), inp(i32), inp(f32, 2), inp(f32), f32, f32)


@kernel(i64(inp(f32, 2), f32, out(f32)))
def measure(gradients: Rows, limit: np.float32, squares: Rows) -> int:
    """Fill ``squares`` [N] with each row's sum of squares, in column order over eight lanes, then the lanes
    in order. Returns the first row whose sum is not at most ``limit`` (NaN and infinity never are), or
    -1."""
    bad = -1
    lanes = np.empty(8, np.float32)
    whole = gradients.shape[1] // 8 * 8
    for i in range(gradients.shape[0]):
        lanes[:] = 0.0
        for start in range(0, whole, 8):
            for lane in range(8):
                lanes[lane] += gradients[i, start + lane] * gradients[i, start + lane]
        for lane in range(gradients.shape[1] - whole):
            lanes[lane] += gradients[i, whole + lane] * gradients[i, whole + lane]
        total = lanes[0]
        for lane in range(1, 8):
            total += lanes[lane]
        squares[i] = total
        if not total <= limit and bad < 0:
            bad = i
    return bad


@kernel(i64(inp(u64), out(i32)))
def group(keys: Keys, groups: Slots) -> int:
    """Number the distinct keys in order of first occurrence: ``groups`` [N]. Returns how many there are."""
    size = 16
    bits = 4
    while size < 2 * keys.shape[0]:
        size *= 2
        bits += 1
    shift = np.uint64(64 - bits)
    mask = np.int64(size - 1)
    first = np.full(size, -1, np.int32)
    distinct = 0
    for i in range(keys.shape[0]):
        # Fibonacci hashing (Knuth, 6.4): keys are hashes already, or small numbers in a row.
        at = np.int64((keys[i] * np.uint64(0x9E3779B97F4A7C15)) >> shift)
        while first[at] >= 0 and keys[first[at]] != keys[i]:
            at = (at + 1) & mask
        if first[at] < 0:
            first[at] = i
            groups[i] = distinct
            distinct += 1
        else:
            groups[i] = groups[first[at]]
    return distinct


@kernel(void(inp(u64), inp(f32, 2), inp(i32), out(u64), out(f32, 2)))
def sum_groups(keys: Keys, gradients: Rows, groups: Slots, unique: Keys, sums: Rows) -> None:
    """Sum the gradients of each group, in order of occurrence, into ``sums`` [U, d]; ``unique`` [U] gets its
    key. The first is copied, so that a gradient of -0.0 is the same whether or not other keys are
    repeated."""
    seen = 0
    for i in range(keys.shape[0]):
        at = groups[i]
        if at == seen:
            seen += 1
            unique[at] = keys[i]
            for column in range(gradients.shape[1]):
                sums[at, column] = gradients[i, column]
        else:
            for column in range(gradients.shape[1]):
                sums[at, column] += gradients[i, column]


@kernel(_APPLY)
def sgd(
    values: Rows,
    state: Rows,
    slots: Slots,
    gradients: Rows,
    squares: Rows,
    rate: np.float32,
    epsilon: np.float32,
) -> None:
    """w -= rate·g."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        for column in range(gradients.shape[1]):
            values[slot, column] -= rate * gradients[i, column]


@kernel(_APPLY)
def rowwise_adagrad(
    values: Rows,
    state: Rows,
    slots: Slots,
    gradients: Rows,
    squares: Rows,
    rate: np.float32,
    epsilon: np.float32,
) -> None:
    """s += mean(g²); w -= (rate / (√s + epsilon))·g, with one s per row."""
    dim = np.float32(gradients.shape[1])
    for i in range(slots.shape[0]):
        slot = slots[i]
        state[slot, 0] += squares[i] / dim
        step = rate / (np.sqrt(state[slot, 0]) + epsilon)
        for column in range(gradients.shape[1]):
            values[slot, column] -= step * gradients[i, column]


@kernel(_APPLY)
def adagrad(
    values: Rows,
    state: Rows,
    slots: Slots,
    gradients: Rows,
    squares: Rows,
    rate: np.float32,
    epsilon: np.float32,
) -> None:
    """s += g²; w -= rate·g / (√s + epsilon), with one s per element (Duchi, Hazan, Singer 2011)."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        for column in range(gradients.shape[1]):
            gradient = gradients[i, column]
            state[slot, column] += gradient * gradient
            values[slot, column] -= rate * gradient / (np.sqrt(state[slot, column]) + epsilon)


APPLY: Final[dict[str, Apply]] = {"sgd": sgd, "rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad}
