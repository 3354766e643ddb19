"""Numbers with a few vectors as bytes: a JSON header, then the arrays as they are. No pickle, nothing executable.

Layout: 4 bytes of magic, which names what it is and its format, the header's length (u32), the header, the arrays in
the header's order, little-endian. Reading allocates no more than the body is long.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST_HEADER = 64 * 1024
DTYPES = ("<f4", "<f8", "<i8")

Vectors = Mapping[str, npt.NDArray[Any]]


class BodyMalformed(ValueError):
    """Bytes that no ``pack`` has written, or that were cut or changed."""


def pack(magic: bytes, values: Mapping[str, Any], vectors: Vectors) -> bytes:
    """``values`` (what JSON can hold, finite) and one-dimensional ``vectors`` (float32, float64 or int64)."""
    described = [[name, vector.dtype.newbyteorder("<").str, len(vector)] for name, vector in vectors.items()]
    if unknown := {dtype for _, dtype, _ in described} - set(DTYPES):
        raise ValueError(f"vectors of type {unknown} cannot be packed")
    header = json.dumps(
        {"values": values, "vectors": described}, separators=(",", ":"), allow_nan=False
    ).encode()
    if len(header) > LONGEST_HEADER:
        raise ValueError(f"a header of {len(header)} bytes is above {LONGEST_HEADER}")
    arrays = [
        vector.astype(vector.dtype.newbyteorder("<"), copy=False).tobytes() for vector in vectors.values()
    ]
    return b"".join([magic, struct.pack("<I", len(header)), header, *arrays])


def unpack(magic: bytes, body: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The values and vectors (copies, writable) of ``body``. Raises BodyMalformed."""
    if body[:4] != magic or len(body) < 8:
        raise BodyMalformed(f"not a body of kind {magic!r}")
    (length,) = struct.unpack_from("<I", body, 4)
    if length > LONGEST_HEADER or 8 + length > len(body):
        raise BodyMalformed(f"a header of {length} bytes in a body of {len(body)}")
    try:
        header = json.loads(body[8 : 8 + length])
        values, described = header["values"], header["vectors"]
        if header.keys() != {"values", "vectors"} or not isinstance(values, dict):
            raise BodyMalformed("the header has other parts than values and vectors")
        rows = [(str(name), str(dtype), int(size)) for name, dtype, size in described]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise BodyMalformed(f"the header cannot be read: {error}") from error
    if any(dtype not in DTYPES or size < 0 for _, dtype, size in rows) or len({row[0] for row in rows}) < len(
        rows
    ):
        raise BodyMalformed("a vector of an unknown type, a negative length or the name of another")
    if 8 + length + sum(int(dtype[2]) * size for _, dtype, size in rows) != len(body):
        raise BodyMalformed("the body is longer or shorter than its header says")
    vectors, start = {}, 8 + length
    for name, dtype, size in rows:
        array = np.frombuffer(body, dtype, size, start)
        vectors[name] = array.astype(array.dtype.newbyteorder("="))
        start += array.nbytes
    return values, vectors
