"""Which rows a puller lacks: by the source's own count of changes, by the update cache, or by a look at all. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from sync.knowledge import Known
from sync.replica import Replica
from sync.table import Table

Keys = npt.NDArray[np.uint64]
How = Literal["token", "cache", "scan"]
_ALL: Final = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Found:
    """The keys of one table whose newest states a puller lacks, and how they were found."""

    table: str
    keys: Keys
    how: How


def missing(replica: Replica, known: Known, since: int | None) -> list[Found]:
    """By table, the keys of the rows and graves that ``known`` does not cover, the longest unchanged first; where only
    a look at all of them told, in the order in which they are stored.

    ``since``: the puller has everything up to this count of the source's changes, of its present incarnation.
    """
    return [
        _missing(replica.table(spec.name), known, since)
        for spec in replica.specs
        if spec.placement == "hashed"
    ]


def _missing(table: Table, known: Known, since: int | None) -> Found:
    if since is not None and table.reaches(since):
        _, slots = table.changed_after(since, _ALL)
        return Found(table.spec.name, table.keys_at(slots[known.above(*table.versions_at(slots))]), "token")
    cached = table.cached(known)
    if cached is not None:
        return Found(table.spec.name, table.keys_at(cached), "cache")
    return Found(table.spec.name, table.scan(known), "scan")
