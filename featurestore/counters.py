"""Exponentially decayed counts, kept so that several writers and repeated events do no harm.

A count with half-life h is worth, at time t, the sum over its events of ``2 ** (-(t - t_e) / h)``. Such
sums add up and decay without knowing their events, so each log partition keeps its own (``stats@3`` is
written only by whoever owns partition 3) and a reader sums over the partitions. A cell remembers the last
offset that it counted: an event delivered again is skipped. The last column is the plain total.

Shapes: N cells or entities, E events, H half-lives in seconds (0: never decays); values are ``[N, H + 1]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

PREFIX: Final = "stats@"
_FORMAT: Final = 1
_HEADER: Final = np.dtype(
    [("format", "<u4"), ("half_lives", "<u4"), ("log", "<u8"), ("offset", "<i8"), ("time_ms", "<i8")]
)


class CounterFormatError(ValueError):
    """A cell is not a counter of a format that this version reads."""


@dataclass(frozen=True, slots=True)
class Decayed:
    """Counts as of a time. Shapes: time_ms ``[N]`` (Unix ms), values ``[N, H + 1]``, the total last."""

    time_ms: Integers
    values: Floats


@dataclass(frozen=True, slots=True)
class Counts:
    """One partition's counts of N entities: the log (``log_tag``) and last offset counted, and the sums.

    Shapes: log ``[N]`` uint64, offset ``[N]`` (-1: nothing counted).
    """

    log: npt.NDArray[np.uint64]
    offset: Integers
    decayed: Decayed


def cell_name(partition: int) -> str:
    """The cell in which the owner of ``partition`` keeps its counts."""
    return f"{PREFIX}{partition}"


def log_tag(incarnation: str) -> int:
    """A 64-bit stand-in for a log's incarnation; offsets of different incarnations do not compare."""
    return int.from_bytes(hashlib.blake2b(incarnation.encode(), digest_size=8).digest(), "little")


def decay(elapsed_ms: npt.NDArray[np.number], half_lives: Sequence[float]) -> Floats:
    """What is left of 1 after ``elapsed_ms`` ``[...]``, per half-life and for the total: ``[..., H + 1]``."""
    rates = np.array([0.001 / h if h else 0.0 for h in half_lives] + [0.0])
    left: Floats = np.exp2(-(np.asarray(elapsed_ms, np.float64)[..., None] * rates))
    return left


def at(decayed: Decayed, time_ms: int | Integers, half_lives: Sequence[float]) -> Floats:
    """The values ``[N, H + 1]`` at ``time_ms``, a moment or one per row; earlier ones count as now."""
    return decayed.values * decay(np.maximum(time_ms - decayed.time_ms, 0), half_lives)


def merge(a: Decayed, b: Decayed, half_lives: Sequence[float]) -> Decayed:
    """The counts of both, row by row, as of the later time. Commutative and associative (up to rounding)."""
    time_ms = np.maximum(a.time_ms, b.time_ms)
    return Decayed(time_ms, at(a, time_ms, half_lives) + at(b, time_ms, half_lives))


def empty(n: int, half_lives: Sequence[float]) -> Counts:
    """N entities of which nothing was counted yet."""
    width = len(half_lives) + 1
    return Counts(
        np.zeros(n, np.uint64), np.full(n, -1, np.int64), Decayed(np.zeros(n, np.int64), np.zeros((n, width)))
    )


def add(
    counts: Counts,
    rows: npt.NDArray[np.integer],
    time_ms: Integers,
    offset: Integers,
    amount: Floats,
    *,
    log: int,
    half_lives: Sequence[float],
) -> Counts:
    """Count E events of one log partition, skipping those at or below a row's last offset of that log.

    Shapes: rows, time_ms, offset and amount ``[E]``; event e adds ``amount[e]`` to row ``rows[e]`` as of
    ``time_ms[e]``, which may lie before or after what the row holds. Several events may share an offset.
    """
    tag = np.uint64(log)
    last = np.where(counts.log == tag, counts.offset, -1)
    new = offset > last[rows]
    rows, time_ms, offset, amount = rows[new], time_ms[new], offset[new], amount[new]
    newest = counts.decayed.time_ms.copy()
    np.maximum.at(newest, rows, time_ms)
    values = at(counts.decayed, newest, half_lives)
    np.add.at(values, rows, amount[:, None] * decay(newest[rows] - time_ms, half_lives))
    touched = np.zeros(len(newest), bool)
    touched[rows] = True
    offsets = np.where(touched, last, counts.offset)
    np.maximum.at(offsets, rows, offset)
    return Counts(np.where(touched, tag, counts.log), offsets, Decayed(newest, values))


def encode(counts: Counts, half_lives: Sequence[float]) -> list[bytes]:
    """The N cells: header, half-lives and values, little-endian."""
    n, h = len(counts.offset), len(half_lives)
    records = np.zeros(n, _record(h))
    records["header"]["format"] = _FORMAT
    records["header"]["half_lives"] = h
    records["header"]["log"] = counts.log
    records["header"]["offset"] = counts.offset
    records["header"]["time_ms"] = counts.decayed.time_ms
    records["half_lives"] = half_lives
    records["values"] = counts.decayed.values
    size, data = records.itemsize, records.tobytes()
    return [data[start : start + size] for start in range(0, n * size, size)]


def decode(cells: Sequence[bytes | None], half_lives: Sequence[float]) -> Counts:
    """N cells as counts over ``half_lives``. A missing cell is empty; a half-life that a cell was not kept
    for starts at 0. Raises CounterFormatError."""
    counts = empty(len(cells), half_lives)
    lengths = np.fromiter((0 if cell is None else len(cell) for cell in cells), np.int64, count=len(cells))
    for length in np.unique(lengths[lengths > 0]):
        rows = np.flatnonzero(lengths == length)
        data = b"".join(cells[row] or b"" for row in rows.tolist())
        _decode_equal(data, int(length), rows, counts, half_lives)
    return counts


def _decode_equal(
    data: bytes, size: int, rows: Integers, counts: Counts, half_lives: Sequence[float]
) -> None:
    """Fill ``rows`` of ``counts`` from cells of one size."""
    stored, rest = divmod(size - _HEADER.itemsize - 8, 16)
    if stored < 0 or rest:
        raise CounterFormatError(f"a counter cell cannot have {size} bytes")
    records = np.frombuffer(data, _record(stored))
    header = records["header"]
    if not ((header["format"] == _FORMAT) & (header["half_lives"] == stored)).all():
        raise CounterFormatError(f"unknown counter format; this version reads {_FORMAT}")
    counts.log[rows] = header["log"]
    counts.offset[rows] = header["offset"]
    counts.decayed.time_ms[rows] = header["time_ms"]
    wanted = np.array(half_lives, np.float64)
    if stored == len(wanted) and (records["half_lives"] == wanted).all():
        counts.decayed.values[rows] = records["values"]
        return
    same = records["half_lives"][:, :, None] == wanted
    counts.decayed.values[rows, :-1] = np.einsum("ns,nsh->nh", records["values"][:, :-1], same)
    counts.decayed.values[rows, -1] = records["values"][:, -1]


def _record(half_lives: int) -> np.dtype[np.void]:
    return np.dtype(
        [("header", _HEADER), ("half_lives", "<f8", (half_lives,)), ("values", "<f8", (half_lives + 1,))]
    )
