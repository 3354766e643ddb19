"""This server among the others: which shards it leads or follows, and the traffic that follows from it.

Belongs to the server's loop. What the coordination store says comes from ``control.py``'s thread by a queue, and
what it has to write there goes back by another; so the loop never waits for the store.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from services.coordination.membership import Member
from services.coordination.shardmap import Place, ShardMap
from services.parameter_server import messages as wire
from services.parameter_server.election import Replication
from services.parameter_server.following import Following, Foreign
from services.parameter_server.replica import Replica, Shards, copy_page
from services.parameter_server.replication import Stream
from services.parameter_server.types import ParametersRefused
from services.rpc.calls import Outgoing
from services.rpc.codec import Array, Failure, Reply
from services.rpc.errors import RpcError
from sync.records import Delta
from sync.wire import to_parts

POLL_TIMEOUT_S: Final = 1.0
"""Polls wait half a second at the other server: one that was lost with its connection is made again soon."""
PAGE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 0.1
"""Pause after a server did not answer as it should."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the coordination store said at ``at_s`` (monotonic): the map, and the parameter servers there are."""

    map: ShardMap
    members: Mapping[str, Member]
    at_s: float


@dataclass(frozen=True, slots=True)
class Stand:
    """An election is on for a shard whose leader had ``fence``: stop following it, and say how far you are."""

    shard: int
    fence: int


@dataclass(frozen=True, slots=True)
class Standing:
    """The answer to ``Stand``. ``epoch`` of the newest step, ``steps`` over all models; -1: what is here is not
    whole, and must not lead."""

    shard: int
    fence: int
    epoch: int
    steps: int
    restarted: bool


@dataclass(frozen=True, slots=True)
class HandOver:
    """The shard may be led by ``to`` now: it has every step, and pushes wait."""

    shard: int
    fence: int
    to: str


@dataclass(frozen=True, slots=True)
class JoinChain:
    """``server`` is in step and may stand at the chain's end."""

    shard: int
    fence: int
    server: str


Order = Seen | Stand
Report = Standing | HandOver | JoinChain


class Connection(Protocol):
    """What asks another server without waiting (``services.rpc.link.Link`` provides it)."""

    address: str

    def ask(self, outgoing: Outgoing, timeout_s: float) -> int: ...

    def receive(self) -> list[tuple[int, Reply | Failure]]: ...

    def expired(self) -> list[int]: ...


@dataclass(slots=True)
class _Peer:
    following: Following
    link: Connection
    calls: dict[int, str] = field(default_factory=dict)
    """By number of the call: tail or copy."""
    not_before_s: float = 0.0

    def open(self, method: str) -> int:
        return sum(1 for asked in self.calls.values() if asked == method)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``lease_s``: without a word from the coordination store for so long, a replicated shard takes no pushes, as
    another may lead it by then."""

    name: str
    incarnation: int
    replication: Replication
    lease_s: float


class Links(Protocol):
    """Makes and ends connections (``RpcServer`` does, with its security)."""

    def connect(self, address: str) -> Connection: ...

    def disconnect(self, connection: Connection) -> None: ...


class Cluster:
    """``on_lead``: told of every fence that this server begins to lead under, before it writes anything."""

    def __init__(
        self,
        config: ClusterConfig,
        shards: Shards,
        links: Links,
        on_lead: Callable[[int], None] = lambda fence: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.replicas: dict[int, Replica] = {}
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.map: ShardMap | None = None
        self._shards, self._links, self._on_lead, self._monotonic = shards, links, on_lead, monotonic
        self._members: Mapping[str, Member] = {}
        self._seen_s = monotonic()
        self._peers: dict[str, _Peer] = {}
        self._reported: dict[int, Report] = {}
        # Never used before by any process of this name: what others know of an earlier one must not fit.
        self._stream_ids = itertools.count(config.incarnation << 24 | 1)

    @property
    def in_order(self) -> bool:
        """Whether this server has found its place: every shard that it holds has a leader."""
        return self.map is not None and all(
            replica.leading or (replica.place.fence and replica.upstream in self._members)
            for replica in self.replicas.values()
        )

    @property
    def followings(self) -> Iterator[Following]:
        """What is asked of each server whose shards are followed here."""
        return (peer.following for peer in self._peers.values())

    def turn(self) -> bool:
        """Follow what the store said, take in what other servers sent, and ask for more. Whether anything
        happened."""
        worked = False
        with suppress(queue.Empty):
            while True:
                self._follow_order(self.orders.get_nowait())
                worked = True
        for peer in list(self._peers.values()):
            worked = self._receive(peer) or worked
            self._ask(peer)
        self._report()
        return worked

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            self._links.disconnect(peer.link)

    def _follow_order(self, order: Order) -> None:
        if isinstance(order, Stand):
            self._stand(order)
            return
        self._seen_s, self._members = order.at_s, order.members
        if self.map is None or order.map.epoch > self.map.epoch:
            self.map = order.map
            self._take_places(order.map)
        self._connect_upstreams()

    def _stand(self, order: Stand) -> None:
        replica = self.replicas.get(order.shard)
        if replica is None or replica.place.fence != order.fence:
            return
        self._shards.follow(order.shard)
        replica.vote()
        shards = self._shards.of(order.shard).values()
        epoch, steps = -1, -1
        if replica.whole:
            epoch = max((shard.epoch for shard in shards), default=0)
            steps = sum(shard.position for shard in shards)
        self.reports.put(Standing(order.shard, order.fence, epoch, steps, replica.restarted))

    def _take_places(self, found: ShardMap) -> None:
        name = self.config.name
        mine = found.held_by(name)
        for shard in [one for one in self.replicas if one not in mine]:
            _log.info("shard %d is no longer held here", shard)
            del self.replicas[shard]
            self._shards.drop(shard)
        for shard in mine:
            place, moving_to = found.places[shard], found.moves.get(shard)
            replica = self.replicas.get(shard)
            if replica is None:
                replica = self.replicas[shard] = Replica(
                    shard, name, self.config.replication, place, Stream(), next(self._stream_ids), moving_to
                )
            else:
                replica.place_at(place, moving_to, next(self._stream_ids))
            self._take_role(replica)

    def _take_role(self, replica: Replica) -> None:
        place = replica.place
        leads = place.leader == self.config.name and place.incarnation == self.config.incarnation
        if leads and not replica.leading and place.fence:
            self._on_lead(place.fence)
            self._shards.lead(replica.shard, place.fence)
            replica.leading = True
            _log.info("leading shard %d under fence %d", replica.shard, place.fence)
        elif not leads:
            self._shards.follow(replica.shard)

    def _connect_upstreams(self) -> None:
        wanted = {one for replica in self.replicas.values() if (one := replica.upstream) is not None}
        for server in [one for one in self._peers if one not in wanted or one not in self._members]:
            self._links.disconnect(self._peers.pop(server).link)
        for server in wanted:
            member = self._members.get(server)
            if member is None:
                continue
            peer = self._peers.get(server)
            if peer is not None and peer.link.address == member.address:
                continue
            if peer is not None:
                self._links.disconnect(peer.link)
            following = Following(self.config.name, server, self._shards, self._stream_ids)
            self._peers[server] = _Peer(following, self._links.connect(member.address))

    def _receive(self, peer: _Peer) -> bool:
        answers = peer.link.receive()
        for call, answer in answers:
            method = peer.calls.pop(call, "")
            try:
                if isinstance(answer, Failure):
                    raise ParametersRefused(f"{answer.code}: {answer.message}")
                if method == "tail":
                    peer.following.tailed(answer, self.replicas)
                else:
                    peer.following.paged(answer, self.replicas)
            except (*Foreign, msgspec.DecodeError) as error:
                _log.warning("following %s: %s", peer.following.server, error)
                self._start_over(peer)
        for call in peer.link.expired():
            peer.calls.pop(call, None)
            self._start_over(peer)
        return bool(answers)

    def _start_over(self, peer: _Peer) -> None:
        peer.following.failed()
        peer.not_before_s = self._monotonic() + RETRY_S

    def _ask(self, peer: _Peer) -> None:
        if self._monotonic() < peer.not_before_s:
            return
        server = peer.following.server
        replicas = [replica for replica in self.replicas.values() if replica.upstream == server]
        polls = peer.open("tail")
        if polls < 2:
            poll = peer.following.poll(replicas, waiting=polls > 0)
            self._send(peer, "tail", poll, POLL_TIMEOUT_S)
        if not peer.open("copy"):
            self._send(peer, "copy", peer.following.page(replicas), PAGE_TIMEOUT_S)

    def _send(self, peer: _Peer, method: str, outgoing: Outgoing | None, timeout_s: float) -> None:
        if outgoing is None:
            return
        try:
            peer.calls[peer.link.ask(outgoing, timeout_s)] = method
        except RpcError as error:
            _log.warning("following %s: %s", peer.following.server, error)
            self._start_over(peer)

    def _report(self) -> None:
        """Tell the control thread what the map should say next, once."""
        for replica in self.replicas.values():
            report: Report | None = None
            if replica.ready_to_hand_over(self._monotonic()) and replica.moving_to is not None:
                report = HandOver(replica.shard, replica.place.fence, replica.moving_to)
            elif (server := replica.to_join_chain()) is not None:
                report = JoinChain(replica.shard, replica.place.fence, server)
            if report is not None and self._reported.get(replica.shard) != report:
                self.reports.put(report)
            if report is None:
                self._reported.pop(replica.shard, None)
            else:
                self._reported[replica.shard] = report

    def took(self, model: str, shard: int, delta: Delta) -> None:
        """A shard that is led here took a step."""
        replica = self.replicas.get(shard)
        if replica is not None:
            replica.took(model, delta)

    def takes_pushes(self, shard: int) -> str:
        """An empty text, or why a shard that is led here takes none now."""
        replica = self.replicas.get(shard)
        if replica is None:
            return ""
        if replica.held_back:
            return f"shard {shard} is about to be led by {replica.moving_to}"
        quiet_s = self._monotonic() - self._seen_s
        if len(replica.place.replicas) > 1 and quiet_s > self.config.lease_s:
            return f"nothing was heard of the coordination store for {quiet_s:.1f} s"
        return ""

    def pending(self, shards: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Of ``shards``, those whose newest step is not acknowledged yet: (stream, number) to wait for."""
        return {
            shard: (replica.stream_id, replica.stream.number)
            for shard in shards
            if (replica := self.replicas.get(shard)) is not None
            and replica.acknowledged < replica.stream.number
        }

    def settled(self, pending: Mapping[int, tuple[int, int]]) -> bool | None:
        """Whether all that was ``pending`` is acknowledged; None where it cannot be any more, as the shard has
        another leader."""
        whole = True
        for shard, (stream_id, number) in pending.items():
            replica = self.replicas.get(shard)
            if replica is None or not replica.leading or replica.stream_id != stream_id:
                return None
            whole = whole and replica.acknowledged >= number
        return whole

    def tail(self, request: wire.TailRequest) -> tuple[wire.TailReply, tuple[Array, ...]] | None:
        """What the asking server does not have yet, or None where it has everything. Shards that it has no part in
        are passed over: only replicas count, and are kept in mind."""
        found: list[wire.TailedShard] = []
        arrays: list[Array] = []
        for asked in request.shards:
            replica = self.replicas.get(asked.shard)
            if replica is None or request.server not in (*replica.place.replicas, replica.moving_to):
                continue
            tailed = replica.tail(asked, request.server, self._shards.of(asked.shard))
            if tailed is not None:
                found.append(tailed[0])
                arrays += tailed[1]
        return (wire.TailReply(found), tuple(arrays)) if found else None

    def knows(self, server: str) -> bool:
        """Whether ``server`` has a part in a shard that is here."""
        return any(
            server in (*replica.place.replicas, replica.moving_to) for replica in self.replicas.values()
        )

    def copy(self, request: wire.CopyRequest) -> tuple[wire.CopyReply, tuple[Array, ...]]:
        """A piece of a shard. Raises ParametersRefused, BadShape."""
        shard = self._shards.of(request.shard).get(request.model)
        if shard is None:
            raise ParametersRefused(f"shard {request.shard} of {request.model} is not here")
        record, cursor = copy_page(shard, request.cursor)
        header, arrays = to_parts(record)
        return wire.CopyReply(header, cursor, shard.position), tuple(arrays)


def describe_place(place: Place) -> str:
    """For people: who leads, and who follows."""
    others = [server for server in place.replicas if server != place.leader]
    return place.leader + (f" ({', '.join(others)})" if others else "")
