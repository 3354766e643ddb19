"""This server among the others: which shards it leads or follows, and the traffic that follows from it.

Belongs to the server's loop. What the coordination store says comes from ``control.py``'s thread by a queue, and
what it has to write there goes back by another; so the loop never waits for the store.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from services.coordination.membership import Member
from services.coordination.shardmap import ShardMap
from services.parameter_server import messages as wire
from services.parameter_server.replication.election import Replication
from services.parameter_server.replication.following import Following, FollowingCounts, Foreign
from services.parameter_server.replication.replica import JOIN_S, Replica, Shards, copy_page
from services.parameter_server.replication.streams import Stream
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
    whole, and must not lead. ``newest_epoch``: see ``election.Vote``."""

    shard: int
    fence: int
    epoch: int
    steps: int
    restarted: bool
    newest_epoch: int = 0


@dataclass(frozen=True, slots=True)
class HandOver:
    """The shard may be led by ``to`` now, as the process of ``incarnation``: it has every step, and pushes wait."""

    shard: int
    fence: int
    to: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class JoinChain:
    """``server`` has what was acknowledged, and may stand at the chain's end."""

    shard: int
    fence: int
    server: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to ``JoinChain``, after a ``Seen`` with a map in which it was done, or will never be."""

    shard: int
    fence: int


@dataclass(frozen=True, slots=True)
class LeaveChain:
    """Steps do not pass ``servers``: they are to be taken out of the chain."""

    shard: int
    fence: int
    servers: tuple[str, ...]


Order = Seen | Stand | Joined
Report = Standing | HandOver | JoinChain | LeaveChain


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
        self._incarnations: dict[str, int] = {}
        """By server, the newest process of its name that is known."""
        self.following_counts = FollowingCounts()
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
        if isinstance(order, Joined):
            replica = self.replicas.get(order.shard)
            if replica is not None and replica.place.fence == order.fence:
                replica.end_joining(self._monotonic() + JOIN_S)
                # It may be asked for again, in the same words.
                self._reported.pop(order.shard, None)
            return
        self._seen_s, self._members = order.at_s, order.members
        self._note_members()
        if self.map is None or order.map.epoch > self.map.epoch:
            self.map = order.map
            self._take_places(order.map)
        self._connect_upstreams()

    def _note_members(self) -> None:
        for member in self._members.values():
            self._note_incarnation(member.name, member.incarnation)
        for server in [one for one in self._incarnations if one not in self._members]:
            self._forget(server)
            del self._incarnations[server]

    def _note_incarnation(self, server: str, incarnation: int) -> bool:
        """Whether that is not a process of ``server`` that another has followed since."""
        known = self._incarnations.get(server)
        if known is None or known < incarnation:
            self._forget(server)
            self._incarnations[server] = incarnation
        return known is None or known <= incarnation

    def _forget(self, server: str) -> None:
        for replica in self.replicas.values():
            replica.followers.forget(server)

    def _stand(self, order: Stand) -> None:
        replica = self.replicas.get(order.shard)
        if replica is None or replica.place.fence != order.fence:
            return
        self._shards.follow(order.shard)
        replica.vote()
        shards = self._shards.of(order.shard).values()
        epoch, steps = -1, -1
        if replica.consistent:
            epoch = max((shard.epoch for shard in shards), default=0)
            steps = sum(shard.position for shard in shards)
        newest = max((max(shard.epochs.values(), default=0) for shard in shards), default=0)
        self.reports.put(Standing(order.shard, order.fence, epoch, steps, replica.restarted, newest))

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
                    shard,
                    name,
                    self.config.replication,
                    place,
                    Stream(),
                    next(self._stream_ids),
                    moving_to,
                    found.epoch,
                )
            else:
                replica.place_at(place, moving_to, next(self._stream_ids), found.epoch)
            self._take_role(replica)

    def _take_role(self, replica: Replica) -> None:
        place = replica.place
        leads = place.leader == self.config.name and place.incarnation == self.config.incarnation
        # A leader that voted waits for what the election says, under whatever map comes before.
        if leads and not replica.leading and place.fence and replica.voted != place.fence:
            self._on_lead(place.fence)
            self._shards.lead(replica.shard, place.fence)
            replica.lead()
            self._announce(replica)
            _log.info("leading shard %d under fence %d", replica.shard, place.fence)
        elif not leads:
            self._shards.follow(replica.shard)

    def _announce(self, replica: Replica) -> None:
        """Take a step under the new fence. A majority that holds it outvotes whoever holds steps of another leader
        that few ever had, also where all that is acknowledged next is older."""
        if len(replica.place.replicas) > 1:
            for shard in self._shards.of(replica.shard).values():
                if shard.position:
                    shard.announce()

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
            following = Following(
                self.config.name,
                self.config.incarnation,
                server,
                self._shards,
                self._stream_ids,
                self.following_counts,
            )
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
                if method == "copy":
                    peer.following.refused(self.replicas)
                self._ask_later(peer)
        for call in peer.link.expired():
            peer.calls.pop(call, None)
            self._ask_later(peer)
        return bool(answers)

    def _ask_later(self, peer: _Peer) -> None:
        peer.following.expired()
        peer.not_before_s = self._monotonic() + RETRY_S

    def _ask(self, peer: _Peer) -> None:
        if self._monotonic() < peer.not_before_s:
            return
        server = peer.following.server
        replicas = [replica for replica in self.replicas.values() if replica.upstream == server]
        polls = peer.open("tail")
        if polls < 2:
            epoch = 0 if self.map is None else self.map.epoch
            poll = peer.following.poll(replicas, epoch, waiting=polls > 0)
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
            self._ask_later(peer)

    def _report(self) -> None:
        """Tell the control thread what the map should say next, once."""
        now_s = self._monotonic()
        for replica in self.replicas.values():
            replica.let_go(now_s)
            if stuck := replica.stuck_in_chain(now_s, self.config.lease_s):
                self.reports.put(LeaveChain(replica.shard, replica.place.fence, stuck))
            report: Report | None = None
            server = replica.to_join_chain(now_s)
            if server is not None:
                report = JoinChain(replica.shard, replica.place.fence, server)
            elif replica.ready_to_hand_over(now_s) and (to := replica.moving_to) is not None:
                process = self._incarnations.get(to, 0)
                report = HandOver(replica.shard, replica.place.fence, to, process)
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

    def pending(self, shards: Collection[int]) -> dict[int, tuple[int, int]]:
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
        if self.knows(request.server) and not self._note_incarnation(request.server, request.incarnation):
            return None
        for asked in request.shards:
            replica = self.replicas.get(asked.shard)
            if replica is None or request.server not in (*replica.place.replicas, replica.moving_to):
                continue
            tailed = replica.tail(asked, request.server, request.epoch, self._shards.of(asked.shard))
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
        replica = self.replicas.get(request.shard)
        shard = self._shards.of(request.shard).get(request.model)
        if shard is None or replica is None:
            raise ParametersRefused(f"shard {request.shard} of {request.model} is not here")
        if request.model in replica.unsettled or replica.to_copy:
            raise ParametersRefused(f"shard {request.shard} of {request.model} is being copied itself")
        replica.being_copied(shard.nbytes, self._monotonic())
        record, cursor = copy_page(shard, request.cursor)
        header, arrays = to_parts(record)
        return wire.CopyReply(header, cursor, shard.position, replica.stream_id), tuple(arrays)
