"""What all servers say of themselves, as one picture: models with their tables, and shards with their servers. Pure.

Of each shard only its leader counts, so replicas are not counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.parameter_server.client.survey import Survey
from services.parameter_server.declarations import Declaration
from services.parameter_server.messages import HeldModel, HeldTable
from sync.spec import TableSpec


@dataclass(frozen=True, slots=True)
class TableSummary:
    """One table over all shards that answered.

    ``row_bytes``: values and optimiser state of the rows; ``allocated_bytes``: what is taken for them, with versions,
    index, graves, sketch and room for growth. ``norm``: the running mean of gradient norms that the guard compares
    with. ``touched_share``: the share of the stored rows that a push writes, on average since the leaders began (None:
    no push yet). ``waiting``: about how many keys wait for their admission. Totals count rows since the leaders began.
    """

    name: str
    kind: Literal["embedding", "dense"]
    dim: int
    rows: int
    row_bytes: int
    allocated_bytes: int
    optimiser: str
    rate: float
    l2: float
    clip: float
    guard: float
    norm: float
    admission: int
    waiting: int
    expiry_s: int
    graves: int
    pushed_rows_total: int
    unadmitted_rows_total: int
    expired_rows_total: int
    touched_share: float | None


@dataclass(frozen=True, slots=True)
class Pushes:
    """Pushes by what became of them, on the shard that saw most of each: every push goes to every shard."""

    applied_total: int = 0
    duplicate_total: int = 0
    gap_total: int = 0
    refused_total: int = 0
    stale_total: int = 0


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """``servers``: the shards that each leads. ``missing``: shards of which nobody answers for the model."""

    name: str
    fingerprint: str
    shards: int
    servers: dict[str, list[int]]
    missing: list[int]
    rows: int
    embedding_bytes: int
    dense_bytes: int
    allocated_bytes: int
    pushes: Pushes
    deleted_rows_total: int
    last_refusal: str
    tables: list[TableSummary]


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """One shard over all models. ``leads``: whether the leader of the map says so itself; else the figures are None.
    ``behind``: the steps that each follower lacks (None: it has not said). ``steps``: since the shard was born."""

    shard: int
    leader: str
    leads: bool
    followers: list[str]
    behind: dict[str, int | None]
    fence: int
    rows: int | None
    bytes: int | None
    steps: int | None
    moving_to: str | None


def summarise_model(declaration: Declaration, survey: Survey) -> ModelSummary:
    """A declared model with its tables."""
    found: dict[int, HeldModel] = {}
    servers: dict[str, list[int]] = {}
    for shard, place in enumerate(survey.map.places):
        held = survey.led(shard)
        part = next((one for one in held.models if one.model == declaration.model), None) if held else None
        if part is not None:
            found[shard] = part
            servers.setdefault(place.leader, []).append(shard)
    parts = list(found.values())
    tables = [_table(spec, parts) for spec in declaration.tables]
    return ModelSummary(
        name=declaration.model,
        fingerprint=declaration.fingerprint,
        shards=survey.map.shards,
        servers=dict(sorted(servers.items())),
        missing=[shard for shard in range(survey.map.shards) if shard not in found],
        rows=sum(table.rows for table in tables),
        embedding_bytes=sum(table.row_bytes for table in tables if table.kind == "embedding"),
        dense_bytes=sum(table.row_bytes for table in tables if table.kind == "dense"),
        allocated_bytes=sum(table.allocated_bytes for table in tables),
        pushes=_pushes(parts),
        deleted_rows_total=sum(part.deleted_total for part in parts),
        last_refusal=next((part.last_refusal for part in parts if part.last_refusal), ""),
        tables=tables,
    )


def _pushes(parts: list[HeldModel]) -> Pushes:
    def most(name: str) -> int:
        return max((getattr(part, name) for part in parts), default=0)

    names = ("applied_total", "duplicate_total", "gap_total", "refused_total", "stale_total")
    return Pushes(*(most(name) for name in names))


def _table(spec: TableSpec, parts: list[HeldModel]) -> TableSummary:
    pairs = [(part, table) for part in parts for table in part.tables if table.name == spec.name]
    tables = [table for _, table in pairs]
    normed = sum(table.normed for table in tables)
    return TableSummary(
        name=spec.name,
        kind="dense" if spec.placement == "single" else "embedding",
        dim=spec.dim,
        rows=sum(table.rows for table in tables),
        row_bytes=sum(table.row_bytes for table in tables),
        allocated_bytes=sum(table.allocated_bytes for table in tables),
        optimiser=spec.optimiser.kind,
        rate=spec.optimiser.rate,
        l2=spec.l2,
        clip=spec.clip,
        guard=spec.guard,
        norm=sum(table.norm * table.normed for table in tables) / normed if normed else 0.0,
        admission=spec.admission,
        waiting=sum(table.waiting for table in tables),
        expiry_s=spec.expiry_s,
        graves=sum(table.graves for table in tables),
        pushed_rows_total=sum(table.pushed_total for table in tables),
        unadmitted_rows_total=sum(table.unadmitted_total for table in tables),
        expired_rows_total=sum(table.expired_total for table in tables),
        touched_share=_touched_share(pairs),
    )


def _touched_share(pairs: list[tuple[HeldModel, HeldTable]]) -> float | None:
    """Rows that a push writes over rows stored. Each shard counts its own pushes: one may have moved lately."""
    seen = [(part, table) for part, table in pairs if part.applied_total and table.rows]
    rows = sum(table.rows for _, table in seen)
    return sum(table.pushed_total / part.applied_total for part, table in seen) / rows if rows else None


def summarise_shards(survey: Survey) -> list[ShardSummary]:
    """All shards, by number."""
    found = []
    for shard, place in enumerate(survey.map.places):
        held = survey.led(shard)
        leads = held is not None and held.fence == place.fence
        followers = [server for server in place.replicas if server != place.leader]
        tables = [table for model in held.models for table in model.tables] if held else []
        found.append(
            ShardSummary(
                shard=shard,
                leader=place.leader,
                leads=leads,
                followers=followers,
                behind={server: held.behind.get(server) if held else None for server in followers},
                fence=place.fence,
                rows=sum(table.rows for table in tables) if held else None,
                bytes=sum(table.allocated_bytes for table in tables) if held else None,
                steps=sum(model.steps for model in held.models) if held else None,
                moving_to=survey.map.moves.get(shard),
            )
        )
    return found
