"""The serving end: one ROUTER socket, a bounded and fair queue, answers now or later.

The owner's loop calls ``wait`` and then ``take`` until nothing is left; ``answer`` and ``fail`` may come at
any time after (a long poll keeps its Call). Used by one thread.

Codes of failures that come from here: ``busy`` (the queue of requests, or that of answers to this peer, is full;
try again), ``late`` (the caller's time was up before its turn), ``too-large`` (no message can hold the answer; ask
for less).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from services.rpc.codec import (
    MAX_FRAME_BYTES,
    Array,
    Buffer,
    Failure,
    Message,
    Reply,
    Request,
    decode,
    encode,
)
from services.rpc.connections import ConnectionCounts, Connections
from services.rpc.errors import MalformedMessage, MessageTooLarge
from services.rpc.gate import DOMAIN, Gate
from services.rpc.link import Link
from services.rpc.outbox import Outbox
from services.rpc.queue import FairQueue
from services.rpc.security import Security

BUSY: Final = "busy"
LATE: Final = "late"
TOO_LARGE: Final = "too-large"
MAX_TEXT: Final = 2_000
"""Characters of a failure's message: what a peer sent may stand in it, whatever its length."""
LOOK: Final = 256
"""Messages taken in at one look at most: whoever floods cannot keep the loop there."""
WATCH_S: Final = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to answer: who asked, what, and until when (monotonic seconds).

    ``key``: the public key (hexadecimal) that the caller proved to have; empty where the server has no security.
    """

    peer: bytes
    request: Request
    deadline_s: float
    key: str = ""


@dataclass(slots=True)
class ServerCounts:
    """What a server saw. ``unsent_total``: answers to peers that are gone, or read none. ``held_back_total``:
    answers to peers with too much on its way to them, as they read too slowly, who were told ``busy`` instead."""

    received_total: int = 0
    malformed_total: int = 0
    busy_total: int = 0
    late_total: int = 0
    unsent_total: int = 0
    too_large_total: int = 0
    held_back_total: int = 0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds: requests and bytes in the queue; messages and bytes on their way to one slow peer, bytes to all."""

    queue: int = 1_024
    queue_bytes: int = 512 * 2**20
    per_peer: int = 1_000
    per_peer_bytes: int = 128 * 2**20
    sending_bytes: int = 512 * 2**20


class RpcServer:
    """Listens at ``listen`` (``HOST:PORT``, port 0: any free one).

    With ``security`` only clients with an allowed key get in, and all is encrypted. Raises KeysError where that
    has no server's key pair, and ZMQError where the address cannot be had.
    """

    def __init__(
        self,
        listen: str,
        security: Security | None = None,
        *,
        limits: ServerLimits | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = ServerCounts()
        self.connections = ConnectionCounts()
        self._limits = limits or ServerLimits()
        self._monotonic = monotonic
        self._queue: FairQueue[Call] = FairQueue(self._limits.queue, self._limits.queue_bytes)
        self._outbox = Outbox(self._limits.per_peer_bytes, self._limits.sending_bytes)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._gate: Gate | None = None
        self._watch: Connections | None = None
        self._next_watch_s = float("-inf")
        self._poller = zmq.Poller()
        try:
            self._open(listen, security)
        except BaseException:
            self.close()
            raise

    def _open(self, listen: str, security: Security | None) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, self._limits.per_peer),
            (zmq.SNDHWM, self._limits.per_peer),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.HANDSHAKE_IVL, 5_000),
        ):
            self._socket.setsockopt(option, value)
        self._poller.register(self._socket, zmq.POLLIN)
        if security is not None:
            security.to_server(self._socket)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            # Before anybody can connect: without it ZeroMQ would let in whoever has any key at all.
            self._gate = Gate(self._context, security.allowed, self._monotonic)
            self._poller.register(self._gate.socket, zmq.POLLIN)
        self._watch = Connections(self._context, self._socket, self.connections, self._monotonic)
        self._socket.bind(f"tcp://{listen}")

    @property
    def port(self) -> int:
        """The port that is listened on."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    @property
    def turned_away(self) -> str:
        """Why somebody was turned away last; empty where nobody was, or it is not known."""
        watched = self._watch.last if self._watch is not None else ""
        return (self._gate.last if self._gate is not None else "") or watched

    def link(self, address: str, security: Security | None) -> Link:
        """A connection to another server that ``wait`` waits for, too. ``unlink`` it when it is done with."""
        link = Link(self._context, address, security, self._monotonic)
        self._poller.register(link.socket, zmq.POLLIN)
        return link

    def unlink(self, link: Link) -> None:
        """Close a connection that ``link`` made."""
        self._poller.unregister(link.socket)
        link.close()

    def watch(self, descriptor: int) -> None:
        """Let ``wait`` end also when this file descriptor can be read: how another thread wakes the loop."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait until a request or an answer to a link is there, or ``timeout_s`` passed, and take requests in."""
        if not len(self._queue):
            self._poller.poll(max(0, round(timeout_s * 1_000)))
        self._look_at_connections()
        for _ in range(LOOK):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, *rest = [frame.buffer for frame in frames]
            self._take_in(bytes(peer), rest, _key(frames[-1]))

    def _look_at_connections(self) -> None:
        if self._gate is not None:
            self._gate.look()
            self.connections.refused_total = self._gate.refused_total
        now = self._monotonic()
        if self._watch is not None and now >= self._next_watch_s:
            # Only counted, so not with every call: looking costs a tenth of a small one.
            self._next_watch_s = now + WATCH_S
            self._watch.look()

    def _take_in(self, peer: bytes, frames: list[memoryview], key: str) -> None:
        self.counts.received_total += 1
        buffers: list[Buffer] = list(frames)
        try:
            message = decode(buffers)
        except MalformedMessage as error:
            self.counts.malformed_total += 1
            _log.debug("dropped a message: %s", error)
            return
        if not isinstance(message, Request):
            self.counts.malformed_total += 1
            return
        call = Call(peer, message, self._monotonic() + message.timeout_ms / 1_000, key)
        for refused in self._queue.put(peer, call, sum(len(frame) for frame in frames)):
            self.counts.busy_total += 1
            self.fail(refused, BUSY, f"{len(self._queue)} requests wait already")

    def take(self) -> Call | None:
        """The next request whose caller still waits, each peer in turn; None when there is none."""
        while (call := self._queue.take()) is not None:
            if call.deadline_s > self._monotonic():
                return call
            self.counts.late_total += 1
            self.fail(call, LATE, "the caller's time was up before its turn came")
        return None

    def answer(self, call: Call, body: bytes, arrays: tuple[Array, ...] = ()) -> None:
        """Send the answer to ``call``; to a peer that is gone, or does not read, it is dropped and counted.

        The arrays must not change afterwards: they are sent from where they are.
        """
        self._send(call.peer, Reply(call.request.id, body, arrays))

    def fail(self, call: Call, code: str, message: str) -> None:
        """Answer ``call`` with an error."""
        self._send(call.peer, Failure(call.request.id, code, message[:MAX_TEXT]))

    def _send(self, peer: bytes, message: Message) -> None:
        try:
            frames = encode(message)
        except MessageTooLarge as error:
            # The peer asked for it, so it is told, and the server goes on.
            self.counts.too_large_total += 1
            frames = encode(Failure(message.id, TOO_LARGE, f"the answer would be {error}; ask for less"))
        size = sum(len(frame) for frame in frames)
        if not self._outbox.has_room(peer, size):
            self.counts.held_back_total += 1
            text = f"answers of more than {self._limits.per_peer_bytes} bytes to you have not left yet"
            frames, size = encode(Failure(message.id, BUSY, text)), 0
        try:
            large = size >= zmq.COPY_THRESHOLD
            tracker = self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False, track=large)
            if large and tracker is not None:
                self._outbox.sent(peer, tracker, size)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts.unsent_total += 1

    def close(self) -> None:
        """Give up the address. Answers not yet sent are lost."""
        if self._watch is not None:
            self._watch.close()
        self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()


def _key(frame: zmq.Frame) -> str:
    """The key that the gate let in (what ZAP calls the user's id)."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
