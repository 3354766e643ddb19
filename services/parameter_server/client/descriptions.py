"""What parameter servers say of themselves, as callers see it."""

from __future__ import annotations

from dataclasses import dataclass

from services.parameter_server.messages import HeldShard


@dataclass(frozen=True, slots=True)
class TableDescription:
    """One table of one model on one server: rows held over its shards."""

    name: str
    dim: int
    rows: int


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What one server says about itself. ``shards``: those that it leads. ``snapshot_age_s`` is None before its first
    snapshot. ``map_epoch``: of the shard map that it goes by; ``held``: what it leads and follows, shard by shard."""

    name: str
    address: str
    incarnation: int
    shards: tuple[int, ...]
    models: dict[str, tuple[TableDescription, ...]]
    fingerprints: dict[str, str]
    pushes: int
    snapshot_age_s: float | None
    map_epoch: int = 0
    held: tuple[HeldShard, ...] = ()
