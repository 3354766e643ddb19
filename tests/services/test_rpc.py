"""The codec alone, the two ends over real sockets, and what strangers send."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from support.rpc import PATIENCE_S, echo, serving, until

from services.rpc import (
    AsyncRpcClient,
    Call,
    Failure,
    MalformedMessage,
    MessageTooLarge,
    NoAnswer,
    Outgoing,
    QueueFull,
    RemoteFailure,
    Reply,
    Request,
    RpcClient,
    RpcServer,
    ServerLimits,
)
from services.rpc.calls import Calls
from services.rpc.client import SEND_QUEUE
from services.rpc.codec import MAX_ARRAYS, PREFIX, Message, decode, encode

DTYPES = [
    np.uint64,
    np.int64,
    np.float64,
    np.uint32,
    np.int32,
    np.float32,
    np.uint16,
    np.uint8,
    np.int8,
    np.bool_,
]
some_arrays = st.lists(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0))
    ),
    max_size=4,
).map(tuple)
ids = st.integers(0, 2**64 - 1)
messages = st.one_of(
    st.builds(Request, ids, st.text(max_size=20), st.integers(0, 2**40), st.binary(max_size=50), some_arrays),
    st.builds(Reply, ids, st.binary(max_size=50), some_arrays),
    st.builds(Failure, ids, st.text(max_size=20), st.text(max_size=50)),
)


def wire(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


class TestCodec:
    @given(messages)
    def test_what_is_encoded_is_decoded(self, message: Message) -> None:
        found = decode(wire(message))
        assert type(found) is type(message)
        if isinstance(message, Failure) or isinstance(found, Failure):
            assert found == message
            return
        assert found.id == message.id
        assert found.body == message.body
        assert len(found.arrays) == len(message.arrays)
        for ours, theirs in zip(message.arrays, found.arrays, strict=True):
            assert theirs.dtype == ours.dtype
            assert theirs.shape == ours.shape
            assert theirs.tobytes() == ours.tobytes()

    @given(st.lists(st.binary(max_size=60), max_size=5))
    def test_any_frames_are_a_message_or_malformed(self, frames: list[bytes]) -> None:
        for some in (frames, [PREFIX + frame for frame in frames]):
            with pytest.raises(MalformedMessage):
                decode(some)

    @given(messages, st.data())
    def test_damaged_frames_never_raise_anything_else(self, message: Message, data: st.DataObject) -> None:
        frames = wire(message)
        which = data.draw(st.integers(0, len(frames) - 1))
        damaged = bytearray(frames[which] or b"x")
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
        cut = data.draw(st.integers(0, len(damaged)))
        for frame in (bytes(damaged), bytes(damaged[:cut])):
            with suppress(MalformedMessage):
                decode([*frames[:which], frame, *frames[which + 1 :]])

    def test_strided_arrays_travel(self) -> None:
        array = np.arange(20, dtype=np.float32).reshape(4, 5)[::2, 1:4]
        found = decode(wire(Reply(1, b"", (array,))))
        assert isinstance(found, Reply)
        np.testing.assert_array_equal(found.arrays[0], array)

    def test_contiguous_arrays_are_not_copied(self) -> None:
        array = np.zeros(1_000, np.float32)
        _, frame = encode(Reply(1, b"", (array,)))
        array[3] = 7.0
        assert np.frombuffer(frame, np.float32)[3] == 7.0
        found = decode([encode(Reply(1, b"", (array,)))[0], memoryview(array).cast("B")])
        assert isinstance(found, Reply)
        assert np.shares_memory(found.arrays[0], array)

    def test_unaligned_frames_come_out_aligned(self) -> None:
        array = np.arange(10, dtype=np.uint64)
        first, frame = encode(Reply(1, b"", (array,)))
        shifted = memoryview(bytearray(b"x" + bytes(frame)))[1:]
        found = decode([first, shifted])
        assert isinstance(found, Reply)
        assert found.arrays[0].flags.aligned
        np.testing.assert_array_equal(found.arrays[0], array)

    @pytest.mark.parametrize(
        ("code", "shape", "frame"),
        [
            ("<f4", (3,), b"\0" * 11),
            ("<f4", (-1,), b""),
            ("<f4", (2**33, 2**33), b"\0" * 4),
            ("|O", (1,), b"\0" * 8),
            ("<f4", (1, 1, 1, 1, 1), b"\0" * 4),
        ],
    )
    def test_impossible_arrays_are_malformed(self, code: str, shape: tuple[int, ...], frame: bytes) -> None:
        header = msgspec.msgpack.encode(["reply", 1, "", 0, b"", [[code, shape]]])
        with pytest.raises(MalformedMessage):
            decode([PREFIX + header, frame])

    def test_fields_of_a_later_version_are_skipped(self) -> None:
        header = msgspec.msgpack.encode(["failure", 1, "code", 0, b"", [], "text", "new", 5])
        assert decode([PREFIX + header]) == Failure(1, "code", "text")

    def test_another_format_is_malformed(self) -> None:
        (frame,) = wire(Failure(1, "a", "b"))
        with pytest.raises(MalformedMessage):
            decode([frame[:2] + b"\x02" + frame[3:]])

    def test_bounds_hold_for_writers_too(self) -> None:
        with pytest.raises(MessageTooLarge):
            encode(Reply(1, b"", (np.zeros(1, np.int8),) * (MAX_ARRAYS + 1)))
        with pytest.raises(MessageTooLarge):
            encode(Reply(1, b"\0" * (5 * 2**20)))
        with pytest.raises(MessageTooLarge):
            encode(Reply(1, b"", (np.zeros(2**26 + 1, np.float32),)))
        with pytest.raises(ValueError, match="complex"):
            encode(Reply(1, b"", (np.zeros(1, np.complex64),)))


class TestCalls:
    def test_only_the_answer_of_the_peer_that_was_asked_counts(self) -> None:
        calls = Calls()
        first, frames = calls.begin("a", Outgoing("m", b"x"), 1.5)
        request = decode([bytes(frame) for frame in frames])
        assert request == Request(first, "m", 1_500, b"x")
        assert calls.receive("b", wire(Reply(first, b"forged"))) is None
        assert calls.receive("a", wire(Reply(first + 1, b"never asked"))) is None
        assert calls.receive("a", wire(Request(first, "m", 1, b""))) is None
        assert calls.receive("a", [b"noise"]) is None
        assert calls.receive("a", wire(Reply(first, b"y"))) == Reply(first, b"y")
        assert calls.receive("a", wire(Reply(first, b"y"))) is None
        assert (calls.counts.late_total, calls.counts.malformed_total) == (3, 2)

    def test_an_answer_after_giving_up_is_late(self) -> None:
        calls = Calls()
        call, _ = calls.begin("a", Outgoing("m", b""), 1.0)
        calls.give_up(call)
        assert calls.receive("a", wire(Reply(call, b""))) is None
        assert calls.counts.late_total == 1


@pytest.fixture
def client() -> Iterator[RpcClient]:
    opened = RpcClient()
    yield opened
    opened.close()


class TestBlocking:
    def test_arrays_go_and_come_back(self, client: RpcClient) -> None:
        keys = np.arange(4_096, dtype=np.uint64)
        rows = np.random.default_rng(0).normal(size=(4_096, 32)).astype(np.float32)
        with serving() as (_, address):
            answer = client.exchange({address: Outgoing("echo", b"body", (keys, rows))}, PATIENCE_S)[address]
        assert isinstance(answer, Reply)
        assert answer.body == b"body"
        np.testing.assert_array_equal(answer.arrays[0], keys)
        np.testing.assert_array_equal(answer.arrays[1], rows)
        assert answer.arrays[1].flags.aligned

    def test_several_peers_at_once(self, client: RpcClient) -> None:
        both = threading.Barrier(2)

        def together(server: RpcServer, call: Call) -> None:
            both.wait(PATIENCE_S)
            echo(server, call)

        with serving(together) as (_, one), serving(together) as (_, other):
            answers = client.exchange({one: Outgoing("m", b"1"), other: Outgoing("m", b"2")}, PATIENCE_S)
        assert [answers[one], answers[other]] == [Reply(1, b"1"), Reply(2, b"2")]

    def test_a_peer_that_is_not_there_is_missing(self, client: RpcClient) -> None:
        with serving() as (_, address):
            answers = client.exchange(
                {address: Outgoing("m", b""), "127.0.0.1:9": Outgoing("m", b"")},
                PATIENCE_S,
                lambda: client.counts["answered_total"] == 0,
            )
        assert set(answers) == {address}

    def test_waiting_ends_when_told(self, client: RpcClient) -> None:
        with serving(lambda _server, _call: None) as (_, address):
            assert client.exchange({address: Outgoing("m", b"")}, 600.0, lambda: False, 0.05) == {}

    def test_a_late_answer_does_not_answer_the_next_call(self, client: RpcClient) -> None:
        held: list[Call] = []

        def second_first(server: RpcServer, call: Call) -> None:
            if call.request.body == b"first":
                held.append(call)
                return
            echo(server, held[0])
            echo(server, call)

        with serving(second_first) as (_, address):
            assert client.exchange({address: Outgoing("m", b"first")}, PATIENCE_S, lambda: False, 0.0) == {}
            answers = client.exchange({address: Outgoing("m", b"second")}, PATIENCE_S)
        assert answers[address] == Reply(2, b"second")
        assert client.counts["late_total"] == 1

    def test_errors_arrive_as_failures(self, client: RpcClient) -> None:
        with serving(lambda server, call: server.fail(call, "no", "because")) as (_, address):
            assert client.exchange({address: Outgoing("m", b"")}, PATIENCE_S)[address] == Failure(
                1, "no", "because"
            )

    def test_a_forgotten_peer_is_connected_anew(self, client: RpcClient) -> None:
        with serving() as (_, address):
            client.exchange({address: Outgoing("m", b"")}, PATIENCE_S)
            client.forget(address)
            client.forget("127.0.0.1:1")
            assert client.exchange({address: Outgoing("m", b"")}, PATIENCE_S)[address] == Reply(2, b"")

    def test_the_send_queue_is_bounded(self, client: RpcClient) -> None:
        nobody = "127.0.0.1:9"
        for _ in range(SEND_QUEUE):
            client.exchange({nobody: Outgoing("m", b"")}, 0.0)
        with pytest.raises(QueueFull, match=nobody):
            client.exchange({nobody: Outgoing("m", b"")}, 0.0)

    def test_threads_may_share_a_client(self, client: RpcClient) -> None:
        wrong: list[object] = []

        def ask(address: str, number: int) -> None:
            for count in range(30):
                body = f"{number}/{count}".encode()
                answer = client.exchange({address: Outgoing("m", body)}, PATIENCE_S)[address]
                if not isinstance(answer, Reply) or answer.body != body:
                    wrong.append(answer)

        with serving() as (_, address):
            threads = [threading.Thread(target=ask, args=(address, number)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[RpcServer, str, zmq.Socket[bytes], RpcClient]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    client = RpcClient()
    with serving() as (server, address):
        socket.connect(f"tcp://{address}")
        yield server, address, socket, client
    client.close()
    socket.close(0)
    context.term()


class TestServer:
    def test_a_full_queue_says_busy(self) -> None:
        server = RpcServer("127.0.0.1:0", limits=ServerLimits(queue=3))
        client = RpcClient()
        address = f"127.0.0.1:{server.port}"
        answers: list[Reply | Failure] = []

        def ask() -> None:
            mine = RpcClient()
            answers.append(mine.exchange({address: Outgoing("m", b"")}, PATIENCE_S)[address])
            mine.close()

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        until(lambda: server.wait(0.01) or server.counts.received_total == 5)
        assert server.counts.busy_total == 2
        while (call := server.take()) is not None:
            echo(server, call)
        for thread in threads:
            thread.join()
        assert sorted(answer.code if isinstance(answer, Failure) else "" for answer in answers) == [
            "", "", "", "busy", "busy",
        ]  # fmt: skip
        server.close()
        client.close()

    def test_bytes_in_the_queue_are_bounded(self, client: RpcClient) -> None:
        server = RpcServer("127.0.0.1:0", limits=ServerLimits(queue_bytes=10_000))
        address = f"127.0.0.1:{server.port}"
        large = Outgoing("m", b"", (np.zeros(8_000, np.uint8),))
        for _ in range(3):
            client.exchange({address: large}, 0.0)
        until(lambda: server.wait(0.01) or server.counts.received_total == 3)
        assert server.counts.busy_total == 2
        server.close()

    def test_a_request_whose_time_is_up_is_not_served(self) -> None:
        now = [0.0]
        server = RpcServer("127.0.0.1:0", monotonic=lambda: now[0])
        client = RpcClient()
        address = f"127.0.0.1:{server.port}"
        client.exchange({address: Outgoing("m", b"")}, 0.01)
        until(lambda: server.wait(0.01) or server.counts.received_total == 1)
        now[0] = 1.0
        assert server.take() is None
        assert server.counts.late_total == 1
        server.close()
        client.close()

    def test_an_answer_to_a_peer_that_left_is_counted(self) -> None:
        server = RpcServer("127.0.0.1:0")
        client = RpcClient()
        address = f"127.0.0.1:{server.port}"
        client.exchange({address: Outgoing("m", b"")}, 0.05)
        until(lambda: server.wait(0.01) or server.counts.received_total == 1)
        client.close()
        call = server.take()
        assert call is not None or server.counts.late_total == 1
        gone = Call(b"nobody", Request(1, "m", 1, b""), 0.0)
        server.answer(gone, b"")
        assert server.counts.unsent_total >= 1
        server.close()

    def test_an_address_in_use_is_an_error(self) -> None:
        server = RpcServer("127.0.0.1:0")
        with pytest.raises(zmq.ZMQError):
            RpcServer(f"127.0.0.1:{server.port}")
        server.close()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.binary(max_size=80), max_size=4), min_size=1, max_size=8))
    def test_foreign_messages_are_counted_and_dropped(
        self, fuzzed: tuple[RpcServer, str, zmq.Socket[bytes], RpcClient], noise: list[list[bytes]]
    ) -> None:
        server, address, socket, client = fuzzed
        before = server.counts.malformed_total
        sent = 0
        for frames in noise:
            for some in (frames, [PREFIX + b"".join(frames)]):
                if some:
                    socket.send_multipart(some)
                    sent += 1
        until(lambda: server.counts.malformed_total == before + sent)
        assert isinstance(
            client.exchange({address: Outgoing("m", b"still here")}, PATIENCE_S)[address], Reply
        )

    def test_replies_sent_to_a_server_are_dropped(
        self, fuzzed: tuple[RpcServer, str, zmq.Socket[bytes], RpcClient]
    ) -> None:
        server, address, socket, client = fuzzed
        before = server.counts.malformed_total
        socket.send_multipart(wire(Reply(1, b"")))
        until(lambda: server.counts.malformed_total == before + 1)
        assert isinstance(client.exchange({address: Outgoing("m", b"")}, PATIENCE_S)[address], Reply)

    def test_bytes_that_are_no_zeromq_do_no_harm(self, client: RpcClient) -> None:
        with serving() as (server, address):
            for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 5_000, b"\xff" * 64, b"\x16\x03\x01"):
                with sockets.create_connection(("127.0.0.1", server.port)) as raw:
                    raw.sendall(noise)
            assert isinstance(client.exchange({address: Outgoing("m", b"")}, PATIENCE_S)[address], Reply)


class TestAsyncio:
    def test_calls_answered_out_of_order(self) -> None:
        held: list[Call] = []

        def last_first(server: RpcServer, call: Call) -> None:
            held.append(call)
            if len(held) == 5:
                for one in reversed(held):
                    echo(server, one)

        async def ask(address: str) -> list[bytes]:
            client = AsyncRpcClient()
            calls = [client.call(address, Outgoing("m", bytes([n])), PATIENCE_S) for n in range(5)]
            replies = await asyncio.gather(*calls)
            client.close()
            return [reply.body for reply in replies]

        with serving(last_first) as (_, address):
            assert asyncio.run(ask(address)) == [bytes([n]) for n in range(5)]

    def test_no_answer_and_errors_are_exceptions(self) -> None:
        async def ask(address: str) -> None:
            client = AsyncRpcClient()
            with pytest.raises(NoAnswer, match=r"127.0.0.1:9: no answer within 0.05 s"):
                await client.call("127.0.0.1:9", Outgoing("m", b""), 0.05)
            with pytest.raises(RemoteFailure, match="no: because"):
                await client.call(address, Outgoing("m", b""), PATIENCE_S)
            client.close()

        with serving(lambda server, call: server.fail(call, "no", "because")) as (_, address):
            asyncio.run(ask(address))

    def test_forgetting_a_peer_ends_its_calls(self) -> None:
        async def ask() -> None:
            client = AsyncRpcClient()
            call = asyncio.create_task(client.call("127.0.0.1:9", Outgoing("m", b""), 60.0))
            await asyncio.sleep(0.05)
            client.forget("127.0.0.1:9")
            with pytest.raises(NoAnswer, match="closed"):
                await call
            client.close()

        asyncio.run(ask())

    def test_the_send_queue_is_bounded(self) -> None:
        async def ask() -> None:
            client = AsyncRpcClient()
            calls = [
                asyncio.create_task(client.call("127.0.0.1:9", Outgoing("m", b""), 0.3))
                for _ in range(SEND_QUEUE + 5)
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
            client.close()
            assert {type(result) for result in results} <= {NoAnswer, QueueFull}
            assert sum(isinstance(result, QueueFull) for result in results) == 5

        asyncio.run(ask())
