"""Moves of shards between servers, as a person orders them: what is allowed, how long it takes, and a fair share.

A move is written into the shard map; the servers do the rest (``replica.py``, ``control.py``). Exceptions::

    ParameterError
    └── MoveFailed          the shard is not led by the wanted server; ``next_step`` says what can be done
        ├── MoveRefused     it was not ordered: there is no such shard or server
        ├── MoveNotNow      it was not ordered: it cannot be now, maybe later
        └── MoveUnfinished  it was not done in time, and goes on
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from services.coordination.contract import Coordination
from services.coordination.membership import Member, members
from services.coordination.shardmap import ShardMap, change_shard_map
from services.parameter_server.client.directory import SERVICE, MapMissing
from services.parameter_server.client.survey import Survey, Surveyor
from services.parameter_server.replication.election import leaderless
from services.parameter_server.types import ParameterError

LOOK_S: Final = 0.1
_SHOW: Final = "`headwater model shards` shows which shards there are, where they are, and what moves."


class MoveFailed(ParameterError):
    """A move did not lead to its end."""

    def __init__(self, message: str, next_step: str) -> None:
        self.next_step = next_step
        super().__init__(message)


class MoveRefused(MoveFailed):
    """A move makes no sense."""


class MoveNotNow(MoveFailed):
    """A move cannot be made as things stand."""


class MoveUnfinished(MoveFailed):
    """A move takes longer than was waited for."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A shard that is led by ``to`` now, under ``fence``. ``took_s``: from the order until ``to`` said so."""

    shard: int
    source: str
    to: str
    fence: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """A shard to be led by ``to`` instead of ``source``. ``copies``: ``to`` does not hold it yet."""

    shard: int
    source: str
    to: str
    copies: bool


def ordered(current: ShardMap, there: Mapping[str, Member], shard: int, to: str) -> ShardMap | None:
    """The map with the move of ``shard`` to ``to``, or None where nothing is to be changed. To the server that leads
    it, a move that is under way is taken back. Raises MoveRefused, MoveNotNow."""
    if not 0 <= shard < current.shards:
        raise MoveRefused(f"there is no shard {shard}: they are 0 to {current.shards - 1}", _SHOW)
    if to not in there:
        names = ", ".join(sorted(there)) or "none"
        raise MoveRefused(
            f"no parameter server {to} is registered",
            f"Registered are: {names}. Start {to} first, or name another.",
        )
    if not there[to].ready:
        raise MoveNotNow(f"{to} is not ready yet", "Wait until `headwater status` says that it is.")
    place, under_way = current.places[shard], current.moves.get(shard)
    if leaderless(place, there):
        reason = f"shard {shard} has no leader now that could hand it over: {place.leader} is gone"
        raise MoveNotNow(reason, "Start that server again, or wait until its followers have elected another.")
    if place.leader == to:
        kept = {other: server for other, server in current.moves.items() if other != shard}
        return current.change({}, kept) if under_way else None
    if under_way not in (None, to):
        back = f"`headwater model shards move {shard} --to {place.leader}`"
        raise MoveNotNow(f"shard {shard} moves to {under_way} already", f"Wait, or take that back by {back}.")
    return current.change({}, {**current.moves, shard: to}) if under_way is None else None


def order(store: Coordination, shard: int, to: str) -> ShardMap:
    """Write the move into the map; the map in force. Raises MoveRefused, MoveNotNow, MapMissing, CoordinationError."""
    there = {member.name: member for member in members(store, SERVICE)}
    found = change_shard_map(store, lambda current: ordered(current, there, shard, to))
    if found is None:
        raise MapMissing("no parameter server has started yet: there is no shard map")
    return found


class Mover:
    """Orders moves and waits for them. ``told`` hears of the progress."""

    def __init__(
        self,
        surveyor: Surveyor,
        told: Callable[[str], None] = lambda text: None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._surveyor, self._told, self._monotonic, self._sleep = surveyor, told, monotonic, sleep

    def move(self, shard: int, to: str, timeout_s: float) -> Moved:
        """Have ``shard`` led by ``to``, and return once that server says so. Raises MoveFailed, CoordinationError."""
        began_s = self._monotonic()
        store = self._surveyor.store
        source = order(store, shard, to).places[shard].leader
        while True:
            survey = self._surveyor.look({source, to})
            place, moving_to = survey.map.places[shard], survey.map.moves.get(shard)
            took_s = self._monotonic() - began_s
            if place.leader == to:
                if moving_to == to:
                    # It was elected before it was handed the shard: the order is still there.
                    order(store, shard, to)
                elif to in survey.servers and shard in survey.servers[to].shards:
                    return Moved(shard, source, to, place.fence, took_s)
            else:
                self._require_under_way(survey, shard, to)
            self._told(_progress(survey, shard, to))
            if took_s >= timeout_s:
                back = f"`headwater model shards move {shard} --to {place.leader}`"
                raise MoveUnfinished(
                    f"shard {shard} is not led by {to} after {timeout_s:g} s; it still moves",
                    f"`headwater model shards` shows how far it is; {back} takes it back.",
                )
            self._sleep(LOOK_S)

    def _require_under_way(self, survey: Survey, shard: int, to: str) -> None:
        """Raises MoveFailed where the order is not in the map any more, or leads nowhere and is taken back."""
        again = f"`headwater model shards move {shard} --to {to}`"
        if survey.map.moves.get(shard) != to:
            raise MoveFailed(
                f"the move of shard {shard} to {to} was given up: {survey.map.places[shard].leader} leads it",
                f"Somebody took it back, or the servers could not write it down. {again} orders it again.",
            )
        if to in survey.members:
            return

        def without(current: ShardMap) -> ShardMap | None:
            kept = {other: server for other, server in current.moves.items() if other != shard}
            return current.change({}, kept) if current.moves.get(shard) == to else None

        change_shard_map(self._surveyor.store, without)
        raise MoveFailed(f"{to} is gone; shard {shard} stays where it is", f"Start {to} again, then {again}.")


def _progress(survey: Survey, shard: int, to: str) -> str:
    held = survey.led(shard)
    behind = None if held is None else held.behind.get(to)
    how = "begins to copy it" if behind is None else f"{behind} steps behind"
    return f"shard {shard}: {to} {how}"


def fair_moves(current: ShardMap, there: Mapping[str, Member]) -> tuple[Move, ...]:
    """The fewest moves after which every server of ``there`` leads its fair share: the shards that have a leader,
    divided by the servers, rounded down or up. Servers that hold a shard already come first. Pure."""
    servers = sorted(name for name, member in there.items() if member.ready)
    led = {
        shard: current.moves.get(shard, place.leader)
        for shard, place in enumerate(current.places)
        if not leaderless(place, there)
    }
    counts = {server: sum(leader == server for leader in led.values()) for server in servers}
    quotas = _quotas(counts, sum(counts.values()))
    moves: list[Move] = []
    for holding in (True, False):
        for shard, source in led.items():
            if shard in current.moves or any(move.shard == shard for move in moves):
                continue
            replicas = current.places[shard].replicas
            to = _receiver(counts, quotas, [s for s in servers if not holding or s in replicas])
            if to is not None and source in counts and counts[source] > quotas[source]:
                moves.append(Move(shard, source, to, to not in replicas))
                counts[source] -= 1
                counts[to] += 1
    return tuple(moves)


def _quotas(counts: Mapping[str, int], shards: int) -> dict[str, int]:
    """How many shards each server is to lead: who leads most has the first claim on one more."""
    if not counts:
        return {}
    share, more = divmod(shards, len(counts))
    ranked = sorted(counts, key=lambda server: (-counts[server], server))
    return {server: share + (rank < more) for rank, server in enumerate(ranked)}


def _receiver(counts: Mapping[str, int], quotas: Mapping[str, int], among: Collection[str]) -> str | None:
    """The server that lacks most of its share."""
    lacking = [server for server in among if counts[server] < quotas[server]]
    return min(lacking, key=lambda server: (counts[server] - quotas[server], server), default=None)
