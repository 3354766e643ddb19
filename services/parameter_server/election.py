"""Who leads a shard next, when nobody does. Pure; no I/O.

Each replica that sees a shard without a leader first stops following the old one, then says how far it has come:
its *vote*. Once it voted it takes nothing from the old leader any more, so what was acknowledged on a majority is
known to someone in every majority of votes. The votes decide; the coordination store only keeps them, and lets
one server write the result (by compare-and-swap of the shard map).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from services.coordination.membership import Member
from services.coordination.shardmap import Place

Replication = Literal["async", "quorum", "chain"]
PREFIX: Final = "parameters/votes/"
SILENT_WAIT_S: Final = 0.5
"""How long an ``async`` election waits for the votes of replicas that are alive but have not spoken."""
RESTARTED_WAIT_S: Final = 10.0
"""How long a ``quorum`` election waits for replicas that have been running all the time, or for all of them."""


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """How far one replica has come: the fencing epoch of its newest step, and its steps over all models.

    ``fence``: of the leader that is gone; a vote counts in that election only. ``incarnation``: of the voter.
    ``steps`` -1: it holds a copy that is not whole, has acknowledged nothing, and cannot lead. ``restarted``: since
    it was started it has not caught up with that leader, so that something it acknowledged may be missing.
    """

    server: str
    incarnation: int
    fence: int
    epoch: int
    steps: int
    restarted: bool = False


def vote_key(shard: int, server: str) -> str:
    """Where the vote of ``server`` on ``shard`` is kept."""
    return f"{PREFIX}{shard}/{server}"


def leaderless(place: Place, members: Mapping[str, Member]) -> bool:
    """Whether the shard's leader is gone: not registered, or not the process that became it."""
    member = members.get(place.leader)
    return place.fence == 0 or member is None or member.incarnation != place.incarnation


@dataclass(frozen=True, slots=True)
class Election:
    """One shard without a leader: who may vote, and for how long it has been so."""

    place: Place
    replication: Replication
    waited_s: float

    def winner(self, votes: Collection[Vote], alive: Collection[str]) -> str | None:
        """Who is to lead, or None where it cannot be told yet: of those that voted, the one furthest on; ties go
        to the order of the replicas. What it takes to know that nothing acknowledged is missing there:

        ``quorum``: votes of a majority that was not restarted meanwhile, or of all; after ``RESTARTED_WAIT_S``
        of any majority. ``chain``: the votes of all in the chain that are alive. ``async``: of all replicas that
        are alive, or ``SILENT_WAIT_S``.
        """
        counted = {vote.server: vote for vote in votes if self._counts(vote)}
        whole = [server for server in self._voters() if server in counted and counted[server].steps >= 0]
        silent = [server for server in self._voters() if server in alive and server not in counted]
        if not whole or not self._enough(counted, silent):
            return None
        return max(whole, key=lambda server: (counted[server].epoch, counted[server].steps))

    def _enough(self, counted: Mapping[str, Vote], silent: Collection[str]) -> bool:
        replicas = len(self.place.replicas)
        if self.replication == "chain":
            return not silent
        if self.replication == "async":
            return not silent or self.waited_s >= SILENT_WAIT_S
        steady = sum(not vote.restarted for vote in counted.values())
        late = self.waited_s >= RESTARTED_WAIT_S and 2 * len(counted) > replicas
        return 2 * steady > replicas or len(counted) == replicas or late

    def _voters(self) -> tuple[str, ...]:
        return self.place.chain if self.replication == "chain" else self.place.replicas

    def _counts(self, vote: Vote) -> bool:
        return vote.fence == self.place.fence and vote.server in self.place.replicas


def elected(place: Place, winner: Vote, votes: Collection[Vote], epoch: int) -> Place:
    """``place`` once the winner leads it since the map's ``epoch``. In a chain those that voted stand behind it;
    who did not, joins when it is in step."""
    voted = {vote.server for vote in votes if vote.fence == place.fence and vote.steps >= 0}
    behind = tuple(server for server in place.chain if server in voted and server != winner.server)
    chain = (winner.server, *behind) if place.chain else ()
    return Place(winner.server, place.replicas, winner.incarnation, epoch, chain)
