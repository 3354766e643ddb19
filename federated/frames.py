"""What travels between a client and a server, as bytes: a header of fixed shape, then the payload.

    FrameRefused (ValueError)   bytes that are no frame of this version, cut short, too long or with impossible values

The client's id and the job stand in the request's address, not here. All numbers are little-endian. Times travel as
seconds from now, since a device's clock may be off. An upload's header has 34 bytes. New kinds may be added; a kind is
never changed: byte 0 holds the version (high half) and the kind (low half).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from federated.rounds.messages import RefusalCode, WaitReason
from federated.rounds.tickets import TICKET_BYTES
from federated.selection import DeviceFacts

VERSION: Final = 1
MOST_INSTRUCTIONS: Final = 65_535
MOST_TEXT: Final = 512
MOST_VECTORS: Final = 16
MOST_SECONDS: Final = 4_000_000.0
MOST_FRAME: Final = 2**31

_START, _ADMITTED, _UPLOAD, _ACCEPTED, _NOT_YET, _REFUSED, _FINISHED, _POLL, _STANDING, _MODEL, _PARTS = (
    range(1, 12)
)
_NEVER: Final = 2**32 - 1
# Their order is that of the wire: new ones are appended.
_CODES: Final[tuple[Any, ...]] = get_args(RefusalCode)
_REASONS: Final[tuple[Any, ...]] = get_args(WaitReason)
_PHASES: Final[tuple[Any, ...]] = ("starting", "updating", "buffering", "aggregating", "stopped", "finished")

_HEADS: Final = {
    _START: struct.Struct("<BBBfffII"),  # flags, battery, compute, bandwidth, examples, version held
    _ADMITTED: struct.Struct("<BBIII16s"),  # repeated, iteration, version, milliseconds left, ticket
    _UPLOAD: struct.Struct("<BBIIIf16s"),  # spare, iteration, examples, steps, loss, ticket
    _ACCEPTED: struct.Struct("<BBII"),  # repeated, iteration, come back in ms
    _NOT_YET: struct.Struct("<BBIH"),  # reason, come back in ms, detail's length
    _REFUSED: struct.Struct("<BBIH"),  # code, come back in ms, reason's length
    _FINISHED: struct.Struct("<BII"),  # iteration, version
    _POLL: struct.Struct("<BI"),  # iteration
    _MODEL: struct.Struct("<BIIHB"),  # version, base, instructions' length, vectors
    _PARTS: struct.Struct("<BBIIIf16s16s"),  # as upload, and the digest
    _STANDING: struct.Struct("<BBBIII"),  # phase, counted, iteration, version, come back in ms
}
_VECTOR: Final = struct.Struct("<BI")  # its name's length and its own, in bytes
UPLOAD_OVERHEAD: Final = _HEADS[_UPLOAD].size


class FrameRefused(ValueError):
    """Bytes that are no frame of this version."""


@dataclass(frozen=True, slots=True)
class StartFrame:
    """A client asks to take part and says what it is and which version it holds (0: none)."""

    facts: DeviceFacts = field(default_factory=DeviceFacts)
    held: int = 0

    def to_bytes(self) -> bytes:
        """22 bytes. Speeds are float32."""
        facts = self.facts
        flags = facts.charging | facts.unmetered << 1 | facts.idle << 2
        return _head(
            _START, flags, 0, _single(facts.battery), _single(facts.compute), _single(facts.bandwidth),
            _whole(facts.examples), _whole(self.held),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdmittedFrame:
    """Train on ``version`` and upload with ``ticket``; after ``left_s`` there is no chance that it counts."""

    iteration: int
    version: int
    left_s: float
    ticket: bytes
    repeated: bool = False

    def to_bytes(self) -> bytes:
        """30 bytes."""
        return _head(
            _ADMITTED,
            int(self.repeated),
            _whole(self.iteration),
            _whole(self.version),
            _ms(self.left_s),
            self.ticket,
        )


@dataclass(frozen=True, slots=True)
class ModelFrame:
    """Model ``version``: ``model`` is the whole (``base`` 0) or the difference from version ``base``.

    ``instructions`` are small values by name (JSON); ``vectors`` travel beside the weights, as bytes by name.
    """

    version: int
    base: int
    instructions: Mapping[str, Any]
    vectors: Mapping[str, bytes]
    model: bytes

    def to_bytes(self) -> bytes:
        """12 bytes, the instructions, 5 bytes a vector and its name, the vectors, the model. Raises ValueError when
        there are too many or too long ones."""
        told = json.dumps(self.instructions, separators=(",", ":"), allow_nan=False).encode()
        if len(told) > MOST_INSTRUCTIONS or len(self.vectors) > MOST_VECTORS:
            raise ValueError(f"{len(told)} bytes of instructions and {len(self.vectors)} vectors: too many")
        parts = [_head(_MODEL, _whole(self.version), _whole(self.base), len(told), len(self.vectors)), told]
        for name, vector in self.vectors.items():
            encoded = name.encode()
            parts.append(_VECTOR.pack(len(encoded), _whole(len(vector))) + encoded)
        return b"".join((*parts, *self.vectors.values(), self.model))


@dataclass(frozen=True, slots=True)
class UploadFrame:
    """A client's update. ``payload`` is what compression made of it."""

    iteration: int
    ticket: bytes
    examples: int
    steps: int
    loss: float
    payload: bytes

    def to_bytes(self) -> bytes:
        """34 bytes and the payload. The loss is float32."""
        return (
            _head(
                _UPLOAD, 0, _whole(self.iteration), _whole(self.examples), _whole(self.steps),
                _single(self.loss), self.ticket,
            )
            + self.payload
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartsFrame:
    """An update whose payload was sent in parts before; ``digest`` (16 bytes) is that of the payload."""

    iteration: int
    ticket: bytes
    examples: int
    steps: int
    loss: float
    digest: bytes

    def to_bytes(self) -> bytes:
        """50 bytes. The loss is float32."""
        return _head(
            _PARTS, 0, _whole(self.iteration), _whole(self.examples), _whole(self.steps),
            _single(self.loss), self.ticket, self.digest,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AcceptedFrame:
    """The upload is counted; the next chance is in ``come_back_s``."""

    iteration: int
    come_back_s: float
    repeated: bool = False

    def to_bytes(self) -> bytes:
        """10 bytes."""
        return _head(_ACCEPTED, int(self.repeated), _whole(self.iteration), _ms(self.come_back_s))


@dataclass(frozen=True, slots=True)
class NotYetFrame:
    """Ask again in ``come_back_s``."""

    come_back_s: float
    reason: WaitReason
    detail: str = ""

    def to_bytes(self) -> bytes:
        """8 bytes and the detail."""
        detail = _text(self.detail)
        return _head(_NOT_YET, _REASONS.index(self.reason), _ms(self.come_back_s), len(detail)) + detail


@dataclass(frozen=True, slots=True)
class RefusedFrame:
    """Refused for good; ``come_back_s`` None: never come back."""

    code: RefusalCode
    reason: str
    come_back_s: float | None = None

    def to_bytes(self) -> bytes:
        """8 bytes and the reason."""
        reason = _text(self.reason)
        wait = _NEVER if self.come_back_s is None else _ms(self.come_back_s)
        return _head(_REFUSED, _CODES.index(self.code), wait, len(reason)) + reason


@dataclass(frozen=True, slots=True)
class FinishedFrame:
    """The job is over; ``version`` is its last model."""

    iteration: int
    version: int

    def to_bytes(self) -> bytes:
        """9 bytes."""
        return _head(_FINISHED, _whole(self.iteration), _whole(self.version))


@dataclass(frozen=True, slots=True)
class PollFrame:
    """Where do things stand? ``iteration`` is that of the client's ticket, 0 for none."""

    iteration: int = 0

    def to_bytes(self) -> bytes:
        """5 bytes."""
        return _head(_POLL, _whole(self.iteration))


@dataclass(frozen=True, slots=True)
class StandingFrame:
    """Where things stand."""

    iteration: int
    version: int
    phase: Literal["starting", "updating", "buffering", "aggregating", "stopped", "finished"]
    counted: bool
    come_back_s: float

    def to_bytes(self) -> bytes:
        """15 bytes."""
        return _head(
            _STANDING, _PHASES.index(self.phase), int(self.counted), _whole(self.iteration),
            _whole(self.version), _ms(self.come_back_s),
        )  # fmt: skip


Frame = (
    StartFrame
    | AdmittedFrame
    | ModelFrame
    | PartsFrame
    | UploadFrame
    | AcceptedFrame
    | NotYetFrame
    | RefusedFrame
    | FinishedFrame
    | PollFrame
    | StandingFrame
)


def read_frame(body: bytes | memoryview, most: int = MOST_FRAME) -> Frame:
    """The frame in ``body``, of at most ``most`` bytes. Allocates no more than ``body`` holds. Raises FrameRefused."""
    if not 1 <= len(body) <= most:
        raise FrameRefused(f"a frame has 1 to {most} bytes, not {len(body)}")
    if body[0] >> 4 != VERSION:
        raise FrameRefused(f"version {body[0] >> 4}, this side speaks {VERSION}")
    kind = body[0] & 15
    if kind not in _HEADS:
        raise FrameRefused(f"a frame of unknown kind {kind}")
    head = _HEADS[kind]
    if len(body) < head.size:
        raise FrameRefused(f"{len(body)} bytes, its header has {head.size}")
    values = head.unpack_from(body)[1:]
    rest = memoryview(body)[head.size :]
    try:
        return _READERS[kind](values, rest)
    except (ValueError, IndexError, RecursionError) as error:
        # RecursionError: JSON that nests too deep.
        raise FrameRefused(f"a frame of kind {kind}: {error}") from None


def _read_start(values: tuple[Any, ...], rest: memoryview) -> StartFrame:
    _exactly(rest, 0)
    flags, spare, battery, compute, bandwidth, examples, held = values
    _flags(flags, 7)
    _flags(spare, 0)
    if not 0 <= battery <= 1 or not compute >= 0 or not bandwidth >= 0:
        raise ValueError(f"impossible facts: battery {battery}, compute {compute}, bandwidth {bandwidth}")
    facts = DeviceFacts(
        battery, bool(flags & 1), bool(flags & 2), bool(flags & 4), compute, bandwidth, examples
    )
    return StartFrame(facts, held)


def _read_admitted(values: tuple[Any, ...], rest: memoryview) -> AdmittedFrame:
    _exactly(rest, 0)
    flags, iteration, version, left, ticket = values
    _flags(flags, 1)
    return AdmittedFrame(iteration, version, left / 1000, ticket, bool(flags))


def _read_model(values: tuple[Any, ...], rest: memoryview) -> ModelFrame:
    version, base, length, count = values
    told = json.loads(bytes(_take(rest, 0, length)), parse_constant=_no_constant)
    if not isinstance(told, dict) or count > MOST_VECTORS:
        raise ValueError(f"{count} vectors and instructions that may be no object")
    at, sizes = length, dict[str, int]()
    for _ in range(count):
        letters, size = _VECTOR.unpack(_take(rest, at, _VECTOR.size))
        name = bytes(_take(rest, at + _VECTOR.size, letters)).decode()
        at += _VECTOR.size + letters
        if name in sizes:
            raise ValueError(f"vector {name!r} stands twice")
        sizes[name] = size
    vectors = dict[str, bytes]()
    for name, size in sizes.items():
        vectors[name] = bytes(_take(rest, at, size))
        at += size
    return ModelFrame(version, base, told, vectors, bytes(rest[at:]))


def _take(rest: memoryview, at: int, length: int) -> memoryview:
    if at + length > len(rest):
        raise ValueError(f"{at + length} bytes are said to follow, {len(rest)} do")
    return rest[at : at + length]


def _read_parts(values: tuple[Any, ...], rest: memoryview) -> PartsFrame:
    _exactly(rest, 0)
    spare, iteration, examples, steps, loss, ticket, digest = values
    _flags(spare, 0)
    if examples < 1 or not math.isfinite(loss):
        raise ValueError(f"{examples} examples and a loss of {loss}")
    return PartsFrame(iteration, ticket, examples, steps, loss, digest)


def _read_upload(values: tuple[Any, ...], rest: memoryview) -> UploadFrame:
    spare, iteration, examples, steps, loss, ticket = values
    _flags(spare, 0)
    if examples < 1 or not math.isfinite(loss):
        raise ValueError(f"{examples} examples and a loss of {loss}")
    return UploadFrame(iteration, ticket, examples, steps, loss, bytes(rest))


def _read_accepted(values: tuple[Any, ...], rest: memoryview) -> AcceptedFrame:
    _exactly(rest, 0)
    flags, iteration, wait = values
    _flags(flags, 1)
    return AcceptedFrame(iteration, wait / 1000, bool(flags))


def _read_not_yet(values: tuple[Any, ...], rest: memoryview) -> NotYetFrame:
    reason, wait, length = values
    _exactly(rest, length)
    return NotYetFrame(wait / 1000, _REASONS[reason], _read_text(rest))


def _read_refused(values: tuple[Any, ...], rest: memoryview) -> RefusedFrame:
    code, wait, length = values
    _exactly(rest, length)
    return RefusedFrame(_CODES[code], _read_text(rest), None if wait == _NEVER else wait / 1000)


def _read_finished(values: tuple[Any, ...], rest: memoryview) -> FinishedFrame:
    _exactly(rest, 0)
    return FinishedFrame(*values)


def _read_poll(values: tuple[Any, ...], rest: memoryview) -> PollFrame:
    _exactly(rest, 0)
    return PollFrame(*values)


def _read_standing(values: tuple[Any, ...], rest: memoryview) -> StandingFrame:
    _exactly(rest, 0)
    phase, counted, iteration, version, wait = values
    _flags(counted, 1)
    return StandingFrame(iteration, version, _PHASES[phase], bool(counted), wait / 1000)


_READERS: Final[Mapping[int, Callable[[tuple[Any, ...], memoryview], Frame]]] = {
    _START: _read_start,
    _ADMITTED: _read_admitted,
    _UPLOAD: _read_upload,
    _MODEL: _read_model,
    _PARTS: _read_parts,
    _ACCEPTED: _read_accepted,
    _NOT_YET: _read_not_yet,
    _REFUSED: _read_refused,
    _FINISHED: _read_finished,
    _POLL: _read_poll,
    _STANDING: _read_standing,
}


def _head(kind: int, *values: Any) -> bytes:
    for value in values:
        if isinstance(value, bytes) and len(value) != TICKET_BYTES:
            raise ValueError(f"a ticket or digest has {TICKET_BYTES} bytes, not {len(value)}")
    return _HEADS[kind].pack(VERSION << 4 | kind, *values)


def _whole(value: int) -> int:
    if not 0 <= value < 2**32:
        raise ValueError(f"{value} does not fit into 32 bits")
    return value


def _single(value: float) -> float:
    # struct raises OverflowError beyond float32: such a speed is as good as infinite, such a loss no number.
    return math.copysign(math.inf, value) if abs(value) > 3.4e38 else value


def _ms(seconds: float) -> int:
    """Milliseconds, rounded up so that nobody comes too early; what is past is 0."""
    return math.ceil(min(max(seconds, 0.0), MOST_SECONDS) * 1000 - 1e-6)


def _text(text: str) -> bytes:
    return text.encode(errors="replace")[:MOST_TEXT].decode(errors="ignore").encode()


def _read_text(rest: memoryview) -> str:
    if len(rest) > MOST_TEXT:
        raise ValueError(f"{len(rest)} bytes of text, at most {MOST_TEXT}")
    return bytes(rest).decode()


def _exactly(rest: memoryview, length: int) -> None:
    if len(rest) != length:
        raise ValueError(f"{len(rest)} bytes follow the header instead of {length}")


def _flags(value: int, known: int) -> None:
    if value & ~known:
        raise ValueError(f"unknown flags {value:#x}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
