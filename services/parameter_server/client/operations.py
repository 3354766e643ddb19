"""What clients ask, without I/O: requests per server, and how their replies become one answer.

The blocking and the asyncio client run the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NoReturn, TypeVar

import msgspec
import numpy as np

from models.samples import Watermark
from services.parameter_server import messages as wire
from services.parameter_server.client.caching import RowCache
from services.parameter_server.client.confirmations import Claim
from services.parameter_server.client.descriptions import ServerDescription, TableDescription
from services.parameter_server.client.readers import Choice
from services.parameter_server.client.routing import PullPlan, Route, plan_pull, plan_push
from services.parameter_server.declarations import Declaration, encode_declaration
from services.parameter_server.types import (
    Applied,
    Bound,
    DenseSnapshot,
    IncarnationChanged,
    Keys,
    Mark,
    ModelMismatch,
    ModelUnknown,
    ParametersRefused,
    Pulled,
    PushReply,
    Rows,
    ShardChanges,
)
from services.rpc.calls import Outgoing
from services.rpc.codec import Array, Reply
from sync.pushes import Source

T = TypeVar("T")
W = TypeVar("W", bound=wire.Wire)
Replies = Mapping[str, Reply]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """Something to ask of several servers, by name; ``merge`` makes one answer of all replies.

    ``incarnations``: of which process each server must be (0 or absent: any). ``patient``: the answer may take
    its time, so a request is not sent again to a server that is still there. ``spared``: servers that others can
    stand in for; where one of them fails, the operation is planned anew without it.
    """

    what: str
    requests: dict[str, Outgoing]
    merge: Callable[[Replies], T]
    incarnations: Mapping[str, int] = field(default_factory=dict)
    patient: bool = False
    spared: frozenset[str] = frozenset()


def read(server: str, reply: Reply, kind: type[W]) -> W:
    """The message that ``server`` answered with. Raises ParametersRefused for another."""
    try:
        return wire.unpack(reply.body, kind)
    except msgspec.DecodeError as error:
        raise ParametersRefused(f"{server} answered something else than {kind.__name__}: {error}") from error


def pull(
    route: Route,
    keys: Mapping[str, Keys],
    choice: Choice | None = None,
    cache: RowCache | None = None,
    *,
    unasked: bool = True,
) -> Operation[Pulled]:
    """Rows of ``keys`` per table, from the leaders, or whom ``choice`` names. Through a ``cache`` only what differs
    from it travels, and what it holds may be used ``unasked``, as its age allows."""
    servers = None if choice is None else choice.servers
    if cache is None:
        plan = plan_pull(route, keys, servers)
        return _pull(route, plan, choice, versioned=False, merge=lambda found: _pulled(route, plan, found))
    looked = cache.look(route, keys, unasked=unasked)
    versions = looked.asked_versions()
    asked = plan_pull(route, looked.asked_keys(), servers, versions, looked.settled)

    def merge(replies: Replies) -> Pulled:
        arrays = {server: reply.arrays for server, reply in replies.items()}
        changed = asked.merge_changed(versions, arrays)
        rows, claims = cache.learn(route, looked, changed, _claims(asked, replies))
        return _with_claims(route, rows, claims)

    return _pull(route, asked, choice, versioned=True, merge=merge)


def _pull(
    route: Route,
    plan: PullPlan,
    choice: Choice | None,
    *,
    versioned: bool,
    merge: Callable[[Replies], Pulled],
) -> Operation[Pulled]:
    model, epoch, followers = route.declaration.model, route.map.epoch, choice is not None
    requests = {}
    for server, parts in plan.parts.items():
        shards = plan.shards[server] if followers else []
        body = wire.pack(wire.PullRequest(model, epoch, parts, followers, versioned, shards))
        requests[server] = Outgoing("pull", body, tuple(plan.arrays[server]))
    spared = choice.spared if choice else frozenset()
    if followers:
        return Operation("pull", requests, lambda found: replace(merge(found), moves={}), spared=spared)
    return Operation("pull", requests, merge)


def _pulled(route: Route, plan: PullPlan, replies: Replies) -> Pulled:
    rows = plan.merge({server: reply.arrays for server, reply in replies.items()})
    return _with_claims(route, rows, _claims(plan, replies))


def _claims(plan: PullPlan, replies: Replies) -> dict[int, Claim]:
    """What each shard's server says of its freshness: the one that was asked of it, where several do."""
    asked: dict[int, Claim] = {}
    others: dict[int, Claim] = {}
    for server, reply in replies.items():
        for one in read(server, reply, wire.PullReply).marks:
            claims = asked if one.shard in plan.shards[server] else others
            claims[one.shard] = Claim.of(one.marks, one.moves, one.epoch)
    return others | asked


def _with_claims(route: Route, rows: dict[str, Rows], claims: Mapping[int, Claim]) -> Pulled:
    marks = wire.least_marks(route.map.shards, {shard: claim.marks for shard, claim in claims.items()})
    return Pulled(rows, marks, {shard: claim.moves for shard, claim in claims.items()})


@dataclass(frozen=True, slots=True)
class Gradients:
    """A push to be made: whose, which, after what, up to which event, and the gradients per table."""

    source: Source
    offset: int
    predecessors: Mapping[int, int]
    accepted_at_ms: int
    watermark: Watermark | None
    parts: Mapping[str, tuple[Keys, Rows]]
    incarnations: Mapping[int, int] | None = None
    bound: Bound | None = None


def push(route: Route, gradients: Gradients) -> Operation[dict[int, PushReply]]:
    """A push to all shards. Raises ParametersRefused where a shard's predecessor is missing."""
    if missing := set(range(route.map.shards)) - gradients.predecessors.keys():
        raise ParametersRefused(f"no predecessor is given for shards {sorted(missing)}")
    parts, arrays = plan_push(route, gradients.parts)
    mark = gradients.watermark
    requests = {}
    expected = gradients.incarnations or {}
    incarnations = {server: expected.get(route.map.owned_by(server)[0], 0) for server in route.servers}
    bound = gradients.bound
    for server in route.servers:
        shards = route.map.owned_by(server)
        request = wire.PushRequest(
            route.declaration.model,
            route.map.epoch,
            gradients.source.log,
            gradients.source.partition,
            gradients.offset,
            gradients.accepted_at_ms,
            None if mark is None else (mark.log, mark.partition, mark.offset, mark.accepted_at_ms),
            list(shards),
            [gradients.predecessors[shard] for shard in shards],
            parts[server],
            incarnations[server],
            [] if bound is None else [bound.seen[shard] for shard in shards],
            0 if bound is None else bound.staleness,
        )
        requests[server] = Outgoing("push", wire.pack(request), tuple(arrays[server]))
    return Operation("push", requests, pushed, incarnations)


def pushed(replies: Replies) -> dict[int, PushReply]:
    """What every shard did with a push."""
    found: dict[int, PushReply] = {}
    for server, reply in replies.items():
        response = read(server, reply, wire.PushResponse)
        for one in response.outcomes:
            found[one.shard] = PushReply(
                one.status, one.applied, one.durable, response.incarnation, one.reason
            )
    return dict(sorted(found.items()))


def applied(route: Route, source: Source) -> Operation[dict[int, Applied]]:
    """How far each shard has come with a source."""
    requests = {}
    for server in route.servers:
        asked = wire.AppliedRequest(
            route.declaration.model,
            route.map.epoch,
            source.log,
            source.partition,
            list(route.map.owned_by(server)),
        )
        requests[server] = Outgoing("applied", wire.pack(asked))

    def merge(replies: Replies) -> dict[int, Applied]:
        found: dict[int, Applied] = {}
        for server, reply in replies.items():
            response = read(server, reply, wire.AppliedReply)
            for shard, offset, durable in response.shards:
                found[shard] = Applied(offset, durable, response.incarnation)
        return dict(sorted(found.items()))

    return Operation("applied", requests, merge)


def dense(route: Route, table: str, published: bool) -> Operation[DenseSnapshot]:
    """The dense weights, from the one server that holds them."""
    server = route.map.servers[route.dense_shard(table)]
    body = wire.pack(wire.DenseRequest(route.declaration.model, route.map.epoch, table, published))

    def merge(replies: Replies) -> DenseSnapshot:
        response = read(server, replies[server], wire.DenseReply)
        spec = route.declaration.table(table)
        (values,) = _rows(server, replies[server].arrays, [(spec.rows, spec.dim)])
        values.flags.writeable = False
        return DenseSnapshot(response.generation, values, _marks(response.marks))

    return Operation("dense", {server: Outgoing("dense", body)}, merge)


def publish(route: Route, table: str) -> Operation[int]:
    """Publish the dense weights now."""
    server = route.map.servers[route.dense_shard(table)]
    body = wire.pack(wire.PublishRequest(route.declaration.model, route.map.epoch, table))

    def merge(replies: Replies) -> int:
        return read(server, replies[server], wire.PublishReply).generation

    return Operation("publish", {server: Outgoing("publish", body)}, merge)


def declare(servers: Sequence[str], declaration: Declaration, *, again: bool = False) -> Operation[None]:
    """Make a model known to ``servers``."""
    request = wire.DeclareRequest(encode_declaration(declaration), again=again)
    outgoing = Outgoing("declare", wire.pack(request))
    return Operation("declare", dict.fromkeys(servers, outgoing), lambda _: None)


def checkpoint(servers: Sequence[str]) -> Operation[None]:
    """Wait until everything applied is on disk."""
    outgoing = Outgoing("checkpoint", wire.pack(wire.CheckpointRequest()))
    return Operation("checkpoint", dict.fromkeys(servers, outgoing), lambda _: None, patient=True)


def metrics(servers: Sequence[str]) -> Operation[dict[str, str]]:
    """Prometheus text of every server."""
    outgoing = Outgoing("metrics", wire.pack(wire.MetricsRequest()))

    def merge(replies: Replies) -> dict[str, str]:
        return {server: read(server, reply, wire.MetricsReply).text for server, reply in replies.items()}

    return Operation("metrics", dict.fromkeys(servers, outgoing), merge)


def describe(servers: Sequence[str], address: Callable[[str], str]) -> Operation[list[ServerDescription]]:
    """What every server says of itself."""
    outgoing = Outgoing("describe", wire.pack(wire.DescribeRequest()))

    def merge(replies: Replies) -> list[ServerDescription]:
        return [
            _description(read(server, reply, wire.DescribeReply), address(server))
            for server, reply in sorted(replies.items())
        ]

    return Operation("describe", dict.fromkeys(servers, outgoing), merge)


def _description(reply: wire.DescribeReply, address: str) -> ServerDescription:
    return ServerDescription(
        name=reply.name,
        address=address,
        incarnation=reply.incarnation,
        shards=tuple(reply.shards),
        models={
            model.name: tuple(TableDescription(table.name, table.dim, table.rows) for table in model.tables)
            for model in reply.models
        },
        fingerprints={model.name: model.fingerprint for model in reply.models},
        pushes=reply.pushes,
        snapshot_age_s=reply.snapshot_age_s,
        map_epoch=reply.map_epoch,
        held=tuple(reply.held),
    )


def changes(
    route: Route,
    server: str,
    tables: Sequence[str],
    cursors: Mapping[int, wire.ShardCursor],
    limit: int,
    wait_ms: int,
) -> Operation[list[tuple[wire.ShardCursor, ShardChanges]]]:
    """What changed on one server after ``cursors`` (by shard), with the cursors to go on from."""
    request = wire.ChangesRequest(
        route.declaration.model, route.map.epoch, list(tables), list(cursors.values()), limit, wait_ms
    )

    def merge(replies: Replies) -> list[tuple[wire.ShardCursor, ShardChanges]]:
        reply = replies[server]
        arrays = iter(reply.arrays)
        deltas = read(server, reply, wire.ChangesReply).deltas
        return [(delta.cursor, _changes(route, server, delta, arrays)) for delta in deltas]

    return Operation("changes", {server: Outgoing("changes", wire.pack(request))}, merge, patient=True)


def _changes(route: Route, server: str, delta: wire.ShardDelta, arrays: Iterator[Array]) -> ShardChanges:
    parts: dict[str, tuple[Keys, Rows]] = {}
    for table, count in delta.parts:
        keys = next(arrays, None)
        if keys is None or keys.shape != (count,) or keys.dtype != np.uint64:
            raise ParametersRefused(f"{server} answered with other keys than it said")
        (rows,) = _rows(server, [*_one(arrays)], [(count, route.declaration.table(table).dim)])
        parts[table] = (keys.view(np.uint64), rows)
    cursor = delta.cursor
    return ShardChanges(
        shard=cursor.shard,
        shards=route.map.shards,
        incarnation=cursor.incarnation,
        parts=parts,
        watermarks=_marks(delta.marks),
        complete=delta.complete,
        restarted=delta.restarted,
        generation=None if cursor.generation < 0 else cursor.generation,
    )


def _one(arrays: Iterator[Array]) -> Iterator[Array]:
    for array in arrays:
        yield array
        return


def _rows(server: str, arrays: Sequence[Array], shapes: Sequence[tuple[int, int]]) -> list[Rows]:
    if [array.shape for array in arrays] != list(shapes) or any(a.dtype != np.float32 for a in arrays):
        found = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays) or "nothing"
        raise ParametersRefused(f"{server} answered with {found}, not float32 {list(shapes)}")
    return [array.view(np.float32) for array in arrays]


def _marks(marks: Sequence[wire.WireMark]) -> dict[tuple[str, int], Mark]:
    return {(log, partition): Mark(offset, at_ms) for log, partition, offset, at_ms in marks}


def raise_failure(what: str, server: str, code: str, message: str, incarnation: int) -> NoReturn:
    """The exception for a server's error answer; ``incarnation``: what the request expected (0: any)."""
    text = f"{what}: {server} answers: {message}"
    if code == wire.INCARNATION:
        raise IncarnationChanged(server, incarnation, int(message) if message.isdecimal() else 0)
    if code == wire.MODEL_MISMATCH:
        raise ModelMismatch(text)
    if code == wire.MODEL_UNKNOWN:
        raise ModelUnknown(text)
    raise ParametersRefused(f"{text} ({code})")
