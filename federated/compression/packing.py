"""Numbers into few bits and back, a batch at a time: codes of 1 to 8 bits, and gaps between indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federated.compression.errors import BodyRefused
from federated.compression.streams import Indices

Bytes = npt.NDArray[np.uint8]

ESCAPE = 255


def packed_length(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` take."""
    return -(-count * bits // 8)


def pack(codes: Bytes, bits: int) -> Bytes:
    """Codes ``[B, N]`` below 2**bits (bits 1, 2, 4 or 8) into ``[B, packed_length]``, first code in the high bits."""
    if bits == 8:
        return codes
    if bits == 1:
        return np.packbits(codes, axis=1)
    each = 8 // bits
    rows, count = codes.shape
    length = packed_length(count, bits)
    padded = np.zeros((rows, length * each), np.uint8)
    padded[:, :count] = codes
    lanes = padded.reshape(rows, length, each)
    out = np.zeros((rows, length), np.uint8)
    for lane in range(each):
        out |= lanes[:, :, lane] << np.uint8(8 - bits * (lane + 1))
    return out


def unpack(packed: Bytes, count: int, bits: int) -> Bytes:
    """The ``count`` codes of each row, ``[B, count]``. Raises BodyRefused when the unused bits are not zero, so
    that one vector has one body."""
    if bits == 8:
        return packed
    each = 8 // bits
    rows, length = packed.shape
    if bits == 1:
        lanes = np.unpackbits(packed, axis=1)
    else:
        lanes = np.empty((rows, length, each), np.uint8)
        for lane in range(each):
            lanes[:, :, lane] = (packed >> np.uint8(8 - bits * (lane + 1))) & np.uint8((1 << bits) - 1)
        lanes = lanes.reshape(rows, length * each)
    if lanes[:, count:].any():
        raise BodyRefused("bits after the last code are not zero")
    return lanes[:, :count]


def most_gap_bytes(chosen: int, dimension: int) -> int:
    """The most bytes that the gaps of ``chosen`` indices below ``dimension`` may take."""
    return chosen + dimension // ESCAPE


def pack_gaps(indices: Indices) -> tuple[Bytes, Indices]:
    """Ascending indices ``[B, K]`` as the distances between them, a byte each; 255 means "255 more, and go on".
    Returns all rows' bytes in one array and where each row ends ``[B]``."""
    chosen = indices.shape[1]
    gaps = np.diff(indices, axis=1, prepend=-1) - 1
    escapes = gaps // ESCAPE
    ends = np.cumsum(escapes.reshape(-1) + 1)
    out = np.full(int(ends[-1]), ESCAPE, np.uint8)
    out[ends - 1] = (gaps - escapes * ESCAPE).reshape(-1)
    return out, ends[chosen - 1 :: chosen]


def unpack_gaps(body: Bytes, rows: int, chosen: int, dimension: int) -> Indices:
    """The indices ``[B, K]`` of ``rows`` rows of ``chosen`` each. Raises BodyRefused unless there are just as
    many, all below ``dimension``."""
    last = body != ESCAPE
    if int(np.count_nonzero(last)) != rows * chosen or not last[-1]:
        raise BodyRefused(f"the gaps do not name {chosen} indices each")
    sums = np.cumsum(body, dtype=np.int64)[last].reshape(rows, chosen)
    sums[1:] -= sums[:-1, -1:].copy()
    indices: Indices = sums + np.arange(chosen)
    if indices[:, -1].max() >= dimension:
        raise BodyRefused(f"an index lies beyond the vector of {dimension}")
    return indices
