"""Dense weights: a single table's rows read as one snapshot, live or as a generation that was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING
from sync.pushes import Watermark
from sync.table import Table

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DenseValues:
    """All rows of a single table, read-only: float32 [rows, dim].

    ``generation`` grows with each publication that changed something (0: the initial values). Two
    incarnations may publish different values under one number; readers compare both.
    """

    generation: int
    incarnation: int
    values: Rows
    watermarks: dict[tuple[str, int], Watermark]


def live_values(
    table: Table, generation: int, incarnation: int, watermarks: dict[tuple[str, int], Watermark]
) -> DenseValues:
    """The rows of a single ``table`` as they are now, a copy."""
    return _frozen(table.pull(_keys(table)), generation, incarnation, watermarks)


@dataclass(slots=True)
class Generations:
    """The newest published generation of each single table of a shard, and which numbers were given."""

    numbers: dict[str, int] = field(default_factory=dict)
    """By table. A number whose values are not here is of before a restart."""
    _published: dict[str, DenseValues] = field(default_factory=dict)
    _sequences: dict[str, int] = field(default_factory=dict)

    def load(self, numbers: Mapping[str, int]) -> None:
        """Go on after the numbers of a snapshot, which has no published values."""
        self.numbers = dict(numbers)

    def newest(self, table: Table, incarnation: int) -> DenseValues:
        """What was published last; the initial values under 0 where nothing was."""
        name = table.spec.name
        if name not in self._published:
            self.numbers[name] = 0
            self._published[name] = _frozen(table.initial(_keys(table)), 0, incarnation, {})
        return self._published[name]

    def outdated(self, table: Table) -> bool:
        """Whether a row changed since the newest generation."""
        sequences, _ = table.changed_after(self._sequences.get(table.spec.name, BEGINNING), 1)
        return len(sequences) > 0

    def publish(self, values: DenseValues, table: str, sequence: int) -> None:
        """``values``, as of the shard's change ``sequence``, are the table's newest generation."""
        self._published[table] = values
        self._sequences[table] = sequence
        self.numbers[table] = values.generation

    def unknown(self) -> list[tuple[str, int]]:
        """The tables of whose newest generation only the number is known."""
        return [(name, number) for name, number in self.numbers.items() if name not in self._published]


def _keys(table: Table) -> npt.NDArray[np.uint64]:
    return np.arange(table.spec.rows, dtype=np.uint64)


def _frozen(
    values: Rows, generation: int, incarnation: int, watermarks: dict[tuple[str, int], Watermark]
) -> DenseValues:
    values.flags.writeable = False
    return DenseValues(generation, incarnation, values, watermarks)
