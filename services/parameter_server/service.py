"""The parameter server's loop: one thread that owns all shards, answers calls and keeps the intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.parameter_server import messages as wire
from services.parameter_server.acknowledging import Acknowledging
from services.parameter_server.declarations import Declaration
from services.parameter_server.describing import describe
from services.parameter_server.expiry import Expiry
from services.parameter_server.handlers import Rejected, guarded, handle
from services.parameter_server.host import Answer, Host
from services.parameter_server.metrics import ServerMetrics, exposition
from services.parameter_server.parking import MAX_WAIT_S, Checkpoint, Parking, Poll, Tail
from services.parameter_server.replication.cluster import Cluster
from services.parameter_server.step_messages import CONTRIBUTE
from services.parameter_server.steps import METHODS as STEP_METHODS
from services.parameter_server.steps import StepService
from services.parameter_server.storage.durability import Durability
from services.parameter_server.syncing.service import METHODS as SYNC_METHODS
from services.parameter_server.syncing.service import READS, SyncConfig, Syncing
from services.parameter_server.syncing.status import STATUS, status
from services.parameter_server.syncing.upstream import Links
from services.rpc.server import BUSY, Call, RpcServer

TURN_S: Final = 0.005
"""How long calls are answered before waiting polls get a look: what a reader may wait under load."""
IDLE_S: Final = 0.05
WRITING_S: Final = 0.002
FINAL_S: Final = 10.0
SLEPT_S: Final = 0.0005
"""A wait of so long found the socket empty: what came then was taken in at once."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often dense weights are published, seconds."""

    generation_s: float


class ParameterServer:
    """Ties the shards (``host``), the socket (``rpc``), what keeps them (``durability``) and the other servers
    (``cluster``) together."""

    def __init__(
        self,
        host: Host,
        rpc: RpcServer,
        durability: Durability,
        cluster: Cluster,
        intervals: Intervals,
        links: Links,
        sync: SyncConfig | None = None,
        settle: Callable[[Declaration], None] = lambda declaration: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``links`` connect to other regions as ``sync`` says; ``settle`` writes models declared there to this region's
        store."""
        self._host, self._rpc, self._durability, self._intervals = host, rpc, durability, intervals
        self._cluster, self._monotonic = cluster, monotonic
        host.on_step = cluster.took
        self._parking = Parking()
        self._pushed = Acknowledging(
            rpc,
            lambda shards: cluster.pending(list(host.fences) if shards is None else shards),
            cluster.settled,
        )
        self._steps = StepService(host, self._pushed, monotonic)
        self._expiry = Expiry(host, self._may_step, monotonic)
        fed = Acknowledging(
            rpc,
            lambda shards: cluster.pending(list(host.fences) if shards is None else shards),
            cluster.settled,
        )
        self._syncing = Syncing(sync or SyncConfig(), host, fed, self._pushed, links, self._may_step, settle)
        self._metrics = ServerMetrics(
            host, rpc, durability, self._parking, self._steps, cluster, self._pushed, self._syncing
        )
        self._unseen_s = 0.0
        """How long a call that is answered in this turn may have waited before it was taken in."""
        self._looked_s = monotonic()
        now = monotonic()
        self._next_generation_s = now + intervals.generation_s

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, then write what is not on disk yet."""
        while not stop.is_set():
            self.turn()
        self.save_all()

    def close(self) -> None:
        """Close the connections to other regions."""
        self._syncing.close()

    def save_all(self) -> None:
        """Wait until every step is on disk."""
        if not self._durability.finish(FINAL_S):
            _log.error("not everything was on disk after %g s; trainers will push it again", FINAL_S)

    def turn(self) -> None:
        """One turn: wait for calls, answer them, wake who waits, do what is due."""
        now = self._monotonic()
        longest = WRITING_S if self._durability.busy or self._parking.checkpoints else IDLE_S
        longest = self._syncing.next_s(self._steps.next_s(self._parking.next_s(now, longest)))
        self._wait(longest)
        worked = self._answer_calls()
        self._keep_intervals()
        self._steps.expire()
        worked = self._expiry.turn() or worked
        worked = self._syncing.turn() or worked
        worked = self._cluster.turn() or worked
        self._wake_followers()
        if worked or self._parking.polls:
            self._wake_polls()

    def _wait(self, timeout_s: float) -> None:
        began_s = self._monotonic()
        self._rpc.wait(timeout_s)
        busy_s, self._looked_s = began_s - self._looked_s, self._monotonic()
        self._unseen_s = 0.0 if self._looked_s - began_s > SLEPT_S else busy_s

    def _answer_calls(self) -> bool:
        until = self._monotonic() + TURN_S
        worked = False
        while (call := self._rpc.take()) is not None:
            worked = True
            self._answer(call)
            if self._monotonic() >= until:
                break
        return worked

    def _answer(self, call: Call) -> None:
        if call.request.method in READS:
            came_s = call.deadline_s - call.request.timeout_ms / 1_000
            waited_s = self._unseen_s + self._monotonic() - came_s
            # What else it waited for, on a machine that has too much to do, passes no sooner with less to take over.
            self._syncing.note_read(min(waited_s, self._syncing.merging_s))
        try:
            if self._syncing.forwarding.take(call, self._takes_no_pushes):
                return
            if call.request.method == "changes":
                self._poll(call)
            elif call.request.method == "checkpoint":
                self._checkpoint(call)
            elif call.request.method == "tail":
                self._tail(call)
            elif call.request.method in ("push", CONTRIBUTE) and (why := self._takes_no_pushes()):
                self._rpc.fail(call, BUSY, why)
            elif call.request.method == "push":
                answer = guarded(lambda: self._at_once(call), call.request.method)
                self._pushed.answer(call, wire.pack(answer[0]), answer[1], _shards_of(answer[0]))
            elif call.request.method in SYNC_METHODS:
                self._syncing.answer(call)
            elif call.request.method in STEP_METHODS:
                self._steps.answer(call)
            else:
                self._send(call, guarded(lambda: self._at_once(call), call.request.method))
        except Rejected as rejected:
            self._rpc.fail(call, rejected.code, rejected.message)

    def _takes_no_pushes(self) -> str:
        """An empty text, or why pushes have to come again later."""
        if self._durability.full:
            self._durability.counts.held_back_total += 1
            return "the disk is slower than the pushes; try again"
        if why := self._syncing.takes_no_pushes():
            return why
        return next((why for shard in self._host.fences if (why := self._cluster.takes_pushes(shard))), "")

    def _may_step(self, shard: int) -> bool:
        """Whether a shard that is led here may take steps of its own now: not while pushes may not."""
        return not (self._durability.full or self._cluster.takes_pushes(shard))

    def _at_once(self, call: Call) -> Answer:
        if call.request.method == "copy":
            return self._cluster.copy(wire.unpack(call.request.body, wire.CopyRequest))
        if call.request.method == "describe":
            return self._describe(), ()
        if call.request.method == STATUS:
            return status(self._syncing), ()
        if call.request.method == "metrics":
            return wire.MetricsReply(exposition(self._metrics)), ()
        return handle(self._host, call.request)

    def _send(self, call: Call, answer: Answer | Rejected) -> None:
        if isinstance(answer, Rejected):
            self._rpc.fail(call, answer.code, answer.message)
        else:
            message, arrays = answer
            self._rpc.answer(call, wire.pack(message), arrays)

    def _describe(self) -> wire.DescribeReply:
        saved_s = self._durability.counts.last_snapshot_s
        age_s = None if saved_s is None else self._monotonic() - saved_s
        return describe(self._host, self._cluster, age_s)

    def _poll(self, call: Call) -> None:
        request = guarded(lambda: wire.unpack(call.request.body, wire.ChangesRequest), "changes")
        found = self._changes(request)
        if found is None and request.wait_ms <= 0:
            found = (wire.ChangesReply([]), ())
        if found is not None:
            self._send(call, found)
        elif self._parking.full_for(call.peer):
            self._refuse_parking(call)
        else:
            wait_s = min(request.wait_ms / 1_000, MAX_WAIT_S)
            self._parking.polls.append(Poll(call, request, self._monotonic() + wait_s))

    def _tail(self, call: Call) -> None:
        request = guarded(lambda: wire.unpack(call.request.body, wire.TailRequest), "tail")
        found = guarded(lambda: self._cluster.tail(request), "tail")
        before = self._parking.tails.pop(request.server, None)
        if before is not None:
            self._send(before.call, (wire.TailReply([]), ()))
        if found is not None or request.wait_ms <= 0:
            self._send(call, found or (wire.TailReply([]), ()))
        elif not self._cluster.knows(request.server):
            self._rpc.fail(call, wire.NOT_MINE, f"{request.server[:64]!r} holds none of these shards")
        else:
            wait_s = min(request.wait_ms / 1_000, MAX_WAIT_S)
            self._parking.tails[request.server] = Tail(call, request, self._monotonic() + wait_s)

    def _wake_followers(self) -> None:
        """Send new steps to those who follow, and answer the pushes that enough of them hold."""
        now = self._monotonic()
        for call, answer in self._parking.ready_tails(self._cluster.tail, now):
            self._send(call, answer)
        if self._pushed.waiting:
            self._pushed.release(now)

    def _changes(self, request: wire.ChangesRequest) -> Answer | None:
        return guarded(lambda: self._host.changes(request), "changes")

    def _refuse_parking(self, call: Call) -> None:
        self._parking.rejected_total += 1
        self._rpc.fail(call, BUSY, "too many calls wait already")

    def _checkpoint(self, call: Call) -> None:
        wanted = {(model, held.shard.shard_id): held.shard.position for model, held in self._host.all_held()}
        if self._parking.full_for(call.peer):
            self._refuse_parking(call)
            return
        self._parking.checkpoints.append(Checkpoint(call, wanted))

    def _wake_polls(self) -> None:
        for call, answer in self._parking.ready_polls(self._changes, self._monotonic()):
            self._send(call, answer)

    def _keep_intervals(self) -> None:
        now = self._monotonic()
        if now >= self._next_generation_s:
            self._next_generation_s = now + self._intervals.generation_s
            self._host.publish_all()
        self._durability.step()
        if self._parking.checkpoints:
            for call in self._parking.ready_checkpoints(self._host, now):
                self._send(call, (wire.Done(), ()))


def _shards_of(answer: wire.Wire) -> list[int] | None:
    """Which shards took a push; another may lack its followers, which is no concern of this one."""
    return [one.shard for one in answer.outcomes] if isinstance(answer, wire.PushResponse) else None
