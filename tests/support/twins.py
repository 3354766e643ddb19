"""Slow, clear twins of what ``sync`` does with versions, one row at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sync.records import Graves, Rows, Update
from sync.replica import Replica

Version = tuple[int, int]
"""(time, writer)."""
Told = tuple[Version, bytes | None]
"""A row's version and value; None: it was deleted."""


def arrays(versions: Iterable[Version]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """``versions`` as columns."""
    pairs = list(versions)
    return np.array([t for t, _ in pairs], np.uint64), np.array([w for _, w in pairs], np.uint32)


def is_above(version: Version, knowledge: Mapping[int, int]) -> bool:
    """Whether ``knowledge`` does not cover ``version``."""
    return version[0] > knowledge.get(version[1], 0)


def is_newer(version: Version, other: Version | None, epochs: Mapping[int, int]) -> bool:
    """Whether ``version`` wins over ``other``; None: there is none."""
    if other is None:
        return True

    def order(one: Version) -> tuple[int, int, int]:
        return epochs.get(one[1], 0), *one

    return order(version) > order(other)


@dataclass
class Twin:
    """A replica as dicts: what it merges, and what it then knows."""

    told: dict[tuple[str, int], Told] = field(default_factory=dict)
    knowledge: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)

    def merge(self, update: Update, whole: Mapping[str, Iterable[int]] | None = None) -> int:
        """Take ``update`` over; returns how many rows and graves were new."""
        self.epochs = dict(update.epochs) | self.epochs
        merged = 0
        for name, told in states(update.versioned):
            version, _ = told
            stored = self.told.get(name)
            if is_above(version, self.knowledge) and is_newer(version, stored and stored[0], self.epochs):
                self.told[name] = told
                merged += 1
        if update.learned is None:
            return merged
        for writer, time in update.learned.knowledge.items():
            self.knowledge[writer] = max(time, self.knowledge.get(writer, 0))
        if whole is not None:
            named = {(table, key) for table, keys in whole.items() for key in keys}
            self.told = {
                name: told
                for name, told in self.told.items()
                if name in named or is_above(told[0], update.learned.knowledge)
            }
        return merged


def states(parts: Iterable[Rows | Graves]) -> Iterable[tuple[tuple[str, int], Told]]:
    """Each row and grave of ``parts`` with its name."""
    for part in parts:
        for i, key in enumerate(part.keys.tolist()):
            version = int(part.time[i]), int(part.writer[i])
            value = part.values[i].tobytes() if isinstance(part, Rows) else None
            yield (part.table, key), (version, value)


def told_by(replica: Replica) -> dict[tuple[str, int], Told]:
    """All rows and graves of the hashed tables of a replica."""
    hashed = {spec.name for spec in replica.specs if spec.placement == "hashed"}
    found: dict[tuple[str, int], Told] = {}
    for name, told in states(page for page in replica.pages() if page.table in hashed):
        assert name not in found, f"{name} is both alive and buried"
        found[name] = told
    return found
