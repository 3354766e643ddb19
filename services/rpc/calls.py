"""A client's open calls, without I/O: numbers requests, matches replies, drops what fits nowhere.

The blocking and the asyncio client both stand on this; neither knows the format of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.rpc.codec import Array, Buffer, Failure, Frames, Reply, Request, decode, encode
from services.rpc.errors import MalformedMessage

MAX_TIMEOUT_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What to ask: a method, its encoded arguments and arrays."""

    method: str
    body: bytes
    arrays: tuple[Array, ...] = ()


@dataclass(slots=True)
class ClientCounts:
    """What a client saw. ``late_total``: replies to calls already given up, or that were never made."""

    sent_total: int = 0
    answered_total: int = 0
    late_total: int = 0
    malformed_total: int = 0


@dataclass(slots=True)
class Calls:
    """The open calls of one client, by id, each with the peer that was asked."""

    counts: ClientCounts = field(default_factory=ClientCounts)
    _last: int = 0
    _open: dict[int, str] = field(default_factory=dict)

    def begin(self, peer: str, outgoing: Outgoing, timeout_s: float) -> tuple[int, Frames]:
        """Open a call to ``peer``: its id and the frames to send. Raises MessageTooLarge."""
        self._last += 1
        timeout_ms = min(MAX_TIMEOUT_MS, max(1, round(timeout_s * 1_000)))
        request = Request(self._last, outgoing.method, timeout_ms, outgoing.body, outgoing.arrays)
        frames = encode(request)
        self._open[self._last] = peer
        self.counts.sent_total += 1
        return self._last, frames

    def receive(self, peer: str, frames: Sequence[Buffer]) -> Reply | Failure | None:
        """The answer in ``frames`` from ``peer``, closing its call; None for what is not one, counted."""
        try:
            message = decode(frames)
        except MalformedMessage:
            self.counts.malformed_total += 1
            return None
        if isinstance(message, Request):
            self.counts.malformed_total += 1
            return None
        if self._open.get(message.id) != peer:
            self.counts.late_total += 1
            return None
        del self._open[message.id]
        self.counts.answered_total += 1
        return message

    def give_up(self, call: int) -> None:
        """Close a call that is not waited for any more; its answer will be counted as late."""
        self._open.pop(call, None)
