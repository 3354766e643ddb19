"""Which parameter server owns which shard: a pure map, written once by whichever server comes first.

The map is kept for good: a server that restarts under its name finds its shards again. It carries an epoch,
so that a client can tell an older map from a newer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from services.coordination.contract import Conflict, Coordination, CoordinationError

KEY: Final = "parameters/shard-map"


class ShardMap(msgspec.Struct, frozen=True):
    """``servers[s]`` is the name of the server that owns shard s."""

    epoch: int
    servers: tuple[str, ...]

    @property
    def shards(self) -> int:
        return len(self.servers)

    def owned_by(self, name: str) -> tuple[int, ...]:
        """The shards of server ``name``, ascending."""
        return tuple(shard for shard, server in enumerate(self.servers) if server == name)


def assign(names: Sequence[str], shards: int) -> ShardMap:
    """The first map: shards dealt in turn to the servers in the order of their names.

    Raises ValueError without servers or shards, or with fewer shards than servers.
    """
    ordered = sorted(set(names))
    if not ordered or shards < len(ordered):
        raise ValueError(
            f"{shards} shards cannot be dealt to {len(ordered)} servers: each needs one at least"
        )
    return ShardMap(1, tuple(ordered[shard % len(ordered)] for shard in range(shards)))


def read_shard_map(store: Coordination) -> ShardMap | None:
    """The map, or None where none was written yet. Raises CoordinationError if it cannot be read."""
    entry = store.get(KEY)
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=ShardMap)
    except msgspec.DecodeError as error:
        raise CoordinationError(f"the shard map under {KEY} cannot be read: {error}") from error


def settle_shard_map(store: Coordination, names: Sequence[str], shards: int) -> ShardMap:
    """The map that is in force: the one in ``store``, else ``assign(names, shards)`` written there.

    Whoever writes first wins; all others read what was written.
    """
    found = read_shard_map(store)
    if found is not None:
        return found
    mine = assign(names, shards)
    try:
        store.put(KEY, msgspec.json.encode(mine), expect_revision=0)
    except Conflict:
        theirs = read_shard_map(store)
        assert theirs is not None
        return theirs
    return mine
