"""A shard as bytes: an envelope with format and checksum around a safetensors file.

    magic        8 bytes   ``HWSHARD`` and a zero byte
    format       u32       1
    reserved     u32       0; aligns the payload
    payload      u64       length of what follows the header, bytes
    checksum    16 bytes   xxh3_128 of the fields above and of the payload
    payload                safetensors: tensors ``table/column``, everything else as JSON in its metadata

Numbers are little-endian. The checksum is looked at before anything inside is; so a flipped bit or a
missing end is told from a snapshot of another kind or version. It guards against accidents, not against
forgers.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import xxhash

from sync.clock import MAX_TIME
from sync.errors import BadSpec, SnapshotDamaged
from sync.pushes import Progress, Source, Watermark
from sync.shard import ShardState
from sync.spec import TableSpec

MAGIC: Final = b"HWSHARD\x00"
FORMAT: Final = 1
_FIELDS: Final = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES: Final = 16
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES

Buffer = bytes | bytearray | memoryview
_DTYPES: Final[dict[str, tuple[str, npt.DTypeLike]]] = {
    "keys": ("U64", np.uint64),
    "values": ("F32", np.float32),
    "state": ("F32", np.float32),
    "version_time": ("U64", np.uint64),
    "version_writer": ("U32", np.uint32),
    "touched_s": ("U32", np.uint32),
}


def encode_buffers(state: ShardState) -> list[Buffer]:
    """The snapshot as buffers to be written one after the other; rows are not copied again."""
    if sys.byteorder != "little":
        raise SystemError("snapshots are little-endian, and this machine is not")
    tensors = {
        f"{table}/{name}": column
        for table, columns in state.columns.items()
        for name, column in columns.items()
    }
    payload: list[Buffer] = [_tensor_header(tensors, json.dumps(_plain(state), separators=(",", ":")))]
    payload += [np.ascontiguousarray(column).data.cast("B") for column in tensors.values() if column.size]
    fields = _FIELDS.pack(MAGIC, FORMAT, 0, sum(len(part) for part in payload))
    return [fields, _checksum([fields, *payload]), *payload]


def encode(state: ShardState) -> bytes:
    """The snapshot as one byte string."""
    return b"".join(encode_buffers(state))


def decode(data: Buffer) -> ShardState:
    """Read a snapshot back, bit for bit. Columns are views into ``data``.

    Raises SnapshotDamaged naming what is wrong: kind, format, length, checksum or content.
    """
    payload = _open_envelope(memoryview(data))
    try:
        tensors, metadata = _read_tensors(payload)
        return _state(json.loads(metadata), tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, BadSpec) as error:
        raise SnapshotDamaged(f"the checksum is right but the content is not: {error!r}") from error


def _open_envelope(data: memoryview) -> memoryview:
    if len(data) < HEADER_BYTES:
        raise SnapshotDamaged(f"truncated: {len(data)} bytes are fewer than the header's {HEADER_BYTES}")
    magic, version, _, length = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotDamaged(f"not a snapshot of a shard: it begins with {magic.hex()}, not {MAGIC.hex()}")
    if version != FORMAT:
        raise SnapshotDamaged(f"format {version}; this version reads {FORMAT}")
    payload = data[HEADER_BYTES:]
    if len(payload) != length:
        what = "truncated" if len(payload) < length else "followed by something else"
        raise SnapshotDamaged(f"{what}: {len(payload)} bytes of payload, the header says {length}")
    if _checksum([data[: _FIELDS.size], payload]) != data[_FIELDS.size : HEADER_BYTES]:
        raise SnapshotDamaged("the checksum does not match: bytes were altered")
    return payload


def _checksum(parts: Iterable[Buffer]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _tensor_header(tensors: Mapping[str, npt.NDArray[np.generic]], metadata: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"shard": metadata}}
    start = 0
    for name, column in tensors.items():
        dtype = _DTYPES[name.rpartition("/")[2]][0]
        end = start + column.nbytes
        header[name] = {"dtype": dtype, "shape": list(column.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # safetensors aligns the data by padding the header with spaces.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_tensors(payload: memoryview) -> tuple[dict[str, npt.NDArray[np.generic]], str]:
    (length,) = struct.unpack_from("<Q", payload)
    header = json.loads(bytes(payload[8 : 8 + length]))
    metadata = header.pop("__metadata__")["shard"]
    data = payload[8 + length :]
    tensors = {}
    for name, entry in header.items():
        letter, dtype = _DTYPES[name.rpartition("/")[2]]
        if entry["dtype"] != letter:
            raise ValueError(f"{name} has type {entry['dtype']}, not {letter}")
        start, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[start:end], dtype).reshape(entry["shape"])
    return tensors, metadata


def _plain(state: ShardState) -> dict[str, object]:
    return {
        "model": state.model,
        "shard_id": state.shard_id,
        "fingerprint": state.fingerprint,
        "specs": [spec.to_plain() for spec in state.specs],
        "clock": state.clock,
        "knowledge": [[writer, time] for writer, time in state.knowledge.items()],
        "pushes": [
            [source.log, source.partition, progress.applied, _plain_watermark(progress.watermark)]
            for source, progress in state.pushes.items()
        ],
        "generations": state.generations,
    }


def _plain_watermark(mark: Watermark | None) -> list[str | int] | None:
    return None if mark is None else [mark.log, mark.partition, mark.offset, mark.accepted_at_ms]


def _state(plain: Mapping[str, object], tensors: Mapping[str, npt.NDArray[np.generic]]) -> ShardState:
    specs = tuple(
        TableSpec.from_plain(spec) for spec in cast("Sequence[Mapping[str, object]]", plain["specs"])
    )
    pushes = cast("Sequence[tuple[str, int, int, tuple[str, int, int, int] | None]]", plain["pushes"])
    clock = int(cast("int", plain["clock"]))
    if not 0 <= clock < MAX_TIME:
        raise ValueError(f"clock {clock}")
    return ShardState(
        model=str(plain["model"]),
        shard_id=int(cast("int", plain["shard_id"])),
        fingerprint=str(plain["fingerprint"]),
        specs=specs,
        clock=clock,
        knowledge={int(w): int(t) for w, t in cast("Sequence[tuple[int, int]]", plain["knowledge"])},
        pushes={
            Source(log, partition): Progress(applied, None if mark is None else Watermark(*mark))
            for log, partition, applied, mark in pushes
        },
        generations={n: int(g) for n, g in cast("Mapping[str, int]", plain["generations"]).items()},
        columns={spec.name: _columns(spec, tensors) for spec in specs},
    )


def _columns(
    spec: TableSpec, tensors: Mapping[str, npt.NDArray[np.generic]]
) -> dict[str, npt.NDArray[np.generic]]:
    columns = {name: tensors[f"{spec.name}/{name}"] for name in _DTYPES}
    rows = len(columns["keys"])
    widths = {"values": (spec.dim,), "state": (spec.state_dim,)}
    for name, column in columns.items():
        shape = (rows, *widths.get(name, ()))
        if column.shape != shape:
            raise ValueError(f"{spec.name}/{name} has shape {column.shape}, not {shape}")
    return columns
