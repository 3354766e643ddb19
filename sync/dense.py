"""Dense weights: a single table's rows read as one snapshot, live or as a generation that was published. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sync.changes import BEGINNING
from sync.pushes import Watermarks
from sync.records import Generation
from sync.table import Table


def live_values(table: Table, number: int, version: tuple[int, int], watermarks: Watermarks) -> Generation:
    """The rows of a single ``table`` as they are now, a copy, as a generation of ``version`` (time, writer)."""
    return _generation(table, number, table.pull(_keys(table)), version, watermarks)


@dataclass(slots=True)
class Generations:
    """The newest published generation of each single table of a shard."""

    _newest: dict[str, Generation] = field(default_factory=dict)
    _sequences: dict[str, int] = field(default_factory=dict)

    def newest(self, table: Table) -> Generation:
        """What was published last; the initial values under 0 where nothing was."""
        name = table.spec.name
        if name not in self._newest:
            self._newest[name] = _generation(table, 0, table.initial(_keys(table)), (0, 0), {})
        return self._newest[name]

    def published(self) -> tuple[Generation, ...]:
        """The newest generation of each table that has one."""
        return tuple(one for one in self._newest.values() if one.number)

    def outdated(self, table: Table) -> bool:
        """Whether a row changed since the newest generation."""
        sequences, _ = table.changed_after(self._sequences.get(table.spec.name, BEGINNING), 1)
        return len(sequences) > 0

    def publish(self, generation: Generation, sequence: int) -> None:
        """``generation``, as of the shard's change ``sequence``, is its table's newest."""
        self._newest[generation.table] = generation
        self._sequences[generation.table] = sequence

    def drop(self, table: str) -> None:
        """Forget that ``table`` was ever published."""
        self._newest.pop(table, None)
        self._sequences.pop(table, None)

    def load(self, generations: Iterable[Generation]) -> None:
        """Go on after what was published before a restart, as of before everything that is live."""
        for one in generations:
            self.publish(one, BEGINNING)


def _keys(table: Table) -> npt.NDArray[np.uint64]:
    return np.arange(table.spec.rows, dtype=np.uint64)


def _generation(
    table: Table,
    number: int,
    values: npt.NDArray[np.float32],
    version: tuple[int, int],
    watermarks: Watermarks,
) -> Generation:
    values.flags.writeable = False
    return Generation(table.spec.name, number, values, *version, watermarks)
