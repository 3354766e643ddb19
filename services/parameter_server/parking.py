"""Calls that wait on the server: long polls for changes, and checkpoints. Bounded; no I/O of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.parameter_server import messages as wire
from services.parameter_server.handlers import Rejected
from services.parameter_server.host import Answer, Host
from services.rpc.server import Call

MAX_PARKED: Final = 1_024
MAX_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Poll:
    """A ``changes`` call that has seen everything, to be answered when something moves, empty at ``until_s``."""

    call: Call
    request: wire.ChangesRequest
    until_s: float


@dataclass(frozen=True, slots=True)
class Tail:
    """A ``tail`` call by a server that has every step, to be answered when there is one more."""

    call: Call
    request: wire.TailRequest
    until_s: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A ``checkpoint`` call: per model and shard, the position that has to be on disk first."""

    call: Call
    wanted: dict[tuple[str, int], int]


@dataclass(slots=True)
class Parking:
    """All waiting calls. ``rejected_total``: those that found no room."""

    capacity: int = MAX_PARKED
    polls: list[Poll] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    tails: dict[str, Tail] = field(default_factory=dict)
    """By server that asks: its newest call counts, as it says more of how far it is."""
    rejected_total: int = 0

    def full_for(self, peer: bytes) -> bool:
        """Whether no further call of ``peer`` may wait: nobody takes more than a quarter of the room."""
        peers = [poll.call.peer for poll in self.polls] + [one.call.peer for one in self.checkpoints]
        return len(peers) >= self.capacity or peers.count(peer) >= max(1, self.capacity // 4)

    def ready_polls(
        self, answer: Callable[[wire.ChangesRequest], Answer | None], now_s: float
    ) -> list[tuple[Call, Answer | Rejected]]:
        """The polls that can be answered now, with their answers; they leave."""
        ready: list[tuple[Call, Answer | Rejected]] = []
        staying: list[Poll] = []
        for poll in self.polls:
            if poll.call.deadline_s <= now_s:
                continue
            found: Answer | Rejected | None
            try:
                found = answer(poll.request)
            except Rejected as rejected:
                found = rejected
            if found is None and poll.until_s <= now_s:
                found = (wire.ChangesReply([]), ())
            if found is None:
                staying.append(poll)
            else:
                ready.append((poll.call, found))
        self.polls = staying
        return ready

    def ready_tails(
        self, answer: Callable[[wire.TailRequest], Answer | None], now_s: float
    ) -> list[tuple[Call, Answer]]:
        """As ``ready_polls``, for servers that follow shards."""
        ready: list[tuple[Call, Answer]] = []
        for server, tail in list(self.tails.items()):
            found = answer(tail.request)
            if found is None and tail.until_s <= now_s:
                found = (wire.TailReply([]), ())
            if found is not None:
                ready.append((tail.call, found))
                del self.tails[server]
        return ready

    def ready_checkpoints(self, host: Host, now_s: float) -> list[Call]:
        """The checkpoints whose shards are on disk; they leave, as do those nobody waits for any more."""
        saved = {(model, held.shard.shard_id): held.durable.position for model, held in host.all_held()}
        waiting = [one for one in self.checkpoints if one.call.deadline_s > now_s]
        ready = [
            one for one in waiting if all(saved.get(key, -1) >= least for key, least in one.wanted.items())
        ]
        self.checkpoints = [one for one in waiting if one not in ready]
        return [one.call for one in ready]

    def next_s(self, now_s: float, at_most_s: float) -> float:
        """Seconds until the next poll has to be answered, but not more than ``at_most_s``."""
        soonest = min((poll.until_s - now_s for poll in self.polls), default=at_most_s)
        return max(0.0, min(soonest, at_most_s))
