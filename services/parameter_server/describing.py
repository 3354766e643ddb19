"""What a parameter server says of itself: its shards, what they hold, and how far those are who follow them.

Nothing looks at rows: every figure is one that is kept anyway, but for an estimate from a bounded sample.
"""

from __future__ import annotations

from services.parameter_server import messages as wire
from services.parameter_server.holdings import Held
from services.parameter_server.host import Host
from services.parameter_server.replication.cluster import Cluster
from sync.table import Table


def describe(host: Host, cluster: Cluster, snapshot_age_s: float | None) -> wire.DescribeReply:
    """The answer to ``describe``."""
    return wire.DescribeReply(
        host.config.name,
        host.incarnation,
        sorted(host.fences),
        host.describe(),
        sum(held.moves for _, held in host.all_held()),
        snapshot_age_s,
        0 if cluster.map is None else cluster.map.epoch,
        [_shard(host, cluster, shard) for shard in sorted(host.holds)],
    )


def _shard(host: Host, cluster: Cluster, shard: int) -> wire.HeldShard:
    replica = cluster.replicas.get(shard)
    behind: dict[str, int] = {}
    if replica is not None and replica.leading:
        newest = replica.stream.number
        behind = {server: newest - number for server, number in sorted(replica.followers.held.items())}
    return wire.HeldShard(
        shard,
        shard in host.fences,
        host.fences.get(shard, 0 if replica is None else replica.place.fence),
        behind,
        [
            _model(name, model.held[shard])
            for name, model in sorted(host.models.items())
            if shard in model.held
        ],
    )


def _model(name: str, held: Held) -> wire.HeldModel:
    shard, counts = held.shard, held.shard.counts
    return wire.HeldModel(
        name,
        shard.epoch,
        shard.position,
        held.whole,
        counts.applied_total,
        counts.duplicate_total,
        counts.gap_total,
        counts.refused_total,
        held.stale_total,
        counts.deleted_rows_total,
        counts.last_refusal,
        [_table(shard.table(spec.name)) for spec in shard.specs],
    )


def _table(table: Table) -> wire.HeldTable:
    norm, counts = table.guard.state(), table.counts
    return wire.HeldTable(
        table.spec.name,
        len(table),
        table.nbytes,
        table.row_nbytes,
        len(table.graves),
        table.waiting,
        norm.mean,
        norm.count,
        counts.pushed_rows_total,
        counts.unadmitted_rows_total,
        counts.expired_rows_total,
    )
