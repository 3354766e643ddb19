"""Coordination between processes: membership, shard map, leases, counters."""

from services.coordination.contract import (
    Change,
    Conflict,
    Coordination,
    CoordinationError,
    Entry,
    Lease,
    LeaseLost,
    Unavailable,
)
from services.coordination.membership import Member, Registration, members, wait_for
from services.coordination.open import open_coordination_store
from services.coordination.shardmap import ShardMap, read_shard_map, settle_shard_map

__all__ = [
    "Change",
    "Conflict",
    "Coordination",
    "CoordinationError",
    "Entry",
    "Lease",
    "LeaseLost",
    "Member",
    "Registration",
    "ShardMap",
    "Unavailable",
    "members",
    "open_coordination_store",
    "read_shard_map",
    "settle_shard_map",
    "wait_for",
]
