"""The server's thread that talks to the coordination store: sees the map and the members, holds elections.

It decides nothing about rows. What it sees goes to the loop (``Cluster.orders``); what the loop wants written
comes back (``Cluster.reports``). Without the store everything stays as it is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Member, members
from services.coordination.shardmap import Place, ShardMap, change_shard_map, read_shard_map
from services.parameter_server.replication.cluster import (
    Cluster,
    ClusterConfig,
    HandOver,
    JoinChain,
    Joined,
    LeaveChain,
    Report,
    Seen,
    Stand,
    Standing,
)
from services.parameter_server.replication.election import (
    PREFIX,
    Election,
    Vote,
    elected,
    leaderless,
    vote_key,
)

SERVICE: Final = "parameter-server"
LOOK_S: Final = 0.2
"""How often the store is looked at where nothing happens; an election looks every ``HURRY_S``."""
HURRY_S: Final = 0.03
_log = logging.getLogger(__name__)


class Control:
    """Runs until ``close``. ``noted_fence``: the largest fence that this server led under, as it remembers."""

    def __init__(
        self,
        store: Coordination,
        cluster: Cluster,
        noted_fence: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._cluster, self._noted = store, cluster, noted_fence
        self._config: ClusterConfig = cluster.config
        self._monotonic = monotonic
        self._since: dict[int, tuple[int, float]] = {}
        """By shard, of which fence there has been no leader, and since when."""
        self._stood: dict[int, int] = {}
        """By shard, after which leader's fence this server was told to stand: it follows that one no more, so the
        election is to be held even if the leader is back before anybody wrote a vote down."""
        self._standing: dict[int, Standing] = {}
        self._unsure: dict[int, HandOver | JoinChain] = {}
        """By shard, what may or may not have been written: the loop waits until that is known."""
        self._ended: list[JoinChain] = []
        """Of which the loop learns the end, once it has seen a map read after it."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, and wait for it."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        failing = False
        while not self._closing.is_set():
            hurry = False
            try:
                hurry = self.look()
                failing = False
            except CoordinationError as error:
                if not failing:
                    _log.warning("the coordination store cannot be asked now: %s", error)
                failing = True
            with suppress(queue.Empty):
                self._take(self._cluster.reports.get(timeout=HURRY_S if hurry else LOOK_S))

    def look(self) -> bool:
        """Look at the store once, tell the loop, and do what is due. Whether an election is on. Raises
        CoordinationError."""
        asked_s = self._monotonic()
        ended = list(self._ended)
        found = read_shard_map(self._store)
        if found is None:
            return False
        there = {member.name: member for member in members(self._store, SERVICE)}
        own = there.get(self._config.name)
        if own is None or own.incarnation == self._config.incarnation:
            self._cluster.orders.put(Seen(found, there, asked_s))
            for report in ended:
                self._cluster.orders.put(Joined(report.shard, report.fence))
                self._ended.remove(report)
        self._mend_chains(found, there)
        self._cancel_unsure()
        self._end_moves(found)
        return self._elect(found, there)

    def _take(self, report: Report) -> None:
        if isinstance(report, Standing):
            self._standing[report.shard] = report
            return
        now: ShardMap | None = None
        try:
            now = self._write(report)
        except CoordinationError as error:
            _log.warning("the shard map cannot be changed now: %s", error)
        if isinstance(report, LeaveChain):
            return
        if isinstance(report, JoinChain) and now is not None:
            self._ended.append(report)
        elif now is None or now.places[report.shard].fence == report.fence:
            self._unsure[report.shard] = report

    def _cancel_unsure(self) -> None:
        """Give up moves and joins that could not be written. That changes the map, so a late write of them fails."""
        for shard, report in list(self._unsure.items()):

            def cancelled(
                current: ShardMap, shard: int = shard, report: HandOver | JoinChain = report
            ) -> ShardMap | None:
                place = current.places[shard]
                if place.leader != self._config.name or place.fence != report.fence:
                    return None
                if isinstance(report, JoinChain):
                    return None if report.server in place.chain else current.change({})
                moves = {other: to for other, to in current.moves.items() if other != shard}
                return current.change({}, moves)

            change_shard_map(self._store, cancelled)
            del self._unsure[shard]
            if isinstance(report, JoinChain):
                self._ended.append(report)
            else:
                _log.warning("the move of shard %d was given up; ask for it again", shard)

    def _end_moves(self, found: ShardMap) -> None:
        """Moves to this server of shards that it leads are done, however it came to lead them."""

        def ended(current: ShardMap) -> ShardMap | None:
            mine = current.owned_by(self._config.name)
            moves = {
                shard: to
                for shard, to in current.moves.items()
                if not (shard in mine and to == self._config.name and current.places[shard].fence)
            }
            return current.change({}, moves) if moves != current.moves else None

        if ended(found) is not None:
            change_shard_map(self._store, ended)

    def _elect(self, found: ShardMap, there: Mapping[str, Member]) -> bool:
        mine = [shard for shard in found.held_by(self._config.name) if self._votes_on(found, shard)]
        votes = self._votes() if mine else {}
        open_shards = [
            shard
            for shard in mine
            if leaderless(found.places[shard], there)
            or _begun(found.places[shard], votes.get(shard, ()))
            or self._stood.get(shard) == found.places[shard].fence
        ]
        # How long there has been no leader: not how long ago one was missing for a moment.
        self._since = {shard: since for shard, since in self._since.items() if shard in open_shards}
        won: dict[int, list[Vote]] = {}
        for shard in open_shards:
            place = found.places[shard]
            self._vote(shard, place)
            election = Election(place, self._config.replication, self._waited_s(shard, place))
            counted = [vote for vote in votes.get(shard, ()) if _alive(vote, there)]
            if election.winner(counted, there) == self._config.name:
                won[shard] = counted
        if won:
            self._claim(found, won)
        return bool(open_shards)

    def _votes_on(self, found: ShardMap, shard: int) -> bool:
        return self._config.name in found.places[shard].replicas

    def _votes(self) -> dict[int, list[Vote]]:
        votes: dict[int, list[Vote]] = {}
        for entry in self._store.scan(PREFIX):
            shard = entry.key.removeprefix(PREFIX).partition("/")[0]
            try:
                votes.setdefault(int(shard), []).append(msgspec.json.decode(entry.value, type=Vote))
            except (ValueError, msgspec.DecodeError) as error:
                _log.warning("the vote %s cannot be read: %s", entry.key, error)
        return votes

    def _waited_s(self, shard: int, place: Place) -> float:
        fence, since = self._since.get(shard, (-1, 0.0))
        if fence != place.fence:
            since = self._monotonic()
            self._since[shard] = (place.fence, since)
        return self._monotonic() - since

    def _vote(self, shard: int, place: Place) -> None:
        """Ask the loop how far it is, and write that down once."""
        standing = self._standing.get(shard)
        if standing is None or standing.fence != place.fence:
            self._stood[shard] = place.fence
            self._cluster.orders.put(Stand(shard, place.fence))
            return
        config = self._config
        vote = Vote(
            config.name,
            config.incarnation,
            standing.fence,
            standing.epoch,
            standing.steps,
            standing.restarted,
            standing.newest_epoch,
        )
        key, value = vote_key(shard, config.name), msgspec.json.encode(vote)
        known = self._store.get(key)
        if known is None or known.value != value:
            self._store.put(key, value)

    def _claim(self, found: ShardMap, won: Mapping[int, Sequence[Vote]]) -> None:
        """Write down that this server leads these shards, where nobody was faster."""
        name = self._config.name
        # Also where the store was lost and begun anew: fences only grow.
        counted = [vote for votes in won.values() for vote in votes]
        least = 1 + max([self._noted, *(max(vote.epoch, vote.newest_epoch) for vote in counted)])

        def claimed(current: ShardMap) -> ShardMap | None:
            epoch = max(current.epoch + 1, least)
            places = {
                shard: elected(current.places[shard], _of(name, votes), votes, epoch)
                for shard, votes in won.items()
                # Also as to the chain: who was taken out of it since may lack something.
                if current.places[shard] == found.places[shard]
            }
            return current.change(places, least_epoch=epoch) if places else None

        change_shard_map(self._store, claimed)

    def _mend_chains(self, found: ShardMap, there: Mapping[str, Member]) -> None:
        """Take servers that are gone out of the chains that this server leads, so that updates pass again."""
        config = self._config

        def mended(current: ShardMap) -> ShardMap | None:
            places = {}
            for shard in current.owned_by(config.name):
                place = current.places[shard]
                alive = tuple(server for server in place.chain if server in there)
                if place.incarnation == config.incarnation and alive != place.chain and config.name in alive:
                    places[shard] = msgspec.structs.replace(place, chain=alive)
            return current.change(places) if places else None

        if mended(found) is not None:
            change_shard_map(self._store, mended)

    def _write(self, report: HandOver | JoinChain | LeaveChain) -> ShardMap | None:
        there = {member.name: member for member in members(self._store, SERVICE)}

        def changed(current: ShardMap) -> ShardMap | None:
            place = current.places[report.shard]
            if place.fence != report.fence or place.leader != self._config.name:
                return None
            if isinstance(report, LeaveChain):
                left = tuple(server for server in place.chain if server not in report.servers)
                if left == place.chain or self._config.name not in left:
                    return None
                return current.change({report.shard: msgspec.structs.replace(place, chain=left)})
            if isinstance(report, JoinChain):
                if report.server in place.chain or report.server not in there:
                    return None
                grown = msgspec.structs.replace(place, chain=(*place.chain, report.server))
                return current.change({report.shard: grown})
            to = there.get(report.to)
            # A process of that name that was started since may lack what the one before it had.
            known = to is not None and to.incarnation == report.incarnation
            if to is None or not known or current.moves.get(report.shard) != report.to:
                return None
            moves = {shard: server for shard, server in current.moves.items() if shard != report.shard}
            moved = moved_to(place, to, current.epoch + 1)
            return current.change({report.shard: moved}, moves)

        return change_shard_map(self._store, changed)


def moved_to(place: Place, to: Member, fence: int) -> Place:
    """``place`` once the shard is led by ``to``. A server that did not hold it takes the old leader's part."""
    replicas, chain = place.replicas, place.chain
    if to.name not in replicas:
        replicas = tuple(to.name if server == place.leader else server for server in replicas)
        chain = tuple(server for server in chain if server != place.leader)
    if chain or place.chain:
        chain = (to.name, *(server for server in chain if server != to.name))
    return Place(to.name, replicas, to.incarnation, fence, chain)


def _begun(place: Place, votes: Collection[Vote]) -> bool:
    """Whether somebody voted in the election that follows the present leader. It is then to be finished: who
    voted takes nothing more from that leader, even if it comes back."""
    return any(vote.fence == place.fence for vote in votes)


def _of(server: str, votes: Sequence[Vote]) -> Vote:
    return next(vote for vote in votes if vote.server == server)


def _alive(vote: Vote, there: Mapping[str, Member]) -> bool:
    member = there.get(vote.server)
    return member is not None and member.incarnation == vote.incarnation
