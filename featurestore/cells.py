"""Cells as bytes: MessagePack ``[value, event_time_ms, ttl_ms]``. Fields may be appended, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from featurestore.online import Cell, StoreError


class _Packed(msgspec.Struct, array_like=True):
    value: Any
    event_time_ms: int
    ttl_ms: int = 0


_encoder = msgspec.msgpack.Encoder()
_cell = msgspec.msgpack.Decoder(_Packed)
_row = msgspec.msgpack.Decoder(dict[str, _Packed])
_raw_row = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def pack(name: str, cell: Cell) -> bytes:
    """One cell. Raises StoreError naming it if its value is of no storable type."""
    try:
        return _encoder.encode((cell.value, cell.event_time_ms, cell.ttl_ms))
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"cell {name!r} cannot be stored: {error}") from error


def unpack(data: bytes | memoryview) -> Cell:
    """The cell that ``pack`` made."""
    packed = _cell.decode(data)
    return Cell(packed.value, packed.event_time_ms, packed.ttl_ms)


def merge_row(stored: bytes | None, cells: Mapping[str, Cell]) -> bytes:
    """A row of packed cells with ``cells`` set in it; those not mentioned keep their bytes."""
    row = _raw_row.decode(stored) if stored is not None else {}
    row.update((name, msgspec.Raw(pack(name, cell))) for name, cell in cells.items())
    return _encoder.encode(row)


def unpack_row(stored: bytes, fields: frozenset[str] | None) -> dict[str, Cell]:
    """The cells of a packed row, or only those named."""
    if fields is None:
        return {
            name: Cell(packed.value, packed.event_time_ms, packed.ttl_ms)
            for name, packed in _row.decode(stored).items()
        }
    row = _raw_row.decode(stored)
    return {name: unpack(bytes(row[name])) for name in fields & row.keys()}
