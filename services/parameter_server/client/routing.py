"""Which key goes to which server, and how replies fit together again. Pure, NumPy, no loop over keys."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.coordination.shardmap import ShardMap
from services.parameter_server.client.hotkeys import UNKNOWN, Flags, Versions
from services.parameter_server.declarations import Declaration
from services.parameter_server.messages import Part
from services.parameter_server.types import Keys, ParametersRefused, Rows
from services.rpc.codec import Array
from sync.placement import shard_of, single_shard

Order = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Split:
    """Keys ``[N]`` sorted by (server, shard): ``order[i]`` is where the i-th came from.

    ``parts``: per server its part and the range of the sorted keys that it covers.
    """

    order: Order
    parts: dict[str, tuple[Part, slice]]


@dataclass(frozen=True, slots=True)
class Route:
    """Where the rows of one model live: its declaration under a shard map."""

    declaration: Declaration
    map: ShardMap

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers, by name."""
        return tuple(sorted(set(self.map.servers)))

    def dense_shard(self, table: str) -> int:
        """The shard that holds the single ``table``. Raises ParametersRefused for another."""
        if self.declaration.table(table).placement != "single":
            raise ParametersRefused(f"table {table} is spread over all shards and has no generations")
        return single_shard(table, self.map.shards)

    def split(self, table: str, keys: Keys, servers: Sequence[str] | None = None) -> Split:
        """Sort ``keys`` ``[N]`` by server and shard. ``servers``: whom to ask, by shard; the leaders where nobody is
        named. Raises ParametersRefused where they are no keys."""
        asked = servers or self.map.servers
        shards = self.shards_of(table, keys)
        # Shards in the order of their servers, so that one sort groups by both.
        by_server = sorted(range(self.map.shards), key=lambda shard: (asked[shard], shard))
        rank = np.empty(self.map.shards, np.uint16)
        rank[by_server] = np.arange(self.map.shards, dtype=np.uint16)
        ranks = rank[shards]
        order = np.argsort(ranks, kind="stable")
        counts = np.bincount(ranks, minlength=self.map.shards).tolist()
        return Split(order, _parts(table, asked, by_server, counts))

    def shards_of(self, table: str, keys: Keys) -> npt.NDArray[np.int32]:
        """The shard of each key ``[N]``. Raises ParametersRefused where they are no keys, or of no table."""
        if keys.ndim != 1 or keys.dtype != np.uint64:
            raise ParametersRefused(
                f"table {table}: keys are {keys.dtype} {list(keys.shape)}, not uint64 [N]"
            )
        spec = self.declaration.table(table)
        if spec.placement == "single":
            return np.full(len(keys), single_shard(spec.name, self.map.shards), np.int32)
        return shard_of(keys, self.map.shards)


def _parts(
    table: str, servers: Sequence[str], by_server: Sequence[int], counts: Sequence[int]
) -> dict[str, tuple[Part, slice]]:
    parts: dict[str, tuple[Part, slice]] = {}
    start = 0
    for shard, count in zip(by_server, counts, strict=True):
        if not count:
            continue
        server = servers[shard]
        part, covered = parts.setdefault(server, (Part(table, [], []), slice(start, start)))
        part.shards.append(shard)
        part.counts.append(count)
        start += count
        parts[server] = (part, slice(covered.start, start))
    return parts


@dataclass(frozen=True, slots=True)
class Changed:
    """Which of the keys ``[N]`` asked for have another version than the one that was told, ``[N]``; of these, their
    ``rows`` ``[N, d]`` and ``versions`` ``[N, 2]`` (anything elsewhere)."""

    changed: Flags
    rows: Rows
    versions: Versions


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What to ask each server for, and where its rows belong. ``shards``: by server, those that it is asked of."""

    parts: dict[str, list[Part]]
    arrays: dict[str, list[Array]]
    shards: dict[str, list[int]]
    _splits: dict[str, Split]
    _shapes: dict[str, tuple[int, int]]

    def merge(self, replies: Mapping[str, Sequence[Array]]) -> dict[str, Rows]:
        """The rows ``[N, d]`` of each table from every server's arrays. Raises ParametersRefused."""
        rows = {table: np.empty(shape, np.float32) for table, shape in self._shapes.items()}
        for server, part, places, (array,) in self._answers(replies, 1):
            _require(server, array, np.float32, (len(places), self._shapes[part.table][1]))
            rows[part.table][places] = array
        return rows

    def merge_changed(
        self, versions: Mapping[str, Versions], replies: Mapping[str, Sequence[Array]]
    ) -> dict[str, Changed]:
        """What has another version than ``versions`` ``[N, 2]``, which were told with the keys. Raises
        ParametersRefused."""
        found = {
            table: Changed(
                np.zeros(count, np.bool_), np.empty((count, dim), np.float32), np.empty((count, 2), np.uint64)
            )
            for table, (count, dim) in self._shapes.items()
        }
        for server, part, places, (flags, rows, theirs) in self._answers(replies, 3):
            _require(server, flags, np.bool_, (len(places),))
            changed = flags.view(np.bool_)
            count = int(changed.sum())
            _require(server, rows, np.float32, (count, self._shapes[part.table][1]))
            _require(server, theirs, np.uint64, (count, 2))
            if (versions[part.table][places[~changed], 0] == UNKNOWN).any():
                raise ParametersRefused(f"{server} answered that a row is as before which it was not told of")
            one = found[part.table]
            one.changed[places] = changed
            one.rows[places[changed]] = rows
            one.versions[places[changed]] = theirs
        return found

    def _answers(
        self, replies: Mapping[str, Sequence[Array]], each: int
    ) -> Iterator[tuple[str, Part, Order, Sequence[Array]]]:
        """Per part: its server, the places of its keys, and the ``each`` arrays of the answer to it."""
        for server, parts in self.parts.items():
            arrays = replies[server]
            if len(arrays) != each * len(parts):
                raise ParametersRefused(f"{server} answered with {len(arrays)} arrays for {len(parts)}")
            for number, part in enumerate(parts):
                split = self._splits[part.table]
                places = split.order[split.parts[server][1]]
                yield server, part, places, arrays[each * number : each * number + each]


def _require(server: str, array: Array, dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ParametersRefused(f"{server} answered with {array.dtype} {list(array.shape)}")


def plan_pull(
    route: Route,
    keys: Mapping[str, Keys],
    servers: Sequence[str] | None = None,
    versions: Mapping[str, Versions] | None = None,
    settled: Container[int] = (),
) -> PullPlan:
    """Split the keys ``[N]`` of several tables over the servers, with their ``versions`` ``[N, 2]`` if told.

    ``servers``: whom to ask, by shard; the leaders where nobody is named. Every one is asked, if only for its marks,
    but those of whose shards all are ``settled`` and no key is asked for.
    """
    asked = servers or route.map.servers
    splits = {table: route.split(table, some, asked) for table, some in keys.items()}
    shapes = {table: (len(some), route.declaration.table(table).dim) for table, some in keys.items()}
    needed = {server for shard, server in enumerate(asked) if shard not in settled}
    needed.update(server for split in splits.values() for server in split.parts)
    parts: dict[str, list[Part]] = {server: [] for server in sorted(needed)}
    arrays: dict[str, list[Array]] = {server: [] for server in parts}
    shards = {server: [shard for shard, other in enumerate(asked) if other == server] for server in parts}
    for table, split in splits.items():
        ordered = keys[table][split.order]
        told = None if versions is None else versions[table][split.order]
        for server, (part, covered) in split.parts.items():
            parts[server].append(part)
            arrays[server].append(ordered[covered])
            if told is not None:
                arrays[server].append(told[covered])
    return PullPlan(parts, arrays, shards, splits, shapes)


def plan_push(
    route: Route, gradients: Mapping[str, tuple[Keys, Rows]]
) -> tuple[dict[str, list[Part]], dict[str, list[Array]]]:
    """Split keys ``[N]`` and gradients ``[N, d]`` of several tables: parts and arrays per server.

    Raises ParametersRefused where shapes do not fit the declared tables.
    """
    parts: dict[str, list[Part]] = {server: [] for server in route.servers}
    arrays: dict[str, list[Array]] = {server: [] for server in route.servers}
    for table, (keys, rows) in gradients.items():
        dim = route.declaration.table(table).dim
        if rows.shape != (len(keys), dim) or rows.dtype != np.float32:
            wanted = f"float32 [{len(keys)}, {dim}]"
            raise ParametersRefused(f"table {table}: {rows.dtype} {list(rows.shape)}, not {wanted}")
        split = route.split(table, keys)
        sorted_keys, sorted_rows = keys[split.order], rows[split.order]
        for server, (part, covered) in split.parts.items():
            parts[server].append(part)
            arrays[server] += [sorted_keys[covered], sorted_rows[covered]]
    return parts, arrays
