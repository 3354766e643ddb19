"""A server's part in synchronous steps: parked until whole, applied once, discarded with its generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.parameters import ALL_KEYS, CHUNK, CHUNKS, DIM, SOURCE, Fleet

from services.parameter_server import messages as wire
from services.parameter_server import step_messages as steps
from services.parameter_server.handlers import Rejected
from services.parameter_server.steps import StepService
from services.rpc.codec import Array, Request
from services.rpc.server import Call
from sync.pushes import Source

OTHER = Source("log-1", 1)
DENSE_KEYS = np.arange(CHUNKS, dtype=np.uint64)


@dataclass
class Answered:
    """What went out, by the id of the request."""

    replies: dict[int, steps.ContributeReply] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def answer(self, call: Call, body: bytes, arrays: tuple[Array, ...] = ()) -> None:
        kind = {steps.CONTRIBUTE: steps.ContributeReply, steps.ATTEND: steps.AttendReply}
        self.replies[call.request.id] = wire.unpack(body, kind[call.request.method])

    def fail(self, call: Call, code: str, message: str) -> None:
        self.failures[call.request.id] = code


class Server:
    """One server with one shard, by direct calls; its clock is the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.host = Fleet().hosts["a"]
        self.out = Answered()
        self.service = StepService(self.host, self.out, lambda: self.now)
        self._id = 0

    @property
    def shard(self):
        return self.host.models["main"].held[0].shard

    def call(self, method: str, message: wire.Wire, arrays: tuple[Array, ...] = ()) -> int:
        self._id += 1
        request = Request(self._id, method, 60_000, wire.pack(message), arrays)
        self.service.answer(Call(b"peer", request, self.now + 60.0))
        return self._id

    def contribute(
        self,
        rank: int,
        step: int = 1,
        *,
        offset: int = 0,
        source: Source | None = None,
        value: float = 1.0,
        generation: int = 1,
        members: int = 2,
        ratio: str = "1",
        late: str = "again",
        shared: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
        empty: bool = False,
    ) -> int:
        """A contribution of a gradient of ``value`` for one key, from the rank's own source."""
        source = source or Source("log-1", rank)
        group = steps.WireGroup(generation, members, rank, ratio)
        part = wire.Part("items", [0], [1])
        push = wire.PushRequest(
            "main", 1, source.log, source.partition, offset, 1_000, ("events", rank, offset, 900), [0],
            [offset - 1], [part],
        )  # fmt: skip
        arrays: list[Array] = [] if empty else [ALL_KEYS[:1], np.full((1, DIM), value, np.float32)]
        shared_parts = []
        for table, (keys, gradients) in (shared or {}).items():
            shared_parts.append(wire.Part(table, [0], [len(keys)]))
            arrays += [keys, gradients]
        request = steps.ContributeRequest(
            "main", group, step, None if empty else push, shared_parts, late, 500, digest=bool(shared)
        )
        return self.call(steps.CONTRIBUTE, request, tuple(arrays))

    def attend(self, rank: int, step: int, generation: int = 1, members: int = 2) -> steps.AttendReply:
        group = steps.WireGroup(generation, members, rank, "1")
        return self.out.replies[self.call(steps.ATTEND, steps.AttendRequest("main", group, step))]

    def statuses(self, call: int) -> list[str]:
        return [one.status for one in self.out.replies[call].outcomes]


def test_a_step_is_one_push_of_the_sum_and_all_offsets_advance_together():
    server, alone = Server(), Server()
    first = server.contribute(1, value=2.0)
    assert server.out.replies == {}
    assert server.shard.applied(Source("log-1", 1)) == -1
    second = server.contribute(0, value=1.0)
    assert [server.out.replies[call].verdict for call in (first, second)] == ["taken", "taken"]
    assert server.statuses(first) == server.statuses(second) == ["applied"]
    assert server.shard.applied(SOURCE) == server.shard.applied(OTHER) == 0
    assert server.shard.watermarks().keys() == {("events", 0), ("events", 1)}
    alone.contribute(0, value=3.0, members=1)
    np.testing.assert_array_equal(
        server.shard.pull("items", ALL_KEYS[:1]), alone.shard.pull("items", ALL_KEYS[:1])
    )
    assert server.out.replies[first].open == 2


def test_a_repeated_contribution_is_neither_doubled_before_nor_after_the_step():
    server, once = Server(), Server()
    for each in (server, once):
        each.contribute(0)
    lost = server.contribute(0)
    for each in (server, once):
        each.contribute(1)
    late = server.contribute(0)
    assert server.statuses(lost) == ["applied"]
    assert server.statuses(late) == ["duplicate"]
    np.testing.assert_array_equal(
        server.shard.pull("items", ALL_KEYS[:1]), once.shard.pull("items", ALL_KEYS[:1])
    )


def test_a_newer_generation_discards_what_waits_and_moves_no_offset():
    server = Server()
    waiting = server.contribute(0)
    before = server.shard.pull("items", ALL_KEYS[:1])
    assert server.attend(0, 0, generation=2, members=1).open == 1
    assert server.out.replies[waiting].verdict == "regrouped"
    assert server.shard.applied(SOURCE) == -1
    np.testing.assert_array_equal(server.shard.pull("items", ALL_KEYS[:1]), before)
    old = server.contribute(1)
    assert server.out.replies[old].verdict == "regrouped"
    new = server.contribute(0, generation=2, members=1)
    assert server.statuses(new) == ["applied"]


def test_whoever_waits_too_long_is_told_so_and_its_contribution_stays():
    server = Server()
    waiting = server.contribute(0)
    assert server.service.next_s(9.0) == 0.5
    server.now = 0.6
    server.service.expire()
    assert server.out.replies[waiting].verdict == "pending"
    assert server.service.parked == 0
    other = server.contribute(1)
    assert server.statuses(other) == ["applied"]
    assert server.shard.applied(SOURCE) == 0


@pytest.mark.parametrize(("late", "status", "applied"), [("drop", "late", 0), ("again", "again", -1)])
def test_what_comes_late_is_dropped_and_done_or_left_to_come_again(late, status, applied):
    server = Server()
    server.contribute(0, ratio="0.5", late=late)
    before = server.shard.pull("items", ALL_KEYS[:1])
    call = server.contribute(1, ratio="0.5", late=late)
    assert server.statuses(call) == [status]
    assert server.out.replies[call].open == 2
    assert server.shard.applied(OTHER) == applied
    np.testing.assert_array_equal(server.shard.pull("items", ALL_KEYS[:1]), before)


def shared_gradient(value: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {"dense": (DENSE_KEYS, np.full((CHUNKS, CHUNK), value, np.float32))}


def test_gradients_of_the_whole_step_go_with_the_offsets_or_not_at_all():
    server = Server()
    dense = server.shard.pull("dense", DENSE_KEYS)
    calls = server.contribute(0, shared=shared_gradient(1.0)), server.contribute(1)
    assert [server.statuses(call) for call in calls] == [["applied"], ["applied"]]
    moved = server.shard.pull("dense", DENSE_KEYS)
    assert (moved != dense).all()
    assert server.out.replies[calls[0]].digest == server.out.replies[calls[1]].digest != ""
    # Rank 1's micro-batch is in the sum once more: nothing of the step may be applied.
    calls = server.contribute(0, 2, offset=1, shared=shared_gradient(1.0)), server.contribute(1, 2)
    assert [server.out.replies[call].verdict for call in calls] == ["again", "again"]
    assert server.shard.applied(SOURCE) == 0
    np.testing.assert_array_equal(server.shard.pull("dense", DENSE_KEYS), moved)


def test_two_members_with_one_partition_apply_its_micro_batch_once():
    server, once = Server(), Server()
    server.contribute(0)
    second = server.contribute(1, source=SOURCE)
    once.contribute(0, members=1)
    assert server.statuses(second) == ["duplicate"]
    np.testing.assert_array_equal(
        server.shard.pull("items", ALL_KEYS[:1]), once.shard.pull("items", ALL_KEYS[:1])
    )


def test_a_sum_that_is_not_finite_is_refused_and_counts_as_done():
    server = Server()
    before = server.shard.pull("items", ALL_KEYS[:1])
    calls = server.contribute(0, value=float("nan")), server.contribute(1)
    assert [server.statuses(call) for call in calls] == [["refused"], ["refused"]]
    assert server.shard.applied(SOURCE) == server.shard.applied(OTHER) == 0
    np.testing.assert_array_equal(server.shard.pull("items", ALL_KEYS[:1]), before)


def test_an_idle_member_holds_nobody_up():
    server = Server()
    assert server.attend(1, steps.ABSTAIN).verdict == "taken"
    assert server.statuses(server.contribute(0)) == ["applied"]
    waiting = server.contribute(0, 2, offset=1)
    assert server.statuses(waiting) == ["applied"]
    assert server.attend(1, 0).open == 3
    waiting = server.contribute(0, 3, offset=2)
    assert waiting not in server.out.replies
    server.attend(1, steps.ABSTAIN)
    assert server.statuses(waiting) == ["applied"]


@pytest.mark.parametrize(
    "wrong",
    [{"members": 0}, {"rank": 5}, {"ratio": "many"}, {"ratio": "NaN"}, {"step": 0}, {"generation": 0}],
)
def test_what_makes_no_sense_is_refused(wrong):
    server = Server()
    rank = wrong.pop("rank", 0)
    with pytest.raises(Rejected, match="refused"):
        server.contribute(rank, **wrong)
    assert server.service.parked == 0


def test_steps_are_counted():
    server = Server()
    server.contribute(0, ratio="0.5", late="drop")
    server.contribute(1, ratio="0.5", late="drop")
    found = {sample.name: sample.value for metric in server.service.collect() for sample in metric.samples}
    assert found["headwater_parameters_steps_taken_total"] == 1
    assert found["headwater_parameters_steps_late_total"] == 1
    assert found["headwater_parameters_steps_dropped_total"] == 1
    assert found["headwater_parameters_steps_waiting"] == 0
