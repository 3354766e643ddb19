"""What a server says of its part between regions: the answer to ``sync-status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from services.parameter_server.messages import Wire

if TYPE_CHECKING:
    # Who only reads such answers loads no compiler.
    from services.parameter_server.syncing.service import Syncing
    from services.parameter_server.syncing.upstream import Upstream
    from sync.exchange import ShardName
    from sync.exchange.puller import Standing

    Standings = Sequence[tuple[str, Mapping[ShardName, Standing]]]
    """By address of a source, how each shard stands to it."""

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
    """One address that the server follows. ``wanted``: shards that it is asked for, ``served``: those that it leads;
    ``contested``: those that both regions write, none of which crosses.
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
    contested: list[int] = msgspec.field(default_factory=list)


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
    standings = puller.standings
    served = [one for one in standings.values() if one.served]
    all_served = {name for _, theirs in _all_standings(syncing) for name, one in theirs.items() if one.served}
    # While nobody serves a shard it falls behind, too: since it was level here the last time.
    orphans = [one for name, one in standings.items() if one.level_s >= 0.0 and name not in all_served]
    levels = [one.level_s for one in (*served, *orphans)]
    counts = puller.counts
    bytes_, rows = syncing.rates[upstream.address]
    return UpstreamStatus(
        upstream.address,
        upstream.region,
        len(standings),
        len(served),
        now - min(levels) if levels and min(levels) >= 0.0 else None,
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
        syncing.contested(upstream),
    )


def status(syncing: Syncing) -> StatusReply:
    """The answer to ``sync-status``."""
    source, host = syncing.source, syncing.host
    counts = source.feeds.counts
    verdict, standings = syncing.clock_verdict, _all_standings(syncing)
    return StatusReply(
        syncing.config.region,
        host.config.name,
        sorted(shard for shard in host.fences if host.writes(shard)),
        [_followed(*name, standings, syncing.now_s) for name in sorted(syncing.followed())],
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


def _all_standings(syncing: Syncing) -> Standings:
    return [(one.address, one.puller.standings) for one in syncing.upstreams]


def _followed(model: str, shard: int, standings: Standings, now_s: float) -> FollowedShard:
    its = [(address, theirs[model, shard]) for address, theirs in standings if (model, shard) in theirs]
    found = next(((address, one) for address, one in its if one.served), None)
    level_s = max((one.level_s for _, one in its), default=-1.0) if found is None else found[1].level_s
    behind_s = None if level_s < 0.0 else now_s - level_s
    return FollowedShard(
        model, shard, "" if found is None else found[0], behind_s, found[1].left if found else 0
    )


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
