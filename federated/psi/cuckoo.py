"""Cuckoo hashing with three places an id and no stash, in NumPy: all that have no place move at once, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.psi.hashing import Rows, tags

HASHES: Final = 3
EXPANSION: Final = 1.27
_FEW: Final = 4_096
_LEAST_BINS: Final = 2_048
_MOST_TURNS: Final = 2_000


class TableFull(ArithmeticError):
    """No place for every id: as likely as 2**-40; another run has other places."""


def bins_for(count: int) -> int:
    """Bins so that ``count`` ids find no place with probability about 2**-40.

    1.27 bins an id for many (Pinkas, Schneider and Zohner 2018, by simulation); small sets fail by three ids that
    share two bins, about 43·n³/B⁷: 2 bins an id and at least 2048 keep that below 2**-40.
    """
    if count <= _FEW:
        return max(_LEAST_BINS, 2 * count)
    return max(2 * _FEW, int(np.ceil(EXPANSION * count)))


def places(ids: Sequence[bytes], key: bytes, bins: int) -> Rows:
    """The three places of each id [N, 3], public for whoever knows ``key`` and the id."""
    drawn = tags("psi-cuckoo", key, ids, 8 * HASHES)
    return (drawn.view("<u8").reshape(-1, HASHES) % np.uint64(bins)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Table:
    """``holds`` [B]: which id stands in a bin, -1 for none. ``at`` [N] and ``by`` [N]: its bin, and by which hash."""

    holds: Rows
    at: Rows
    by: npt.NDArray[np.int64]


def build(where: Rows, bins: int, generator: np.random.Generator) -> Table:
    """A bin for every id whose three places are ``where`` [N, 3]. Raises TableFull."""
    count = len(where)
    holds = np.full(bins, -1, np.int64)
    by = np.zeros(count, np.int64)
    waiting = np.arange(count)
    for _ in range(_MOST_TURNS):
        if not len(waiting):
            return Table(holds, where[np.arange(count), by], by)
        wanted = where[waiting, by[waiting]]
        before = holds[wanted]
        holds[wanted] = waiting
        placed = holds[wanted] == waiting
        out = before[placed]
        waiting = np.concatenate([waiting[~placed], out[out >= 0]])
        by[waiting] = (by[waiting] + generator.integers(1, HASHES, len(waiting))) % HASHES
    raise TableFull(f"{len(waiting)} of {count} ids found no place")
