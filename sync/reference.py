"""Slow clear twins of the kernels, in NumPy and plain Python: what the kernels must equal bit for bit.

The same tests run on both. Functions here take the same arguments as the kernels of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.optimisers import (
    BETA,
    BETA1,
    BETA2,
    EPSILON,
    L1,
    L2,
    MAX_ACCUMULATED,
    MAX_STEPS,
    RATE,
    Apply,
    Settings,
    settings_of,
)
from sync.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def initial_rows(spec: TableSpec, keys: Sequence[int]) -> Rows:
    """The initial values of ``keys``, by the formula of ``initial.py``: float32 ``[N, dim]``."""
    rows = np.zeros((len(keys), spec.dim), np.float32)
    for i, key in enumerate(keys):
        segment = [s for s in spec.initialiser.segments if s.first_key <= key][-1]
        scale, constant = float(np.float32(segment.scale)), float(np.float32(segment.constant))
        row = mix(mix(key + _GOLDEN & _MASK) ^ spec.seed)
        for column in range(spec.dim):
            unit = (mix(row + _GOLDEN * (column + 1) & _MASK) >> 40) * 2.0**-23 - 1.0
            rows[i, column] = np.float32(constant + scale * unit)
    return rows


def measure(gradients: Rows, limit: np.float32, squares: Rows) -> int:
    """Sums of squares over eight lanes; the first row above ``limit``, or -1."""
    lanes = np.zeros((len(gradients), 8), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, gradients.shape[1], 8):
            block = gradients[:, start : start + 8]
            lanes[:, : block.shape[1]] += block * block
        squares[:] = lanes[:, 0]
        for lane in range(1, 8):
            squares += lanes[:, lane]
    bad = np.flatnonzero(~(squares <= limit))
    return int(bad[0]) if len(bad) else -1


def group(keys: Keys, groups: Slots) -> int:
    """Number the distinct keys in order of first occurrence."""
    numbers: dict[int, int] = {}
    for i, key in enumerate(keys.tolist()):
        groups[i] = numbers.setdefault(key, len(numbers))
    return len(numbers)


def sum_groups(keys: Keys, gradients: Rows, groups: Slots, unique: Keys, sums: Rows) -> None:
    """Sum the gradients of each group in order of occurrence."""
    for i, at in enumerate(groups.tolist()):
        first = groups.tolist().index(at)
        unique[at] = keys[i]
        sums[at] = gradients[i] if i == first else sums[at] + gradients[i]


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
    """Scale gradients longer than ``clip`` to that length, then add l2·w."""
    scale = np.ones(len(slots), np.float32)
    if clip > 0:
        long = squares > clip * clip
        scale[long] = clip / np.sqrt(squares[long])
    new_gradients[:] = scale[:, None] * gradients + l2 * values[slots]
    measure(new_gradients, np.float32(np.inf), new_squares)


def sgd(values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings) -> None:
    """w -= rate·g."""
    values[slots] -= settings[RATE] * gradients


def rowwise_adagrad(
    values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings
) -> None:
    """s += mean(g²); w -= (rate / (√s + epsilon))·g."""
    state[slots, 0] += squares / np.float32(gradients.shape[1])
    step = settings[RATE] / (np.sqrt(state[slots, 0]) + settings[EPSILON])
    values[slots] -= step[:, None] * gradients


def adagrad(
    values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings
) -> None:
    """s += g²; w -= rate·g / (√s + epsilon)."""
    state[slots] += gradients * gradients
    values[slots] -= settings[RATE] * gradients / (np.sqrt(state[slots]) + settings[EPSILON])


def power(base: float, exponent: int) -> float:
    """By squaring, from the lowest bit of the exponent."""
    result = 1.0
    for bit in reversed(f"{exponent:b}"):
        if bit == "1":
            result *= base
        base *= base
    return result


def adam(values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings) -> None:
    """Adam, with the row's own pushes as t; a row's state is m [d], v [d], t."""
    dim = gradients.shape[1]
    beta1, beta2, one = settings[BETA1], settings[BETA2], np.float32(1)
    for slot, g in zip(slots.tolist(), gradients, strict=True):
        m, v = state[slot, :dim], state[slot, dim : 2 * dim]
        t = state[slot, 2 * dim] = min(int(state[slot, 2 * dim]) + 1, MAX_STEPS)
        step = np.float32(float(settings[RATE]) / (1 - power(float(beta1), t)))
        correction = np.float32(np.sqrt(1 - power(float(beta2), t)))
        m[:] = beta1 * m + (one - beta1) * g
        v[:] = beta2 * v + (one - beta2) * (g * g)
        values[slot] -= step * m / (np.sqrt(v) / correction + settings[EPSILON])


def ftrl(values: Rows, state: Rows, slots: Slots, gradients: Rows, squares: Rows, settings: Settings) -> None:
    """FTRL-proximal; a row's state is z [d], n [d]. Elements with a gradient of 0 are left alone."""
    dim = gradients.shape[1]
    w, z, n = values[slots], state[slots, :dim], state[slots, dim:]
    after = np.minimum(n + gradients * gradients, np.float32(MAX_ACCUMULATED))
    sigma = (np.sqrt(after) - np.sqrt(n)) / settings[RATE]
    new_z = z + (gradients - sigma * w)
    shrunk = np.maximum(np.abs(new_z) - settings[L1], np.float32(0))
    size = shrunk / ((settings[BETA] + np.sqrt(after)) / settings[RATE] + settings[L2])
    untouched = gradients == 0
    values[slots] = np.where(untouched, w, np.where(new_z > 0, -size, size))
    state[slots] = np.hstack([np.where(untouched, z, new_z), np.where(untouched, n, after)])


APPLY: Final[dict[str, Apply]] = {
    "sgd": sgd,
    "rowwise_adagrad": rowwise_adagrad,
    "adagrad": adagrad,
    "adam": adam,
    "ftrl": ftrl,
}


def follow(squares: Rows, mean: float, count: int, longest: int, least: float) -> tuple[float, int]:
    """``RunningNorm.update`` on one row after the other."""
    for norm in np.sqrt(squares.astype(np.float64)).tolist():
        if norm >= least:
            count = min(count + 1, longest)
            mean += (norm - mean) / count
    return mean, count


class ReferenceSketch:
    """``CountSketch`` one key at a time; the width is a power of two."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.counters = [[0] * width for _ in range(4)]
        self.counted = 0

    def estimate(self, key: int) -> int:
        """The smallest of the key's counters."""
        return min(row[at] for row, at in zip(self.counters, self._places(key), strict=True))

    def count(self, keys: Keys) -> list[int]:
        """Raise the smallest counters of each key; its estimates. Halve all of them after ``width`` keys."""
        estimates = []
        for key in keys.tolist():
            estimate = min(self.estimate(key) + 1, 255)
            for row, at in zip(self.counters, self._places(key), strict=True):
                row[at] = max(row[at], estimate)
            estimates.append(estimate)
            self.counted += 1
            if self.counted == self.width:
                self.counters = [[counter // 2 for counter in row] for row in self.counters]
                self.counted = 0
        return estimates

    def _places(self, key: int) -> list[int]:
        mixed = mix(key)
        start, stride = mixed & 0xFFFFFFFF, mixed >> 32
        return [(start + row * stride) % self.width for row in range(4)]


@dataclass(slots=True)
class ReferenceRow:
    """A stored row: values [dim], optimiser state [state_dim] and version (time, writer)."""

    values: Rows
    state: Rows
    version: tuple[int, int]


class ReferenceTable:
    """A table as a dict of rows, one row at a time."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.rows: dict[int, ReferenceRow] = {}

    def pull(self, keys: Keys) -> Rows:
        """What ``Table.pull`` returns."""
        rows = [self._row(key).values for key in keys.tolist()]
        return np.array(rows, np.float32).reshape(len(keys), self.spec.dim)

    def newest(self, keys: Keys) -> int:
        """The newest version time among the stored rows of ``keys``, 0 if there are none."""
        return max((self.rows[key].version[0] for key in keys.tolist() if key in self.rows), default=0)

    def push(self, keys: Keys, gradients: Rows, version: tuple[int, int]) -> None:
        """Sum repeated keys, then let the optimiser change each row."""
        sums: dict[int, Rows] = {}
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            sums[key] = sums[key] + gradient if key in sums else gradient
        first = np.zeros(1, np.int32)
        for key, gradient in sums.items():
            row = self.rows[key] = self._row(key)
            squares = np.zeros(1, np.float32)
            measure(gradient[None], np.float32(np.inf), squares)
            gradients, values = gradient[None], row.values[None]
            if self.spec.clip or self.spec.l2:
                gradients, raw = np.empty_like(gradients), squares.copy()
                clip, l2 = np.float32(self.spec.clip), np.float32(self.spec.l2)
                regularise(values, first, gradient[None], raw, clip, l2, gradients, squares)
            settings = settings_of(self.spec.optimiser)
            APPLY[self.spec.optimiser.kind](values, row.state[None], first, gradients, squares, settings)
            row.version = version

    def _row(self, key: int) -> ReferenceRow:
        known = self.rows.get(key)
        if known is not None:
            return known
        state = np.zeros(self.spec.state_dim, np.float32)
        return ReferenceRow(initial_rows(self.spec, [key])[0], state, (0, 0))


class ReferenceIndex:
    """``KeyIndex`` as a dict and lists."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._keys: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> int:
        """One more than the largest slot ever given out."""
        return len(self._keys)

    @property
    def keys(self) -> Keys:
        """The key of each slot; of a free slot, the one that it had last."""
        return np.array(self._keys, np.uint64)

    def find(self, keys: Keys) -> tuple[Slots, int]:
        """The slot of each key, -1 where unknown, and how many are unknown."""
        slots = np.array([self._slots.get(key, -1) for key in keys.tolist()], np.int32)
        return slots, int((slots < 0).sum())

    def gather(self, keys: Keys, values: Rows, rows: Rows) -> tuple[Slots, int]:
        """What ``find`` returns; copies the rows of known keys."""
        slots, missing = self.find(keys)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                rows[i] = values[slot]
        return slots, missing

    def live(self, first: int, count: int) -> Slots:
        """The slots of [first, first + count) that hold a key."""
        taken = sorted(slot for slot in self._slots.values() if first <= slot < first + count)
        return np.array(taken, np.int32)

    def reserve(self, extra: int) -> None:
        """Lists grow by themselves."""

    def insert(self, keys: Keys) -> Slots:
        """The slot of each key; unknown ones get the slot freed last, or else the next."""
        slots = []
        for key in keys.tolist():
            slot = self._slots.get(key)
            if slot is None:
                slot = self._free.pop() if self._free else len(self._keys)
                if slot == len(self._keys):
                    self._keys.append(key)
                self._slots[key] = slot
                self._keys[slot] = key
            slots.append(slot)
        return np.array(slots, np.int32)

    def delete(self, keys: Keys) -> Slots:
        """Remove keys; returns the slot of each, -1 where unknown."""
        slots = [self._slots.pop(key, -1) for key in keys.tolist()]
        self._free += [slot for slot in slots if slot >= 0]
        return np.array(slots, np.int32)
