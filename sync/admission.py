"""How often keys without a row were pushed, in bounded memory: what decides whether they get one.

A count-min sketch (Cormode, Muthukrishnan 2005) of four rows of one-byte counters, with conservative update
(Estan, Varghese 2002): only the smallest of a key's four counters is raised, and that is the estimate. It is
never below the true count, up to 255, and is above it only where the key shares all four counters.

After ``width`` counted keys all counters are halved, rounding down, so that yesterday's keys make room: the
aging of TinyLFU (Einziger, Friedman, Manes 2017). A key that comes more seldom than that many others may
therefore never be admitted; a sketch as wide as the keys of a day forgets in a day.

A key's counter in row r is at (low + r·high) mod width, low and high being the halves of its mix (Kirsch,
Mitzenmacher 2006). The mix is public: who may push can craft keys that count for each other, which admits
them earlier and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.errors import BadSpec, SnapshotDamaged
from sync.kernel import i64, inp, kernel, mix, out, u8, u64

ROWS: Final = 4
MAX_WIDTH: Final = 2**28
"""A gibibyte."""
SAMPLED: Final = 65_536
"""Counters that an estimate of all keys looks at."""

Keys = npt.NDArray[np.uint64]
Counters = npt.NDArray[np.uint8]


@kernel(i64(out(u8, 2), inp(u64), out(u8), i64))
def _count(counters: Counters, keys: Keys, estimates: Counters, counted: int) -> int:
    """Count each of ``keys`` [N] once and fill ``estimates`` [N]; returns the keys counted since the last
    halving."""
    width = np.uint64(counters.shape[1])
    places = np.empty(ROWS, np.uint64)
    for i in range(keys.shape[0]):
        mixed = mix(keys[i])
        place = mixed & np.uint64(0xFFFFFFFF)
        stride = mixed >> np.uint64(32)
        least = 254
        for row in range(ROWS):
            places[row] = place & (width - np.uint64(1))
            least = min(least, int(counters[row, places[row]]))
            place += stride
        estimate = np.uint8(least + 1)
        for row in range(ROWS):
            counters[row, places[row]] = max(counters[row, places[row]], estimate)
        estimates[i] = estimate
        counted += 1
        if counted == counters.shape[1]:
            for row in range(ROWS):
                for at in range(counters.shape[1]):
                    counters[row, at] >>= np.uint8(1)
            counted = 0
    return counted


@dataclass(frozen=True, slots=True)
class SketchState:
    """A sketch at rest: its counters [4, width] and the keys counted since they were halved."""

    counters: Counters
    counted: int


class CountSketch:
    """Estimated pushes of the keys of one table that have no row.

    ``width``: counters per row, a power of two, four bytes each. Raises BadSpec.
    """

    __slots__ = ("_counted", "_counters")

    def __init__(self, width: int) -> None:
        if not 1 <= width <= MAX_WIDTH or width & (width - 1):
            raise BadSpec(f"sketch: width {width} is not a power of two up to {MAX_WIDTH}")
        self._counters: Counters = np.zeros((ROWS, width), np.uint8)
        self._counted = 0

    @property
    def width(self) -> int:
        """Counters per row."""
        width: int = self._counters.shape[1]
        return width

    @property
    def nbytes(self) -> int:
        """Bytes that the counters take."""
        return self._counters.nbytes

    def count(self, keys: Keys) -> Counters:
        """One more push of each of the distinct ``keys`` [N] uint64: their new estimates [N], uint8.

        Keys are counted in order, and a halving in between is part of that.
        """
        estimates = np.empty(len(keys), np.uint8)
        self._counted = _count(self._counters, keys, estimates, self._counted)
        return estimates

    def waiting(self, admission: int) -> int:
        """About how many keys were counted fewer than ``admission`` times, at least once.

        By linear counting (Whang, Vander-Zanden, Taylor 1990) of one row's counters, 65,536 of them at most: of w
        counters of which z_t are below t, n keys were counted t times or more, n = -w ln(z_t / w). A halving
        forgets keys, and lets those that were admitted before it count as waiting until they have faded, too.
        """
        some = self._counters[0, :SAMPLED]
        # Without a single counter below it an estimate is infinite; one is the most that can be told.
        empty = max(int(np.count_nonzero(some == 0)), 1)
        below = max(int(np.count_nonzero(some < admission)), 1)
        return round(self.width * math.log(below / empty))

    def state(self) -> SketchState:
        """A copy for a snapshot; ``load`` of it into the same width goes on bit for bit."""
        return SketchState(self._counters.copy(), self._counted)

    def load(self, state: SketchState) -> None:
        """Go on from ``state``, which may have another width: counters that fall together keep the largest,
        those that part are copied, and no key's estimate falls. Raises SnapshotDamaged."""
        counters = state.counters
        if counters.dtype != np.uint8 or counters.ndim != 2 or len(counters) != ROWS:
            raise SnapshotDamaged(f"sketch: counters are {counters.dtype} {list(counters.shape)}")
        width = counters.shape[1]
        if not 1 <= width <= MAX_WIDTH or width & (width - 1):
            raise SnapshotDamaged(f"sketch: width {width} is not a power of two up to {MAX_WIDTH}")
        if not 0 <= state.counted < width:
            raise SnapshotDamaged(f"sketch: {state.counted} keys counted, but every {width} keys age it")
        if width >= self.width:
            folded = counters.reshape(ROWS, width // self.width, self.width).max(axis=1)
        else:
            folded = np.tile(counters, (1, self.width // width))
        self._counters[:] = folded
        self._counted = state.counted % self.width
