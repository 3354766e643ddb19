"""A client's cache of hot rows: what is asked of the servers in spite of it, and what their answers make of it. Pure.

Every row is used by its version. A pull tells the servers which version of a key the client has, and they send what
differs; so it gives what a pull without the cache would give, whatever happened in between. Within ``max_age_s`` of
an answer that confirmed a row it may also be used without asking; then the pull claims no more than that answer did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from services.parameter_server.client.confirmations import MOST, Claim, Confirmations
from services.parameter_server.client.hotkeys import WAYS, HotCounts, HotTable, Known, Numbers, Versions
from services.parameter_server.client.readers import Reading
from services.parameter_server.client.routing import Changed, Route
from services.parameter_server.types import Keys, Rows

Places = npt.NDArray[np.intp]
_NEVER: Final = np.int64(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Looked:
    """What the cache has of a pull's keys. Per table: what is ``known`` of them ``[N]``, and which are to be ``asked``
    (places in them, ``[M]``). ``used``: by shard of which rows are used unasked, what may be claimed of
    these. ``settled``: by shard that need not be asked for its marks, what may be claimed of it."""

    asked_s: float
    known: Mapping[str, Known]
    asked: Mapping[str, Places]
    used: Mapping[int, Claim]
    settled: Mapping[int, Claim]

    def asked_keys(self) -> dict[str, Keys]:
        """The keys ``[M]`` per table to ask for."""
        return {table: known.keys[self.asked[table]] for table, known in self.known.items()}

    def asked_versions(self) -> dict[str, Versions]:
        """Beside them, the versions ``[M, 2]`` that are known."""
        return {table: known.versions[self.asked[table]] for table, known in self.known.items()}


@dataclass(slots=True)
class _Model:
    tables: dict[str, HotTable] = field(default_factory=dict)
    shards: dict[int, Confirmations] = field(default_factory=dict)


class RowCache:
    """At most ``rows`` rows of each table of each model that is pulled through it. ``max_age_s``: the oldest that a
    row may be to be used without asking, where a pull allows it (0: none is). Thread-safe."""

    def __init__(
        self, rows: int, max_age_s: float = 0.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = HotCounts()
        self._rows, self._max_age_s = rows, max_age_s
        self._monotonic = monotonic
        self._models: dict[str, _Model] = {}
        self._lock = threading.Lock()

    def look(self, route: Route, keys: Mapping[str, Keys], *, unasked: bool = True) -> Looked:
        """What is here of ``keys`` ``[N]`` per table; ``unasked``: rows may be used by their age. Raises
        ParametersRefused where they are no keys, or of no table."""
        now = self._monotonic()
        by_age = unasked and self._max_age_s > 0
        with self._lock:
            model = self._models.setdefault(route.declaration.model, _Model())
            usable = self._usable_from(model, route.map.shards, now) if by_age else None
            known: dict[str, Known] = {}
            asked: dict[str, Places] = {}
            oldest = np.full(route.map.shards, _NEVER, np.int64)
            for table, some in keys.items():
                shards = route.shards_of(table, some)
                found = known[table] = self._table(model, route, table).look(some)
                if usable is None:
                    asked[table] = np.arange(len(some))
                    continue
                used = found.found & (found.confirmed >= usable[shards])
                asked[table] = np.flatnonzero(~used)
                np.minimum.at(oldest, shards[used], found.confirmed[used])
                self.counts.unasked_total += len(some) - len(asked[table])
            used_claims = {
                int(shard): model.shards[int(shard)].since(int(oldest[shard]))
                for shard in np.flatnonzero(oldest != _NEVER)
            }
            settled = {}
            if usable is not None:
                settled = {shard: one.since(one.newest) for shard, one in model.shards.items() if one.newest}
        return Looked(now, known, asked, used_claims, settled)

    def _usable_from(self, model: _Model, shards: int, now: float) -> Numbers:
        """By shard, the number of the oldest answer by which a row may be used unasked."""
        found = np.full(shards, _NEVER, np.int64)
        for shard, answers in model.shards.items():
            if shard < shards:
                found[shard] = answers.usable_from(now - self._max_age_s)
        return found

    def _table(self, model: _Model, route: Route, table: str) -> HotTable:
        found = model.tables.get(table)
        if found is None:
            spec = route.declaration.table(table)
            rows = max(WAYS, min(self._rows, spec.rows or self._rows))
            found = model.tables[table] = HotTable(rows, spec.dim, self.counts)
        return found

    def learn(
        self, route: Route, looked: Looked, answers: Mapping[str, Changed], claims: Mapping[int, Claim]
    ) -> tuple[dict[str, Rows], dict[int, Claim]]:
        """Take what the servers answered of the keys asked for, and what may be claimed of each shard. Returns the
        rows ``[N, d]`` per table of all keys, and what may be claimed of them by shard."""
        with self._lock:
            model = self._models[route.declaration.model]
            numbers = self._numbers(model, route.map.shards, looked.asked_s, claims)
            rows = {}
            for table, changed in answers.items():
                asked, known = looked.asked[table], looked.known[table]
                by = numbers[route.shards_of(table, known.keys[asked])]
                hot = self._table(model, route, table)
                hot.learn(known, asked, changed.changed, changed.rows, changed.versions, by)
                new = changed.changed
                rows[table] = known.rows
                rows[table][asked[new]] = changed.rows[new]
        merged = {**looked.settled, **claims}
        for shard, claim in looked.used.items():
            merged[shard] = merged[shard].least(claim)
        return rows, merged

    def _numbers(self, model: _Model, shards: int, asked_s: float, claims: Mapping[int, Claim]) -> Numbers:
        """By shard, the number of this answer (0: it confirms nothing)."""
        found = np.zeros(shards, np.int64)
        for shard, claim in claims.items():
            if 0 <= shard < shards and self._max_age_s > 0:
                answers = model.shards.setdefault(shard, Confirmations())
                found[shard] = answers.note(asked_s, claim, self._max_age_s / MOST)
        return found


def open_cache(reading: Reading, monotonic: Callable[[], float] = time.monotonic) -> RowCache | None:
    """The cache that ``reading`` wants, if any."""
    if not reading.cached_rows:
        return None
    return RowCache(reading.cached_rows, reading.cache_age_s, monotonic)
