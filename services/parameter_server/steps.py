"""The server's part in synchronous steps: contributions are parked until ``sync.steps`` says that a step is
whole, then applied to every shard in the order of the ranks, one optimiser step a shard.

Each server decides on its own. With a ratio below 1 one server may take a member's gradients that another
drops, as its step was whole before they came: the offset is done on both, the gradients are in one. And a
member that dies between two servers leaves a step that one took and the other discards; whoever takes its
partition over repeats the micro-batch, which the first answers as a duplicate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Final

import xxhash
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.parameter_server import messages as wire
from services.parameter_server import step_messages as steps
from services.parameter_server.acknowledging import Answers
from services.parameter_server.handlers import Rejected, guarded
from services.parameter_server.holdings import Held
from services.parameter_server.host import Answer, Host
from services.parameter_server.parking import MAX_PARKED
from services.parameter_server.types import ModelUnknown, ParametersRefused
from services.rpc.codec import Array
from services.rpc.server import BUSY, Call
from sync.columns import MAX_ROWS
from sync.pushes import Part, Push, PushOutcome
from sync.steps import BadStep, Collector, Group, Taken

METHODS: Final = frozenset((steps.CONTRIBUTE, steps.ATTEND, steps.DENSE_STATE))
MAX_WAIT_S: Final = 5.0
DENSE: Final = "dense"
_PREFIX: Final = "headwater_parameters_steps"
_log = logging.getLogger(__name__)

Outcomes = list[steps.StepOutcome]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one member adds to a step: its push by shard, and gradients by shard that belong to the step."""

    pushes: Mapping[int, Push]
    shared: Mapping[int, tuple[Part, ...]]
    accepted_at_ms: int
    digest: bool
    more: bool


@dataclass(frozen=True, slots=True)
class _Parked:
    call: Call
    until_s: float


@dataclass(slots=True)
class _Steps:
    """One model's steps: what is collected, and who waits for it, by rank and step."""

    collector: Collector[Contribution] = field(default_factory=Collector)
    parked: dict[tuple[int, int], _Parked] = field(default_factory=dict)


class StepService:
    """Answers the methods of ``step_messages``. Used by the server's one thread."""

    def __init__(self, host: Host, rpc: Answers, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._host, self._rpc, self._monotonic = host, rpc, monotonic
        self._models: dict[str, _Steps] = {}
        self._dropped_total = 0

    @property
    def parked(self) -> int:
        """Calls that wait now."""
        return sum(len(model.parked) for model in self._models.values())

    def answer(self, call: Call) -> None:
        """Answer one of ``METHODS`` at once or later. Raises Rejected."""
        request = call.request
        if request.method == steps.CONTRIBUTE:
            guarded(lambda: self._contribute(call), request.method)
        elif request.method == steps.ATTEND:
            self._send(call, (guarded(lambda: self._attend(request.body), request.method), ()))
        else:
            self._send(call, guarded(lambda: self._dense_state(request.body), request.method))

    def expire(self) -> None:
        """Tell those whose wait is over that their step is still pending; their contributions stay."""
        now = self._monotonic()
        for model in self._models.values():
            for key, parked in list(model.parked.items()):
                if min(parked.until_s, parked.call.deadline_s) <= now:
                    del model.parked[key]
                    self._reply(parked.call, model, "pending")

    def next_s(self, at_most_s: float) -> float:
        """Seconds until ``expire`` has something to do, but not more than ``at_most_s``."""
        now = self._monotonic()
        waits = [parked.until_s - now for model in self._models.values() for parked in model.parked.values()]
        return max(0.0, min([at_most_s, *waits]))

    def _steps(self, model: str, group: steps.WireGroup) -> _Steps | None:
        """The model's steps under ``group``; None where a newer generation is known. Raises BadStep,
        ModelUnknown."""
        self._host.model(model)
        try:
            wanted = Group(group.generation, group.members, Decimal(group.ratio))
        except InvalidOperation as error:
            raise BadStep(f"{group.ratio!r} is no decimal number") from error
        found = self._models.setdefault(model, _Steps())
        how = found.collector.follow(wanted)
        if how == "newer":
            for parked in found.parked.values():
                self._reply(parked.call, found, "regrouped")
            found.parked.clear()
        return None if how == "older" else found

    def _attend(self, body: bytes) -> steps.AttendReply:
        request = wire.unpack(body, steps.AttendRequest)
        found = self._steps(request.model, request.group)
        if found is None:
            return steps.AttendReply("regrouped", self._host.incarnation, 0)
        if request.step == steps.ABSTAIN:
            found.collector.abstain(request.group.rank)
        else:
            found.collector.join(request.group.rank, request.step)
        self._take(request.model, found)
        return steps.AttendReply("taken", self._host.incarnation, found.collector.open)

    def _contribute(self, call: Call) -> None:
        request = wire.unpack(call.request.body, steps.ContributeRequest)
        self._host.require_incarnation(request.incarnation)
        found = self._steps(request.model, request.group)
        if found is None:
            self._send(call, (steps.ContributeReply("regrouped", self._host.incarnation, 0, []), ()))
            return
        contribution = self._contribution(request, call.request.arrays)
        key = request.group.rank, request.step
        if not found.collector.contribute(*key, contribution):
            self._late(call, found, request, contribution)
            return
        if (before := found.parked.pop(key, None)) is not None:
            self._reply(before.call, found, "pending")
        if self.parked >= MAX_PARKED:
            raise Rejected(BUSY, f"{MAX_PARKED} contributions wait already")
        wait_s = min(max(request.wait_ms, 0) / 1_000, MAX_WAIT_S)
        found.parked[key] = _Parked(call, self._monotonic() + wait_s)
        self._take(request.model, found)

    def _contribution(self, request: steps.ContributeRequest, arrays: Sequence[Array]) -> Contribution:
        own = 0 if request.push is None else 2 * len(request.push.parts)
        pushes: dict[int, Push] = {}
        if request.push is not None:
            if request.push.model != request.model:
                raise ParametersRefused(f"a push to {request.push.model} in a step of {request.model}")
            found = self._host.pushes(request.push, arrays[:own])
            pushes = {held.shard.shard_id: push for held, push in found}
        shared = self._host.parts(request.model, request.shared, arrays[own:])
        accepted_at_ms = 0 if request.push is None else request.push.accepted_at_ms
        return Contribution(
            pushes,
            {shard: tuple(parts) for shard, parts in shared.items()},
            accepted_at_ms,
            request.digest,
            request.more,
        )

    def _take(self, model: str, found: _Steps) -> None:
        """Apply every step that is whole by now, and answer those who wait for it."""
        while (taken := found.collector.take()) is not None:
            waiting = {rank: found.parked.pop((rank, taken.number), None) for rank, _ in taken.parts}
            try:
                outcomes, digest = guarded(partial(self._apply, model, taken), steps.CONTRIBUTE)
            except Rejected as rejected:
                for parked in waiting.values():
                    if parked is not None:
                        self._rpc.fail(parked.call, rejected.code, rejected.message)
                continue
            again = any(one.status == "again" for some in outcomes.values() for one in some)
            more = any(one.more for _, one in taken.parts)
            for rank, parked in waiting.items():
                if parked is not None:
                    self._reply(
                        parked.call, found, "again" if again else "taken", outcomes[rank], digest, more
                    )

    def _apply(self, model: str, taken: Taken[Contribution]) -> tuple[dict[int, Outcomes], str]:
        """One optimiser step a shard with all pushes of the step; what became of them by rank."""
        outcomes: dict[int, Outcomes] = {rank: [] for rank, _ in taken.parts}
        of_model = self._host.model(model)
        shards = sorted({shard for _, one in taken.parts for shard in one.pushes})
        held = {shard: self._host.held(of_model, shard) for shard in shards}
        for shard in shards:
            ranks = [rank for rank, one in taken.parts if shard in one.pushes]
            pushes = [one.pushes[shard] for _, one in taken.parts if shard in one.pushes]
            shared = tuple(part for _, one in taken.parts for part in one.shared.get(shard, ()))
            for rank, push, result in zip(
                ranks, pushes, self._together(held[shard], pushes, shared), strict=True
            ):
                outcomes[rank].append(self._outcome(held[shard], push, result))
        self._host.pushed(model, max((one.accepted_at_ms for _, one in taken.parts), default=0))
        wanted = any(one.digest for _, one in taken.parts)
        return outcomes, self._digest(model) if wanted else ""

    @staticmethod
    def _together(held: Held, pushes: Sequence[Push], shared: tuple[Part, ...]) -> list[PushOutcome | None]:
        """What becomes of the pushes of one step; None for each where none may be applied without all."""
        if not shared:
            return list(held.shard.push_together(pushes))
        table = held.shard.pushes
        whole = len({push.source for push in pushes}) == len(pushes) and all(
            table.decide(push.source, push.offset, push.predecessor) == "next" for push in pushes
        )
        if not whole:
            return [None] * len(pushes)
        first = replace(pushes[0], parts=(*pushes[0].parts, *shared))
        return list(held.shard.push_together([first, *pushes[1:]]))

    def _outcome(self, held: Held, push: Push, result: PushOutcome | None) -> steps.StepOutcome:
        now = result or PushOutcome("gap", held.shard.applied(push.source))
        found = self._host.outcome(held, push.source, now.status, now.applied, now.reason)
        status: steps.StepStatus = "again" if result is None else result.status
        return steps.StepOutcome(found.shard, status, found.applied, found.durable, found.reason)

    def _late(
        self, call: Call, found: _Steps, request: steps.ContributeRequest, contribution: Contribution
    ) -> None:
        """Answer a contribution whose step was taken: a repetition is a duplicate, the rest as asked."""
        of_model = self._host.model(request.model)
        held = {shard: self._host.held(of_model, shard) for shard in contribution.pushes}
        outcomes: Outcomes = []
        for shard, push in contribution.pushes.items():
            if push.offset <= held[shard].shard.applied(push.source):
                result: PushOutcome | None = PushOutcome("duplicate", held[shard].shard.applied(push.source))
                outcomes.append(self._outcome(held[shard], push, result))
            elif request.late == "again":
                outcomes.append(self._outcome(held[shard], push, None))
            else:
                result = held[shard].shard.push(replace(push, parts=()))
                outcomes.append(self._outcome(held[shard], push, result))
                if result.status == "applied":
                    outcomes[-1].status = "late"
                    self._dropped_total += 1
        self._host.pushed(request.model, contribution.accepted_at_ms)
        digest = self._digest(request.model) if request.digest else ""
        again = any(one.status == "again" for one in outcomes)
        self._reply(call, found, "again" if again else "late", outcomes, digest)

    def _digest(self, model: str, table: str = DENSE) -> str:
        """Of the live values of the dense table, where it is here."""
        held = self._host.holder(model, table)
        if held is None:
            return ""
        return xxhash.xxh3_128_hexdigest(held.shard.dense(table, published=False).values.data)

    def _dense_state(self, body: bytes) -> Answer:
        request = wire.unpack(body, steps.DenseStateRequest)
        incarnation = self._host.incarnation
        if self._steps(request.model, request.group) is None:
            return steps.DenseStateReply("regrouped", incarnation, ""), ()
        held = self._host.holder(request.model, request.table)
        if held is None:
            raise ModelUnknown(f"table {request.table} of {request.model} is not on this server")
        digest = self._digest(request.model, request.table)
        rows, _ = held.shard.table(request.table).page(0, MAX_ROWS)
        return steps.DenseStateReply("taken", incarnation, digest), (rows.keys, rows.values, rows.state)

    def _reply(
        self,
        call: Call,
        found: _Steps,
        verdict: steps.StepVerdict,
        outcomes: Outcomes | None = None,
        digest: str = "",
        more: bool = False,
    ) -> None:
        incarnation = self._host.incarnation
        reply = steps.ContributeReply(
            verdict, incarnation, found.collector.open, outcomes or [], digest, more
        )
        self._send(call, (reply, ()))

    def _send(self, call: Call, answer: Answer) -> None:
        message, arrays = answer
        self._rpc.answer(call, wire.pack(message), arrays)

    def collect(self) -> Iterator[Metric]:
        """The counters, by model."""
        yield CounterMetricFamily(
            f"{_PREFIX}_dropped", "Late pushes counted as done without their gradients.", self._dropped_total
        )
        helps = {
            "taken": ("steps_total", "Steps of a group of trainers that were applied."),
            "late": ("late_total", "Contributions that came after their step was taken."),
            "discarded": ("discarded_total", "Contributions to steps of an older generation."),
            "repeated": ("repeated_total", "Contributions that replaced one of the same member and step."),
        }
        for name, (attribute, text) in helps.items():
            family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("model",))
            for model, found in self._models.items():
                family.add_metric((model,), float(getattr(found.collector.counts, attribute)))
            yield family
        waiting = GaugeMetricFamily(f"{_PREFIX}_waiting", "Contributions that wait now.", labels=("model",))
        for model, found in self._models.items():
            waiting.add_metric((model,), float(found.collector.waiting))
        yield waiting
