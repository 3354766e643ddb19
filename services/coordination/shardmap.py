"""Which parameter servers hold which shard, and which of them leads it: a pure map in the coordination store.

The map is kept for good: a server that restarts under its name finds its shards again. Every change is a
compare-and-swap and raises the map's epoch; the epoch at which a shard got its present leader is its fence, which
leads the versions of everything that the leader writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from services.coordination.contract import Conflict, Coordination, CoordinationError

KEY: Final = "parameters/shard-map"


class Place(msgspec.Struct, frozen=True):
    """Where one shard is.

    ``leader`` leads it as the process of ``incarnation`` since the map's epoch ``fence`` (0: nobody does yet, and
    ``leader`` is who should). ``replicas``: all servers that hold it. ``chain``: those that are in step, in the
    order in which updates pass them, where they pass along a chain; else empty.
    """

    leader: str
    replicas: tuple[str, ...]
    incarnation: int = 0
    fence: int = 0
    chain: tuple[str, ...] = ()


class ShardMap(msgspec.Struct, frozen=True):
    """``places[s]`` is where shard s is. ``moves``: shard → server that it is to be led by, under way.

    ``chained``: updates pass from replica to replica; the map then also says who is in step.
    """

    epoch: int
    places: tuple[Place, ...]
    moves: dict[int, str] = {}
    chained: bool = False

    @property
    def shards(self) -> int:
        return len(self.places)

    @property
    def servers(self) -> tuple[str, ...]:
        """By shard, the name of the server that leads it."""
        return tuple(place.leader for place in self.places)

    @property
    def replicated(self) -> bool:
        """Whether any shard is held by more than one server."""
        return any(len(place.replicas) > 1 for place in self.places)

    def owned_by(self, name: str) -> tuple[int, ...]:
        """The shards that server ``name`` leads, ascending."""
        return tuple(shard for shard, place in enumerate(self.places) if place.leader == name)

    def held_by(self, name: str) -> tuple[int, ...]:
        """The shards that server ``name`` holds, or is about to, ascending."""
        return tuple(
            shard
            for shard, place in enumerate(self.places)
            if name in place.replicas or self.moves.get(shard) == name
        )

    def change(
        self, places: Mapping[int, Place], moves: dict[int, str] | None = None, least_epoch: int = 0
    ) -> ShardMap:
        """The next map, with these places changed; its epoch is at least ``least_epoch``."""
        return ShardMap(
            max(self.epoch + 1, least_epoch),
            tuple(places.get(shard, place) for shard, place in enumerate(self.places)),
            self.moves if moves is None else moves,
            self.chained,
        )


def assign(names: Sequence[str], shards: int, replicas: int = 1, *, chained: bool = False) -> ShardMap:
    """The first map: shards dealt in turn to the servers in the order of their names; each shard's further
    replicas are the servers that follow.

    Servers that get none are spare until a shard is moved to them. Raises ValueError without servers or shards, or
    with fewer servers than replicas.
    """
    ordered = sorted(set(names))
    if not ordered or shards < 1:
        raise ValueError(f"{shards} shards cannot be dealt to {len(ordered)} servers")
    if not 1 <= replicas <= len(ordered):
        raise ValueError(f"{replicas} replicas of a shard need as many servers; there are {len(ordered)}")
    places = []
    for shard in range(shards):
        held = tuple(ordered[(shard + n) % len(ordered)] for n in range(replicas))
        places.append(Place(held[0], held, chain=held if chained else ()))
    return ShardMap(1, tuple(places), chained=chained)


def read_shard_map(store: Coordination) -> ShardMap | None:
    """The map, or None where none was written yet. Raises CoordinationError if it cannot be read."""
    found = read_with_revision(store)
    return None if found is None else found[0]


def read_with_revision(store: Coordination) -> tuple[ShardMap, int] | None:
    """The map and the revision of the store at which it was written. Raises CoordinationError."""
    entry = store.get(KEY)
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=ShardMap), entry.revision
    except msgspec.DecodeError as error:
        raise CoordinationError(f"the shard map under {KEY} cannot be read: {error}") from error


def settle_shard_map(
    store: Coordination, names: Sequence[str], shards: int, replicas: int = 1, *, chained: bool = False
) -> ShardMap:
    """The map that is in force: the one in ``store``, else what ``assign`` makes, written there.

    Whoever writes first wins; all others read what was written.
    """
    found = read_shard_map(store)
    if found is not None:
        return found
    mine = assign(names, shards, replicas, chained=chained)
    try:
        store.put(KEY, msgspec.json.encode(mine), expect_revision=0)
    except Conflict:
        theirs = read_shard_map(store)
        assert theirs is not None
        return theirs
    return mine


def change_shard_map(store: Coordination, change: Callable[[ShardMap], ShardMap | None]) -> ShardMap | None:
    """Write ``change(map)`` in place of the map, if it gives one; the map in force, or None where none was
    written yet. ``change`` is asked again where another was faster. Raises CoordinationError."""
    while (found := read_with_revision(store)) is not None:
        current, revision = found
        wanted = change(current)
        if wanted is None:
            return current
        try:
            store.put(KEY, msgspec.json.encode(wanted), expect_revision=revision)
        except Conflict:
            continue
        return wanted
    return None
