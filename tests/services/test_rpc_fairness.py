"""Back-pressure: what happens where more is asked than a server can answer."""

from __future__ import annotations

import random
import socket as sockets
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rpc import PATIENCE_S, echo, serving, until

from services.rpc import Call, Failure, Outgoing, Reply, Request, RpcClient, RpcServer, ServerLimits
from services.rpc.codec import decode, encode
from services.rpc.outbox import Outbox
from services.rpc.queue import FairQueue
from services.rpc.server import LOOK

puts = st.lists(
    st.one_of(
        st.none(),
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 30)),
    ),
    max_size=60,
)


class TestQueue:
    @given(puts, st.integers(1, 8), st.integers(1, 60))
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_bounds_order_and_nothing_lost(
        self, steps: list[tuple[bytes, int] | None], count: int, size: int
    ) -> None:
        """Against a plain model: a list of who waits, from which the queue takes and drops."""
        queue: FairQueue[tuple[bytes, int, int]] = FairQueue(count, size)
        waiting: dict[bytes, deque[tuple[bytes, int, int]]] = defaultdict(deque)
        for number, step in enumerate(steps):
            if step is None:
                taken = queue.take()
                assert (taken is None) == (not any(waiting.values()))
                if taken is not None:
                    assert waiting[taken[0]].popleft() == taken, "each peer's own order"
            else:
                peer, length = step
                request = (peer, number, length)
                waiting[peer].append(request)
                for refused in queue.put(peer, request, length):
                    assert waiting[refused[0]].pop() == refused, "the newest goes first"
            every = [request for line in waiting.values() for request in line]
            assert len(queue) == len(every) <= count
            assert queue.size == sum(length for *_, length in every)
            assert queue.size <= size or len(queue) == 1

    def test_peers_are_served_in_turn(self) -> None:
        queue: FairQueue[str] = FairQueue(10, 100)
        for request in ("a1", "a2", "a3", "b1", "c1", "c2"):
            assert queue.put(request[:1].encode(), request, 1) == []
        assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "c2", "a3", None]

    def test_who_has_most_makes_room(self) -> None:
        queue: FairQueue[str] = FairQueue(3, 100)
        for request in ("a1", "a2", "a3"):
            queue.put(b"a", request, 1)
        assert queue.put(b"a", "a4", 1) == ["a4"]
        assert queue.put(b"b", "b1", 1) == ["a3"]
        assert queue.put(b"b", "b2", 1) == ["b2"], "it would have as much as the other"
        assert queue.put(b"c", "c1", 1) == ["a2"]
        assert [queue.take() for _ in range(3)] == ["a1", "b1", "c1"]

    def test_bytes_make_room_likewise(self) -> None:
        queue: FairQueue[str] = FairQueue(100, 100)
        for number in range(9):
            queue.put(b"a", f"a{number}", 11)
        assert queue.put(b"b", "b", 25) == ["a8", "a7", "a6"]
        assert queue.put(b"c", "c", 200) == ["c"], "it would have more than anybody"
        assert queue.size <= 100

    def test_one_request_is_taken_whatever_its_size(self) -> None:
        queue: FairQueue[str] = FairQueue(1, 1)
        assert queue.put(b"a", "large", 1_000) == []
        assert queue.take() == "large"


@contextmanager
def flooding(address: str, request: list[bytes], senders: int = 1) -> Iterator[list[int]]:
    """Peers that send without end and never read; yields how much each has sent so far."""
    stop = threading.Event()
    sent = [0] * senders
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def flood(number: int) -> None:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{address}")
        while not stop.is_set():
            if socket.poll(10, zmq.POLLOUT):
                socket.send_multipart(request)
                sent[number] += 1
        socket.close()

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(senders)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        context.term()


class TestFlood:
    @pytest.mark.parametrize("size", [16, 60_000], ids=["small", "large"])
    def test_a_flooding_peer_starves_nobody(self, size: int) -> None:
        """Each call costs a millisecond; the flood asks for far more than that, the other for one at a time."""

        def slow(server: RpcServer, call: Call) -> None:
            time.sleep(0.001)
            echo(server, call)

        flood = [bytes(frame) for frame in encode(Request(1, "m", 60_000, b"x" * size))]
        limits = ServerLimits(queue=50, queue_bytes=500_000)
        with (
            serving(slow, limits) as (server, address),
            closing(RpcClient()) as client,
            flooding(address, flood) as sent,
        ):
            until(lambda: server.counts.busy_total > 100)
            for number in range(30):
                answers = client.exchange({address: Outgoing("m", b"%d" % number)}, PATIENCE_S)
                assert isinstance(answers.get(address), Reply), f"call {number}: {answers}"
            until(lambda: sent[0] > 300)

    def test_a_look_takes_in_no_more_than_its_bound(self) -> None:
        server = RpcServer("127.0.0.1:0", limits=ServerLimits(per_peer=4 * LOOK))
        flood = [bytes(frame) for frame in encode(Request(1, "m", 60_000, b""))]
        try:
            with flooding(f"127.0.0.1:{server.port}", flood) as sent:
                until(lambda: sent[0] > 3 * LOOK)
                server.wait(PATIENCE_S)
                assert 0 < server.counts.received_total <= LOOK
        finally:
            server.close()

    def test_connections_without_end_do_no_harm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """More of them, while the server does not look, than it has room to be told of."""
        monkeypatch.setattr("services.rpc.connections.QUEUE", 10)
        server = RpcServer("127.0.0.1:0")
        address = f"127.0.0.1:{server.port}"
        answers: dict[str, object] = {}

        def ask() -> None:
            with closing(RpcClient()) as client:
                answers.update(client.exchange({address: Outgoing("m", b"")}, PATIENCE_S))

        knock(server.port, 1_050)
        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            server.wait(0.02)
            while (call := server.take()) is not None:
                echo(server, call)
        thread.join()
        assert isinstance(answers.get(address), Reply)
        # More than the 1,000 that wait to be told and the 10 that wait to be looked at.
        seen = server.connections
        until(
            lambda: server.wait(0.0) is None and seen.accepted_total > 1_050 and seen.established_total == 1
        )
        knock(server.port, 1_050)
        server.close()


def knock(port: int, times: int) -> None:
    """Connect and hang up; the system keeps each connection until the server takes it."""
    for _ in range(times):
        sockets.create_connection(("127.0.0.1", port), PATIENCE_S).close()


class _Sent:
    """A message that has left once a test says so."""

    def __init__(self) -> None:
        self.done = False


class TestOutbox:
    @given(
        st.lists(
            st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 40), st.booleans()), max_size=60
        ),
        st.randoms(use_true_random=False),
    )
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_bounds_hold_but_for_one_answer_to_each(
        self, steps: list[tuple[bytes, int, bool]], rng: random.Random
    ) -> None:
        outbox, waiting = Outbox(50, 80), list[tuple[bytes, int, _Sent]]()
        for peer, size, some_leave in steps:
            if some_leave and waiting:
                rng.choice(waiting)[2].done = True
            mine = [one for one in waiting if one[0] == peer]
            # Messages to one peer leave in their order.
            while mine and mine[0][2].done:
                waiting.remove(mine.pop(0))
            if outbox.has_room(peer, size):
                assert not mine or sum(one[1] for one in mine) + size <= 50
                sent = _Sent()
                outbox.sent(peer, sent, size)
                waiting.append((peer, size, sent))
            else:
                assert mine, "a first answer is always sent"
        for _, _, sent in waiting:
            sent.done = True
        for peer in (b"a", b"b", b"c"):
            assert outbox.has_room(peer, 50)
        assert outbox.size == 0

    def test_peers_that_are_gone_are_forgotten(self) -> None:
        outbox, gone = Outbox(50, 80), _Sent()
        outbox.sent(b"gone", gone, 50)
        gone.done = True
        outbox.sent(b"new", _Sent(), 10)
        assert outbox.size == 10

    def test_who_asks_and_never_reads_is_held_back(self) -> None:
        """It asks for 200 MB. It is refused, its neighbours are served, and once it reads, it finds answers and
        refusals."""
        large = np.zeros(2**20, np.uint8)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.RCVHWM, 1)
        limits = ServerLimits(per_peer_bytes=8 * 2**20)
        with (
            serving(lambda server, call: server.answer(call, b"", (large,)), limits) as (server, address),
            closing(RpcClient()) as client,
        ):
            deaf.connect(f"tcp://{address}")
            for number in range(200):
                deaf.send_multipart(encode(Request(number, "m", 600_000, b"")))
            until(lambda: server.counts.held_back_total > 100)
            refused = sum(_ask_until_served(client, address) for _ in range(20))
            found = [decode(deaf.recv_multipart()) for _ in range(200)]
            held_back = [message for message in found if isinstance(message, Failure)]
            assert {message.code for message in held_back} == {"busy"}
            assert len(held_back) + refused == server.counts.held_back_total
            assert server.counts.unsent_total == 0
        deaf.close(0)
        context.term()


def _ask_until_served(client: RpcClient, address: str) -> int:
    """Ask once for a large answer, again while told ``busy``; how often that was. A reader is told so as well
    where pyzmq's thread, starved, has not yet said that what it read has left."""
    refused = 0
    while not isinstance(
        answer := client.exchange({address: Outgoing("m", b"")}, PATIENCE_S)[address], Reply
    ):
        assert answer.code == "busy"
        refused += 1
    return refused


class TestZeroCopy:
    def test_what_is_sent_is_read_from_where_it_lies(self) -> None:
        """The request waits for a server that is not there yet; the array changes; the change arrives."""
        array = np.zeros((4_096, 32), np.float32)
        with closing(RpcServer("127.0.0.1:0")) as placeholder:
            address = f"127.0.0.1:{placeholder.port}"
        with closing(RpcClient()) as client:
            client.exchange({address: Outgoing("m", b"", (array,))}, 60.0, lambda: False, 0.0)
            array[7, 3] = 5.0
            with closing(RpcServer(address)) as server:
                until(lambda: server.wait(0.01) is None and server.counts.received_total == 1)
                call = server.take()
        assert call is not None
        assert call.request.arrays[0][7, 3] == 5.0

    def test_what_is_received_is_the_transports_own_memory_and_read_only(self) -> None:
        sent = np.arange(4_096 * 32, dtype=np.float32).reshape(4_096, 32)
        kept: list[np.ndarray] = []

        def keep(server: RpcServer, call: Call) -> None:
            kept.extend(call.request.arrays)
            echo(server, call)

        with serving(keep) as (_, address), closing(RpcClient()) as client:
            answer = client.exchange({address: Outgoing("m", b"", (sent,))}, PATIENCE_S)[address]
            assert isinstance(answer, Reply)
            for array in (*kept, *answer.arrays):
                np.testing.assert_array_equal(array, sent)
                assert not array.flags.owndata
                assert isinstance(_root(array), zmq.Frame), "it lies in the frame that ZeroMQ received"
                with pytest.raises(ValueError, match="read-only"):
                    array[0, 0] = 1.0


def _root(array: np.ndarray) -> object:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


_OUT_OF_DESCRIPTORS: Final = """
import os, resource, sys
from services.rpc import RpcServer
server = RpcServer("127.0.0.1:0")
print(server.port, flush=True)
room = len(os.listdir("/proc/self/fd")) + 20
resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
while True:
    server.wait(0.05)
    while (call := server.take()) is not None:
        server.answer(call, b"")
        if call.request.method == "end":
            server.wait(0.2)
            server.close()
            sys.exit()
"""


def test_a_server_out_of_descriptors_answers_whom_it_has_and_recovers() -> None:
    """More connections than the system allows; those that never speak are dropped after a while."""
    command = [sys.executable, "-c", _OUT_OF_DESCRIPTORS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        address = f"127.0.0.1:{port}"
        with closing(RpcClient()) as early, closing(RpcClient()) as late:
            assert address in early.exchange({address: Outgoing("m", b"")}, PATIENCE_S)
            idle = [sockets.create_connection(("127.0.0.1", port)) for _ in range(60)]
            assert address not in late.exchange({address: Outgoing("m", b"")}, 0.3)
            for _ in range(20):
                assert address in early.exchange({address: Outgoing("m", b"")}, PATIENCE_S)
            for one in idle:
                one.close()
            assert address in late.exchange({address: Outgoing("m", b"")}, PATIENCE_S)
            early.exchange({address: Outgoing("end", b"")}, PATIENCE_S)
        assert process.wait(PATIENCE_S) == 0
