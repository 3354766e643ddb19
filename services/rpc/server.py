"""The serving end: one ROUTER socket, a bounded queue, answers now or later.

The owner's loop calls ``wait`` and then ``take`` until nothing is left; ``answer`` and ``fail`` may come at
any time after (a long poll keeps its Call). Used by one thread.

Codes of failures that come from here: ``busy`` (the queue is full; try again), ``late`` (the caller's time
was up before its turn).
"""

from __future__ import annotations

import logging
import time
from collections import deque
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
from services.rpc.errors import MalformedMessage

BUSY: Final = "busy"
LATE: Final = "late"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to answer: who asked, what, and until when (monotonic seconds)."""

    peer: bytes
    request: Request
    deadline_s: float


@dataclass(slots=True)
class ServerCounts:
    """What a server saw. ``unsent_total``: answers to peers that are gone or do not read."""

    received_total: int = 0
    malformed_total: int = 0
    busy_total: int = 0
    late_total: int = 0
    unsent_total: int = 0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds: requests and bytes in the queue, messages waiting for one slow peer."""

    queue: int = 1_024
    queue_bytes: int = 512 * 2**20
    per_peer: int = 1_000


class RpcServer:
    """Listens at ``listen`` (``HOST:PORT``, port 0: any free one)."""

    def __init__(
        self,
        listen: str,
        *,
        limits: ServerLimits | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = ServerCounts()
        self._limits = limits or ServerLimits()
        self._monotonic = monotonic
        self._queue: deque[tuple[Call, int]] = deque()
        self._queue_bytes = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.RCVHWM, self._limits.per_peer),
                (zmq.SNDHWM, self._limits.per_peer),
                (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.HANDSHAKE_IVL, 5_000),
            ):
                self._socket.setsockopt(option, value)
            self._socket.bind(f"tcp://{listen}")
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """The port that is listened on."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def wait(self, timeout_s: float) -> None:
        """Wait until a request is there or ``timeout_s`` passed, and take in what has arrived."""
        if not self._queue:
            self._socket.poll(max(0, round(timeout_s * 1_000)))
        # One look takes in no more than the queue holds: whoever floods cannot keep the loop in here.
        for _ in range(self._limits.queue):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, *rest = [frame.buffer for frame in frames]
            self._take_in(bytes(peer), rest)

    def _take_in(self, peer: bytes, frames: list[memoryview]) -> None:
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
        size = sum(len(frame) for frame in frames)
        full = len(self._queue) >= self._limits.queue
        if full or (self._queue and self._queue_bytes + size > self._limits.queue_bytes):
            self.counts.busy_total += 1
            self._send(peer, Failure(message.id, BUSY, f"{len(self._queue)} requests wait already"))
            return
        self._queue.append((Call(peer, message, self._monotonic() + message.timeout_ms / 1_000), size))
        self._queue_bytes += size

    def take(self) -> Call | None:
        """The next request whose caller still waits; None when there is none."""
        while self._queue:
            call, size = self._queue.popleft()
            self._queue_bytes -= size
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
        self._send(call.peer, Failure(call.request.id, code, message))

    def _send(self, peer: bytes, message: Message) -> None:
        try:
            self._socket.send_multipart([peer, *encode(message)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts.unsent_total += 1

    def close(self) -> None:
        """Give up the address. Answers not yet sent are lost."""
        self._socket.close()
        self._context.term()
