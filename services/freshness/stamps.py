"""Stamps: when marked events passed the processor and the trainers, on the ``probes`` topic of the log.

Only batches that hold a probe are stamped, once each, by position: so a stamp costs nothing where nobody
measures, and little where somebody does. They are appended by a thread of their own: no batch waits for them,
and what finds the queue full, or the log away, is dropped and counted. A stamp is a measurement, not a promise.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from services.freshness.stages import Kind, Stage
from services.messagelog.contract import LogError, Message, Producer
from services.topics import PROBES

FORMAT: Final = b"\x01"
WAITING: Final = 1_024

log = logging.getLogger(__name__)


class Marked(msgspec.Struct, frozen=True, array_like=True):
    """A probe as it is announced: its id, its offset in the stamp's partition, its acceptance (Unix ms)."""

    id: str
    offset: int
    accepted_at_ms: float


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """``stage`` has everything of ``log``/``partition`` up to ``offset`` since ``at_ms`` (Unix ms, the stamping
    process's clock). ``probes``: those in it, where the stage is the first that stamps their kind."""

    stage: Stage
    kind: Kind
    log: str
    partition: int
    offset: int
    at_ms: float
    probes: list[Marked] = []


class StampFormatError(ValueError):
    """The bytes are not a stamp of a format that this version reads."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Stamp)


def encode_stamp(stamp: Stamp) -> bytes:
    """The topic's form of ``stamp``."""
    return FORMAT + _encoder.encode(stamp)


def decode_stamp(data: bytes) -> Stamp:
    """Read the topic's form back. Raises StampFormatError."""
    if data[:1] != FORMAT:
        raise StampFormatError(f"unknown stamp format {data[:1].hex() or 'empty'}; this version reads 01")
    try:
        return _decoder.decode(data[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StampFormatError(str(error)) from error


def stamp_message(stamp: Stamp) -> Message:
    """The message of the ``probes`` topic that carries ``stamp``."""
    return Message(PROBES, 0, b"", encode_stamp(stamp), round(stamp.at_ms))


class Stamps(Protocol):
    """Where a stage leaves its stamps."""

    def put(self, stamp: Stamp) -> None:
        """Take ``stamp``; returns at once and never raises."""
        ...


class Unstamped:
    """For whoever has no topic to stamp to."""

    def put(self, stamp: Stamp) -> None:
        """Forget it."""


class Stamper:
    """Appends stamps in the background. Thread-safe. The producer is opened, and the thread started, by the first
    stamp. ``dropped``: stamps that were not written."""

    def __init__(self, open_producer: Callable[[], Producer], most: int = WAITING) -> None:
        self._open, self._most = open_producer, most
        self._waiting: deque[Stamp] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.dropped = 0

    def put(self, stamp: Stamp) -> None:
        """See Stamps."""
        with self._wake:
            if self._closing or len(self._waiting) >= self._most:
                self.dropped += 1
                return
            self._waiting.append(stamp)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="stamps", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Append what waits, and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        producer: Producer | None = None
        while stamps := self._next():
            try:
                if producer is None:
                    producer = self._open()
                producer.append([stamp_message(stamp) for stamp in stamps])
            except LogError as error:
                self.dropped += len(stamps)
                log.warning("%d stamps of probes are lost: %s", len(stamps), error)
        if producer is not None:
            producer.close()

    def _next(self) -> list[Stamp]:
        """Wait for stamps; all that wait. Empty once closed and drained."""
        with self._wake:
            while not self._waiting and not self._closing:
                self._wake.wait()
            stamps = list(self._waiting)
            self._waiting.clear()
            return stamps
