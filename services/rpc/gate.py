"""Who may come in: the answering end of ZAP (ZeroMQ RFC 27), asked by ZeroMQ once per connection.

It has no thread of its own. The server's loop answers for it, so a handshake waits for the loop as a call does,
and closing the server closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

DOMAIN: Final = b"headwater"
ENDPOINT: Final = "inproc://zeromq.zap.01"
LOOK: Final = 64
"""Handshakes answered in one look at most: whoever knocks without end cannot keep the loop here."""
_VERSION: Final = b"1.0"
_TELL_S: Final = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one ZAP request; ``why`` is empty for who may come in."""

    frames: list[bytes]
    why: str = ""


def judge(request: Sequence[bytes], allowed: Container[bytes]) -> Verdict:
    """Let in who proves to have a key of ``allowed``, and nobody else.

    ``request``: version, request id, domain, address, identity, mechanism, client's public key.
    """
    if len(request) < 6 or request[0] != _VERSION:
        return _refuse(request[1] if len(request) > 1 else b"", b"500", "a ZAP request of another version")
    number, address, mechanism, credentials = request[1], request[3], request[5], list(request[6:])
    who = address.decode("ascii", "replace")
    if mechanism != b"CURVE" or len(credentials) != 1:
        return _refuse(number, b"400", f"{who} shows no CURVE key")
    if credentials[0] not in allowed:
        return _refuse(number, b"400", f"{who} has the unknown public key {credentials[0].hex()}")
    return Verdict([_VERSION, number, b"200", b"OK", credentials[0].hex().encode(), b""])


def _refuse(number: bytes, status: bytes, why: str) -> Verdict:
    return Verdict([_VERSION, number, status, b"refused", b"", b""], why)


class Gate:
    """Binds ZAP in a context, for as long as it is open, and answers when told to look."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: Container[bytes],
        monotonic: Callable[[], float],
    ) -> None:
        self.let_in_total = 0
        self.refused_total = 0
        self.last = ""
        """Why somebody was refused last."""
        self._allowed, self._monotonic = allowed, monotonic
        self._told_s = float("-inf")
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def look(self) -> None:
        """Answer who waits now."""
        for _ in range(LOOK):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            verdict = judge(request, self._allowed)
            self.socket.send_multipart(verdict.frames, zmq.NOBLOCK)
            if verdict.why:
                self._refused(verdict.why)
            else:
                self.let_in_total += 1

    def _refused(self, why: str) -> None:
        self.refused_total += 1
        self.last = why
        if self._monotonic() - self._told_s >= _TELL_S:
            self._told_s = self._monotonic()
            _log.warning(
                "refused: %s (%d so far); `headwater keys add` lets a key in (at a party of a joint job: [peers] in "
                "its file)",
                why,
                self.refused_total,
            )

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()
