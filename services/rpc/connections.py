"""Who connects, by what ZeroMQ's monitors tell: a server counts, a client learns why it was turned away.

Either end may notice first that the two do not fit, and then hangs up; the other sees a broken connection.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq

QUEUE: Final = 10_000
"""Events that may wait. ZeroMQ's own thread waits beyond it, as it would for a loop that reads no calls."""
# Not EVENT_ACCEPT_FAILED: out of descriptors, ZeroMQ tells it a hundred thousand times a second.
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENT: Final = struct.Struct("=HI")
"""ZeroMQ's first frame: which event, and a value whose meaning depends on it."""
_TELL_S: Final = 10.0
_CRYPTOGRAPHIC: Final = 0x1100_0001
_MISMATCH: Final = 0x1100_0002
_HINTS: Final = {
    _CRYPTOGRAPHIC: "the client expects another server: the server.public files of the two ends differ (parties of "
    "a joint job: the client's [peers] has another key)",
    _MISMATCH: "one end uses keys and the other does not: rpc.keys has to be set on both, or on neither",
}
_UNKNOWN_KEY: Final = (
    "the server does not know this client's key: `headwater keys add` there lets it in (a party of a joint job: "
    "[peers] in its file)"
)
_numbers = itertools.count()
_log = logging.getLogger(__name__)


def _monitor(context: zmq.Context[Any], socket: zmq.Socket[Any], events: int) -> zmq.Socket[bytes]:
    """A socket that tells ``events`` of ``socket`` from now on."""
    endpoint = f"inproc://monitor-{next(_numbers)}"
    socket.monitor(endpoint, events)
    told: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
    told.setsockopt(zmq.LINGER, 0)
    told.setsockopt(zmq.RCVHWM, QUEUE)
    told.connect(endpoint)
    return told


@dataclass(slots=True)
class ConnectionCounts:
    """``accepted_total`` − ``established_total``: connections that never finished a handshake of ours.

    ``refused_total``: handshakes by clients whose key is not allowed.
    """

    accepted_total: int = 0
    established_total: int = 0
    refused_total: int = 0


class Connections:
    """Reads the monitor of ``socket`` when told to look."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[Any],
        counts: ConnectionCounts,
        monotonic: Callable[[], float],
    ) -> None:
        self.last = ""
        """Why the last handshake failed that told why."""
        self._socket, self._counts, self._monotonic = socket, counts, monotonic
        self._told_s = float("-inf")
        self._events = _monitor(context, socket, _EVENTS)

    def look(self) -> None:
        """Count what happened since."""
        for _ in range(QUEUE):
            if not self._count_one():
                return

    def _count_one(self) -> bool:
        try:
            frames = self._events.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._count(frames)
        return True

    def _count(self, frames: list[bytes]) -> None:
        event, value = _EVENT.unpack(frames[0])
        counts = self._counts
        if event == zmq.EVENT_ACCEPTED:
            counts.accepted_total += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            counts.established_total += 1
        elif hint := _HINTS.get(value):
            self.last = hint
            if self._monotonic() - self._told_s >= _TELL_S:
                self._told_s = self._monotonic()
                _log.warning("a connection was refused: %s", hint)

    def close(self) -> None:
        """Stop counting; before the socket closes."""
        # All of it: if ZeroMQ's thread waited for room meanwhile, the next line would wait for it in turn.
        while self._count_one():
            pass
        self._socket.disable_monitor()
        self._events.close()


class Refusal:
    """Why ``peer``, at the other end of a client's ``socket``, turned it away, if it did; logged once.

    ZeroMQ does not try again after such a handshake, so a socket tells of one at most.
    """

    def __init__(
        self, context: zmq.Context[Any], socket: zmq.Socket[Any], peer: str, known: str = ""
    ) -> None:
        """``known``: what an earlier socket told of ``peer``, which is not logged again."""
        self._socket, self._peer, self._known = socket, peer, known
        self._events = _monitor(
            context, socket, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._why = ""

    def why(self) -> str:
        """The reason with its next step; an empty text for none."""
        while not self._events.closed and self._events.poll(0):
            event, value = _EVENT.unpack(self._events.recv_multipart()[0])
            auth = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._why = _UNKNOWN_KEY if auth else _HINTS.get(value, "it is not a server of ours")
            if self._why != self._known:
                _log.warning("%s does not answer: %s", self._peer, self._why)
        return self._why

    def close(self) -> None:
        """Stop listening; before the socket closes."""
        self._socket.disable_monitor()
        self._events.close()
