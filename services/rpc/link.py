"""The client for a loop that has other sockets too: never waits; one connection, any number of open calls.

The loop polls ``socket`` with its own, and calls ``receive`` when it is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from services.rpc.calls import Calls, Outgoing
from services.rpc.client import configure
from services.rpc.codec import Buffer, Failure, Reply
from services.rpc.errors import QueueFull
from services.rpc.security import Security


class Link:
    """Calls to the peer at ``address`` (``HOST:PORT``). Used by one thread."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        security: Security | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._monotonic = monotonic
        self._calls = Calls()
        self._until: dict[int, float] = {}
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        configure(self.socket, security)
        self.socket.connect(f"tcp://{address}")

    def ask(self, outgoing: Outgoing, timeout_s: float) -> int:
        """Send a request; its number. Raises QueueFull, MessageTooLarge; then nothing was sent."""
        call, frames = self._calls.begin(self.address, outgoing, timeout_s)
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            self._calls.give_up(call)
            raise QueueFull(f"{self.address}: too many messages wait to be sent") from error
        self._until[call] = self._monotonic() + timeout_s
        return call

    def receive(self) -> list[tuple[int, Reply | Failure]]:
        """The answers that have arrived, with the numbers of their requests."""
        found: list[tuple[int, Reply | Failure]] = []
        while True:
            try:
                received = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return found
            frames: list[Buffer] = [frame.buffer for frame in received]
            answer = self._calls.receive(self.address, frames)
            if answer is not None and self._until.pop(answer.id, None) is not None:
                found.append((answer.id, answer))

    def expired(self) -> list[int]:
        """The requests whose time is up; their answers will be dropped."""
        now = self._monotonic()
        late = [call for call, until in self._until.items() if until <= now]
        for call in late:
            del self._until[call]
            self._calls.give_up(call)
        return late

    def close(self) -> None:
        """Close the connection, with whatever waits in it."""
        self.socket.close()
