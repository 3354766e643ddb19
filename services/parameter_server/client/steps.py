"""The blocking client's calls for synchronous steps: contribute, attend, load the dense weights' state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

import numpy as np

from models.samples import Watermark
from services.coordination.shardmap import ShardMap
from services.parameter_server import messages as wire
from services.parameter_server import step_messages as steps
from services.parameter_server.client import ParameterClient
from services.parameter_server.client.operations import Operation, Replies, pushed, read
from services.parameter_server.client.routing import Route, plan_push
from services.parameter_server.types import Bound, Keys, ParametersRefused, PushReply, Rows
from services.rpc.calls import Outgoing
from services.rpc.codec import Array
from sync.pushes import Source

WAIT_MS: Final = 500
"""How long a contribution waits at a server before the member looks whether its group is still the same."""

Parts = Mapping[str, tuple[Keys, Rows]]


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place: generation and size of its group, its rank, the share that makes a step whole."""

    generation: int
    members: int
    rank: int
    ratio: Decimal = Decimal(1)

    def wire(self) -> steps.WireGroup:
        """As it travels."""
        return steps.WireGroup(self.generation, self.members, self.rank, str(self.ratio))


@dataclass(frozen=True, slots=True)
class StepPush:
    """What a member learned from one micro-batch: see ``ParameterClient.push``. ``predecessors`` name the shards
    that step together with the others' pushes."""

    source: Source
    offset: int
    predecessors: Mapping[int, int]
    accepted_at_ms: int
    watermark: Watermark | None
    parts: Parts


@dataclass(frozen=True, slots=True)
class StepReply:
    """What one shard did with a push of a step.

    Beside the statuses of ``PushReply``: ``late``, the step was taken without it, its offset is done and its
    gradients are dropped; ``again``, nothing was applied: pull again, compute again.
    """

    status: steps.StepStatus
    applied: int
    durable: int
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Contributed:
    """What became of a contribution. ``verdict``: ``taken``; ``pending``, some server still waits for others;
    ``regrouped``, the group has changed; ``late`` or ``again`` where any server said so. ``open``: the step to
    contribute to next. ``shards``: of those that answered. ``digest``: of the dense table, '' where unknown.
    ``more``: some member has further micro-batches waiting."""

    verdict: steps.StepVerdict
    open: int
    shards: dict[int, StepReply]
    digest: str
    more: bool


@dataclass(frozen=True, slots=True)
class Attendance:
    """The step that each server collects now. None: the group has changed."""

    open: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DenseState:
    """The stored rows of a dense table: keys uint64 ``[N]``, values float32 ``[N, d]``, state float32 ``[N, s]``;
    ``digest`` of all its live values. ``incarnation``: of the server that holds it."""

    keys: Keys
    values: Rows
    state: Rows
    digest: str
    incarnation: int


class StepClient(ParameterClient):
    """A ``ParameterClient`` that also takes part in synchronous steps."""

    def shard_map(self) -> ShardMap:
        """Which server has which shard. Raises CoordinationError."""
        return self._directory.map()

    def dense_shard(self, model: str, table: str) -> int:
        """The shard that holds the single ``table``. Raises ParameterError, CoordinationError."""
        return self._directory.route(model).dense_shard(table)

    def contribute(
        self,
        model: str,
        seat: Seat,
        step: int,
        push: StepPush | None,
        *,
        late: Literal["drop", "again"] = "again",
        shared: Parts | None = None,
        shards: Collection[int] | None = None,
        incarnations: Mapping[int, int] | None = None,
        digest: bool = False,
        more: bool = False,
        wait_ms: int = WAIT_MS,
    ) -> Contributed:
        """Add ``push`` (None: nothing) to ``step`` on every server of ``shards`` (None: all), and wait until
        they are whole, at most ``wait_ms`` or so. ``shared``: gradients of the step as a whole.

        The same contribution may be made again, whatever became of it. Raises IncarnationChanged where a
        server is not the process in ``incarnations`` (by shard), and what every call raises.
        """
        asked = _Asked(
            model, seat, step, push, late, shared or {}, shards, incarnations or {}, digest, more, wait_ms
        )
        return self._routed("contribute", model, lambda route: _contribute(route, asked))

    def push_apart(
        self,
        model: str,
        push: StepPush,
        *,
        incarnations: Mapping[int, int] | None = None,
        bound: Bound | None = None,
    ) -> dict[int, PushReply]:
        """``ParameterClient.push``, to those shards alone that ``push.predecessors`` name. The parts must have
        no key of another shard."""
        return self._routed("push", model, lambda route: _push_apart(route, push, incarnations or {}, bound))

    def attend(self, model: str, seat: Seat, step: int, shards: Collection[int] | None = None) -> Attendance:
        """Take part from ``step`` on (0: the open one; ``ABSTAIN``: not until further notice), on the servers
        of ``shards`` (None: all)."""

        def plan(route: Route) -> Operation[Attendance]:
            body = wire.pack(steps.AttendRequest(model, seat.wire(), step))
            servers = _servers(route, range(route.map.shards) if shards is None else shards)
            return Operation("attend", dict.fromkeys(servers, Outgoing(steps.ATTEND, body)), _attended)

        return self._routed("attend", model, plan)

    def dense_state(self, model: str, seat: Seat, table: str) -> DenseState | None:
        """The dense ``table`` with its optimiser's state, after all steps of older generations; None: the
        group has changed."""

        def plan(route: Route) -> Operation[DenseState | None]:
            server = route.map.servers[route.dense_shard(table)]
            body = wire.pack(steps.DenseStateRequest(model, seat.wire(), table))
            request = {server: Outgoing(steps.DENSE_STATE, body)}
            return Operation("dense-state", request, lambda replies: _dense_state(server, replies))

        return self._routed("dense-state", model, plan)


@dataclass(frozen=True, slots=True)
class _Asked:
    model: str
    seat: Seat
    step: int
    push: StepPush | None
    late: Literal["drop", "again"]
    shared: Parts
    shards: Collection[int] | None
    incarnations: Mapping[int, int]
    digest: bool
    more: bool
    wait_ms: int


def _servers(route: Route, shards: Collection[int]) -> tuple[str, ...]:
    return tuple(sorted({route.map.servers[shard] for shard in shards}))


def _contribute(route: Route, asked: _Asked) -> Operation[Contributed]:
    push = asked.push
    named = set() if push is None else set(push.predecessors)
    parts, arrays = plan_push(route, {} if push is None else push.parts)
    shared_parts, shared_arrays = plan_push(route, asked.shared)
    servers = _servers(route, range(route.map.shards) if asked.shards is None else asked.shards)
    requests: dict[str, Outgoing] = {}
    expected: dict[str, int] = {}
    for server in servers:
        shards = [shard for shard in route.map.owned_by(server) if shard in named]
        expected[server] = next(
            (asked.incarnations[s] for s in route.map.owned_by(server) if s in asked.incarnations), 0
        )
        own: wire.PushRequest | None = None
        own_arrays: list[Array] = []
        if push is not None and shards:
            own = _push_request(route, push, shards, parts[server])
            own_arrays = arrays[server]
        request = steps.ContributeRequest(
            asked.model,
            asked.seat.wire(),
            asked.step,
            own,
            shared_parts[server],
            asked.late,
            asked.wait_ms,
            expected[server],
            asked.digest,
            asked.more,
        )
        body = wire.pack(request)
        requests[server] = Outgoing(steps.CONTRIBUTE, body, (*own_arrays, *shared_arrays[server]))
    return Operation("contribute", requests, _contributed, expected, patient=True)


def _push_apart(
    route: Route, push: StepPush, incarnations: Mapping[int, int], bound: Bound | None
) -> Operation[dict[int, PushReply]]:
    parts, arrays = plan_push(route, push.parts)
    requests: dict[str, Outgoing] = {}
    expected: dict[str, int] = {}
    for server in _servers(route, push.predecessors):
        shards = [shard for shard in route.map.owned_by(server) if shard in push.predecessors]
        request = _push_request(route, push, shards, parts[server])
        request.incarnation = expected[server] = incarnations.get(shards[0], 0)
        if bound is not None:
            request.seen, request.staleness = [bound.seen[shard] for shard in shards], bound.staleness
        requests[server] = Outgoing("push", wire.pack(request), tuple(arrays[server]))
    return Operation("push", requests, pushed, expected)


def _push_request(
    route: Route, push: StepPush, shards: list[int], parts: list[wire.Part]
) -> wire.PushRequest:
    mark = push.watermark
    return wire.PushRequest(
        route.declaration.model,
        route.map.epoch,
        push.source.log,
        push.source.partition,
        push.offset,
        push.accepted_at_ms,
        None if mark is None else (mark.log, mark.partition, mark.offset, mark.accepted_at_ms),
        shards,
        [push.predecessors[shard] for shard in shards],
        parts,
    )


def _contributed(replies: Replies) -> Contributed:
    found = {server: read(server, reply, steps.ContributeReply) for server, reply in replies.items()}
    verdicts = {one.verdict for one in found.values()}
    # What asks most of the member comes first: a new group, a repetition, then waiting on.
    order: tuple[steps.StepVerdict, ...] = ("regrouped", "again", "pending", "late", "taken")
    shards = {
        one.shard: StepReply(one.status, one.applied, one.durable, reply.incarnation, one.reason)
        for reply in found.values()
        for one in reply.outcomes
    }
    return Contributed(
        next((verdict for verdict in order if verdict in verdicts), "taken"),
        max((one.open for one in found.values()), default=0),
        dict(sorted(shards.items())),
        next((one.digest for one in found.values() if one.digest), ""),
        any(one.more for one in found.values()),
    )


def _attended(replies: Replies) -> Attendance:
    found = [read(server, reply, steps.AttendReply) for server, reply in replies.items()]
    if any(one.verdict == "regrouped" for one in found):
        return Attendance(None)
    return Attendance(tuple(one.open for one in found))


def _dense_state(server: str, replies: Replies) -> DenseState | None:
    reply = replies[server]
    found = read(server, reply, steps.DenseStateReply)
    if found.verdict == "regrouped":
        return None
    if [array.dtype for array in reply.arrays] != [np.uint64, np.float32, np.float32]:
        raise ParametersRefused(f"{server} answered with other arrays than keys, values and state")
    keys, values, state = reply.arrays
    return DenseState(
        keys.view(np.uint64),
        values.view(np.float32),
        state.view(np.float32),
        found.digest,
        found.incarnation,
    )
