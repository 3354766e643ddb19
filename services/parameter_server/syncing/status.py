"""What a server says of its part between regions: the answer to ``sync-status``."""

from __future__ import annotations

from typing import Final

import msgspec

from services.parameter_server.messages import Wire
from services.parameter_server.syncing.service import Syncing
from services.parameter_server.syncing.upstream import Upstream

STATUS: Final = "sync-status"


class StatusRequest(Wire):
    pass


class FollowedShard(Wire):
    """A shard that the server leads and another region writes. ``upstream``: whom it comes from now, empty where nobody
    serves it; ``behind_s``: since it was level the last time (None: never yet), and ``behind_changes`` then."""

    model: str
    shard: int
    upstream: str
    behind_s: float | None
    behind_changes: int


class UpstreamStatus(Wire):
    """One address that the server follows. ``wanted``: shards that it is asked for, ``served``: those that it leads.
    ``bytes_s``, ``rows_s``: over the last ten seconds; ``rate``: bytes a second that the link was seen to carry."""

    address: str
    region: str
    wanted: int
    served: int
    behind_s: float | None
    behind_changes: int
    bytes_s: float
    rows_s: float
    rate: float
    round_trip_s: float
    clock_ahead_s: float
    bytes_total: int
    batches_total: int
    rows_total: int
    faults_total: int
    damaged_total: int
    ahead_total: int
    last_fault: str
    unlike: list[str]


class PullerStatus(Wire):
    """A server of another region that pulls here."""

    name: str
    region: str
    precision: str
    bytes_total: int
    batches_total: int
    clock_ahead_s: float | None


class StatusReply(Wire):
    """``found``: exchanges as a source by how their rows were found: token, cache, scan. ``clock_ahead_s``: of this
    clock before the median of the others; ``refuses``: why it takes no pushes for it, or empty."""

    region: str
    server: str
    written: list[int]
    followed: list[FollowedShard]
    upstreams: list[UpstreamStatus]
    pullers: list[PullerStatus]
    found: dict[str, int]
    fed_rows_total: int
    fed_bytes_total: int
    replacements_total: int
    clock_ahead_s: float | None
    refuses: str
    forwarded_total: int = 0
    brake: float = 0.0


def standing_of(syncing: Syncing, upstream: Upstream) -> UpstreamStatus:
    """How this server stands to one address."""
    now, puller = syncing.now_s, upstream.puller
    served = [one for one in puller.standings.values() if one.served]
    known = [now - one.level_s for one in served if one.level_s >= 0.0]
    counts = puller.counts
    bytes_, rows = syncing.rates[upstream.address]
    return UpstreamStatus(
        upstream.address,
        upstream.region,
        len(puller.standings),
        len(served),
        max(known) if served and len(known) == len(served) else None,
        sum(one.left for one in served),
        bytes_.per_s(puller.pace.bytes_total, now),
        rows.per_s(counts.rows_total, now),
        puller.pace.rate,
        puller.pace.round_trip_s,
        puller.clock_ahead_s,
        puller.pace.bytes_total,
        counts.batches_total,
        counts.rows_total,
        counts.faults_total,
        upstream.counts.damaged_total,
        counts.ahead_total,
        upstream.counts.last_fault or counts.last_fault,
        sorted(upstream.unlike),
    )


def status(syncing: Syncing) -> StatusReply:
    """The answer to ``sync-status``."""
    source, host = syncing.source, syncing.host
    counts = source.feeds.counts
    verdict = syncing.clock_verdict
    return StatusReply(
        syncing.config.region,
        host.config.name,
        sorted(shard for shard in host.fences if host.writes(shard)),
        [_followed(syncing, *name) for name in sorted(syncing.followed())],
        [standing_of(syncing, upstream) for upstream in syncing.upstreams],
        [
            PullerStatus(
                one.name, one.region, one.precision, one.bytes_total, one.batches_total, one.clock_ahead_s
            )
            for one in source.peers.values()
        ],
        {how: counts.found[how] for how in counts.found},
        counts.rows_total,
        source.counts.bytes_total,
        counts.replacements_total,
        verdict.ahead_s,
        syncing.takes_no_pushes(),
        syncing.forwarding.counts.forwarded_total,
        syncing.brake_level,
    )


def _followed(syncing: Syncing, model: str, shard: int) -> FollowedShard:
    for upstream in syncing.upstreams:
        standing = upstream.puller.standings.get((model, shard))
        if standing is not None and standing.served:
            behind_s = None if standing.level_s < 0.0 else syncing.now_s - standing.level_s
            return FollowedShard(model, shard, upstream.address, behind_s, standing.left)
    return FollowedShard(model, shard, "", None, 0)


def to_plain(reply: StatusReply) -> dict[str, object]:
    """As names and values, for JSON."""
    found: dict[str, object] = {
        name: msgspec.to_builtins(getattr(reply, name)) for name in reply.__struct_fields__
    }
    for name in ("followed", "upstreams", "pullers"):
        found[name] = [
            {field: getattr(one, field) for field in one.__struct_fields__} for one in getattr(reply, name)
        ]
    return found
