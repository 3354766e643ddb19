"""The blocking client: asks several peers at once and waits for all of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from services.rpc.calls import Calls, Outgoing
from services.rpc.codec import MAX_FRAME_BYTES, Buffer, Failure, Reply
from services.rpc.connections import Refusal
from services.rpc.errors import QueueFull
from services.rpc.security import Security

SEND_QUEUE: Final = 64
MAX_PEERS: Final = 256
"""Peers with an open connection at most; the one used longest ago is closed first."""


def configure(socket: zmq.Socket[Any], security: Security | None) -> None:
    """The options of every client socket: bounded queues, no waiting at the end, keys where there are some."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, SEND_QUEUE),
        (zmq.RCVHWM, SEND_QUEUE),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.RECONNECT_IVL, 20),
        (zmq.RECONNECT_IVL_MAX, 500),
    ):
        socket.setsockopt(option, value)
    if security is not None:
        security.to_client(socket)


class RpcClient:
    """Blocking calls to any number of peers (``HOST:PORT``). Thread-safe, one exchange at a time.

    Without ``security`` calls travel in the clear, and reach only servers that ask for no keys.
    """

    def __init__(
        self, security: Security | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._security = security
        self._monotonic = monotonic
        self._calls = Calls()
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._refusals: dict[str, Refusal] = {}
        self._known: dict[str, str] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """What was sent, answered, late and malformed so far."""
        seen = self._calls.counts
        return {
            "sent_total": seen.sent_total,
            "answered_total": seen.answered_total,
            "late_total": seen.late_total,
            "malformed_total": seen.malformed_total,
        }

    def exchange(
        self,
        requests: Mapping[str, Outgoing],
        timeout_s: float,
        keep_waiting: Callable[[], bool] | None = None,
        look_s: float = 0.2,
    ) -> dict[str, Reply | Failure]:
        """Send one request to each peer and return what answered within ``timeout_s``, by peer.

        ``keep_waiting`` is asked after every ``look_s`` without an answer, and ends the wait by False.

        A peer that is missing did not answer; whether it acted is unknown, and the arrays may still be on
        their way to it until ``forget``. Raises QueueFull (nothing more was sent) and MessageTooLarge.
        """
        deadline = self._monotonic() + timeout_s
        with self._lock:
            open_calls: dict[int, str] = {}
            answers: dict[str, Reply | Failure] = {}
            try:
                for peer, outgoing in requests.items():
                    call, frames = self._calls.begin(peer, outgoing, timeout_s)
                    open_calls[call] = peer
                    try:
                        self._socket(peer).send_multipart(frames, zmq.NOBLOCK, copy=False)
                    except zmq.Again as error:
                        raise QueueFull(f"{peer}: {SEND_QUEUE} messages wait to be sent") from error
                self._collect(open_calls, answers, deadline, keep_waiting or (lambda: True), look_s)
            finally:
                for call, peer in open_calls.items():
                    self._calls.give_up(call)
                    if peer in self._refusals:
                        self._refusals[peer].why()
        return answers

    def _collect(
        self,
        open_calls: dict[int, str],
        answers: dict[str, Reply | Failure],
        deadline: float,
        keep_waiting: Callable[[], bool],
        look_s: float,
    ) -> None:
        poller = zmq.Poller()
        peers = {self._sockets[peer]: peer for peer in open_calls.values()}
        for socket in peers:
            poller.register(socket, zmq.POLLIN)
        while open_calls:
            remaining_s = min(deadline - self._monotonic(), look_s)
            ready = poller.poll(max(0, math.ceil(remaining_s * 1_000)))
            if not ready and (remaining_s <= 0 or not keep_waiting()):
                return
            for socket, _ in ready:
                frames: list[Buffer] = [frame.buffer for frame in socket.recv_multipart(copy=False)]
                answer = self._calls.receive(peers[socket], frames)
                if answer is not None:
                    answers[open_calls.pop(answer.id)] = answer

    def _socket(self, peer: str) -> zmq.Socket[bytes]:
        socket = self._sockets.pop(peer, None)
        if socket is None:
            while len(self._sockets) >= MAX_PEERS:
                self._close(next(iter(self._sockets)))
            socket = self._context.socket(zmq.DEALER)
            configure(socket, self._security)
            self._refusals[peer] = Refusal(self._context, socket, peer, self._known.pop(peer, ""))
            socket.connect(f"tcp://{peer}")
        self._sockets[peer] = socket
        return socket

    def refusal(self, peer: str) -> str:
        """Why ``peer`` turned this client away, with the next step; an empty text where it did not, or did not say."""
        with self._lock:
            return self._refusals[peer].why() if peer in self._refusals else ""

    def forget(self, peer: str) -> None:
        """Close the connection to ``peer``, with whatever waits in it: a later call starts afresh."""
        with self._lock:
            if peer in self._sockets:
                # Whoever calls again and again tells of it once.
                if why := self._refusals[peer].why():
                    self._known[peer] = why
                self._close(peer)

    def _close(self, peer: str) -> None:
        self._refusals.pop(peer).close()
        self._sockets.pop(peer).close()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for peer in list(self._sockets):
                self._close(peer)
            self._context.term()
