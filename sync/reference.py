"""Slow clear twins of the kernels, in NumPy and plain Python: what the kernels must equal bit for bit.

The same tests run on both. Functions here take the same arguments as the kernels of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.optimisers import Apply
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
    values[slots] -= rate * gradients


def rowwise_adagrad(
    values: Rows,
    state: Rows,
    slots: Slots,
    gradients: Rows,
    squares: Rows,
    rate: np.float32,
    epsilon: np.float32,
) -> None:
    """s += mean(g²); w -= (rate / (√s + epsilon))·g."""
    state[slots, 0] += squares / np.float32(gradients.shape[1])
    step = rate / (np.sqrt(state[slots, 0]) + epsilon)
    values[slots] -= step[:, None] * gradients


def adagrad(
    values: Rows,
    state: Rows,
    slots: Slots,
    gradients: Rows,
    squares: Rows,
    rate: np.float32,
    epsilon: np.float32,
) -> None:
    """s += g²; w -= rate·g / (√s + epsilon)."""
    state[slots] += gradients * gradients
    values[slots] -= rate * gradients / (np.sqrt(state[slots]) + epsilon)


APPLY: Final[dict[str, Apply]] = {"sgd": sgd, "rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad}


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
        optimiser = self.spec.optimiser
        for key, gradient in sums.items():
            row = self.rows[key] = self._row(key)
            squares = np.zeros(1, np.float32)
            measure(gradient[None], np.float32(np.inf), squares)
            APPLY[optimiser.kind](
                row.values[None],
                row.state[None],
                first,
                gradient[None],
                squares,
                np.float32(optimiser.rate),
                np.float32(optimiser.epsilon),
            )
            row.version = version

    def _row(self, key: int) -> ReferenceRow:
        known = self.rows.get(key)
        if known is not None:
            return known
        state = np.zeros(self.spec.state_dim, np.float32)
        return ReferenceRow(initial_rows(self.spec, [key])[0], state, (0, 0))
