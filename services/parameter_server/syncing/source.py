"""The source's end: pulls of other regions are parked until there is a batch for them, which then leaves as soon as
this region's own replicas hold what it tells. So no region ever has a step that a fail-over here loses.

Used by the server's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec
import numpy as np

from services.parameter_server import messages as wire
from services.parameter_server.acknowledging import Acknowledging
from services.parameter_server.declarations import Declaration, encode_declaration
from services.parameter_server.handlers import Rejected, guarded
from services.parameter_server.host import Host
from services.parameter_server.syncing.messages import (
    LARGEST_BYTES,
    MAX_NAME,
    MAX_PART_BYTES,
    OTHER_SHARDS,
    REST,
    SAME_NUMBER,
    WHOLE_BYTES,
    RestReply,
    RestRequest,
    SyncReply,
    SyncRequest,
    pull_of,
    reply_of,
)
from services.rpc.codec import Array
from services.rpc.server import BUSY, Call
from sync.errors import RecordDamaged
from sync.exchange import Batch, FeedConfig, Feeds, ShardName
from sync.exchange.feed import MAX_PULLS
from sync.exchange.feeds import MAX_PULLERS
from sync.exchange.messages import MAX_ENTRIES
from sync.quantise import Precision, value_bytes
from sync.replica import Replica

_log = logging.getLogger(__name__)
SILENT_S: Final = 10.0
"""Who pulls every second and was not heard for so long is gone."""
SWEEP_S: Final = 1.0
MAX_COALESCE_S: Final = 10.0
VERSIONED_BYTES: Final = 20
"""A key and its version."""
MAX_PULL_BYTES: Final = 2 * 2**20
MAX_SHARDS: Final = 1_048_576
"""Shards, over all models, that one stream may speak of."""


class Clock(Protocol):
    """The server's clocks."""

    def monotonic(self) -> float: ...

    def physical_us(self) -> int: ...


@dataclass(slots=True)
class Peer:
    """One puller. ``told``: the models that it knows, each with the digest of its declaration; ``clock_ahead_s``: by
    how much its clock is ahead of ours, less what a pull takes on its way."""

    name: str
    region: str
    stream: int
    precision: Precision
    told: dict[str, str]
    heard_s: float
    clock_ahead_s: float | None = None
    bytes_total: int = 0
    batches_total: int = 0
    named: set[ShardName] = field(default_factory=set)
    """Shards that were ever wanted, or not any more: of each the feed keeps something."""
    rest: dict[int, Array] = field(default_factory=dict)
    """By number of a batch that is too large to be sent at once, its bytes until the last were fetched."""
    parked: dict[int, Call] = field(default_factory=dict)


@dataclass(slots=True)
class SourceCounts:
    """``refused_total``: pulls that made no sense, or came from a region that does not fit this one. ``late_total``:
    batches that nobody waited for any more."""

    refused_total: int = 0
    late_total: int = 0
    bytes_total: int = 0


class Source:
    """Feeds the shards that ``host`` leads. ``answers`` sends a batch once its steps are acknowledged."""

    def __init__(
        self,
        host: Host,
        answers: Acknowledging,
        clock: Clock,
        region: str = "",
        member_timeout_s: float = 3_600.0,
    ) -> None:
        self.counts = SourceCounts()
        self.peers: dict[str, Peer] = {}
        self.feeds = Feeds(lambda: self._fed, FeedConfig(), member_timeout_s)
        self._host, self._answers, self._clock, self._region = host, answers, clock, region
        self._fed: Mapping[ShardName, Replica] = {}
        self._next_sweep_s = 0.0
        self._told = 0, 0

    def take(self, call: Call) -> None:
        """Hear a pull; it is answered later. Raises Rejected."""
        now = self._clock.monotonic()
        try:
            if len(call.request.body) > MAX_PULL_BYTES:
                raise RecordDamaged(
                    f"a pull of {len(call.request.body)} bytes; it has at most {MAX_PULL_BYTES}"
                )
            request = wire.unpack(call.request.body, SyncRequest)
            if request.shards != self._host.config.shards:
                raise Rejected(
                    OTHER_SHARDS,
                    f"this region has {self._host.config.shards} shards and region {request.region[:64]} "
                    f"{request.shards}: set parameters.shards alike, and begin the new region with empty folders",
                )
            if request.region_number == self._host.config.region and request.region != self._region:
                raise Rejected(
                    SAME_NUMBER,
                    f"regions {self._region} and {request.region[:64]} both have region.number = "
                    f"{request.region_number}: give each its own, and begin the new region with empty folders",
                )
            pull = pull_of(request)
            if pull.entries > MAX_ENTRIES:
                raise RecordDamaged(f"vectors of {pull.entries} writers; a pull has at most {MAX_ENTRIES}")
        except (Rejected, RecordDamaged, msgspec.DecodeError) as error:
            self.counts.refused_total += 1
            if isinstance(error, Rejected):
                raise
            raise Rejected(wire.REFUSED, str(error)) from error
        self._look()
        pull = replace(pull, budget=self._budget(pull.budget, request.precision))
        ended = self.feeds.take(request.puller, pull, now, _config(request))
        peer = self.peers.get(request.puller)
        if ended is None and (peer is None or peer.stream != pull.stream):
            peer = self._new_peer(request, now)
        if ended is not None or peer is None:
            self._send(call, Batch(pull.stream, pull.number, ended=True))
            return
        peer.heard_s = now
        peer.named.update(want.shard for want in pull.wants)
        peer.named.update(pull.unwanted)
        if request.clock_us:
            peer.clock_ahead_s = (request.clock_us - self._clock.physical_us()) / 1e6
        if len(peer.parked) >= MAX_PULLS or len(peer.named) > MAX_SHARDS:
            self.feeds.drop(peer.name)
            del self.peers[peer.name]
            raise Rejected(BUSY, "you wait for too much at once")
        peer.parked[pull.number] = call

    def _budget(self, wire_bytes: int, precision: Precision) -> int:
        """What ``wire_bytes`` are where values are float32, as feeds count: for rows of the widest table. Else a puller
        would never have all that it asked for, and take its link for one without a limit and itself for level."""
        tables = (spec for model in self._host.models.values() for spec in model.declaration.tables)
        dim = max((spec.dim for spec in tables if spec.placement == "hashed"), default=0)
        exact, narrow = (VERSIONED_BYTES + value_bytes(dim, one) for one in ("float32", precision))
        return max(wire_bytes, wire_bytes * exact // narrow)

    def _new_peer(self, request: SyncRequest, now_s: float) -> Peer:
        before = self.peers.get(request.puller)
        peer = self.peers[request.puller] = Peer(
            request.puller,
            request.region[:MAX_NAME],
            request.stream,
            request.precision,
            dict(request.models),
            now_s,
        )
        if before is not None:
            peer.bytes_total, peer.batches_total = before.bytes_total, before.batches_total
        return peer

    def take_rest(self, call: Call) -> None:
        """Answer with a part of a batch that was too large. Raises Rejected."""
        request = guarded(lambda: wire.unpack(call.request.body, RestRequest), REST)
        peer = self.peers.get(request.puller)
        found = None if peer is None or peer.stream != request.stream else peer.rest.get(request.number)
        if peer is None or found is None or not 0 <= request.start < len(found):
            raise Rejected(wire.REFUSED, "there is no such part of a batch here")
        part = found[request.start : request.start + min(max(request.size, 1), MAX_PART_BYTES)]
        if request.start + len(part) == len(found):
            del peer.rest[request.number]
        peer.heard_s = self._clock.monotonic()
        peer.bytes_total += part.nbytes
        self.counts.bytes_total += part.nbytes
        self._answers.answer(call, wire.pack(RestReply()), (part,), ())

    def turn(self) -> bool:
        """Answer what can be answered now. Whether anything was."""
        now = self._clock.monotonic()
        if self._answers.waiting:
            self._answers.release(now)
        if not self.peers:
            return False
        self._look()
        answered = False
        for puller, batch in self.feeds.ready(now, self._clock.physical_us()):
            answered = True
            peer = self.peers[puller]
            call = peer.parked.pop(batch.number, None)
            if call is None or call.deadline_s <= now:
                self.counts.late_total += 1
            else:
                self._send(call, batch, peer)
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_S
            self._sweep(now)
        return answered

    def next_s(self, at_most_s: float) -> float:
        """Seconds until ``turn`` has something to do although nothing comes in, but not more than ``at_most_s``."""
        if not self.peers:
            return at_most_s
        now = self._clock.monotonic()
        due = self.feeds.due_s(now)
        return at_most_s if due is None else max(0.0, min(due - now, at_most_s))

    def _look(self) -> None:
        """Note which shards can be fed now."""
        self._fed = {
            (name, shard): held.shard
            for name, model in self._host.models.items()
            for shard, held in self._host.led(model)
            if held.whole
        }

    def _send(self, call: Call, batch: Batch, peer: Peer | None = None) -> None:
        declarations: list[bytes] = []
        if peer is not None:
            declarations = [encode_declaration(one) for one in self._untold(peer)]
        precision: Precision = "float32" if peer is None else peer.precision
        written = self._host.written if batch.number == 1 else None
        body, arrays = reply_of(batch, precision, declarations, self._region, written)
        if peer is not None and sum(array.nbytes for array in arrays) > WHOLE_BYTES:
            peer.rest[batch.number] = np.concatenate(arrays)
            while sum(map(len, peer.rest.values())) > LARGEST_BYTES and len(peer.rest) > 1:
                # A puller takes no more than that at once: it has given this one up, or never fetches.
                del peer.rest[min(peer.rest)]
            reply = wire.unpack(body, SyncReply)
            reply.lengths = [array.nbytes for array in arrays]
            body, arrays = wire.pack(reply), ()
        size = len(body) + sum(array.nbytes for array in arrays)
        self.counts.bytes_total += size
        if peer is not None:
            peer.bytes_total += size
            peer.batches_total += 1
        self._answers.answer(call, body, arrays, {piece.shard[1] for piece in batch.pieces})

    def _untold(self, peer: Peer) -> list[Declaration]:
        """The models of which the puller has no declaration, or another."""
        models = self._host.models
        untold = [one.declaration for name, one in models.items() if peer.told.get(name) != one.digest]
        for declaration in untold:
            peer.told[declaration.model] = models[declaration.model].digest
        return untold

    def _sweep(self, now_s: float) -> None:
        """Forget calls that nobody waits for any more, and pullers that are gone."""
        for peer in list(self.peers.values()):
            for number in [n for n, call in peer.parked.items() if call.deadline_s <= now_s]:
                del peer.parked[number]
            if not peer.parked and now_s - peer.heard_s > SILENT_S:
                self.feeds.drop(peer.name)
                del self.peers[peer.name]
        counts = self.feeds.counts
        if self._told != (told := (counts.forgotten_total, counts.turned_away_total)):
            _log.warning(
                "more than %d servers of other regions pulled lately: %d that are gone were forgotten so far, and get "
                "everything again if they come back; %d were turned away",
                MAX_PULLERS, *told,
            )  # fmt: skip
            self._told = told


def _config(request: SyncRequest) -> FeedConfig:
    return FeedConfig(
        min(request.coalesce_s, MAX_COALESCE_S),
        request.priority_share,
        request.max_staleness_s,
        request.state,
    )
