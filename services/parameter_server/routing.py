"""Which key goes to which server, and how replies fit together again. Pure, NumPy, no loop over keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.coordination.shardmap import ShardMap
from services.parameter_server.declarations import Declaration
from services.parameter_server.messages import Part
from services.parameter_server.types import Keys, ParametersRefused, Rows
from services.rpc.codec import Array
from sync.placement import shard_of, single_shard
from sync.spec import TableSpec

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

    def split(self, table: str, keys: Keys) -> Split:
        """Sort ``keys`` ``[N]`` by server and shard. Raises ParametersRefused where they are no keys."""
        if keys.ndim != 1 or keys.dtype != np.uint64:
            raise ParametersRefused(
                f"table {table}: keys are {keys.dtype} {list(keys.shape)}, not uint64 [N]"
            )
        shards = self._shards(self.declaration.table(table), keys)
        # Shards in the order of their servers, so that one sort groups by both.
        by_server = sorted(range(self.map.shards), key=lambda shard: (self.map.servers[shard], shard))
        rank = np.empty(self.map.shards, np.uint16)
        rank[by_server] = np.arange(self.map.shards, dtype=np.uint16)
        ranks = rank[shards]
        order = np.argsort(ranks, kind="stable")
        counts = np.bincount(ranks, minlength=self.map.shards).tolist()
        return Split(order, self._parts(table, by_server, counts))

    def _shards(self, spec: TableSpec, keys: Keys) -> npt.NDArray[np.int32]:
        if spec.placement == "single":
            return np.full(len(keys), single_shard(spec.name, self.map.shards), np.int32)
        return shard_of(keys, self.map.shards)

    def _parts(
        self, table: str, by_server: Sequence[int], counts: Sequence[int]
    ) -> dict[str, tuple[Part, slice]]:
        parts: dict[str, tuple[Part, slice]] = {}
        start = 0
        for shard, count in zip(by_server, counts, strict=True):
            if not count:
                continue
            server = self.map.servers[shard]
            part, covered = parts.setdefault(server, (Part(table, [], []), slice(start, start)))
            part.shards.append(shard)
            part.counts.append(count)
            start += count
            parts[server] = (part, slice(covered.start, start))
        return parts


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What to ask each server for, and where its rows belong."""

    parts: dict[str, list[Part]]
    arrays: dict[str, list[Array]]
    _splits: dict[str, Split]
    _shapes: dict[str, tuple[int, int]]

    def merge(self, replies: Mapping[str, Sequence[Array]]) -> dict[str, Rows]:
        """The rows ``[N, d]`` of each table from every server's arrays. Raises ParametersRefused."""
        rows = {table: np.empty(shape, np.float32) for table, shape in self._shapes.items()}
        for server, parts in self.parts.items():
            arrays = replies[server]
            if len(arrays) != len(parts):
                raise ParametersRefused(f"{server} answered with {len(arrays)} arrays for {len(parts)}")
            for part, array in zip(parts, arrays, strict=True):
                split = self._splits[part.table]
                places = split.order[split.parts[server][1]]
                if array.shape != (len(places), self._shapes[part.table][1]) or array.dtype != np.float32:
                    raise ParametersRefused(f"{server} answered with {array.dtype} {list(array.shape)}")
                rows[part.table][places] = array
        return rows


def plan_pull(route: Route, keys: Mapping[str, Keys]) -> PullPlan:
    """Split the keys of several tables over the servers; every server is asked, if only for its marks."""
    splits = {table: route.split(table, some) for table, some in keys.items()}
    shapes = {table: (len(some), route.declaration.table(table).dim) for table, some in keys.items()}
    parts: dict[str, list[Part]] = {server: [] for server in route.servers}
    arrays: dict[str, list[Array]] = {server: [] for server in route.servers}
    for table, split in splits.items():
        ordered = keys[table][split.order]
        for server, (part, covered) in split.parts.items():
            parts[server].append(part)
            arrays[server].append(ordered[covered])
    return PullPlan(parts, arrays, splits, shapes)


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
