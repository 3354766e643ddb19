"""Records as bytes in files, each with its own checksum: snapshots are files of records, and so is the log.

    magic         4 bytes   ``HWR1``
    arrays        u32       how many arrays follow the header
    header        u64       length of the header, bytes
    body          u64       length of the arrays with their descriptions, bytes
    checksum     16 bytes   xxh3_128 of the fields above, the header and the body
    header                  see ``wire.py``
    body                    descriptions of the arrays (MessagePack), then each array, all padded to 8 bytes

Numbers are little-endian. A flipped bit or a missing end is told from a file of another kind. The checksum
guards against accidents, not against forgers. A snapshot is a head, rows and graves, and an end; without its
end it is not one. What comes after the last whole record of a log was being written when the process died.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np
import xxhash

from sync.errors import RecordDamaged, SnapshotDamaged
from sync.records import Delta, End, Graves, Head, Record, Rows
from sync.replica import ShardState
from sync.shard import Shard
from sync.wire import Array, from_parts, to_parts

MAGIC: Final = b"HWR1"
_FIELDS: Final = struct.Struct("<4sIQQ")
_CHECKSUM_BYTES: Final = 16
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES
MAX_ARRAYS: Final = 65_536
_DTYPES: Final = {"u8": np.uint64, "u4": np.uint32, "f4": np.float32, "u1": np.uint8}

Buffer = bytes | bytearray | memoryview
_Description = tuple[str, list[int]]
_descriptions: Final = msgspec.msgpack.Decoder(list[_Description])


def encode_record(record: Record) -> list[Buffer]:
    """The record as buffers to be written one after the other; arrays are not copied."""
    if sys.byteorder != "little":
        raise SystemError("records are little-endian, and this machine is not")
    header, arrays = to_parts(record)
    described = msgspec.msgpack.encode([(f"{a.dtype.kind}{a.itemsize}", a.shape) for a in arrays])
    body: list[Buffer] = []
    parts: list[Buffer] = [struct.pack("<Q", len(described)) + described]
    parts += [_bytes(array) for array in arrays if array.size]
    for part in parts:
        body.append(part)
        if padding := -len(part) % 8:
            body.append(b"\0" * padding)
    padded = header + b"\xc0" * (-len(header) % 8)  # MessagePack's nil, which no reader looks at
    fields = _FIELDS.pack(MAGIC, len(arrays), len(header), sum(len(part) for part in body))
    return [fields, _checksum([fields, padded, *body]), padded, *body]


def decode_record(data: memoryview) -> tuple[Record, int]:
    """The record that ``data`` begins with, arrays as views, and how many bytes it takes. Raises RecordDamaged
    naming what is wrong, Truncated where the bytes end before the record does."""
    end = record_size(data[:HEADER_BYTES], len(data))
    _, count, header_length, body_length = _FIELDS.unpack_from(data)
    body_start = end - body_length
    if _checksum([data[: _FIELDS.size], data[HEADER_BYTES:end]]) != data[_FIELDS.size : HEADER_BYTES]:
        raise RecordDamaged("the checksum of a record does not match: bytes were altered")
    try:
        arrays = _arrays(data[body_start:end])
    except (msgspec.DecodeError, struct.error, ValueError, KeyError, TypeError) as error:
        raise RecordDamaged(f"the checksum is right but the arrays are not: {error!r}") from error
    if len(arrays) != count:
        raise RecordDamaged(f"{len(arrays)} arrays, the header says {count}")
    return from_parts(data[HEADER_BYTES : HEADER_BYTES + header_length], arrays), end


def record_size(header: Buffer, left: int) -> int:
    """How many bytes the record takes that begins with ``header``, of which there are ``left``. Raises as
    ``decode_record`` where that can be told from the header alone."""
    if len(header) < HEADER_BYTES:
        raise Truncated(f"{len(header)} bytes are fewer than a record's header of {HEADER_BYTES}")
    magic, count, header_length, body_length = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise RecordDamaged(f"not a record: it begins with {bytes(magic).hex()}, not {MAGIC.hex()}")
    end: int = HEADER_BYTES + header_length + -header_length % 8 + body_length
    if count > MAX_ARRAYS or end > left:
        raise Truncated(f"a record of {end} bytes has only {left} left")
    return end


class Truncated(RecordDamaged):
    """The bytes end before the record does: of a log, its last record was being written."""


def records(data: Buffer) -> Iterator[tuple[Record, int]]:
    """Every record in ``data`` with the offset of its end. Raises as ``decode_record`` at the first that is not
    whole."""
    view, start = memoryview(data), 0
    while start < len(view):
        record, length = decode_record(view[start:])
        start += length
        yield record, start


def encode_buffers(state: ShardState) -> list[Buffer]:
    """The snapshot as buffers to be written one after the other; rows are not copied again."""
    whole: Iterable[Record] = (state.head, *state.rows, *state.graves, End(state.head.position))
    return [buffer for record in whole for buffer in encode_record(record)]


def encode(state: ShardState) -> bytes:
    """The snapshot as one byte string."""
    return b"".join(encode_buffers(state))


def decode(data: Buffer) -> ShardState:
    """Read a snapshot back that was taken at once, bit for bit. Arrays are views into ``data``.

    Raises SnapshotDamaged naming what is wrong: kind, length, checksum or content.
    """
    head, pages, _ = decode_pages(data)
    return ShardState(
        head,
        tuple(page for page in pages if isinstance(page, Rows)),
        tuple(page for page in pages if isinstance(page, Graves)),
    )


def decode_pages(data: Buffer) -> tuple[Head, list[Rows | Graves], int]:
    """A snapshot's head, rows and graves in their order, and the position up to which deltas have to be applied
    to them. Raises SnapshotDamaged."""
    try:
        found = [record for record, _ in records(data)]
    except RecordDamaged as error:
        raise SnapshotDamaged(str(error)) from error
    if not found or not isinstance(found[0], Head):
        raise SnapshotDamaged("not a snapshot of a shard: it does not begin with a head")
    if not isinstance(found[-1], End):
        raise SnapshotDamaged("truncated: the snapshot has no end")
    pages = [page for page in found[1:-1] if isinstance(page, Rows | Graves)]
    if len(pages) != len(found) - 2:
        raise SnapshotDamaged("a snapshot holds something other than rows and graves")
    return found[0], pages, found[-1].position


def restore(shard: Shard, data: Buffer, deltas: Iterable[Delta] = ()) -> None:
    """Fill a new ``shard`` from a snapshot and what happened since. Raises SnapshotDamaged, OutOfOrder, BadSpec;
    the shard is then to be thrown away."""
    head, pages, position = decode_pages(data)
    shard.begin(head)
    for page in pages:
        if isinstance(page, Rows):
            shard.put(page)
        else:
            shard.bury(page)
    for delta in deltas:
        if delta.position > shard.position:
            shard.apply(delta)
    if shard.position < position:
        raise SnapshotDamaged(
            f"the snapshot needs the steps up to {position}; the log ends at {shard.position}"
        )


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _arrays(body: memoryview) -> list[Array]:
    (length,) = struct.unpack_from("<Q", body)
    start = 8 + length
    start += -start % 8
    found: list[Array] = []
    for kind, shape in _descriptions.decode(body[8 : 8 + length]):
        dtype = np.dtype(_DTYPES[kind])
        if any(side < 0 for side in shape):
            raise ValueError(f"shape {shape}")
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        found.append(np.frombuffer(body[start : start + size], dtype).reshape(shape))
        start += size + -size % 8
    if start != len(body):
        raise ValueError(f"the arrays take {start} bytes of {len(body)}")
    return found


def _checksum(parts: Iterable[Buffer]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
