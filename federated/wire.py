"""Requests, replies and models as frames and back. The same functions at the client and at the server.

The client's id stands in the request's address and is an argument when reading. Waits travel as seconds from now: the
reader adds its own clock, so clocks need not agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Final, TypeVar

import numpy as np

from federated.device import Instructions
from federated.frames import (
    AcceptedFrame,
    AdmittedFrame,
    FinishedFrame,
    FrameRefused,
    ModelFrame,
    NotYetFrame,
    PartsFrame,
    PollFrame,
    RefusedFrame,
    StandingFrame,
    StartFrame,
    UploadFrame,
    read_frame,
)
from federated.rounds.messages import (
    Accepted,
    Admitted,
    Finished,
    NotYet,
    PollRequest,
    Refused,
    Reply,
    Standing,
    StartRequest,
    UploadRequest,
)
from federated.rounds.records import DIGEST_BYTES
from federated.weights import Array

F = TypeVar("F")
MOST_REQUEST: Final = 64  # bytes of a request without its payload
_DEFAULTS: Final = Instructions()


@dataclass(frozen=True, slots=True)
class ReceivedModel:
    """``model`` as it was encoded: version ``version`` whole (``base`` 0) or the difference from ``base``.
    ``vectors`` [D] by name travel beside it."""

    version: int
    base: int
    model: bytes
    instructions: Instructions
    vectors: dict[str, Array]


def digest_of(payload: bytes | memoryview) -> bytes:
    """What an upload's body is known by: BLAKE2b, 16 bytes."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def encode_start(request: StartRequest) -> bytes:
    """A StartRequest without the client's id."""
    return StartFrame(request.facts, request.version).to_bytes()


def decode_start(body: bytes, client: str) -> StartRequest:
    """``client``'s StartRequest. Raises FrameRefused."""
    frame = _expect(StartFrame, body, MOST_REQUEST)
    return StartRequest(client, frame.facts, frame.held)


def encode_poll(request: PollRequest) -> bytes:
    """A PollRequest without the client's id."""
    return PollFrame(request.iteration).to_bytes()


def decode_poll(body: bytes, client: str) -> PollRequest:
    """``client``'s PollRequest. Raises FrameRefused."""
    return PollRequest(client, _expect(PollFrame, body, MOST_REQUEST).iteration)


def encode_upload(request: UploadRequest, payload: bytes | None) -> bytes:
    """An UploadRequest with its payload; None when that was sent in parts before, and the digest travels instead."""
    told = (request.iteration, request.ticket, request.examples, request.steps, request.loss)
    if payload is None:
        return PartsFrame(*told, request.digest).to_bytes()
    return UploadFrame(*told, payload).to_bytes()


def decode_upload(body: bytes, client: str, most: int = 2**31) -> tuple[UploadRequest, bytes | None]:
    """``client``'s UploadRequest of at most ``most`` bytes, and its payload; None when that was sent in parts. The
    digest of a payload is computed, not believed. Raises FrameRefused."""
    frame = read_frame(body, most)
    if isinstance(frame, PartsFrame):
        payload, digest = None, frame.digest
    elif isinstance(frame, UploadFrame):
        payload, digest = frame.payload, digest_of(frame.payload)
    else:
        raise FrameRefused(f"{type(frame).__name__} instead of an upload")
    request = UploadRequest(
        client, frame.iteration, frame.ticket, digest, frame.examples, frame.steps, frame.loss
    )
    return request, payload


def encode_reply(reply: Reply, now: float) -> bytes:
    """A reply as of ``now``, the server's time."""
    if isinstance(reply, Admitted):
        left_s = reply.until - now
        return AdmittedFrame(reply.iteration, reply.version, left_s, reply.ticket, reply.repeated).to_bytes()
    if isinstance(reply, Accepted):
        return AcceptedFrame(reply.iteration, reply.come_back_at - now, reply.repeated).to_bytes()
    if isinstance(reply, NotYet):
        return NotYetFrame(reply.come_back_at - now, reply.reason, reply.detail).to_bytes()
    if isinstance(reply, Refused):
        wait_s = None if reply.come_back_at is None else reply.come_back_at - now
        return RefusedFrame(reply.code, reply.reason, wait_s).to_bytes()
    if isinstance(reply, Finished):
        return FinishedFrame(reply.iteration, reply.version).to_bytes()
    phase: Any = reply.phase
    return StandingFrame(
        reply.iteration, reply.version, phase, reply.counted, reply.come_back_at - now
    ).to_bytes()


def decode_reply(body: bytes, now: float) -> Reply:
    """The reply, its times by the reader's own clock ``now``. Raises FrameRefused."""
    frame = read_frame(body, MOST_REQUEST + 1024)
    if isinstance(frame, AdmittedFrame):
        return Admitted(frame.iteration, frame.version, frame.ticket, now + frame.left_s, frame.repeated)
    if isinstance(frame, AcceptedFrame):
        return Accepted(frame.iteration, now + frame.come_back_s, frame.repeated)
    if isinstance(frame, NotYetFrame):
        return NotYet(now + frame.come_back_s, frame.reason, frame.detail)
    if isinstance(frame, RefusedFrame):
        return Refused(
            frame.code, frame.reason, None if frame.come_back_s is None else now + frame.come_back_s
        )
    if isinstance(frame, FinishedFrame):
        return Finished(frame.iteration, frame.version)
    if isinstance(frame, StandingFrame):
        return Standing(frame.iteration, frame.version, frame.phase, frame.counted, now + frame.come_back_s)
    raise FrameRefused(f"{type(frame).__name__} instead of a reply")


def encode_model(
    version: int, base: int, model: bytes, instructions: Instructions, vectors: Mapping[str, Array]
) -> bytes:
    """A model for a device: see ReceivedModel. ``vectors`` are [D] float32 by name."""
    told = {
        field.name: getattr(instructions, field.name)
        for field in fields(instructions)
        if getattr(instructions, field.name) != getattr(_DEFAULTS, field.name)
    }
    raw = {name: np.ascontiguousarray(vector, "<f4").tobytes() for name, vector in vectors.items()}
    return ModelFrame(version, base, told, raw, model).to_bytes()


def decode_model(body: bytes, size: int, most: int = 2**31) -> ReceivedModel:
    """The model of D = ``size`` in at most ``most`` bytes. An instruction that this side does not know is refused: it
    would train otherwise than it was told. Raises FrameRefused."""
    frame = _expect(ModelFrame, body, most)
    vectors = {}
    for name, raw in frame.vectors.items():
        if len(raw) != 4 * size:
            raise FrameRefused(f"vector {name!r} has {len(raw)} bytes instead of {4 * size}")
        vectors[name] = np.frombuffer(raw, "<f4").astype(np.float32)
        if not np.isfinite(vectors[name]).all():
            raise FrameRefused(f"vector {name!r} holds NaN or infinity")
    instructions = _read_instructions(frame.instructions)
    if set(instructions.vectors) != set(vectors):
        raise FrameRefused(f"vectors {sorted(vectors)} came, {sorted(instructions.vectors)} were announced")
    return ReceivedModel(frame.version, frame.base, frame.model, instructions, vectors)


def _read_instructions(told: Mapping[str, Any]) -> Instructions:
    checks = {
        "proximal": lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        ),
        "steps": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        "full_batch": lambda value: isinstance(value, bool),
        "threshold": lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf
        ),
        "vectors": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    }
    for name, value in told.items():
        if name not in checks or not checks[name](value):
            raise FrameRefused(f"instruction {name!r} is unknown here or impossible: {value!r}")
    return Instructions(**{**told, "vectors": tuple(told.get("vectors", ()))})


def _expect(kind: type[F], body: bytes, most: int) -> F:
    frame = read_frame(body, most)
    if not isinstance(frame, kind):
        raise FrameRefused(f"{type(frame).__name__} instead of {kind.__name__}")
    return frame
