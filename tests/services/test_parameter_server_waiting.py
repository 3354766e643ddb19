"""Who waits on the server, and how clients wait: bounds, deadlines, pauses. No network."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parameters import Fleet, gradients, recorded

from services.parameter_server import messages as wire
from services.parameter_server.client import operations
from services.parameter_server.client.retries import judge, pause_s
from services.parameter_server.handlers import Rejected
from services.parameter_server.host import Answer
from services.parameter_server.parking import Checkpoint, Parking, Poll
from services.parameter_server.types import (
    IncarnationChanged,
    ModelMismatch,
    ParametersRefused,
)
from services.rpc import Call, Failure, Reply, Request

REQUEST = wire.ChangesRequest("main", 1, ["items"], [], 10, 1_000)


def call(number: int, deadline_s: float = 100.0) -> Call:
    return Call(b"peer", Request(number, "changes", 1, b""), deadline_s)


def nothing(_request: wire.ChangesRequest) -> Answer | None:
    return None


class TestParking:
    def test_polls_stay_until_something_moves_or_their_time_is_up(self) -> None:
        parking = Parking()
        first, second = Poll(call(1), REQUEST, 5.0), Poll(call(2), REQUEST, 9.0)
        parking.polls += [first, second]
        assert parking.ready_polls(nothing, 4.9) == []
        ((answered, answer),) = parking.ready_polls(nothing, 5.0)
        assert answered is first.call
        assert not isinstance(answer, Rejected)
        assert answer[0] == wire.ChangesReply([])
        moved = (wire.ChangesReply([]), ())
        assert parking.ready_polls(lambda _: moved, 6.0) == [(second.call, moved)]
        assert parking.polls == []

    def test_a_poll_that_nobody_waits_for_is_dropped(self) -> None:
        parking = Parking(polls=[Poll(call(1, deadline_s=2.0), REQUEST, 5.0)])
        assert parking.ready_polls(lambda _: pytest.fail("it was looked at"), 2.0) == []
        assert parking.polls == []

    def test_an_error_answers_its_own_poll_alone(self) -> None:
        parking = Parking(polls=[Poll(call(1), REQUEST, 5.0), Poll(call(2), REQUEST, 5.0)])
        looks: list[int] = []

        def look(_request: wire.ChangesRequest) -> Answer | None:
            looks.append(1)
            if len(looks) == 1:
                raise Rejected(wire.REFUSED, "odd")
            return None

        ((answered, answer),) = parking.ready_polls(look, 1.0)
        assert answered.request.id == 1
        assert isinstance(answer, Rejected)
        assert [poll.call.request.id for poll in parking.polls] == [2]

    def test_the_next_look_is_never_later_than_asked(self) -> None:
        parking = Parking()
        assert parking.next_s(0.0, 0.05) == 0.05
        parking.polls.append(Poll(call(1), REQUEST, 10.0))
        assert parking.next_s(0.0, 0.05) == 0.05
        assert parking.next_s(9.98, 0.05) == pytest.approx(0.02)
        assert parking.next_s(11.0, 0.05) == 0.0

    def test_the_number_of_waiting_calls_is_bounded(self) -> None:
        parking = Parking(capacity=2)
        parking.polls.append(Poll(call(1), REQUEST, 5.0))
        assert not parking.full_for(b"another")
        parking.checkpoints.append(Checkpoint(call(2), {}))
        assert parking.full_for(b"another")

    def test_nobody_takes_all_the_room(self) -> None:
        parking = Parking(capacity=8)
        parking.polls.append(Poll(call(1), REQUEST, 5.0))
        assert not parking.full_for(b"peer")
        parking.checkpoints.append(Checkpoint(call(2), {}))
        assert parking.full_for(b"peer")
        assert not parking.full_for(b"another")

    def test_a_checkpoint_waits_for_every_shard(self) -> None:
        fleet = Fleet(("a",), 2)
        host = fleet.hosts["a"]
        fleet.ask(operations.push(fleet.route, gradients(0, recorded(0), 2)))
        wanted = {(model, held.shard.shard_id): held.shard.position for model, held in host.all_held()}
        assert all(wanted.values())
        parking = Parking(checkpoints=[Checkpoint(call(1), wanted), Checkpoint(call(2, 1.0), wanted)])
        shards = host.models["main"].held
        shards[0].durable.reached(wanted["main", 0])
        assert parking.ready_checkpoints(host, 2.0) == []
        assert [one.call.request.id for one in parking.checkpoints] == [1]
        shards[1].durable.reached(wanted["main", 1] + 4)
        assert [one.request.id for one in parking.ready_checkpoints(host, 2.0)] == [1]
        assert parking.checkpoints == []


class TestRetries:
    @given(st.integers(1, 60), st.floats(0, 1))
    def test_pauses_grow_to_half_a_second(self, attempt: int, draw: float) -> None:
        pause = pause_s(attempt, lambda: draw)
        assert 0.01 <= pause <= 0.5
        assert pause <= 0.02 * 2 ** (attempt - 1)
        assert pause <= pause_s(attempt + 1, lambda: draw)

    @pytest.mark.parametrize(
        ("code", "verdict"),
        [("busy", "again"), ("late", "again"), (wire.NOT_MINE, "replan"), (wire.MODEL_UNKNOWN, "declare")],
    )
    def test_what_a_retry_can_help(self, code: str, verdict: str) -> None:
        assert judge("pull", "a", 0, Failure(1, code, "why")) == verdict

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            (wire.MODEL_MISMATCH, ModelMismatch),
            (wire.INCARNATION, IncarnationChanged),
            (wire.FULL, ParametersRefused),
            (wire.INTERNAL, ParametersRefused),
            ("a code of tomorrow", ParametersRefused),
        ],
    )
    def test_what_it_cannot(self, code: str, error: type[Exception]) -> None:
        with pytest.raises(error):
            judge("pull", "a", 0, Failure(1, code, "7"))

    def test_a_reply_is_done(self) -> None:
        assert judge("pull", "a", 0, Reply(1, b"")) == "done"


def test_the_server_loads_no_torch() -> None:
    code = "import sys, services.parameter_server.main; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_clients_load_no_compiler() -> None:
    code = "import sys, services.parameter_server.client; print('numba' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
