"""The bodies of messages between parties: named fields of numbers, text, arrays and ciphertexts, as bytes.

    body  = version, number of fields, fields in the order given
    field = name, tag, what its tag says; all numbers little-endian, every length stands before what it measures

The reader says beforehand what it expects and how large that may be (``unpack``'s ``expected``), and allocates no more
than the body holds. What differs is the sender's fault: PeerFault with rule ``malformed``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.parties import MOST_BODY, PeerFault

VERSION: Final = 1
MOST_FIELDS: Final = 64
MOST_NAME: Final = 64
MOST_DIMENSIONS: Final = 4

_INT, _FLOAT, _TEXT, _BYTES, _BLOBS, _ARRAY = range(1, 7)
# Their order is that of the wire: new ones are appended.
_DTYPES: Final = tuple(
    np.dtype(code) for code in ("<f8", "<f4", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1")
)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_U32, _U64, _I64, _F64 = (struct.Struct(code) for code in ("<I", "<Q", "<q", "<d"))

Array = npt.NDArray[Any]
Value = int | float | str | bytes | Sequence[bytes] | Array


@dataclass(frozen=True, slots=True)
class Int:
    """A whole number, bounds included."""

    least: int = 0
    most: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Float:
    """A finite number, bounds included."""

    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 of at most ``most`` bytes."""

    most: int = 1_000


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes, between ``least`` and ``most`` of them."""

    most: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Blobs:
    """A list of bytes: ``least`` to ``most`` of them, each of ``least_each`` to ``most_each`` bytes."""

    most: int
    most_each: int
    least: int = 0
    least_each: int = 0


@dataclass(frozen=True, slots=True)
class Arr:
    """An array of ``dtype`` with ``shape``; None stands for any length up to ``most`` elements in all.

    Floats must be finite unless ``finite`` is False.
    """

    dtype: str
    shape: tuple[int | None, ...]
    most: int = MOST_BODY // 8
    finite: bool = True


@dataclass(frozen=True, slots=True)
class AnyArr:
    """An array of any type that travels, of ``rows`` in its first dimension and at most ``most`` elements; finite."""

    rows: int
    most: int = MOST_BODY // 8


Expected = Int | Float | Text | Bytes | Blobs | Arr | AnyArr


def pack(fields: Mapping[str, Value]) -> bytes:
    """``fields`` as bytes. Raises ValueError for what does not travel."""
    if len(fields) > MOST_FIELDS:
        raise ValueError(f"{len(fields)} fields; at most {MOST_FIELDS}")
    parts: list[bytes | memoryview] = [bytes((VERSION, len(fields)))]
    for name, value in fields.items():
        encoded = name.encode()
        if not 0 < len(encoded) <= MOST_NAME:
            raise ValueError(f"{name!r} is no name of a field")
        parts.append(bytes((len(encoded),)) + encoded)
        _pack_value(value, parts)
    body = b"".join(parts)
    if len(body) > MOST_BODY:
        raise ValueError(f"{len(body)} bytes; a message has at most {MOST_BODY}")
    return body


def _pack_value(value: Value, parts: list[bytes | memoryview]) -> None:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype not in _CODES or value.ndim > MOST_DIMENSIONS:
            raise ValueError(f"an array of {value.dtype} and shape {value.shape} does not travel")
        parts.append(bytes((_ARRAY, _CODES[array.dtype], value.ndim)))
        parts.extend(_U64.pack(length) for length in value.shape)
        parts.append(array.tobytes())
    elif isinstance(value, bool | np.bool_ | int | np.integer):
        parts.append(bytes((_INT,)) + _I64.pack(int(value)))
    elif isinstance(value, float | np.floating):
        parts.append(bytes((_FLOAT,)) + _F64.pack(float(value)))
    elif isinstance(value, str):
        encoded = value.encode()
        parts.append(bytes((_TEXT,)) + _U32.pack(len(encoded)) + encoded)
    elif isinstance(value, bytes):
        parts += (bytes((_BYTES,)) + _U64.pack(len(value)), value)
    else:
        parts.append(bytes((_BLOBS,)) + _U32.pack(len(value)))
        for blob in value:
            parts += (_U64.pack(len(blob)), blob)


def unpack(body: bytes, sender: str, expected: Mapping[str, Expected]) -> dict[str, Any]:
    """The fields of ``body``: exactly those of ``expected``, in its order, each within its bounds.

    Int gives int, Float float, Text str, Bytes bytes, Blobs list[bytes], Arr and AnyArr a read-only array.
    Raises PeerFault (``sender``, ``malformed``).
    """
    try:
        return _unpack(body, expected)
    except (ValueError, struct.error, IndexError, OverflowError) as error:
        raise PeerFault(sender, "malformed", str(error)[:200]) from None


def _unpack(body: bytes, expected: Mapping[str, Expected]) -> dict[str, Any]:
    reader = _Reader(memoryview(body))
    version, count = reader.take(2)
    if version != VERSION:
        raise ValueError(f"version {version}, this side speaks {VERSION}")
    if count != len(expected):
        raise ValueError(f"{count} fields, expected {len(expected)}")
    found: dict[str, Any] = {}
    for name, wanted in expected.items():
        told = bytes(reader.take(reader.byte())).decode(errors="replace")
        if told != name:
            raise ValueError(f"field {told!r} where {name!r} is expected")
        try:
            found[name] = _READERS[type(wanted)](reader, wanted)
        except (ValueError, struct.error, IndexError, OverflowError) as error:
            raise ValueError(f"field {name!r}: {error}") from None
    if reader.left:
        raise ValueError(f"{reader.left} bytes after the end")
    return found


class _Reader:
    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, length: int) -> memoryview:
        if length > self.left:
            raise ValueError(f"cut short: {length} bytes are said to follow, {self.left} do")
        self._at += length
        return self._body[self._at - length : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def tag(self, wanted: int) -> None:
        if (tag := self.byte()) != wanted:
            raise ValueError(f"of type {tag}, expected {wanted}")


def _within(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} {value} is not within {least} and {most}")


def _read_int(reader: _Reader, wanted: Int) -> int:
    reader.tag(_INT)
    value: int = reader.number(_I64)
    _within("the number", value, wanted.least, wanted.most)
    return value


def _read_float(reader: _Reader, wanted: Float) -> float:
    reader.tag(_FLOAT)
    value: float = reader.number(_F64)
    if not math.isfinite(value):
        raise ValueError("not finite")
    _within("the number", value, wanted.least, wanted.most)
    return value


def _read_text(reader: _Reader, wanted: Text) -> str:
    reader.tag(_TEXT)
    length = reader.number(_U32)
    _within("a length of", length, 0, wanted.most)
    return bytes(reader.take(length)).decode()


def _read_bytes(reader: _Reader, wanted: Bytes) -> bytes:
    reader.tag(_BYTES)
    length = reader.number(_U64)
    _within("a length of", length, wanted.least, wanted.most)
    return bytes(reader.take(length))


def _read_blobs(reader: _Reader, wanted: Blobs) -> list[bytes]:
    reader.tag(_BLOBS)
    count = reader.number(_U32)
    _within("a count of", count, wanted.least, wanted.most)
    # Each has a length of its own, so a body that is cut short ends the loop at once.
    found: list[bytes] = []
    for _ in range(count):
        length = reader.number(_U64)
        _within("a length of", length, wanted.least_each, wanted.most_each)
        found.append(bytes(reader.take(length)))
    return found


def _read_array(reader: _Reader, wanted: Arr) -> Array:
    dtype, shape = _read_shape(reader)
    if dtype != np.dtype(wanted.dtype):
        raise ValueError(f"an array of {dtype}, expected {wanted.dtype}")
    if len(shape) != len(wanted.shape):
        raise ValueError(f"{len(shape)} dimensions, expected {len(wanted.shape)}")
    for length, known in zip(shape, wanted.shape, strict=True):
        if known is not None and length != known:
            raise ValueError(f"shape {shape}, expected {wanted.shape}")
    return _read_elements(reader, dtype, shape, wanted.most, wanted.finite)


def _read_any_array(reader: _Reader, wanted: AnyArr) -> Array:
    dtype, shape = _read_shape(reader)
    if shape[:1] != (wanted.rows,):
        raise ValueError(f"shape {shape}, expected {wanted.rows} rows")
    return _read_elements(reader, dtype, shape, wanted.most, True)


def _read_shape(reader: _Reader) -> tuple[np.dtype[Any], tuple[int, ...]]:
    reader.tag(_ARRAY)
    code, dimensions = reader.byte(), reader.byte()
    if code >= len(_DTYPES) or dimensions > MOST_DIMENSIONS:
        raise ValueError(f"an array of type {code} with {dimensions} dimensions")
    return _DTYPES[code], tuple(reader.number(_U64) for _ in range(dimensions))


def _read_elements(
    reader: _Reader, dtype: np.dtype[Any], shape: tuple[int, ...], most: int, finite: bool
) -> Array:
    _within("elements", math.prod(shape), 0, most)
    # Lengths beside a 0 count too: NumPy refuses what has too many elements without it.
    _within("lengths", math.prod(length for length in shape if length), 0, 2**48)
    array: Array = np.frombuffer(reader.take(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    if dtype.kind == "f" and finite and not np.isfinite(array).all():
        raise ValueError("not finite")
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("a truth value that is neither")
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


_READERS: Final[Mapping[type, Any]] = {
    Int: _read_int,
    Float: _read_float,
    Text: _read_text,
    Bytes: _read_bytes,
    Blobs: _read_blobs,
    Arr: _read_array,
    AnyArr: _read_any_array,
}
