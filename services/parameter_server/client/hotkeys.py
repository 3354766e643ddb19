"""The hot rows of one table at a client: a bounded set-associative cache in NumPy arrays, vectorised over a batch.

A key may be in any of the ``WAYS`` places of its set. Who gets a place is decided by frequency, as TinyLFU does
(Einziger, Friedman, Manes 2017), within a set of limited associativity (Adas, Einziger, Friedman 2021): a key that
is not here is counted in a sketch, and takes the place of the least used row of its set only if it came more often
than that one. So a scan of cold keys, each seen once, evicts nothing. After ``SAMPLE`` times as many looks as there
are places all counts are halved, so that yesterday's hot keys make room.

A row is kept with its version, (time, writer) as the shard's owner gave it, which is given once: who knows a key's
version knows its value, whatever became of the server. Version (0, 0) is that of a key without a row, which has its
initial value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.parameter_server.types import Keys, Rows

Versions = npt.NDArray[np.uint64]
"""``[N, 2]``: time and writer of each row; ``UNKNOWN`` twice where nothing is known of it."""
Numbers = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Uses = npt.NDArray[np.uint8]

UNKNOWN: Final = np.uint64(2**64 - 1)
WAYS: Final = 8
SAMPLE: Final = 10
_SKETCH: Final = 4
"""Counters of the sketch per place, in each of its two rows."""
_MOST: Final = 255


@dataclass(slots=True)
class HotCounts:
    """Totals of one cache, in rows: ``found`` here when they were looked for, or ``missed``; ``unasked``: of those
    found, used without asking a server; ``unchanged``: confirmed by a server; ``admitted``; ``evicted`` for them."""

    found_total: int = 0
    missed_total: int = 0
    unasked_total: int = 0
    unchanged_total: int = 0
    admitted_total: int = 0
    evicted_total: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """What is here of some ``keys`` ``[N]``: ``rows`` ``[N, d]`` (copies; anything where not ``found``), ``versions``
    ``[N, 2]``, and ``confirmed`` ``[N]``, the number of the answer that confirmed each (0: none that counts).

    ``mixed`` and ``places``, ``[N]`` too, are where they were looked for, while the table was in ``state``.
    """

    keys: Keys
    found: Flags
    rows: Rows
    versions: Versions
    confirmed: Numbers
    mixed: Keys
    places: Places
    state: int


class HotTable:
    """At most ``rows`` rows (at least ``WAYS``) of ``dim`` values. One thread at a time."""

    __slots__ = (
        "_confirmed", "_filled", "_keys", "_looked", "_sets", "_sketch", "_state", "_uses", "_values", "_versions",
        "counts", "dim",
    )  # fmt: skip

    def __init__(self, rows: int, dim: int, counts: HotCounts | None = None) -> None:
        if rows < WAYS:
            raise ValueError(f"a cache of {rows} rows; at least {WAYS} are needed")
        self._sets = 1 << ((rows // WAYS).bit_length() - 1)
        places = self._sets * WAYS
        self.dim = dim
        self.counts = counts or HotCounts()
        self._keys = np.zeros((self._sets, WAYS), np.uint64)
        self._filled = np.zeros((self._sets, WAYS), np.bool_)
        self._uses: Uses = np.zeros((self._sets, WAYS), np.uint8)
        self._values = np.zeros((places, dim), np.float32)
        self._versions = np.zeros((places, 2), np.uint64)
        self._confirmed = np.zeros(places, np.int64)
        self._sketch: Uses = np.zeros((2, 1 << (_SKETCH * places - 1).bit_length()), np.uint8)
        self._looked = 0
        self._state = 0

    def __len__(self) -> int:
        """How many rows are here."""
        return int(self._filled.sum())

    @property
    def capacity(self) -> int:
        """How many there may be."""
        return self._sets * WAYS

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        arrays = (self._keys, self._filled, self._uses, self._values, self._versions, self._confirmed)
        return sum(array.nbytes for array in arrays) + self._sketch.nbytes

    def look(self, keys: Keys) -> Known:
        """What is here of ``keys`` ``[N]``, each counted as used once (repeats within a batch are one use)."""
        mixed = _mixed(keys)
        places, found = self._find(keys, mixed)
        hits = int(np.count_nonzero(found))
        self.counts.found_total += hits
        self.counts.missed_total += len(keys) - hits
        uses, used = self._uses.reshape(-1), places[found]
        uses[used] += uses[used] < _MOST
        self._count(mixed[~found])
        self._age(len(keys))
        versions = self._versions.take(places, axis=0)
        versions[~found] = UNKNOWN
        confirmed = np.where(found, self._confirmed.take(places), 0)
        rows = self._values.take(places, axis=0)
        return Known(keys, found, rows, versions, confirmed, mixed, places, self._state)

    def learn(
        self, known: Known, asked: Places, changed: Flags, rows: Rows, versions: Versions, numbers: Numbers
    ) -> None:
        """Servers were ``asked`` for some of the keys that were looked for (places in these, ``[M]``), and said which
        ``changed``, ``[M]``: those have ``rows`` ``[M, d]`` and ``versions`` ``[M, 2]`` now, the others are as they
        were known. ``numbers`` ``[M]`` are those of the answers.

        Rows that are here are replaced; others come in where they are used more than what they push out. Equal keys
        have equal rows.
        """
        keys, mixed = known.keys[asked], known.mixed[asked]
        places, found = known.places[asked], known.found[asked]
        same = found & ~changed
        self.counts.unchanged_total += len(changed) - int(np.count_nonzero(changed))
        if known.state != self._state:
            # Another pull was answered meanwhile: rows may have moved, or be of another version now.
            places, found = self._find(keys, mixed)
            now = self._versions.take(places, axis=0)
            same = found & ~changed & (now == known.versions[asked]).all(axis=1)
        self._confirmed[places[same]] = numbers[same]
        if not changed.any():
            return
        self._state += 1
        here = np.flatnonzero(found & changed)
        self._put(places[here], here, rows, versions, numbers)
        waiting: Places = np.flatnonzero(changed & ~found)
        for _ in range(WAYS):
            if not len(waiting):
                break
            waiting = self._admit(waiting, mixed, keys, rows, versions, numbers)

    def _put(self, places: Places, taken: Places, rows: Rows, versions: Versions, numbers: Numbers) -> None:
        self._values[places], self._versions[places] = rows[taken], versions[taken]
        self._confirmed[places] = numbers[taken]

    def _admit(
        self, waiting: Places, mixed: Keys, keys: Keys, rows: Rows, versions: Versions, numbers: Numbers
    ) -> Places:
        """Let in those of ``waiting`` (places in ``keys``) that deserve it, one for each place of the cache; returns
        those that lost that place to another of them, and are not here yet."""
        wanted = mixed[waiting]
        sets = self._set_of(wanted)
        uses = self._uses[sets].astype(np.int16)
        uses[~self._filled[sets]] = -1
        ways = uses.argmin(axis=1)
        estimates = self._estimate(wanted)
        admitted = estimates > uses[np.arange(len(ways)), ways]
        waiting, estimates = waiting[admitted], estimates[admitted]
        places = (sets * WAYS + ways)[admitted]
        # Several may want one place; whichever is written last wins it, with everything that belongs to it.
        winner = np.empty(self.capacity, np.intp)
        order = np.arange(len(places))
        winner[places] = order
        won = winner[places] == order
        place, taken = places[won], waiting[won]
        self.counts.admitted_total += len(place)
        self.counts.evicted_total += int(self._filled.reshape(-1)[place].sum())
        self._keys.reshape(-1)[place] = keys[taken]
        self._filled.reshape(-1)[place] = True
        self._uses.reshape(-1)[place] = estimates[won]
        self._put(place, taken, rows, versions, numbers)
        # A repeated key is here now: it wants no second place.
        lost = waiting[~won]
        still: Places = lost[self._keys.reshape(-1)[places[~won]] != keys[lost]]
        return still

    def _find(self, keys: Keys, mixed: Keys) -> tuple[Places, Flags]:
        """Where each key is ``[N]`` (some place of its set where it is not), and whether it is."""
        sets = self._set_of(mixed)
        # A set's places fill from the first on and are never freed, so a key that is here stands before empty ones.
        ways = (self._keys[sets] == keys[:, None]).argmax(axis=1)
        places = sets * WAYS + ways
        return places, (self._keys.reshape(-1)[places] == keys) & self._filled.reshape(-1)[places]

    def _set_of(self, mixed: Keys) -> Places:
        return ((mixed >> np.uint64(40)) & np.uint64(self._sets - 1)).astype(np.intp)

    def _columns(self, mixed: Keys) -> tuple[Places, Places]:
        mask = np.uint64(self._sketch.shape[1] - 1)
        return (mixed & mask).astype(np.intp), ((mixed >> np.uint64(29)) & mask).astype(np.intp)

    def _estimate(self, mixed: Keys) -> npt.NDArray[np.int16]:
        """How often each was looked for while it was not here, never too low since the last halving (up to 255)."""
        first, second = self._columns(mixed)
        least: Uses = np.minimum(self._sketch[0, first], self._sketch[1, second])
        return least.astype(np.int16)

    def _count(self, mixed: Keys) -> None:
        """Only the smaller of a key's two counters is raised (Estan, Varghese 2002)."""
        raised = np.minimum(self._estimate(mixed) + 1, _MOST).astype(np.uint8)
        for row, column in zip(self._sketch, self._columns(mixed), strict=True):
            np.maximum.at(row, column, raised)

    def _age(self, looked: int) -> None:
        self._looked += looked
        if self._looked >= SAMPLE * self.capacity:
            self._looked = 0
            self._uses >>= 1
            self._sketch >>= 1


def _mixed(keys: Keys) -> Keys:
    """Murmur3's 64-bit finaliser, other constants than the placement's: keys of one shard use all sets (Stafford's
    variant 13)."""
    mixed: Keys = keys ^ (keys >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
