"""The parameter server's loop: one thread that owns all shards, answers calls and keeps the intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.parameter_server import messages as wire
from services.parameter_server.handlers import Rejected, guarded, handle
from services.parameter_server.host import Answer, Host
from services.parameter_server.metrics import ServerMetrics, exposition
from services.parameter_server.parking import MAX_WAIT_S, Checkpoint, Parking, Poll
from services.parameter_server.saver import Saver
from services.parameter_server.steps import METHODS as STEP_METHODS
from services.parameter_server.steps import StepService
from services.rpc.server import BUSY, Call, RpcServer

TURN_S: Final = 0.005
"""How long calls are answered before waiting polls get a look: what a reader may wait under load."""
IDLE_S: Final = 0.05
SAVING_S: Final = 0.005
FINAL_SNAPSHOT_S: Final = 15.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often shards are saved and dense weights published, seconds."""

    snapshot_s: float
    generation_s: float


class ParameterServer:
    """Ties the shards (``host``), the socket (``rpc``) and the snapshots (``saver``) together."""

    def __init__(
        self,
        host: Host,
        rpc: RpcServer,
        saver: Saver,
        intervals: Intervals,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._rpc, self._saver, self._intervals = host, rpc, saver, intervals
        self._monotonic = monotonic
        self._parking = Parking()
        self._steps = StepService(host, rpc, monotonic)
        self._metrics = ServerMetrics(host, rpc, saver, self._parking, self._steps)
        now = monotonic()
        self._next_snapshot_s = now + intervals.snapshot_s
        self._next_generation_s = now + intervals.generation_s

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, then save what has not been saved."""
        while not stop.is_set():
            self.turn()
        self.save_all()

    def save_all(self) -> None:
        """Save every shard that moved since it was saved, and wait for it."""
        self._saver.begin(list(self._host.all_held()))
        if not self._saver.finish(FINAL_SNAPSHOT_S):
            _log.error("the last snapshots were not complete after %g s", FINAL_SNAPSHOT_S)

    def turn(self) -> None:
        """One turn: wait for calls, answer them, wake who waits, do what is due."""
        now = self._monotonic()
        longest = IDLE_S if self._saver.idle else SAVING_S
        self._rpc.wait(self._steps.next_s(self._parking.next_s(now, longest)))
        worked = self._answer_calls()
        self._keep_intervals()
        self._steps.expire()
        if worked or self._parking.polls:
            self._wake_polls()

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
        try:
            if call.request.method == "changes":
                self._poll(call)
            elif call.request.method == "checkpoint":
                self._checkpoint(call)
            elif call.request.method in STEP_METHODS:
                self._steps.answer(call)
            else:
                self._send(call, guarded(lambda: self._at_once(call), call.request.method))
        except Rejected as rejected:
            self._rpc.fail(call, rejected.code, rejected.message)

    def _at_once(self, call: Call) -> Answer:
        if call.request.method == "describe":
            return self._describe(), ()
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
        config, saved_s = self._host.config, self._saver.counts.last_saved_s
        return wire.DescribeReply(
            config.name,
            config.incarnation,
            list(config.owned),
            self._host.describe(),
            sum(held.moves for _, held in self._host.all_held()),
            None if saved_s is None else self._monotonic() - saved_s,
        )

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

    def _changes(self, request: wire.ChangesRequest) -> Answer | None:
        return guarded(lambda: self._host.changes(request), "changes")

    def _refuse_parking(self, call: Call) -> None:
        self._parking.rejected_total += 1
        self._rpc.fail(call, BUSY, "too many calls wait already")

    def _checkpoint(self, call: Call) -> None:
        wanted = {(model, held.shard.shard_id): held.moves for model, held in self._host.all_held()}
        if self._parking.full_for(call.peer):
            self._refuse_parking(call)
            return
        self._parking.checkpoints.append(Checkpoint(call, wanted))
        self._saver.begin(list(self._host.all_held()))

    def _wake_polls(self) -> None:
        for call, answer in self._parking.ready_polls(self._changes, self._monotonic()):
            self._send(call, answer)

    def _keep_intervals(self) -> None:
        now = self._monotonic()
        if now >= self._next_snapshot_s:
            self._next_snapshot_s = now + self._intervals.snapshot_s
            self._saver.begin(list(self._host.all_held()))
        if now >= self._next_generation_s:
            self._next_generation_s = now + self._intervals.generation_s
            self._host.publish_all()
        self._saver.step()
        if self._parking.checkpoints:
            for call in self._parking.ready_checkpoints(self._host, now):
                self._send(call, (wire.Done(), ()))
