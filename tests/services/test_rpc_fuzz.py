"""What strangers, damaged frames and odd peers can send: to the codec, to a live server, to the handlers.

Three promises: nothing but the promised errors, everything counted, and a proper call right after is answered.
"""

from __future__ import annotations

import random
import re
import socket as sockets
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.parameters import (
    DECLARATION,
    SOURCE,
    Fleet,
    client_of,
    gradients,
    make_settings,
    recorded,
    threads,
    wait_ready,
)
from support.rpc import serving, until

from services.parameter_server import messages as wire
from services.parameter_server.client import operations
from services.parameter_server.client.caching import RowCache
from services.parameter_server.client.readers import Choice
from services.parameter_server.declarations import Declaration, encode_declaration
from services.parameter_server.handlers import _HANDLERS, Rejected, guarded, handle
from services.parameter_server.holdings import MAX_MODELS
from services.rpc import (
    Failure,
    KeyPair,
    MalformedMessage,
    Outgoing,
    Reply,
    Request,
    RpcClient,
    RpcServer,
    Security,
)
from services.rpc.codec import MAX_ARRAYS, PREFIX, Array, decode, encode
from services.rpc.server import MAX_TEXT, TOO_LARGE
from sync.snapshot import decode as decode_snapshot
from sync.snapshot import encode as encode_snapshot

FUZZ: Final = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
KEYS, ROWS = np.arange(6, dtype=np.uint64), np.ones((6, 4), np.float32)
DEEP: Final = b"\x91" * 20_000 + b"\xc0"


def frames_of(message: Request | Reply | Failure) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


VALID: Final = [
    frames_of(Request(7, "pull", 5_000, b"\x93\x01\x02\x03", (KEYS, ROWS))),
    frames_of(Request(2**64 - 1, "", 0, b"", (np.zeros((0, 4), np.float32),))),
    frames_of(Reply(7, b"body", (KEYS.astype(np.int8), ROWS))),
    frames_of(Failure(7, "refused", "because")),
]


class Mutation:
    """One way to damage a message, chosen by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, frames: Sequence[bytes]) -> list[bytes]:
        """``frames`` damaged one to three times."""
        found = [bytes(frame) for frame in frames]
        for _ in range(self._random.randint(1, 3)):
            found = self._random.choice(
                [
                    self._flip,
                    self._cut,
                    self._swap,
                    self._drop,
                    self._add,
                    self._grow,
                    self._header,
                    self._deep,
                ]
            )(found)
        return found

    def _which(self, frames: list[bytes]) -> int:
        return self._random.randrange(len(frames)) if frames else 0

    def _replaced(self, frames: list[bytes], at: int, frame: bytes) -> list[bytes]:
        return [*frames[:at], frame, *frames[at + 1 :]]

    def _flip(self, frames: list[bytes]) -> list[bytes]:
        at = self._which(frames)
        damaged = bytearray(frames[at] if frames else b"") or bytearray(1)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return self._replaced(frames, at, bytes(damaged))

    def _cut(self, frames: list[bytes]) -> list[bytes]:
        at = self._which(frames)
        frame = frames[at] if frames else b""
        return self._replaced(frames, at, frame[: self._random.randint(0, len(frame))])

    def _swap(self, frames: list[bytes]) -> list[bytes]:
        shuffled = list(frames)
        self._random.shuffle(shuffled)
        return shuffled

    def _drop(self, frames: list[bytes]) -> list[bytes]:
        at = self._which(frames)
        return [*frames[:at], *frames[at + 1 :]]

    def _add(self, frames: list[bytes]) -> list[bytes]:
        at = self._random.randint(0, len(frames))
        count = self._random.choice([1, 2, MAX_ARRAYS + 1])
        return [*frames[:at], *[self._random.randbytes(self._random.randint(0, 9))] * count, *frames[at:]]

    def _grow(self, frames: list[bytes]) -> list[bytes]:
        at = self._which(frames)
        frame = frames[at] if frames else b""
        return self._replaced(frames, at, frame + self._random.randbytes(self._random.randint(1, 40)))

    def _header(self, frames: list[bytes]) -> list[bytes]:
        """A header that reads well and says something else: lengths, types, shapes, kinds."""
        huge = [0, 1, -1, 2**31, 2**39, 2**40 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
        pick = self._random.choice
        arrays = [
            [
                pick(["<f4", "<u8", "|b1", "|O", ">f4", "", "<f4" * 30]),
                [pick([*huge, 6, 4]) for _ in range(pick([0, 1, 2, 3, 4, 5, 40]))],
            ]
            for _ in range(pick([0, 1, 2, len(frames)]))
        ]
        fields: list[object] = [
            pick(["request", "reply", "failure", "x"]),
            pick(huge),
            "m",
            pick(huge),
            b"",
            arrays,
        ]
        return self._replaced(frames, 0, PREFIX + msgspec.msgpack.encode(fields[: pick([6, 6, 6, 5])]))

    def _deep(self, frames: list[bytes]) -> list[bytes]:
        """A field of a later version, nested without end; or one of ours."""
        known = [msgspec.msgpack.encode(field) for field in ("reply", 1, "", 0, b"", [], "")]
        at = self._random.choice([7, 5, 4, 0])
        return self._replaced(frames, 0, PREFIX + bytes([0x90 + at + 1]) + b"".join(known[:at]) + DEEP)


seeds = st.integers(0, 2**32 - 1)
mutated = st.builds(lambda frames, seed: Mutation(seed)(frames), st.sampled_from(VALID), seeds)


class TestDecode:
    @given(mutated)
    @settings(FUZZ, max_examples=1_500)
    def test_a_message_or_malformed(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames)
        except MalformedMessage:
            return
        for array in () if isinstance(message, Failure) else message.arrays:
            assert array.nbytes <= sum(len(frame) for frame in frames)
            assert not array.flags.writeable

    @pytest.mark.parametrize(
        "shape", [(0, 2**39, 2**39), (2**39, 0, 2**39, 2**39), (0, 2**40), (0,) * 5, (0, -1), (2**63,)]
    )
    def test_nothing_of_impossible_size(self, shape: tuple[int, ...]) -> None:
        header = msgspec.msgpack.encode(["reply", 1, "", 0, b"", [["<f8", shape]]])
        with pytest.raises(MalformedMessage, match="shape"):
            decode([PREFIX + header, b""])

    def test_nesting_without_end_where_a_later_version_has_a_field(self) -> None:
        known = b"".join(msgspec.msgpack.encode(field) for field in ("failure", 1, "", 0, b"", [], ""))
        with pytest.raises(MalformedMessage, match="recursion"):
            decode([PREFIX + b"\x98" + known + DEEP])


FOREIGN: Final = {
    "http": b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 64,
    "tls": bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 190,
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "zeros": b"\0" * 5_000,
    "ones": b"\xff" * 5_000,
    "half a greeting": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03",
    "zmtp, then noise": b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL" + b"\0" * 48 + b"\xa5" * 100,
    "zmtp, a huge command": b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL" + b"\0" * 48 + b"\x06" + b"\xff" * 8,
    "zmtp 1, a huge frame": b"\x01\0" + b"\xff" + struct.pack(">Q", 2**62) + b"\0" * 100,
    "zmtp 1, a message": b"\x01\0" + b"\x06\0hello",
}
SERVER, CLIENT = KeyPair.generate(), KeyPair.generate()
OURS = Security(SERVER.public, CLIENT, SERVER, frozenset({CLIENT.public}))


@pytest.fixture(scope="module", params=["in the clear", "with keys"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    security = OURS if request.param == "with keys" else None
    with serving(security=security) as (server, address), closing(Live(server, address, security)) as found:
        yield found


class Live:
    """A running server, a peer that may send it anything, and a proper client."""

    def __init__(self, server: RpcServer, address: str, security: Security | None) -> None:
        self.server, self.address = server, address
        self.client = RpcClient(security)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if security is not None:
            security.to_client(self.socket)
        self.socket.connect(f"tcp://{address}")

    def works(self) -> bool:
        answer = self.client.exchange({self.address: Outgoing("m", b"still here")}, 5.0).get(self.address)
        return isinstance(answer, Reply) and answer.body == b"still here"

    def close(self) -> None:
        self.client.close()
        self.socket.close(0)
        self._context.term()


class TestServer:
    @given(st.lists(mutated, min_size=1, max_size=8))
    @settings(FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_damaged_messages_are_counted_and_dropped(self, live: Live, batch: list[list[bytes]]) -> None:
        counts = live.server.counts
        received, malformed = counts.received_total, counts.malformed_total
        wrong = sum(not _is_request(frames) for frames in batch if frames)
        for frames in batch:
            if frames:
                live.socket.send_multipart(frames)
        sent = sum(bool(frames) for frames in batch)
        until(lambda: counts.received_total == received + sent)
        assert counts.malformed_total == malformed + wrong
        assert live.works()
        while live.socket.poll(0):
            live.socket.recv_multipart()

    @pytest.mark.parametrize("name", FOREIGN)
    def test_foreign_protocols_never_become_calls(self, live: Live, name: str) -> None:
        before = live.server.counts.received_total - live.server.counts.malformed_total
        accepted = live.server.connections.accepted_total
        established = live.server.connections.established_total
        with sockets.create_connection(("127.0.0.1", live.server.port)) as raw:
            raw.sendall(FOREIGN[name])
            until(lambda: live.server.connections.accepted_total == accepted + 1)
        assert live.server.counts.received_total - live.server.counts.malformed_total == before
        assert live.server.connections.established_total == established
        assert live.works()

    def test_random_bytes_at_the_port(self, live: Live) -> None:
        rng = random.Random(5)
        accepted = live.server.connections.accepted_total
        for _ in range(100):
            with sockets.create_connection(("127.0.0.1", live.server.port)) as raw:
                raw.sendall(
                    rng.choice([b"", FOREIGN["zmtp, then noise"]]) + rng.randbytes(rng.randint(1, 300))
                )
        until(lambda: live.server.connections.accepted_total >= accepted + 100)
        assert live.works()


def _is_request(frames: list[bytes]) -> bool:
    try:
        return isinstance(decode(frames), Request)
    except MalformedMessage:
        return False


class TestAnswers:
    def test_an_answer_that_no_message_can_hold_is_an_error_of_its_own(self) -> None:
        small = np.zeros(1, np.int8)
        with (
            serving(lambda server, call: server.answer(call, b"", (small,) * (MAX_ARRAYS + 1))) as (
                server,
                address,
            ),
            closing(RpcClient()) as client,
        ):
            answer = client.exchange({address: Outgoing("m", b"")}, 5.0)[address]
            assert isinstance(answer, Failure)
            assert answer.code == TOO_LARGE
            assert server.counts.too_large_total == 1

    def test_the_text_of_a_failure_is_bounded(self) -> None:
        with (
            serving(lambda server, call: server.fail(call, "no", call.request.method * 2)) as (_, address),
            closing(RpcClient()) as client,
        ):
            answer = client.exchange({address: Outgoing("m" * 4_000_000, b"")}, 5.0)[address]
        assert answer == Failure(1, "no", "m" * MAX_TEXT)


# --- the parameter server ---------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([40, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)]),
)
words = st.sampled_from(
    ["main", "items", "dense", "log-1", "", "nobody", "../../x", "/", "é" * 300, "x" * 3_000, "\0"]
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type: plausible ones, and the ends of what the type can hold."""
    if kind is int:
        return numbers
    if kind is str:
        return words
    if kind is bytes:
        return st.one_of(st.binary(max_size=20), st.just(encode_declaration(DECLARATION)))
    if kind is bool:
        return st.booleans()
    if kind is float:
        return st.floats()
    if kind is type(None):
        return st.none()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct_of(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return values(inner[0])  # beyond its bounds, too
    if origin is list:
        return st.lists(values(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if origin is Literal:
        return st.sampled_from(inner)
    assert origin is Union or type(None) in inner, kind
    return st.one_of(*map(values, inner))


def struct_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = msgspec.inspect.type_info(kind)
    assert isinstance(fields, msgspec.inspect.StructType)
    hints = msgspec._utils.get_class_annotations(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields.fields})


REQUESTS: Final = [kind for kind in wire.Wire.__subclasses__() if kind.__name__.endswith("Request")]
some_arrays: st.SearchStrategy[tuple[Array, ...]] = st.lists(
    st.one_of(
        st.sampled_from([KEYS, ROWS, KEYS[:0], ROWS[:0], KEYS[:3], ROWS[:3], ROWS * np.float32(np.nan)]),
        st.sampled_from(
            [np.full(3, 2**64 - 1, np.uint64), np.zeros((3, 2), np.uint64), np.float32(1.0).reshape(())]
        ),
        st.builds(
            lambda dtype, shape: np.ones(shape, dtype),
            st.sampled_from([np.int64, np.float64, np.uint8, np.bool_, np.float32, np.uint64]),
            st.lists(st.integers(0, 4), max_size=4),
        ),
    ),
    max_size=5,
).map(tuple)


def plausible() -> list[tuple[str, bytes, tuple[Array, ...]]]:
    """Proper requests, to be damaged."""
    fleet = Fleet()
    made = [
        operations.pull(fleet.route, {"items": KEYS, "dense": np.arange(3, dtype=np.uint64)}),
        operations.pull(fleet.route, {"items": KEYS}, Choice(("a",), frozenset()), RowCache(64)),
        operations.push(fleet.route, gradients(1, recorded(1), 1)),
        operations.applied(fleet.route, SOURCE),
        operations.dense(fleet.route, "dense", True),
        operations.publish(fleet.route, "dense"),
        operations.declare(["a"], DECLARATION),
        operations.changes(fleet.route, "a", ["items", "dense"], {0: wire.ShardCursor(0)}, 10, 0),
    ]
    outgoing = [request for operation in made for request in operation.requests.values()]
    return [(one.method, one.body, one.arrays) for one in outgoing]


PLAUSIBLE: Final = plausible()
methods = st.sampled_from(
    [*_HANDLERS, "changes", "describe", "metrics", "checkpoint", "", "nobody", "x" * 9_000]
)
bodies = st.one_of(
    st.sampled_from(REQUESTS).flatmap(struct_of).map(wire.pack),
    st.binary(max_size=40),
    st.just(DEEP),
    st.just(b"\x97" + b"\xa4main" + b"\x01\x90\x90\x01\x00" + DEEP),
)
made_up = st.tuples(methods, bodies, some_arrays)


def _damaged(one: tuple[str, bytes, tuple[Array, ...]], seed: int, arrays: tuple[Array, ...]) -> Any:
    rng = random.Random(seed)
    method, body, own = one
    if rng.random() < 0.7:
        (body,) = (Mutation(seed)._flip if rng.random() < 0.7 else Mutation(seed)._cut)([body])
    return method, body, own if rng.random() < 0.6 else arrays


def _of_its_method(method: str) -> st.SearchStrategy[tuple[str, bytes, tuple[Array, ...]]]:
    kind = getattr(wire, f"{method.title().replace('-', '').replace('_', '')}Request", None)
    body = bodies if kind is None else struct_of(kind).map(wire.pack)
    return st.tuples(st.just(method), body, some_arrays)


calls = st.one_of(
    made_up,
    st.sampled_from([*_HANDLERS, "changes"]).flatmap(_of_its_method),
    st.builds(_damaged, st.sampled_from(PLAUSIBLE), seeds, some_arrays),
)


def answered(fleet: Fleet, method: str, body: bytes, arrays: tuple[Array, ...]) -> str:
    """The code that a call ends with, or nothing where it is answered."""
    host = fleet.hosts["a"]
    request = decode(frames_of(Request(1, method, 1_000, body, arrays)))
    assert isinstance(request, Request)
    try:
        if method == "changes":
            guarded(lambda: host.changes(wire.unpack(body, wire.ChangesRequest)), method)
        else:
            handle(host, request)
    except Rejected as rejected:
        return rejected.code
    return ""


class TestHandlers:
    @given(st.lists(calls, min_size=1, max_size=12))
    @settings(FUZZ, max_examples=400)
    def test_no_input_is_our_fault_or_does_damage(
        self, batch: list[tuple[str, bytes, tuple[Array, ...]]]
    ) -> None:
        fleet = Fleet()
        for method, body, arrays in batch:
            assert answered(fleet, method, body, arrays) != wire.INTERNAL, (method, body)
        held = fleet.hosts["a"].models["main"].held[0]
        state = held.shard.state()
        assert encode_snapshot(decode_snapshot(encode_snapshot(state))) == encode_snapshot(state)
        before = held.shard.applied(SOURCE)
        fleet.ask(operations.push(fleet.route, gradients(before + 1, recorded(3), 1, after=before)))
        assert held.shard.applied(SOURCE) == before + 1
        rows = fleet.ask(operations.pull(fleet.route, {"items": KEYS})).rows["items"]
        assert np.isfinite(rows).all()

    @pytest.mark.parametrize("model", ["../../x", "/tmp/x", "", ".", "a/b", "x" * 65, "\0", "Main"])
    def test_a_models_name_is_no_path(self, model: str) -> None:
        fleet = Fleet()
        body = wire.pack(
            wire.DeclareRequest(encode_declaration(Declaration(model, "fp", DECLARATION.tables)))
        )
        assert answered(fleet, "declare", body, ()) == wire.REFUSED
        assert set(fleet.hosts["a"].models) == {"main"}

    def test_a_table_that_no_message_can_hold_is_refused(self) -> None:
        large = msgspec.json.decode(encode_declaration(DECLARATION))
        large["model"], large["tables"][1]["rows"] = "other", 2**40
        body = wire.pack(wire.DeclareRequest(msgspec.json.encode(large)))
        assert answered(Fleet(), "declare", body, ()) == wire.REFUSED

    def test_the_number_of_models_is_bounded(self) -> None:
        fleet = Fleet()
        codes = [
            answered(
                fleet,
                "declare",
                wire.pack(wire.DeclareRequest(encode_declaration(Declaration(f"m{number}", "fp", ())))),
                (),
            )
            for number in range(MAX_MODELS)
        ]
        assert codes == [""] * (MAX_MODELS - 1) + [wire.REFUSED]

    def test_a_pull_of_more_than_one_answer_holds_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fleet = Fleet()
        part = wire.Part("items", [0], [6])
        body = wire.pack(wire.PullRequest("main", 1, [part, part]))
        monkeypatch.setattr("services.parameter_server.host.MAX_ANSWER_BYTES", 2 * ROWS.nbytes)
        assert answered(fleet, "pull", body, (KEYS, KEYS)) == ""
        monkeypatch.setattr("services.parameter_server.host.MAX_ANSWER_BYTES", 2 * ROWS.nbytes - 1)
        assert answered(fleet, "pull", body, (KEYS, KEYS)) == wire.REFUSED

    def test_changes_tell_no_more_at_once_than_one_answer_holds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet = Fleet()
        fleet.ask(operations.push(fleet.route, gradients(0, recorded(0), 1)))
        monkeypatch.setattr("services.parameter_server.host.MAX_ANSWER_BYTES", 5 * ROWS[0].nbytes)
        found = fleet.hosts["a"].changes(
            wire.ChangesRequest("main", 1, ["items"], [wire.ShardCursor(0)], 1_000, 0)
        )
        assert found is not None
        reply, (keys, rows) = found
        assert isinstance(reply, wire.ChangesReply)
        assert (len(keys), rows.nbytes) == (5, 5 * ROWS[0].nbytes)
        assert not reply.deltas[0].complete

    @pytest.mark.parametrize(
        ("method", "message", "arrays"),
        [
            ("pull", wire.PullRequest("main", 1, [wire.Part("items", [0, 0], [3, 3])]), (KEYS,)),
            ("push", wire.PushRequest("main", 1, "l", 0, 1, 1, None, [0, 0], [-1, -1], []), ()),
            ("changes", wire.ChangesRequest("main", 1, ["items"], [wire.ShardCursor(0)] * 2, 9, 0), ()),
            ("changes", wire.ChangesRequest("main", 1, ["items"] * 2, [wire.ShardCursor(0)], 9, 0), ()),
        ],
    )
    def test_what_is_named_twice_is_refused(
        self, method: str, message: wire.Wire, arrays: tuple[Array, ...]
    ) -> None:
        assert answered(Fleet(), method, wire.pack(message), arrays) == wire.REFUSED


def test_a_parameter_server_survives_it_all(tmp_path: Path) -> None:
    """Damaged calls over a real socket, between proper ones; each that can be read is answered."""
    rng = random.Random(11)
    between_servers = [
        ("tail", wire.TailRequest("a", [wire.TailShard(0, stream, number, held, positions)], 0))
        for stream, number, held in ((0, 0, 0), (1, 5, 5), (-1, -1, 2**63), (2**64 - 1, 2**64 - 1, 2**64 - 1))
        for positions in ({}, {"main": (1, 1)}, {"main": (-1, 2**64 - 1), "": (0, -1)})
    ] + [
        ("copy", wire.CopyRequest(model, shard, cursor))
        for model in ("main", "../x")
        for shard in (0, 1, -1)
        for cursor in (None, (0, False, 0), (7, True, 2**63), (-1, False, -1), (2**64 - 1, True, -5))
    ]
    chosen = [*PLAUSIBLE, *[(method, wire.pack(message), ()) for method, message in between_servers]]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    with threads(make_settings(tmp_path, servers=1, shards=1)), client_of(tmp_path) as client:
        client.declare("main", DECLARATION.tables, DECLARATION.fingerprint)
        (member,) = wait_ready(tmp_path, 1).values()
        socket.connect(f"tcp://{member.address}")
        codes: set[str] = set()
        for number in range(1_000):
            one = chosen[number] if number < len(chosen) else rng.choice(chosen)
            method, body, arrays = (
                one if number < len(chosen) else _damaged(one, rng.randrange(2**32), (KEYS, ROWS))
            )
            frames = frames_of(Request(number, method, 5_000, body, arrays))
            if rng.random() < 0.3:
                frames = Mutation(rng.randrange(2**32))(frames)
            if not frames:
                continue
            socket.send_multipart(frames)
            if _asks(frames, number):
                answer = _answer_to(socket, number)
                codes |= {answer.code} if isinstance(answer, Failure) else {""}
        assert {"", wire.REFUSED} <= codes
        assert wire.INTERNAL not in codes
        found = re.search(r"messages_malformed_total (\d+)", client.metrics()[member.name])
        assert found is not None
        assert int(found[1]) > 50
        assert np.isfinite(client.pull("main", {"items": KEYS}).rows["items"]).all()
        client.checkpoint()
    socket.close(0)
    context.term()


def _asks(frames: list[bytes], number: int) -> bool:
    """Whether ``frames`` are call ``number`` with time left to answer it."""
    try:
        message = decode(frames)
    except MalformedMessage:
        return False
    return isinstance(message, Request) and message.id == number and message.timeout_ms >= 1_000


def _answer_to(socket: zmq.Socket[bytes], number: int) -> Reply | Failure:
    while socket.poll(10_000):
        message = decode(socket.recv_multipart())
        if message.id == number:
            assert not isinstance(message, Request)
            return message
    raise AssertionError(f"call {number} was not answered")
