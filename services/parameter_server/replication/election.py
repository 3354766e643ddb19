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
"""How long an ``async`` or ``chain`` election waits for the votes of replicas that are alive but have not spoken."""
RESTARTED_WAIT_S: Final = 10.0
"""How long an election waits for replicas that may not lack anything, or for all of them."""


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """How far one replica has come: the fencing epoch of its newest step, and its steps over all models.

    ``fence``: of the leader that is gone; a vote counts in that election only. ``incarnation``: of the voter.
    ``steps`` -1: it holds a copy that is not whole and cannot lead. ``restarted``: since it was started it has not
    caught up with a leader, so that something it acknowledged may be missing. ``newest_epoch``: of all whose versions
    it holds, those of other regions too; who leads next is to write under a larger one.
    """

    server: str
    incarnation: int
    fence: int
    epoch: int
    steps: int
    restarted: bool = False
    newest_epoch: int = 0

    @property
    def steady(self) -> bool:
        """Whether everything that it ever acknowledged is still there."""
        return self.steps >= 0 and not self.restarted


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

        ``quorum``: votes of a majority that are *steady*, or of all; after ``RESTARTED_WAIT_S`` of any majority.
        ``chain``: one steady vote, as all in the chain hold what was acknowledged, or the votes of all in it; after
        ``RESTARTED_WAIT_S`` any. ``async``: the votes of all that are alive. These two wait for those that
        are alive, as the one furthest on may be among them: ``SILENT_WAIT_S`` with a steady vote, else
        ``RESTARTED_WAIT_S``.
        """
        counted = {vote.server: vote for vote in votes if self._counts(vote)}
        voted = [server for server in self._voters() if server in counted]
        whole = [server for server in voted if counted[server].steps >= 0]
        silent = [server for server in self._voters() if server in alive and server not in counted]
        steady = [server for server in whole if counted[server].steady]
        if not whole or not self._enough(len(voted), len(steady), silent):
            return None
        # Who is furthest on by steps of a newer epoch has all; but in a chain a restarted one may have lost some.
        candidates = steady if self.replication == "chain" and steady else whole
        return max(candidates, key=lambda server: (counted[server].epoch, counted[server].steps))

    def _enough(self, voted: int, steady: int, silent: Collection[str]) -> bool:
        voters = len(self._voters())
        late = self.waited_s >= RESTARTED_WAIT_S
        if self.replication == "quorum":
            return 2 * steady > voters or voted == voters or (late and 2 * voted > voters)
        if not silent:
            return self.replication == "async" or steady > 0 or voted == voters or late
        return late or (steady > 0 and self.waited_s >= SILENT_WAIT_S)

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
