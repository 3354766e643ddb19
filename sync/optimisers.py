"""How gradients change rows: one kernel per optimiser, each with a slow clear twin in ``reference.py``.

Every kernel takes the same arguments and has the same bits as its twin: all arithmetic is float32 in a
fixed order, and nothing is reassociated. ``squares`` holds each gradient's sum of squares, which
``measure`` computed while it looked for what must be refused. Rows do not touch each other, so a batch
does what its rows do one by one, in whatever batches or shards they come.

Where a table clips or decays, ``regularise`` stands before the optimiser, once every row has a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.kernel import f32, f64, i32, i64, inp, kernel, out, u64, void
from sync.spec import Optimiser

Slots = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Settings = npt.NDArray[np.float32]
Apply = Callable[[Rows, Rows, Slots, Rows, Rows, Settings], None]
"""(values [C, d], state [C, s], slots [N] distinct and valid, gradients [N, d], squares [N], settings [8])."""

_APPLY: Final = void(out(f32, 2), out(f32, 2), inp(i32), inp(f32, 2), inp(f32), inp(f32))

RATE: Final = 0
EPSILON: Final = 1
BETA1: Final = 2
BETA2: Final = 3
BETA: Final = 4
L1: Final = 5
L2: Final = 6
SETTINGS: Final = 8
"""How many numbers ``settings_of`` lays out; the last is not used yet."""

MAX_STEPS: Final = 2**24
"""Adam's count of a row's pushes stays here, the largest up to which float32 counts exactly."""
MAX_ACCUMULATED: Final = 1e38
"""FTRL's sum of squares stays here: the difference of two infinite roots would be NaN."""


def settings_of(optimiser: Optimiser) -> Settings:
    """The numbers that the kernels take, at the places named above: float32 [8]."""
    settings = np.zeros(SETTINGS, np.float32)
    settings[RATE] = optimiser.rate
    settings[EPSILON] = optimiser.epsilon
    settings[BETA1] = optimiser.beta1
    settings[BETA2] = optimiser.beta2
    settings[BETA] = optimiser.beta
    settings[L1] = optimiser.l1
    settings[L2] = optimiser.l2
    return settings


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


def sum_repeated(keys: Keys, gradients: Rows) -> tuple[Keys, Rows]:
    """The distinct ``keys`` [N] in order of first occurrence, each with the sum of its ``gradients`` [N, d]."""
    groups = np.empty(len(keys), np.int32)
    distinct = group(keys, groups)
    if distinct == len(keys):
        return keys, gradients
    unique = np.empty(distinct, np.uint64)
    sums = np.empty((distinct, gradients.shape[1]), np.float32)
    sum_groups(keys, gradients, groups, unique, sums)
    return unique, sums


@kernel(void(inp(f32, 2), inp(i32), inp(f32, 2), inp(f32), f32, f32, out(f32, 2), out(f32)))
def regularise(
    values: Rows,
    slots: Slots,
    gradients: Rows,
    squares: Rows,
    clip: np.float32,
    l2: np.float32,
    new_gradients: Rows,
    new_squares: Rows,
) -> None:
    """g ← g·min(1, clip/|g|) + l2·w: a row's gradient is clipped to the length ``clip`` (0: not), then
    weight decay is added. ``new_gradients`` [N, d] and ``new_squares`` [N], as ``measure`` sums them, are
    what the optimiser takes; ``squares``, which guard and priority look at, stay as they were pushed.

    Every slot must be valid: new rows are inserted, with their initial values, before.
    """
    limit = clip * clip
    for i in range(slots.shape[0]):
        slot = slots[i]
        scale = np.float32(1.0)
        if clip > np.float32(0.0) and squares[i] > limit:
            scale = clip / np.sqrt(squares[i])
        for column in range(gradients.shape[1]):
            new_gradients[i, column] = scale * gradients[i, column] + l2 * values[slot, column]
    measure(new_gradients, np.float32(np.inf), new_squares)


@kernel(_APPLY)
def sgd(values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings) -> None:
    """w -= rate·g."""
    rate = settings[RATE]
    for i in range(slots.shape[0]):
        slot = slots[i]
        for column in range(gradients.shape[1]):
            values[slot, column] -= rate * gradients[i, column]


@kernel(_APPLY)
def rowwise_adagrad(
    values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings
) -> None:
    """s += mean(g²); w -= (rate / (√s + epsilon))·g, with one s per row."""
    rate = settings[RATE]
    epsilon = settings[EPSILON]
    dim = np.float32(gradients.shape[1])
    for i in range(slots.shape[0]):
        slot = slots[i]
        state[slot, 0] += squares[i] / dim
        step = rate / (np.sqrt(state[slot, 0]) + epsilon)
        for column in range(gradients.shape[1]):
            values[slot, column] -= step * gradients[i, column]


@kernel(_APPLY)
def adagrad(
    values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings
) -> None:
    """s += g²; w -= rate·g / (√s + epsilon), with one s per element (Duchi, Hazan, Singer 2011)."""
    rate = settings[RATE]
    epsilon = settings[EPSILON]
    for i in range(slots.shape[0]):
        slot = slots[i]
        for column in range(gradients.shape[1]):
            gradient = gradients[i, column]
            state[slot, column] += gradient * gradient
            values[slot, column] -= rate * gradient / (np.sqrt(state[slot, column]) + epsilon)


@kernel(f64(f64, i64))
def _power(base: float, exponent: int) -> float:
    """By squaring: ``**`` has other last bits in every library."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@kernel(_APPLY)
def adam(values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings) -> None:
    """m ← β1·m + (1 - β1)·g; v ← β2·v + (1 - β2)·g²; w -= rate·m̂ / (√v̂ + epsilon), with m̂ = m / (1 - β1^t),
    v̂ = v / (1 - β2^t) (Kingma, Ba 2015, algorithm 1). State of a row: m [d], v [d], t.

    Lazy: t counts the row's own pushes, and a row that is not pushed neither moves nor forgets. For rows
    in every push that is Adam itself; where a row is rare, its first steps have the full length ``rate``.
    """
    one = np.float32(1.0)
    beta1 = settings[BETA1]
    beta2 = settings[BETA2]
    epsilon = settings[EPSILON]
    dim = gradients.shape[1]
    for i in range(slots.shape[0]):
        slot = slots[i]
        steps = min(int(state[slot, 2 * dim]) + 1, MAX_STEPS)
        state[slot, 2 * dim] = np.float32(steps)
        step = np.float32(np.float64(settings[RATE]) / (1.0 - _power(np.float64(beta1), steps)))
        correction = np.float32(np.sqrt(1.0 - _power(np.float64(beta2), steps)))
        # As arrays of their own: the compiler sees that they do not overlap, and vectorises.
        means = state[slot, :dim]
        variances = state[slot, dim : 2 * dim]
        for column in range(dim):
            gradient = gradients[i, column]
            mean = beta1 * means[column] + (one - beta1) * gradient
            variance = beta2 * variances[column] + (one - beta2) * (gradient * gradient)
            means[column] = mean
            variances[column] = variance
            values[slot, column] -= step * mean / (np.sqrt(variance) / correction + epsilon)


@kernel(_APPLY)
def ftrl(values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings) -> None:
    """FTRL-proximal (McMahan et al. 2013, algorithm 1), α = rate: σ = (√(n + g²) - √n) / α; z += g - σ·w;
    n += g²; w = 0 where |z| ≤ l1, else -(z - sign(z)·l1) / ((β + √n) / α + l2). State of a row: z [d], n [d].

    As there, elements with a gradient of 0 are left alone. w follows from z and n, which know of an initial
    value w₀ only through σ: without l1 and l2 the first push leaves (|g|·w₀ - α·g) / (β + |g|). So small
    first gradients forget w₀, and where that is not wanted β is to be small beside them.
    """
    zero = np.float32(0.0)
    most = np.float32(MAX_ACCUMULATED)
    alpha = settings[RATE]
    beta = settings[BETA]
    l1 = settings[L1]
    l2 = settings[L2]
    dim = gradients.shape[1]
    for i in range(slots.shape[0]):
        slot = slots[i]
        sums = state[slot, :dim]
        accumulated = state[slot, dim:]
        for column in range(dim):
            # Selections instead of branches, so that the loop is vectorised.
            gradient = gradients[i, column]
            weight = values[slot, column]
            before = accumulated[column]
            after = min(before + gradient * gradient, most)
            root = np.sqrt(after)
            sigma = (root - np.sqrt(before)) / alpha
            z = sums[column] + (gradient - sigma * weight)
            size = max(abs(z) - l1, zero) / ((beta + root) / alpha + l2)
            moved = -size if z > zero else size
            accumulated[column] = after
            sums[column] = z if gradient != zero else sums[column]
            values[slot, column] = moved if gradient != zero else weight


APPLY: Final[dict[str, Apply]] = {
    "sgd": sgd,
    "rowwise_adagrad": rowwise_adagrad,
    "adagrad": adagrad,
    "adam": adam,
    "ftrl": ftrl,
}
