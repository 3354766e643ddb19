"""Pushes to shards that another region writes: they go there, and the answer is the owner's. So do declarations.

A push may be for several shards, of which some are written here and the others are led by several servers there. Each
server gets its share; what all of them answer goes back as one answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import numpy as np

from services.parameter_server import messages as wire
from services.parameter_server.acknowledging import Answers
from services.parameter_server.declarations import Declaration, decode_declaration
from services.parameter_server.handlers import Rejected, guarded
from services.parameter_server.host import Host
from services.parameter_server.syncing.upstream import Upstream
from services.rpc.calls import Outgoing
from services.rpc.codec import Array, Failure, Reply
from services.rpc.errors import RpcError
from services.rpc.server import BUSY, Call

FORWARDED: Final = frozenset(("push", "applied", "publish", "declare"))
MAX_FORWARDED: Final = 1_024
"""Calls that wait for other regions at most."""
TELL_S: Final = 2.0
"""How long is waited for what nobody waits for."""
MAX_HOPS: Final = 4
"""A push that passed so many regions goes round in circles: none of them writes the shard."""

OF_THE_REST: Final = 0.75
"""Which part of what a caller waits goes to an address that may be away, where an answer of another will do."""
_log = logging.getLogger(__name__)

Gather = Callable[[Sequence[bytes]], wire.Wire]


def split_push(
    request: wire.PushRequest, arrays: Sequence[Array], groups: Iterable[Collection[int]]
) -> list[tuple[wire.PushRequest, tuple[Array, ...]]]:
    """The push of each group of shards: what the request says of these, without the bound on staleness, which counts
    pushes here. Raises Rejected for what is no push."""
    if len(arrays) != 2 * len(request.parts) or len(request.shards) != len(request.predecessors):
        raise Rejected(wire.REFUSED, f"{len(request.parts)} parts, {len(arrays)} arrays")
    return [_share(request, arrays, frozenset(group)) for group in groups]


def _share(
    request: wire.PushRequest, arrays: Sequence[Array], group: frozenset[int]
) -> tuple[wire.PushRequest, tuple[Array, ...]]:
    parts: list[wire.Part] = []
    found: list[Array] = []
    for number, part in enumerate(request.parts):
        pair = arrays[2 * number : 2 * number + 2]
        ends = np.cumsum(np.asarray([0, *part.counts], np.int64))
        total = int(ends[-1])
        fits = len(part.shards) == len(part.counts) and min(part.counts, default=0) >= 0
        if not fits or any(a.ndim < 1 or len(a) != total for a in pair):
            raise Rejected(wire.REFUSED, f"table {part.table}: arrays are not as long as their counts say")
        kept = [at for at, shard in enumerate(part.shards) if shard in group]
        if not kept:
            continue
        parts.append(
            wire.Part(part.table, [part.shards[at] for at in kept], [part.counts[at] for at in kept])
        )
        found += [np.concatenate([array[ends[at] : ends[at + 1]] for at in kept]) for array in pair]
    named = [at for at, shard in enumerate(request.shards) if shard in group]
    share = msgspec.structs.replace(
        request,
        shards=[request.shards[at] for at in named],
        predecessors=[request.predecessors[at] for at in named],
        parts=parts,
        incarnation=0,
        seen=[],
        hops=request.hops + 1,
    )
    return share, tuple(found)


@dataclass(slots=True)
class _Forwarded:
    """A call whose shares are on their way. ``shards``: those that are written here and took their share.
    ``one_suffices``: addresses that are away do not count as long as another answers."""

    call: Call
    waiting: int
    gather: Gather
    shards: Collection[int] = ()
    answers: list[bytes] = field(default_factory=list)
    one_suffices: bool = False
    done: bool = False


@dataclass(slots=True)
class ForwardCounts:
    """``forwarded_total``: calls that went to other regions; ``failed_total``: those that could not be answered."""

    forwarded_total: int = 0
    failed_total: int = 0


class Forwarding:
    """``pushed`` sends answers once what they tell of the shards here is acknowledged. ``learn``: takes over what was
    declared in another region than ``region``, this one."""

    def __init__(
        self,
        host: Host,
        upstreams: Sequence[Upstream],
        pushed: Callable[[Call, bytes, Collection[int]], None],
        answers: Answers,
        monotonic: Callable[[], float],
        region: str,
        learn: Callable[[Declaration], None],
    ) -> None:
        self.counts = ForwardCounts()
        self._host, self._upstreams, self._pushed = host, upstreams, pushed
        self._answers, self._monotonic = answers, monotonic
        self._region, self._learn = region, learn
        self._waiting = 0
        self._incarnations: dict[tuple[str, int], tuple[str, int]] = {}
        """By model and shard, who answered for it last: address and incarnation."""

    def owner_of(self, model: str, shard: int) -> str:
        """The region that serves the shard here, in words."""
        upstream = self._serving(model, shard)
        return "another region" if upstream is None or not upstream.region else f"region {upstream.region}"

    def take(self, call: Call, refuse_local: Callable[[], str]) -> bool:
        """Forward a call that concerns another region's shards; False: it does not. Raises Rejected."""
        method = call.request.method
        if method not in FORWARDED or (self._host.config.written is None and method != "declare"):
            return False
        return guarded(lambda: self._take(call, refuse_local), call.request.method)

    def _take(self, call: Call, refuse_local: Callable[[], str]) -> bool:
        body = call.request.body
        if call.request.method == "push":
            return self._push(call, wire.unpack(body, wire.PushRequest), refuse_local)
        if call.request.method == "applied":
            return self._applied(call, wire.unpack(body, wire.AppliedRequest))
        if call.request.method == "declare":
            return self._declare(call, wire.unpack(body, wire.DeclareRequest))
        return self._publish(call, wire.unpack(body, wire.PublishRequest))

    def _push(self, call: Call, request: wire.PushRequest, refuse_local: Callable[[], str]) -> bool:
        foreign = [shard for shard in request.shards if not self._host.writes(shard)]
        if not foreign:
            return False
        self._host.require_incarnation(request.incarnation)
        targets = self._targets(request.model, foreign, request.hops)
        own = [shard for shard in request.shards if self._host.writes(shard)]
        mine, *shares = split_push(request, call.request.arrays, [own, *targets.values()])
        outcomes: list[wire.ShardOutcome] = []
        if own:
            if why := refuse_local():
                raise Rejected(BUSY, why)
            here = msgspec.structs.replace(mine[0], seen=_of(own, request.shards, request.seen))
            answer, _ = self._host.push(here, mine[1])
            assert isinstance(answer, wire.PushResponse)
            outcomes += answer.outcomes

        def gather(bodies: Sequence[bytes]) -> wire.Wire:
            for address, body in zip(targets, bodies, strict=True):
                reply = wire.unpack(body, wire.PushResponse)
                self._note(request.model, targets[address], (address, reply.incarnation))
                outcomes.extend(reply.outcomes)
            order = {shard: at for at, shard in enumerate(request.shards)}
            outcomes.sort(key=lambda one: order.get(one.shard, len(order)))
            return wire.PushResponse(self._host.incarnation, outcomes)

        outgoing = [Outgoing("push", wire.pack(share), arrays) for share, arrays in shares]
        self._send(call, dict(zip(targets, outgoing, strict=True)), gather, own)
        return True

    def _applied(self, call: Call, request: wire.AppliedRequest) -> bool:
        foreign = [shard for shard in request.shards if not self._host.writes(shard)]
        if not foreign:
            return False
        targets = self._targets(request.model, foreign, request.hops)
        own = [shard for shard in request.shards if self._host.writes(shard)]
        answer, _ = self._host.applied(msgspec.structs.replace(request, shards=own))
        assert isinstance(answer, wire.AppliedReply)
        found = list(answer.shards)

        def gather(bodies: Sequence[bytes]) -> wire.Wire:
            for address, body in zip(targets, bodies, strict=True):
                reply = wire.unpack(body, wire.AppliedReply)
                self._note(request.model, targets[address], (address, reply.incarnation))
                found.extend(reply.shards)
            order = {shard: at for at, shard in enumerate(request.shards)}
            found.sort(key=lambda one: order.get(one[0], len(order)))
            return wire.AppliedReply(self._host.incarnation, found)

        asked = {
            address: Outgoing(
                "applied",
                wire.pack(msgspec.structs.replace(request, shards=sorted(shards), hops=request.hops + 1)),
            )
            for address, shards in targets.items()
        }
        self._send(call, asked, gather, ())
        return True

    def _publish(self, call: Call, request: wire.PublishRequest) -> bool:
        shard = self._host.shard_of(request.table)
        if self._host.writes(shard):
            return False
        self._host.held(self._host.model(request.model), shard)
        (address,) = self._targets(request.model, [shard], request.hops)
        asked = msgspec.structs.replace(request, hops=request.hops + 1)

        def gather(bodies: Sequence[bytes]) -> wire.Wire:
            return wire.unpack(bodies[0], wire.PublishReply)

        self._send(call, {address: Outgoing("publish", wire.pack(asked))}, gather, ())
        return True

    def _declare(self, call: Call, request: wire.DeclareRequest) -> bool:
        """Whoever writes the shards has to know a model before anybody here learns of it."""
        declaration = decode_declaration(request.declaration)
        if declaration.model in self._host.models or request.again:
            # What is declared otherwise here is refused before anybody else hears of it.
            self._host.declare(declaration)
        asked: list[Upstream] = []
        if len(self._host.written) < self._host.config.shards and len(request.via) < MAX_HOPS:
            asked = [one for one in self._upstreams if one.region not in request.via]
        if not asked or self._region in request.via:
            self._take_over(declaration, request)
            return False
        onward = wire.DeclareRequest(request.declaration, [*request.via, self._region])
        outgoing = Outgoing("declare", wire.pack(onward))
        if request.again:
            # It may be for a reader, who is not to wait for another region.
            self._tell(declaration.model, asked, outgoing)
            return False

        def gather(bodies: Sequence[bytes]) -> wire.Wire:
            for body in filter(None, bodies):
                wire.unpack(body, wire.Done)
            guarded(lambda: self._take_over(declaration, request), "declare")
            return wire.Done()

        to = {one.address: outgoing for one in asked}
        self._send(call, to, gather, (), one_suffices=True)
        return True

    def _take_over(self, declaration: Declaration, request: wire.DeclareRequest) -> None:
        if request.via:
            self._learn(declaration)
        else:
            self._host.declare(declaration)

    def _tell(self, model: str, asked: Iterable[Upstream], outgoing: Outgoing) -> None:
        """Declare it there, without waiting. Who needs it there asks for it again."""

        def told(upstream: Upstream, answer: Reply | Failure | None) -> None:
            if isinstance(answer, Failure) and answer.code != BUSY:
                _log.error("model %s cannot be declared in %s: %s", model, _called(upstream), answer.message)

        for upstream in asked:
            try:
                upstream.ask(outgoing, TELL_S, partial(told, upstream))
            except RpcError as error:
                _log.debug("model %s is not declared in %s now: %s", model, _called(upstream), error)

    def _targets(self, model: str, shards: Iterable[int], hops: int) -> dict[str, set[int]]:
        """By address, the shards that are to be asked for there. Raises Rejected."""
        if hops >= MAX_HOPS:
            raise Rejected(wire.REFUSED, f"no region on the way writes shards {sorted(shards)} (sync.writes)")
        if not self._upstreams:
            raise Rejected(
                wire.REFUSED,
                f"shards {sorted(shards)} are not written here (sync.writes), and sync.upstreams is empty",
            )
        found: dict[str, set[int]] = {}
        for shard in shards:
            upstream = self._serving(model, shard)
            if upstream is None:
                regions = ", ".join(sorted({one.region for one in self._upstreams if one.region}))
                raise Rejected(
                    BUSY, f"shard {shard} of {model} is written in {regions or 'another region'}, of which no "
                    "server in sync.upstreams serves it now",
                )  # fmt: skip
            found.setdefault(upstream.address, set()).add(shard)
        return found

    def _serving(self, model: str, shard: int) -> Upstream | None:
        return next((one for one in self._upstreams if one.serves((model, shard))), None)

    def _send(
        self,
        call: Call,
        asked: Mapping[str, Outgoing],
        gather: Gather,
        shards: Collection[int],
        *,
        one_suffices: bool = False,
    ) -> None:
        if self._waiting >= MAX_FORWARDED:
            raise Rejected(BUSY, f"{MAX_FORWARDED} calls wait for other regions already")
        forwarded = _Forwarded(call, len(asked), gather, shards, [b""] * len(asked), one_suffices)
        self._waiting += 1
        self.counts.forwarded_total += 1
        timeout_s = max(call.deadline_s - self._monotonic(), 0.001)
        if one_suffices:
            timeout_s *= OF_THE_REST
        by_address = {one.address: one for one in self._upstreams}
        for number, (address, outgoing) in enumerate(asked.items()):
            upstream = by_address[address]

            def answered(
                answer: Reply | Failure | None, number: int = number, upstream: Upstream = upstream
            ) -> None:
                self._answered(forwarded, number, upstream, answer)

            try:
                upstream.ask(outgoing, timeout_s, answered)
            except RpcError as error:
                self._answered(forwarded, number, upstream, Failure(0, BUSY, str(error)))

    def _answered(
        self, forwarded: _Forwarded, number: int, upstream: Upstream, answer: Reply | Failure | None
    ) -> None:
        if forwarded.done:
            return
        away = answer is None or (isinstance(answer, Failure) and answer.code == BUSY)
        if away and forwarded.one_suffices and (forwarded.waiting > 1 or any(forwarded.answers)):
            self._answer_came(forwarded, upstream)
            return
        if answer is None:
            self._fail(forwarded, BUSY, f"{_called(upstream)} does not answer")
            return
        if isinstance(answer, Failure):
            # Who leads the shard there now is seen soon; it is to be tried again.
            code = BUSY if answer.code == wire.NOT_MINE else answer.code
            self._fail(forwarded, code, f"{_called(upstream)}: {answer.message}")
            return
        forwarded.answers[number] = answer.body
        self._answer_came(forwarded, upstream)

    def _answer_came(self, forwarded: _Forwarded, upstream: Upstream) -> None:
        """From ``upstream``, or none will come: the last one ends the call."""
        forwarded.waiting -= 1
        if forwarded.waiting:
            return
        self._end(forwarded)
        try:
            body = wire.pack(forwarded.gather(forwarded.answers))
        except msgspec.DecodeError as error:
            self.counts.failed_total += 1
            self._answers.fail(
                forwarded.call, wire.INTERNAL, f"{_called(upstream)} answers nonsense: {error}"
            )
            return
        except Rejected as rejected:
            self.counts.failed_total += 1
            self._answers.fail(forwarded.call, rejected.code, rejected.message)
            return
        self._pushed(forwarded.call, body, forwarded.shards)

    def _fail(self, forwarded: _Forwarded, code: str, message: str) -> None:
        if not forwarded.done:
            self._end(forwarded)
            self.counts.failed_total += 1
            self._answers.fail(forwarded.call, code, message)

    def _end(self, forwarded: _Forwarded) -> None:
        forwarded.done = True
        self._waiting -= 1

    def _note(self, model: str, shards: Iterable[int], who: tuple[str, int]) -> None:
        """Where another process answers than before something may be lost: whoever pushes through this one is to
        know."""
        before = [self._incarnations.get((model, shard), who) for shard in shards]
        self._incarnations |= {(model, shard): who for shard in shards}
        if any(known != who for known in before):
            self._host.foreign_starts += 1


def _of(own: Collection[int], shards: Sequence[int], seen: Sequence[int]) -> list[int]:
    """Of what was ``seen`` of ``shards``, that of ``own``."""
    kept = set(own)
    return [one for shard, one in zip(shards, seen, strict=False) if shard in kept]


def _called(upstream: Upstream) -> str:
    return f"region {upstream.region or '?'} at {upstream.address}"
