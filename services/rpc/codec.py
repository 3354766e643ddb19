"""Messages to frames and back, without I/O: a MessagePack header, then one raw frame per array.

First frame: ``MAGIC``, a format byte, the header. An array's frame is its memory in C order, little-endian.
Readers wrap received frames, read-only, without copying where the memory is aligned.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from services.rpc.errors import MalformedMessage, MessageTooLarge

MAGIC: Final = b"HW"
FORMAT: Final = 1
PREFIX: Final = MAGIC + bytes([FORMAT])
MAX_ARRAYS: Final = 512
MAX_HEADER_BYTES: Final = 4 * 2**20
MAX_FRAME_BYTES: Final = 256 * 2**20

_DTYPES: Final = {
    code: np.dtype(code) for code in ("<u8", "<i8", "<f8", "<u4", "<i4", "<f4", "<u2", "|u1", "|i1", "|b1")
}
_NAMES: Final = {dtype: code for code, dtype in _DTYPES.items()}
if sys.byteorder != "little":
    raise ImportError("arrays travel in little-endian order, which this machine does not use")

Array = npt.NDArray[np.generic]
Buffer = bytes | memoryview
Frames = list[Buffer]


@dataclass(frozen=True, slots=True)
class Request:
    """A call: ``timeout_ms`` is how long the caller still waits."""

    id: int
    method: str
    timeout_ms: int
    body: bytes
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the request ``id``."""

    id: int
    body: bytes
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """The error answer to the request ``id``. Codes of this layer: see ``services.rpc.server``."""

    id: int
    code: str
    message: str


Message = Request | Reply | Failure


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """New fields go to the end, with defaults: older readers skip them."""

    kind: Literal["request", "reply", "failure"]
    id: int
    name: str
    timeout_ms: int
    body: bytes
    arrays: list[tuple[str, tuple[int, ...]]]
    text: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode(message: Message) -> Frames:
    """The frames of ``message``. Arrays are views of the given memory, copied only to make them contiguous.

    Raises MessageTooLarge beyond the bounds; ValueError for a dtype that does not travel.
    """
    if isinstance(message, Failure):
        header = _Header("failure", message.id, message.code, 0, b"", [], message.message)
        return [PREFIX + _encoder.encode(header)]
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    described = [(_code(array.dtype), array.shape) for array in arrays]
    if isinstance(message, Request):
        header = _Header("request", message.id, message.method, message.timeout_ms, message.body, described)
    else:
        header = _Header("reply", message.id, "", 0, message.body, described)
    first = PREFIX + _encoder.encode(header)
    if len(first) > MAX_HEADER_BYTES or len(arrays) > MAX_ARRAYS:
        raise MessageTooLarge(f"a header of {len(first)} bytes with {len(arrays)} arrays")
    largest = max((array.nbytes for array in arrays), default=0)
    if largest > MAX_FRAME_BYTES:
        raise MessageTooLarge(f"an array of {largest} bytes; a frame has at most {MAX_FRAME_BYTES}")
    return [first, *(array.data.cast("B") if array.size else b"" for array in arrays)]


def decode(frames: Sequence[Buffer]) -> Message:
    """Read ``encode``'s frames back. Raises MalformedMessage naming what does not fit."""
    if not frames:
        raise MalformedMessage("no frames")
    first = frames[0]
    if bytes(first[: len(PREFIX)]) != PREFIX:
        raise MalformedMessage("it does not begin as our messages do")
    if len(first) > MAX_HEADER_BYTES:
        raise MalformedMessage(f"a header of {len(first)} bytes")
    try:
        header = _decoder.decode(first[len(PREFIX) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # RecursionError: lists in lists in lists, where a field of a later version would be.
        raise MalformedMessage(str(error)) from error
    if not 0 <= header.id < 2**64 or header.timeout_ms < 0:
        raise MalformedMessage("a negative or overlong number")
    if len(header.arrays) != len(frames) - 1 or len(frames) - 1 > MAX_ARRAYS:
        raise MalformedMessage(f"{len(frames) - 1} array frames, {len(header.arrays)} described")
    if header.kind == "failure":
        return Failure(header.id, header.name, header.text)
    arrays = tuple(_array(*one, frame) for one, frame in zip(header.arrays, frames[1:], strict=True))
    if header.kind == "request":
        return Request(header.id, header.name, header.timeout_ms, header.body, arrays)
    return Reply(header.id, header.body, arrays)


def _code(dtype: np.dtype[np.generic]) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"arrays of {dtype} do not travel") from None


def _array(code: str, shape: tuple[int, ...], frame: Buffer) -> Array:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise MalformedMessage(f"unknown element type {code[:16]!r}")
    if len(shape) > 4 or any(not 0 <= length < 2**40 for length in shape):
        raise MalformedMessage("an impossible shape")
    # Lengths beside a 0 count too: NumPy refuses what has too many elements without it, also where there are none.
    if math.prod(length for length in shape if length) * dtype.itemsize >= 2**62:
        raise MalformedMessage("an impossible shape")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise MalformedMessage(f"{len(frame)} bytes do not hold {list(shape)} of {code}")
    array: Array = np.frombuffer(frame, dtype).reshape(shape)
    # A small frame may lie anywhere in the transport's buffer; compiled kernels want aligned memory.
    if not array.flags.aligned:
        array = array.copy()
    # The transport's memory is nobody's to write in: several arrays, or messages, may lie in one buffer.
    array.flags.writeable = False
    return array
